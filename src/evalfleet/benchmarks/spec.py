"""A command benchmark as it is planned and recorded: the checked contents of its file but for the tasks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import Bundle, Command, Needs, SetupStep, Task

from .containers import ContainerSettings, bundle_digest, digests_script, image_step
from .files import IgnoreRules, bundle_files, check_files, covering, digest, keep_files
from .tasks import own_of, with_own

PLACEHOLDER = re.compile(r"\{(task_id|domain|attempt|params\.[^{}]+)\}")


class CommandSpec(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checked contents of the file but for its tasks. `root` is its folder, absolute.

    `digest` is the bundle's when the run was planned, and names the copy of it that the run keeps.
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
    image: str = ""
    container: ContainerSettings = ContainerSettings()
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """What `--set` may change, with the defaults."""
    steps: str = ""
    """The file below $EVALFLEET_OUT that the agent writes its steps into."""


def bundle_of(spec: CommandSpec, kept: Path | None = None) -> Bundle:
    """What every machine gets. Reads every file once. RequestError if one cannot be read or has changed.

    `kept` is where a run keeps its files; one of an earlier version has none there, and needs those in the
    benchmark's folder as they were.
    """
    steps = (*_image_step(spec, spec.image), *_steps(spec, spec.setup, spec.env))
    return _bundle(spec, spec.files, steps, spec.digest, kept)


def score_bundle_of(spec: CommandSpec, kept: Path | None = None) -> Bundle:
    """The files that only the score command gets. Raises RequestError as `bundle_of` does."""
    if not spec.score_files:
        return Bundle()
    return _bundle(spec, spec.score_files, (), spec.score_digest, kept, "score-")


def _bundle(
    spec: CommandSpec,
    entries: Sequence[str],
    steps: tuple[SetupStep, ...],
    planned: str,
    kept: Path | None,
    prefix: str = "",
) -> Bundle:
    names = covering(entries)
    unknown = digests_script(planned, steps)

    def digest_in(root: Path, rules: IgnoreRules | None = None) -> str:
        return prefix + bundle_digest(steps, lambda counted: digest(root, names, counted, rules))

    own = kept / planned if kept is not None and planned else None
    if own is not None and own.is_dir():
        if digest_in(own) != planned and not unknown:
            raise RequestError(f"the files that the run keeps in {own} were changed: {NEW_FILES}")
        return Bundle(planned, {name: str(own / name) for name in names}, steps)
    root = Path(spec.root)
    found = digest_in(root, IgnoreRules(root))
    if planned in ("", found):
        return Bundle(found, {name: str(path) for name, path in bundle_files(root, entries).items()}, steps)
    if unknown and not names:  # there are no files that could have changed
        return Bundle(planned, {}, steps)
    if digest_in(root) == planned:  # an earlier version sent what is ignored, too
        return Bundle(planned, {name: str(root / name) for name in names}, steps)
    raise RequestError(
        f"the files of benchmark {spec.name!r} in {spec.root} have changed since the run was planned, and "
        f"it has no copy of them: {NEW_FILES}"
    )


NEW_FILES = "put them back as they were, or go on with `evalfleet resume RUN --with-new-files`"


def keep_bundles(
    spec: CommandSpec, tasks: Sequence[Task], folder: Path, twins: Callable[[str], Path | None]
) -> None:
    """Copy all that machines get into the folder, each bundle under its digest. Raises RequestError.

    `twins` tells where another run keeps the bundle of this digest.
    """
    _keep(spec, spec.files, spec.digest, folder, twins, partial(bundle_of, spec, folder))
    _keep(spec, spec.score_files, spec.score_digest, folder, twins, partial(score_bundle_of, spec, folder))
    for task in tasks:
        own = own_of(task)
        _keep(spec, own.files, own.digest, folder, twins, partial(task_bundle_of, spec, task, folder))


def _keep(
    spec: CommandSpec,
    entries: Sequence[str],
    planned: str,
    folder: Path,
    twins: Callable[[str], Path | None],
    check: Callable[[], object],
) -> None:
    if not entries or not planned:
        return
    if (twin := twins(planned)) is not None:
        with suppress(RequestError):  # somebody has changed those, or deletes them now
            _copy(spec, entries, folder / planned, twin)
            check()
            return
        shutil.rmtree(folder / planned, ignore_errors=True)
    _copy(spec, entries, folder / planned, None)
    check()


def _copy(spec: CommandSpec, entries: Sequence[str], target: Path, twin: Path | None) -> None:
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        keep_files(Path(spec.root), entries, target, twin)
    except OSError as err:
        raise RequestError(
            f"the files of benchmark {spec.name!r} cannot be copied from {twin or spec.root} to "
            f"{target.parent}: {err.strerror or err}"
        ) from err


def _image_step(spec: CommandSpec, image: str) -> tuple[SetupStep, ...]:
    return (image_step(spec.container, [image]),) if image else ()


def _steps(
    spec: CommandSpec, setup: Sequence[tuple[str, ...]], env: Mapping[str, str]
) -> tuple[SetupStep, ...]:
    return tuple(
        SetupStep(f"setup-{number}", Command(argv, env, spec.setup_secrets), spec.setup_timeout_s or 3600.0)
        for number, argv in enumerate(setup, start=1)
    )


def planned_task(spec: CommandSpec, task: Task, where: str) -> Task:
    """The task, with the digest of the files that it has for itself, and what sets machines up for it.

    RequestError if they are wrong.
    """
    own = own_of(task)
    if not (own.files or own.setup or own.image):
        return task
    check_files(Path(spec.root), own.files, f"{where}: task {task.id!r}")
    digest = task_bundle_of(spec, task).digest
    # of all that a machine can have already, an image takes longest to come
    task = msgspec.structs.replace(task, set_up=own.image or digest)
    return with_own(task, msgspec.structs.replace(own, digest=digest))


def task_bundle_of(spec: CommandSpec, task: Task, kept: Path | None = None) -> Bundle:
    """What a task has for itself: files, and steps among them that know the task. Empty if it has nothing.

    Raises RequestError as `bundle_of` does.
    """
    own = own_of(task)
    if not (own.files or own.setup or own.image):
        return Bundle()
    steps = _image_step(spec, own.image) + _steps(spec, own.setup, {**spec.env, **own.env, **task_env(task)})
    return _bundle(spec, own.files, steps, own.digest, kept, "task-")


def task_env(task: Task) -> dict[str, str]:
    """The variables that tell a command which task it is for."""
    params = msgspec.json.encode(task.params).decode()
    return {"EVALFLEET_TASK_ID": task.id, "EVALFLEET_PARAMS": params}


def spec_data(spec: CommandSpec) -> dict[str, Any]:
    """The spec as JSON would give it back: lists, not tuples."""
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec))
    return data
