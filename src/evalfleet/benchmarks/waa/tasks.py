"""The tasks of a list of WAA's, checked against the definitions beside it, wherever these are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import Task, TaskId
from evalfleet.names import hint
from evalfleet.toml_tables import reason

from .task_files import TaskFiles

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
        return msgspec.json.decode(files.read(name), type=TaskList)
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
    """By its definition; by its domain where there is none to read."""
    try:
        raw = files.read(f"{examples}/{task.domain}/{task.id}.json")
        applications = msgspec.json.decode(raw, type=Definition).related_apps
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        applications = ()
    names = [re.sub(r"[-_ ]", "", name.lower()) for name in (*applications, task.domain)]
    return [program for start, program in PROGRAMS.items() if any(name.startswith(start) for name in names)]
