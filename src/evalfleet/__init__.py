"""evalfleet runs agent benchmarks on fleets of machines.

    import evalfleet
    run = evalfleet.run("mybench.toml", on="local", workers=4)
    run.wait()["success_rate"]

Importing it loads nothing else; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.python import compare, open, pools, rerun, resume, run, runs
    from .api.run import Run
    from .errors import FleetError, RequestError

__all__ = [
    "FleetError",
    "RequestError",
    "Run",
    "__version__",
    "compare",
    "open",
    "pools",
    "rerun",
    "resume",
    "run",
    "runs",
]
_MODULES = {"Run": ".api.run", "FleetError": ".errors", "RequestError": ".errors"}
"""Where a name is, if not in `api.python`."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES.get(name, ".api.python"), __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
