"""The version, and where this evalfleet comes from: alone, so that anything may know it."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

UNKNOWN = "REPOSITORY@COMMIT"
"""To be written by whoever knows it."""


def requirement(extras: str = "", *, elsewhere: bool = False) -> str:
    """What to give to pip or uv to have this evalfleet, with these extras. `elsewhere`: on another computer.

    It is a path or a pinned commit, never the bare name: in a package index that is not ours, and whoever
    takes it would be run with the secrets of clouds in the environment.
    """
    wanted = f"[{extras}]" if extras else ""
    origin = _origin()
    url, commit = str(origin.get("url", "")), origin.get("vcs_info", {}).get("commit_id")
    if commit:
        return f"evalfleet{wanted} @ git+{url}@{commit}"
    if not elsewhere and "dir_info" in origin and url.startswith("file://"):
        return f"{url.removeprefix('file://')}{wanted}"
    return f"evalfleet{wanted} @ git+https://{UNKNOWN}"


def _origin() -> dict[str, Any]:
    """What the installer wrote down (PEP 610)."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("evalfleet").read_text("direct_url.json")
        return dict(json.loads(text)) if text else {}
    except (metadata.PackageNotFoundError, ValueError):
        return {}
