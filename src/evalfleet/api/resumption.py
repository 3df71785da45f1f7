"""Taking runs up again, here or from another computer; grading them; stopping those that nobody controls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from evalfleet.controller import Order
from evalfleet.errors import RequestError
from evalfleet.events import (
    Event,
    GradingRequested,
    NewFiles,
    RunResumed,
    RunSteered,
    StopRequested,
    TasksReopened,
)
from evalfleet.journal import Holder
from evalfleet.mirror import (
    Mirror,
    MirroredJournal,
    StoreAway,
    collected_in,
    lacks_files,
    open_objects,
    store_url,
    the_run,
)
from evalfleet.model import IMPORTED, AttemptId, Limits, Task, seconds_between
from evalfleet.named_pools import read_pool
from evalfleet.names import folder_of
from evalfleet.planning import values
from evalfleet.planning.flags import Count, Number
from evalfleet.planning.new_files import has_changed, read_again
from evalfleet.planning.plan_parts import PlaceSettings, benchmark_of, check_files, secret_names
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Graded
from evalfleet.state import RunState, is_ungradable
from evalfleet.views.format import plural
from evalfleet.views.notable import new_files

from .run import Run, whoami
from .runs import control, open_run, tell_overdue

CLOCKS_APART_S = 60.0
"""Clocks of two computers that differ by less are not worth a word."""


def new_limits(
    budget: Number | None = None, max_duration: Number | None = None, workers: Count | None = None
) -> dict[str, float]:
    """Limits that a run is taken up or run again with. Raises RequestError."""
    limits: dict[str, float] = {}
    if budget is not None:
        limits["budget_usd"] = values.parse_usd(budget, "--budget")
    if max_duration is not None:
        limits["max_duration_s"] = values.parse_duration(max_duration, "--max-duration")
    if workers is not None:
        limits["workers"] = values.parse_count(workers, "--workers", 1, 10_000)
    return limits


def resume_order(
    workspace: Workspace,
    found: Run,
    *,
    only_broken: bool = False,
    take_over: bool = False,
    limits: Mapping[str, float] | None = None,
    env_file: str | None = None,
    with_new_files: bool = False,
    claims: bool = False,
) -> Order:
    """What it takes to take a run up again. Raises RequestError when there is nothing left to do.

    `claims`: it is another home's, and taken from there through its store.

    `with_new_files`: what is left runs with the benchmark as it is now. Machines that are up have the files
    of before: they must be let go first.
    """
    state = found.state()
    if state.plan.places == (IMPORTED,):
        raise RequestError(
            f"run {found.name!r} was imported, and cannot be taken up: start a run of its tasks"
        )
    if found.is_of_another_home:
        raise RequestError(
            f"run {found.name!r} was made in another home, where its machines are: take it up there"
        )
    _refuse_spent(state, (limits or {}).get("budget_usd"))
    first = tuple(_resumption(state, only_broken, limits or {}))
    if state.ended_at is not None and not first:
        hint = "; `--only broken` runs the broken ones again" if state.broken else ""
        raise RequestError(f"run {found.name!r} has no unrun tasks{hint}")
    if state.plan.pool:
        read_pool(workspace.records(), state.plan.pool)
    plan = state.plan
    unsettled = _unsettled(state)
    if with_new_files:
        if new := read_again(plan, unsettled, found.home, found.folder):
            plan, first = new.renewed(plan), tuple(_with_new_files(state, first, new))
    elif unsettled and not lacks_files(found.folder):
        check_files(plan, unsettled, found.folder)
    secrets, environ = workspace.secrets(plan, env_file)
    settings, notify = workspace.changed_settings(plan), workspace.notify(env_file)
    return Order(
        *(found.home, found.name, secrets, environ, take_over, first, notify),
        settings=settings,
        claims=claims,
    )


def _refuse_spent(state: RunState, budget_usd: float | None) -> None:
    """A budget that pays nothing more would end the run again as soon as it began."""
    if budget_usd is None:
        return
    spent = state.spend.machines.spent + state.spend.models.spent + state.spend.models.lost
    already = f"--budget {budget_usd:g}: run {state.plan.run!r} has cost ${spent:.2g} already"
    if budget_usd <= spent:
        raise RequestError(f"{already}; give more")
    call_usd = state.spend.models.spent / max(1, state.spend.calls)
    if budget_usd - spent < call_usd:
        raise RequestError(f"{already}, and the rest does not pay one call of a model (${call_usd:.2g})")


def _unsettled(state: RunState) -> list[Task]:
    return [known.task for known in state.tasks.values() if known.status not in ("scored", "answered")]


def _resumption(state: RunState, only_broken: bool, limits: Mapping[str, float]) -> list[Event]:
    """Events that reopen a run. A run whose controller merely died needs none: it goes on."""
    ungradable = _ungradable(state)
    grade = [GradingRequested(ungradable)] if ungradable else []
    if only_broken:
        if not state.broken:
            raise RequestError(f"run {state.plan.run!r} has no broken tasks")
        broken = tuple(
            task
            for task, known in state.tasks.items()
            if known.status == "broken" and not is_ungradable(known)
        )
        reopened = [TasksReopened(broken)] if broken else []
        return [*reopened, RunResumed(_limits(state, limits), only=broken), *grade]
    unrun = state.waiting + state.answered + state.counts["held"]
    if state.ended_at is not None and not unrun and not grade:
        return []
    if state.ended_at is not None or state.stop is not None or limits:
        return [RunResumed(_limits(state, limits)), *grade]
    return (
        [RunSteered("set", whoami(), "resumed", workers=state.limits.workers)]
        if state.paused is not None
        else []
    )


def _ungradable(state: RunState) -> tuple[AttemptId, ...]:
    """The answers on which the grader failed: it is asked again, and no agent is."""
    decided = (known.decided_by for known in state.tasks.values() if is_ungradable(known))
    return tuple(attempt for attempt in decided if attempt is not None)


def _limits(state: RunState, changes: Mapping[str, float]) -> Limits | None:
    return msgspec.structs.replace(state.limits, **changes) if changes else None


def _with_new_files(state: RunState, first: Sequence[Event], new: NewFiles) -> Iterator[Event]:
    resumed = next((event for event in first if isinstance(event, RunResumed)), RunResumed())
    # a machine must not give up a task that has become longer while nobody controls it
    longest_s = max((task.limit_s for task in new.tasks), default=0.0)
    limits = resumed.limits or state.limits
    limits = msgspec.structs.replace(limits, lease_s=max(limits.lease_s, 2 * longest_s + 600))
    yield from (event for event in first if event is not resumed)
    yield msgspec.structs.replace(resumed, limits=limits, new_files=new)


async def ready_to_resume(
    workspace: Workspace,
    name: str | None,
    *,
    tell: Callable[[str], None],
    with_new_files: bool,
    take_over: bool,
    from_url: str | None = None,
    **more: Any,
) -> tuple[Run, Order]:
    """The run, and what `resume_order` returns. Machines that have files of before are let go first.

    `tell` is told what there is to know about new files. `from_url`: the store that has the run, which may be
    another home's.
    """
    await tell_overdue(workspace)
    if from_url is not None:
        name = await fetch_run(workspace, from_url, name, tell, compares=with_new_files)
        more["claims"] = True
    run = open_run(workspace, name)  # once: its journal may be long
    if from_url is None:
        await _put_rest(workspace, run, tell)
    order_now = functools.partial(
        resume_order, workspace, run, with_new_files=with_new_files, take_over=take_over, **more
    )
    order = order_now()
    if with_new_files and run.state().undeleted:
        tell(f"machines of {run.name} have the old files: they go first")
        stopped = await control(workspace, replace(cancelling_order(workspace, run), take_over=take_over))
        await stopped.ended(progress=False)
        order = order_now()
    if with_new_files:
        resumed = (event for event in order.first if isinstance(event, RunResumed))
        new = next((event.new_files for event in resumed), None)
        changed = f"{order.run} goes on {new_files(new)}" if new else "no file of the benchmark has changed"
        tell(changed)
    return run, order


def what_is_left(run: Run, order: Order) -> str:
    """Return what a run that is resumed still has to do, in words."""
    state = run.state()
    only = next((event.only for event in order.first if isinstance(event, RunResumed)), None)
    left = len(_unsettled(state)) - state.broken if only is None else len(only)
    running = sum(attempt.outcome is None for attempt in state.attempts.values())
    adopted = f", {plural(running, 'running attempt')} adopted" if running else ""
    again = " that broke" if only is not None else ""
    return f"{run.name} is resumed: {left:,} of {plural(state.total, 'task')}{again} to run{adopted}"


def tell_of_changes(run: Run, tell: Callable[[str], None]) -> None:
    """Tell of a benchmark that has changed since the run was planned, though the run goes on as it was.

    Call it once a controller is at work: reading a large benchmark takes a while, and nothing waits for it.
    """
    if (left := _unsettled(run.state())) and has_changed(run.state().plan, left, run.home):
        tell(
            f"the benchmark has changed since: {run.name} goes on with its files as they were; "
            "`--with-new-files` takes the new ones"
        )


async def _put_rest(workspace: Workspace, run: Run, tell: Callable[[str], None]) -> None:
    """Put what the store of a run that is over has not, because it was away at the end. Raises
    RequestError."""
    state = run.state()
    if not state.plan.store or state.ended_at is None:
        return
    store, holder = workspace.store(), Holder.here(workspace.now())
    environ = workspace.environment()
    mirror = Mirror(state.plan.store, environ, store, run.name, run.folder, claims=False)
    try:
        await mirror.catch_up(holder)
        if (missing := state.events - (mirror.newest.seq if mirror.newest else 0)) > 0:
            local = store.acquire(run.name, holder, workspace.now())
            journal = await MirroredJournal.open(local, mirror, holder, lambda: None)
            await journal.close()
            tell(f"the last {missing} events of {run.name} are in {mirror.sequence.where} now")
    except StoreAway as err:
        raise RequestError(str(err)) from err


async def fetch_run(
    workspace: Workspace, url: str, name: str | None, tell: Callable[[str], None], *, compares: bool = False
) -> str:
    """Bring a run here from the store that has it, and return its name. Nobody else's right to it ends yet.

    Its files may be much: they follow once the run is ours, unless it is over. `compares`: what machines get
    is to be compared with new files, and comes at once. Raises RequestError.
    """
    store, environ = workspace.store(), workspace.environment()
    url = store_url(url, workspace.cwd)
    try:
        objects = open_objects(url, environ)
        run = await the_run(objects, name)
        folder = folder_of(workspace.home, run)
        folder.mkdir(parents=True, exist_ok=True)
        mirror = Mirror(url, environ, store, run, folder, claims=True)
        await mirror.bring()
        state = open_run(workspace, run).state()
        if state.plan.pool:
            raise RequestError(
                f"run {run!r} borrows from pool {state.plan.pool!r} of another home: resume it there"
            )
        if compares or state.ended_at is not None:
            await mirror.files.fetch_kept_files()
        if state.ended_at is None:
            mirror.files.note_lack()
        else:
            await mirror.files.fetch_artefacts(collected_in(state))
    except StoreAway as err:
        raise RequestError(str(err)) from err
    if state.ended_at is None and (newest := mirror.newest) is not None:
        tell(f"run {run}, which {newest.who} had last, is taken over from {url}")
        if (behind_s := seconds_between(workspace.now(), newest.wrote_at)) > CLOCKS_APART_S:
            tell(
                f"this computer's clock is {behind_s / 60:.0f} minutes or more behind that of "
                f"{newest.holder.host}: set it, else machines of the run may end sooner than is known here"
            )
    return run


def grade_order(
    workspace: Workspace, name: str | None = None, *, again: bool = False, env_file: str | None = None
) -> Order:
    """What it takes to grade the answers of a run, and to run nothing. Raises RequestError.

    `again`: what has a score is graded again. The first grade of an attempt stays; the new one is kept too.
    """
    found = open_run(workspace, name)
    state = found.state()
    if state.plan.places == (IMPORTED,):
        raise RequestError(f"run {found.name!r} was imported: there is nothing of it to grade")
    if state.running or state.undeleted or (state.ended_at is None and state.waiting):
        finish = f"`evalfleet resume {found.name}` finishes it, and grades its answers"
        raise RequestError(f"run {found.name!r} is not over: {finish}")
    scored = tuple(known.decided_by for known in state.tasks.values() if known.status == "scored")
    attempts = tuple(attempt for attempt in scored if attempt is not None) if again else ()
    attempts += _ungradable(state)
    if not attempts and not state.answered:
        hint = "; `--regrade` grades once more what has a score" if scored and not again else ""
        raise RequestError(f"run {found.name!r} has no answers to grade{hint}")
    benchmark = benchmark_of(state.plan)
    if not isinstance(benchmark, Graded) or benchmark.grader is None:
        raise RequestError(f"the benchmark of run {found.name!r} scores its attempts itself: it cannot grade")
    first: list[Event] = [RunResumed(only=())]
    if attempts:
        first.append(GradingRequested(attempts))
    secrets, environ = workspace.secrets(state.plan, env_file)
    return Order(found.home, found.name, secrets, environ, first=tuple(first))


def cancelling_order(workspace: Workspace, run: Run, reason: str = "") -> Order:
    """For a run that nobody controls: take it, stop it, clean up.

    Nothing is started, so no secret is needed; where one has no value here, no artefact is collected.
    """
    state = run.state()
    environ = workspace.environ
    with suppress(RequestError):
        environ = workspace.environment()
    secrets = {name: environ.get(name, "") for name in secret_names(state.plan)}
    stopped = state.stop is not None and not state.stop.drain
    first = () if stopped else (StopRequested("user", "cancelled", by=whoami(), why=reason),)
    settings: PlaceSettings = {}
    with suppress(RequestError):
        settings = workspace.changed_settings(state.plan)
    return Order(
        run.home, run.name, secrets, environ, first=first, notify=workspace.notify(), settings=settings
    )
