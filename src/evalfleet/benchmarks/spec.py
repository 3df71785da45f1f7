"""A command benchmark as it is planned and recorded: the checked contents of its file but for the tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import Bundle, Command, Needs, SetupStep, Task

from .files import bundle_files, check_files, digest
from .tasks import own_of, with_own

PLACEHOLDER = re.compile(r"\{(task_id|domain|attempt|params\.[^{}]+)\}")


class CommandSpec(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checked contents of the file but for its tasks. `root` is its folder, absolute.

    `digest` is the bundle's when the run was planned: files that change later are refused, not mixed.
    """

    name: str
    root: str
    command: tuple[str, ...]
    files: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    probe: tuple[str, ...] = ()
    on_timeout: Literal["zero", "broken"] = "zero"
    score_from: Literal["result", "exit_code"] = "result"
    digest: str = ""
    secrets: tuple[str, ...] = ()
    needs: Needs = Needs()
    slots: int = 1
    score: tuple[str, ...] = ()
    score_files: tuple[str, ...] = ()
    score_timeout_s: float = 600.0
    score_digest: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    setup_timeout_s: float | None = None
    setup_secrets: tuple[str, ...] = ()


def score_bundle_of(spec: CommandSpec) -> Bundle:
    """The files that only the score command gets. Raises RequestError as `bundle_of` does."""
    if not spec.score_files:
        return Bundle()
    root = Path(spec.root)
    files = bundle_files(root, spec.score_files)
    found = "score-" + digest(root, files, ())
    _check_unchanged(spec, spec.score_digest, found)
    return Bundle(found, {name: str(path) for name, path in files.items()})


def _check_unchanged(spec: CommandSpec, planned: str, found: str) -> None:
    if planned not in ("", found):
        raise RequestError(
            f"the files of benchmark {spec.name!r} in {spec.root} have changed since the run was planned: "
            "put them back as they were, or start a new run"
        )


def bundle_of(spec: CommandSpec) -> Bundle:
    """Reads every file once. Raises RequestError if one cannot be read or has changed."""
    steps = _steps(spec, spec.setup, spec.env)
    root = Path(spec.root)
    files = bundle_files(root, spec.files)
    found = digest(root, files, steps)
    _check_unchanged(spec, spec.digest, found)
    return Bundle(found, {name: str(path) for name, path in files.items()}, steps)


def _steps(
    spec: CommandSpec, setup: Sequence[tuple[str, ...]], env: Mapping[str, str]
) -> tuple[SetupStep, ...]:
    return tuple(
        SetupStep(f"setup-{number}", Command(argv, env, spec.setup_secrets), spec.setup_timeout_s or 3600.0)
        for number, argv in enumerate(setup, start=1)
    )


def planned_task(spec: CommandSpec, task: Task, where: str) -> Task:
    """The task, with the digest of the files that it has for itself. RequestError if they are wrong."""
    own = own_of(task)
    if not (own.files or own.setup):
        return task
    check_files(Path(spec.root), own.files, f"{where}: task {task.id!r}")
    return with_own(task, msgspec.structs.replace(own, digest=task_bundle_of(spec, task).digest))


def task_bundle_of(spec: CommandSpec, task: Task) -> Bundle:
    """What a task has for itself: files, and steps among them that know the task. Empty if it has nothing.

    Raises RequestError as `bundle_of` does.
    """
    own = own_of(task)
    if not (own.files or own.setup):
        return Bundle()
    root = Path(spec.root)
    files = bundle_files(root, own.files)
    steps = _steps(spec, own.setup, {**spec.env, **own.env, **task_env(task)})
    found = "task-" + digest(root, files, steps)
    _check_unchanged(spec, own.digest, found)
    return Bundle(found, {name: str(path) for name, path in files.items()}, steps)


def task_env(task: Task) -> dict[str, str]:
    """The variables that tell a command which task it is for."""
    params = msgspec.json.encode(task.params).decode()
    return {"EVALFLEET_TASK_ID": task.id, "EVALFLEET_PARAMS": params}


def spec_data(spec: CommandSpec) -> dict[str, Any]:
    """As JSON would give it back: lists, not tuples."""
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec))
    return data
