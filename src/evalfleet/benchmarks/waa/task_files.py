"""WAA's lists of tasks and definitions: in a checkout, or kept in the home as prepared machines told them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from evalfleet.errors import RequestError
from evalfleet.files import replace
from evalfleet.model import SECOND, Micros

from .host.iso import LICENCE_DAYS
from .settings import WaaSettings

LIST = "test_all.json"


class TaskFiles(Protocol):
    """A tree of files that define tasks. Names are paths below it, with `/`."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user about where they come from."""
        ...

    def read(self, name: str) -> bytes:
        """Raises OSError."""
        ...

    def lists(self) -> list[str]:
        """Their names, without `.json`."""
        ...

    def has(self, name: str) -> bool: ...

    def has_folder(self, name: str) -> bool: ...


class Folder:
    """The files of a checkout."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def lists(self) -> list[str]:
        return [each.stem for each in self._path.glob("test_*.json")]

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def has_folder(self, name: str) -> bool:
        return (self._path / name).is_dir()


class ImageTasks(Struct, frozen=True):
    """The folder as the image `name` has it, told by a machine: its lists, and which tasks it defines."""

    name: str
    digest: str
    texts: Mapping[str, str]
    defined: frozenset[str]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"tasks: from {self.where}",)

    @property
    def where(self) -> str:
        return f"{self.name}@{self.digest}"

    def read(self, name: str) -> bytes:
        if name not in self.texts:
            raise FileNotFoundError(name)
        return self.texts[name].encode()

    def lists(self) -> list[str]:
        return [name.removesuffix(".json") for name in self.texts]

    def has(self, name: str) -> bool:
        return name in self.defined

    def has_folder(self, name: str) -> bool:
        return any(each.startswith(f"{name}/") for each in self.defined)


# -- where they are -------------------------------------------------------------------------------------

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
    if told := kept_list(home, settings.image):
        return told
    raise RequestError(
        f"there is no list of WAA's tasks here. Either type `{_CLONE}` beside evalfleet.toml, or give a "
        "checkout elsewhere with --set waa=PATH; or set up a machine with `evalfleet pool prepare POOL waa`, "
        f"which then tells the tasks of {settings.image}"
    )


# -- what machines told ---------------------------------------------------------------------------------

KEPT = Path(".waa") / "told"
EARLIER = Path(".waa") / "tasks"
"""Earlier versions read images themselves and kept here what they found. It is still good."""
NAMES = "names.json"
"""Image -> the digest that it had when its tasks were told last."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def kept_list(home: Path, image: str) -> ImageTasks | None:
    """The list of this image. One that cannot be read counts as missing."""
    for folder in (home / KEPT, home / EARLIER):
        digest = _names(folder).get(image, "")
        try:
            told = _read(_path(folder, digest).read_bytes(), image)
        except (OSError, RequestError):
            continue
        if told.digest == digest:
            return told
    return None


def keep_list(home: Path, image: str, listed: bytes) -> None:
    """Keep what a machine told of this image. Raises RequestError if that is no list, OSError."""
    told, folder = _read(listed, image), home / KEPT
    folder.mkdir(parents=True, exist_ok=True)
    _write(_path(folder, told.digest), told)
    _write(folder / NAMES, {**_names(folder), image: told.digest})


def _read(listed: bytes, image: str) -> ImageTasks:
    """Agents have worked on the machine that wrote it: what becomes a path or a message is checked."""
    try:
        told = msgspec.json.decode(listed, type=ImageTasks)
    except msgspec.MsgspecError as err:
        raise RequestError(f"what it tells is no list of tasks ({err})") from None
    if not _DIGEST.fullmatch(told.digest) or not all(name.isprintable() for name in told.texts):
        raise RequestError("what it tells is no list of tasks: its digest or a name in it is malformed")
    if LIST not in told.texts:
        raise RequestError(f"{image} has no {LIST}: it is no image of WAA")
    return msgspec.structs.replace(told, name=image)


def _path(folder: Path, digest: str) -> Path:
    return folder / f"{digest.replace(':', '-')}.json"


def _names(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / NAMES).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, content: Struct | Mapping[str, str | int]) -> None:
    """Replace the file as a whole: another process may read or write it at the same time."""
    replace(path, msgspec.json.encode(content, order="deterministic"))


# -- how long their Windows may be used ----------------------------------------------------------------

LICENCES = "licences.json"
"""Golden storage -> when the licence of its Windows ends, as the last prepared machine told."""
WARN_DAYS = 14
_DAY = 86_400 * SECOND


class _Installed(Struct, frozen=True):
    """The part of what a machine tells that is about its Windows."""

    installed: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    """When that was installed, in seconds since 1970; 0 if nothing tells."""


def licence_end(listed: bytes) -> Micros | None:
    """When the licence ends of the Windows on a machine that told this, if it told that."""
    try:
        installed = msgspec.json.decode(listed, type=_Installed).installed
    except msgspec.MsgspecError:
        return None
    return int(installed * SECOND) + LICENCE_DAYS * _DAY if installed else None


def keep_licence(home: Path, golden: str, listed: bytes) -> None:
    """Keep when it ends, if other machines get the same Windows: a new installation has a new licence."""
    end = licence_end(listed)
    if golden and end is not None:
        path = home / KEPT / LICENCES
        _write(path, {**_licences(path), golden: end})


def licence_warnings(home: Path, golden: str, now: Micros) -> tuple[str, ...]:
    """What is to be said of the Windows that a plan's machines get."""
    end = _licences(home / KEPT / LICENCES).get(golden)
    if not golden or end is None or now < end - WARN_DAYS * _DAY:
        return ()
    days = abs(end - now) // _DAY
    when = f"ends in {days} days" if now < end else f"ended {days} days ago"
    return (
        f"the licence of the Windows in golden={golden} {when} (Windows 11 Enterprise Evaluation: "
        f"{LICENCE_DAYS} days); install a new one with --set iso=PATH, or give another golden storage",
    )


def _licences(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
