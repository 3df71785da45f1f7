"""The tasks of a WAA checkout: its lists, checked against its definitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import Task, TaskId
from evalfleet.names import hint
from evalfleet.tables import reason

DEFAULT_FOLDER = "WindowsAgentArena"
_INSIDE = ("", "src/win-arena-container/client/evaluation_examples_windows", "evaluation_examples_windows")
_CLONE = "git clone https://github.com/microsoft/WindowsAgentArena, then --set waa=WindowsAgentArena"

TaskList = dict[str, list[str]]


class Found(NamedTuple):
    tasks: tuple[Task, ...]
    warnings: tuple[str, ...]


def read_tasks(given: str, base: Path, task_list: str, hard: bool, timeout_s: float, ready_s: float) -> Found:
    """All tasks of the list, in its order. RequestError says what to do."""
    folder = _folder(given, base)
    listed = _read_list(folder, task_list)
    tasks = tuple(
        Task(TaskId(id), domain, timeout_s=timeout_s, ready_s=ready_s)
        for domain, ids in listed.items()
        for id in ids
    )
    _check_ids(tasks, folder / _file_name(task_list))
    undefined = [task.id for task in tasks if not _is_defined(folder, task, hard)]
    warnings = _about(undefined, folder) if undefined else ()
    return Found(tasks, warnings)


def _folder(given: str, base: Path) -> Path:
    root = base / Path(given or DEFAULT_FOLDER).expanduser()
    for inside in _INSIDE:
        if (root / inside / "test_all.json").is_file():
            return root / inside
    if not given:
        raise RequestError(f"benchmark 'waa' needs a checkout of WAA for its list of tasks: {_CLONE}")
    what = "has no test_all.json" if root.is_dir() else "is no folder"
    raise RequestError(f"--set waa={given}: {root} {what}; name a checkout of WAA: {_CLONE}")


def _file_name(task_list: str) -> str:
    return task_list if task_list.endswith(".json") else f"{task_list}.json"


def _read_list(folder: Path, task_list: str) -> TaskList:
    path = folder / _file_name(task_list)
    try:
        return msgspec.json.decode(path.read_bytes(), type=TaskList)
    except FileNotFoundError:
        lists = [each.stem for each in folder.glob("test_*.json")]
        raise RequestError(
            f"--set task_list={task_list}: {folder} has no such list; {hint(task_list, lists)}"
        ) from None
    except OSError as e:
        raise RequestError(f"{path} cannot be read ({reason(e)})") from None
    except msgspec.MsgspecError as e:
        raise RequestError(f"{path} is no list of tasks ({e}); write domains, each with its ids") from None


def _check_ids(tasks: tuple[Task, ...], path: Path) -> None:
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


def _is_defined(folder: Path, task: Task, hard: bool) -> bool:
    """Data that was taken out of a checkout may lack the harder ones, or all: then nothing can be said."""
    examples = folder / ("examples_noctxt" if hard else "examples")
    return not examples.is_dir() or (examples / task.domain / f"{task.id}.json").is_file()


def _about(undefined: Sequence[str], folder: Path) -> tuple[str, ...]:
    return (f"{folder} defines no task {undefined[0]!r} ({len(undefined)} such); the image may not, either",)
