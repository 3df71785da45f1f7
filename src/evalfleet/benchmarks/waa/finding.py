"""Where WAA's list of tasks is: in a checkout, or kept in the home as a prepared machine told it."""

from __future__ import annotations

from pathlib import Path

from evalfleet.errors import RequestError

from . import kept
from .files import LIST, Folder, TaskFiles
from .settings import WaaSettings

CHECKOUT = "WindowsAgentArena"
_INSIDE = ("", "src/win-arena-container/client/evaluation_examples_windows", "evaluation_examples_windows")
_CLONE = "git clone --depth 1 https://github.com/microsoft/WindowsAgentArena"


def task_files(settings: WaaSettings, base: Path, home: Path) -> TaskFiles:
    """Raises RequestError, which says how to get the list if there is none."""
    root = base / Path(settings.waa or CHECKOUT).expanduser()
    for inside in _INSIDE:
        if (root / inside / LIST).is_file():
            return Folder(root / inside)
    if settings.waa:
        what = f"has no {LIST}" if root.is_dir() else "is no folder"
        raise RequestError(f"--set waa={settings.waa}: {root} {what}; name a checkout of WAA: `{_CLONE}`")
    if told := kept.find(home, settings.image):
        return told
    raise RequestError(
        f"there is no list of WAA's tasks here. Either type `{_CLONE}` beside evalfleet.toml, or give a "
        "checkout elsewhere with --set waa=PATH; or set up a machine with `evalfleet pool prepare POOL waa`, "
        f"which then tells the tasks of {settings.image}"
    )
