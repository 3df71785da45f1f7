"""evalfleet runs agent benchmarks on fleets of machines.

    import evalfleet
    run = evalfleet.run("mybench.toml", on="local", workers=4)
    run.wait()["success_rate"]

Importing it loads nothing else; the first use of `run` or `open` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.runs import Run, open, run

__all__ = ["Run", "__version__", "open", "run"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "open", "run"):
        from .api import runs

        return getattr(runs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
