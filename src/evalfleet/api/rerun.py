"""Running tasks of an earlier run again, in a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from evalfleet.benchmarks.selection import matching
from evalfleet.errors import RequestError
from evalfleet.model import IMPORTED, Plan, Provenance, Task
from evalfleet.named_pools import read_pool
from evalfleet.names import check_run_name, default_run_name
from evalfleet.planning.past import past_of
from evalfleet.planning.plan import Resolved, free_name, kept_pool, weigh
from evalfleet.planning.plan_parts import check_files
from evalfleet.planning.provenance import tasks_digest, versions
from evalfleet.planning.workspace import Workspace

from .runs import open_run, tasks_that_went


def resolve_rerun(
    workspace: Workspace,
    name: str,
    tasks: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
    new_name: str | None = None,
    keep: bool = False,
    env_file: str | None = None,
) -> Resolved:
    """A new run of the same benchmark, model, settings, places and limits, of all tasks or of these.

    `tasks` are ids, globs and ranges; `only` are outcomes. The earlier run stays as it is; the new one's plan
    names it. Raises RequestError.
    """
    found = open_run(workspace, name)
    earlier = found.state().plan
    if earlier.places == (IMPORTED,):
        raise RequestError(
            f"run {found.name!r} was imported, with its results alone: start a run of its benchmark with "
            f"--from {found.name}"
        )
    went = {task["task_id"] for task in tasks_that_went(found, only)}
    every = [known.task for known in found.state().tasks.values()]
    chosen = [task for task in (matching(every, tasks, "task") if tasks else every) if task.id in went]
    if not chosen:
        raise RequestError(f"run {found.name!r}: none of the tasks named is {' or '.join(only)}")
    store = workspace.store()
    taken = {info.name for info in store.streams()}
    if new_name is not None and check_run_name(new_name) in taken:
        raise RequestError(f"the name {new_name!r} is taken; choose another with --name")
    run = new_name or free_name(default_run_name(earlier.benchmark, workspace.now()), taken)
    bounds = msgspec.structs.replace(earlier.limits, **(limits or {}))
    plan = msgspec.structs.replace(
        earlier,
        run=run,
        limits=bounds,
        home=store.home_id,
        pool=kept_pool(run) if keep else _pool(workspace, found.name, earlier),
        rerun_of=found.name,
        provenance=msgspec.structs.replace(
            earlier.provenance or Provenance(),
            selection={"rerun_of": found.name, "task": list(tasks), "only": list(only)},
            tasks_digest=tasks_digest(chosen),
            versions=versions(),
        ),
    )
    _check_files(plan, chosen, found.folder)
    secrets, environ = workspace.secrets(plan, env_file)
    return Resolved(
        plan=plan,
        tasks=weigh(chosen, past_of(workspace.home, plan.benchmark).durations()),
        home=workspace.home,
        warnings=(),
        secrets=secrets,
        environ=environ,
        made_up=new_name is None,
        keep=keep,
        notify=workspace.notify(env_file),
    )


def _pool(workspace: Workspace, name: str, plan: Plan) -> str:
    """The pool that the earlier run borrowed, or left behind if it is still there. Raises RequestError."""
    if not plan.pool:
        return ""
    try:
        view = read_pool(workspace.records(), plan.pool)
    except RequestError:
        if plan.pool == kept_pool(name):
            return ""
        raise
    if problem := view.unusable(workspace.now()):
        raise RequestError(problem)
    return plan.pool


def _check_files(plan: Plan, tasks: Sequence[Task], folder: Path) -> None:
    """The same files as then, which the earlier run keeps: others would make another experiment of it."""
    try:
        check_files(plan, tasks, folder)
    except RequestError as err:
        raise RequestError(
            f"{err}; `evalfleet run BENCHMARK --from {plan.rerun_of}` runs its tasks with new files"
        ) from None
