"""WAA's tasks: where their lists and definitions are found, and how a list is read and checked against them.

They are in a checkout, or kept in the home as prepared machines told them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from evalfleet.errors import RequestError
from evalfleet.files import replace
from evalfleet.model import SECOND, Micros, Task, TaskId, decodable
from evalfleet.names import hint
from evalfleet.toml_tables import reason

from .host.config import V2_MARK
from .host.iso import LICENCE_DAYS
from .settings import WaaSettings

LIST = "test_all.json"


class TaskFiles(Protocol):
    """A tree of files that define tasks. Names are paths below it, with `/`."""

    @property
    def where(self) -> str:
        """Where the files are, in words for messages."""
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
            _check_version(root / inside)
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


def _check_version(folder: Path) -> None:
    """Raises RequestError for a checkout of GAIR's fork."""
    if (folder.parent / V2_MARK).is_file():
        raise RequestError(
            f"{folder} is of WindowsAgentArena-V2, whose client has other flags and another tree of results: "
            f"evalfleet runs microsoft/WindowsAgentArena alone; `{_CLONE}`, and name it with --set waa=PATH"
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
        told = msgspec.json.decode(listed, type=decodable(ImageTasks))
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
        installed = msgspec.json.decode(listed, type=decodable(_Installed)).installed
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


# -- lists, read --------------------------------------------------------------------------------------------

TaskList = dict[str, list[str]]


class ReadTasks(NamedTuple):
    """The tasks of one of WAA's lists, and what is odd about them."""

    tasks: tuple[Task, ...]
    warnings: tuple[str, ...]


def read_tasks(files: TaskFiles, task_list: str, hard: bool, timeout_s: float, ready_s: float) -> ReadTasks:
    """All tasks of the list, in its order. RequestError says what to do."""
    name = task_list if task_list.endswith(".json") else f"{task_list}.json"
    listed = _read_list(files, name, task_list)
    tasks = tuple(
        Task(TaskId(id), domain, timeout_s=timeout_s, ready_s=ready_s)
        for domain, ids in listed.items()
        for id in ids
    )
    _check_ids(tasks, f"{files.where}/{name}")
    tasks = _with_programs(tasks, files, "examples_noctxt" if hard else "examples")
    undefined = [task.id for task in tasks if not _is_defined(files, task, hard)]
    return ReadTasks(tasks, (*files.notes, *(_about(undefined, files) if undefined else ())))


def _read_list(files: TaskFiles, name: str, asked: str) -> TaskList:
    path = f"{files.where}/{name}"
    try:
        return msgspec.json.decode(files.read(name), type=decodable(TaskList))
    except FileNotFoundError:
        raise RequestError(
            f"--set task_list={asked}: {files.where} has no such list; {hint(asked, files.lists())}"
        ) from None
    except OSError as e:
        raise RequestError(f"{path} cannot be read ({reason(e)})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise RequestError(f"{path} is no list of tasks ({e}); write domains, each with its ids") from None


def _check_ids(tasks: tuple[Task, ...], path: str) -> None:
    if not tasks:
        raise RequestError(f"{path} has no tasks; write at least one")
    seen: dict[str, str] = {}
    for task in tasks:
        if any(not _is_name(name) for name in (task.id, task.domain)):
            raise RequestError(
                f"{path}: {task.domain[:80]!r}: {task.id[:80]!r} is no name of a task; mend it"
            )
        if task.id in seen:
            raise RequestError(
                f"{path}: {task.id!r} is in {seen[task.id]!r} and {task.domain!r}; take one out"
            )
        seen[task.id] = task.domain


def _is_name(text: str) -> bool:
    """It becomes a part of paths, here and in the container."""
    return (
        bool(text)
        and len(text) <= 150
        and text.isprintable()
        and not set("/\\\0 ") & set(text)
        and text[0] != "."
    )


def _is_defined(files: TaskFiles, task: Task, hard: bool) -> bool:
    """Data that was taken out of a checkout may lack the harder ones, or all: then nothing can be said."""
    examples = "examples_noctxt" if hard else "examples"
    return not files.has_folder(examples) or files.has(f"{examples}/{task.domain}/{task.id}.json")


def _about(undefined: Sequence[str], files: TaskFiles) -> tuple[str, ...]:
    said = f"{files.where} defines no task {undefined[0]!r} ({len(undefined)} such)"
    return (f"{said}; the image may not, either",)


# -- what they need in Windows ---------------------------------------------------------------------

PROGRAMS = {
    "libreoffice": "LibreOffice",
    "chrome": "Google Chrome",
    "vlc": "VLC",
    "vscode": "VS Code",
    "gimp": "GIMP",
    "thunderbird": "Thunderbird",
}
"""Programs that are installed beside Windows, by how the names of a task's applications begin."""


class Definition(msgspec.Struct):
    """What a task's definition says of what it needs."""

    related_apps: tuple[str, ...] = ()


def _with_programs(tasks: tuple[Task, ...], files: TaskFiles, examples: str) -> tuple[Task, ...]:
    """Each task knows its programs."""
    needed = {task.id: _programs(task, files, examples) for task in tasks}
    return tuple(msgspec.structs.replace(task, params={"programs": needed[task.id]}) for task in tasks)


def ask_for_all_programs(chosen: tuple[Task, ...]) -> tuple[Task, ...]:
    """Let every task ask Windows for what any of them needs, with how many of them need it.

    So the first attempt finds out what is missing, on one machine, before anything is paid for the others.
    """
    sharers = Counter(name for task in chosen for name in task.params["programs"])
    params = {"programs": dict(sorted(sharers.items()))} if sharers else {}
    return tuple(msgspec.structs.replace(task, params=params) for task in chosen)


def _programs(task: Task, files: TaskFiles, examples: str) -> list[str]:
    """The programs that a task needs by its definition, or by its domain where there is none to read."""
    try:
        raw = files.read(f"{examples}/{task.domain}/{task.id}.json")
        applications = msgspec.json.decode(raw, type=decodable(Definition)).related_apps
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        applications = ()
    names = [re.sub(r"[-_ ]", "", name.lower()) for name in (*applications, task.domain)]
    return [program for start, program in PROGRAMS.items() if any(name.startswith(start) for name in names)]
