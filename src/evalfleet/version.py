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


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this evalfleet, by the installer that was used."""
    import shlex
    import sys
    from importlib import metadata
    from pathlib import Path

    receipts = {"uv-receipt.toml": "uv tool", "pipx_metadata.json": "pipx"}
    for receipt, tool in receipts.items():
        if (Path(sys.prefix) / receipt).exists():  # a tool is installed anew: the other extras are named, too
            extras = ",".join(sorted({*_installed_extras(), extra}))
            return f"{tool} install --force {shlex.quote(requirement(extras))}"
    try:
        by = metadata.distribution("evalfleet").read_text("INSTALLER") or ""
    except metadata.PackageNotFoundError:
        by = ""
    pip = "uv pip" if by.strip() == "uv" else "pip"
    return f"{pip} install {shlex.quote(requirement(extra))}"


def _installed_extras() -> list[str]:
    import re
    from importlib import metadata

    present: dict[str, list[bool]] = {}
    for line in metadata.requires("evalfleet") or ():
        if (found := re.match(r"([\w.-]+).*; extra == ['\"](\w+)['\"]", line)) is not None:
            installed = any(metadata.distributions(name=found[1]))
            present.setdefault(found[2], []).append(installed)
    return [extra for extra, packages in present.items() if all(packages)]


def _origin() -> dict[str, Any]:
    """What the installer wrote down (PEP 610)."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("evalfleet").read_text("direct_url.json")
        return dict(json.loads(text)) if text else {}
    except (metadata.PackageNotFoundError, ValueError):
        return {}
