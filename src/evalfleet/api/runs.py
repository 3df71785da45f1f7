"""Starting runs, finding them, and taking them up again: what the command line calls."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.clock import WallClock
from evalfleet.controller import Controller, Order, folder_of
from evalfleet.errors import RequestError
from evalfleet.events import (
    Event,
    GradingRequested,
    NewFiles,
    PoolPlanned,
    RunPlanned,
    RunResumed,
    RunSteered,
    StopRequested,
    TasksPlanned,
    TasksReopened,
)
from evalfleet.journal import Holder, Store
from evalfleet.journal.database import FILE
from evalfleet.journal.sqlite import StreamKind
from evalfleet.mirror import Mirror, StoreAway, open_objects, store_url, the_run
from evalfleet.model import IMPORTED, AttemptId, Limits, Task
from evalfleet.named_pools import read_pool
from evalfleet.planning import values
from evalfleet.planning.flags import Count, Number
from evalfleet.planning.history import known_durations
from evalfleet.planning.new_files import has_changed, read_again
from evalfleet.planning.plan import (
    KEPT_FILES,
    HomeFacts,
    LentPool,
    PlaceSettings,
    Resolved,
    benchmark_of,
    check_files,
    free_name,
    keep_files,
    resolve,
    secret_names,
    vetted,
)
from evalfleet.planning.request import RunRequest
from evalfleet.planning.workspace import Workspace
from evalfleet.state import RunState, is_ungradable
from evalfleet.views import notify
from evalfleet.views.notable import new_files
from evalfleet.views.tasks import by_outcome

from .owners import granting, within_cap
from .pools import keep_plan, tend
from .run import Run, whoami

if TYPE_CHECKING:
    from evalfleet.views.compare import Comparison
    from evalfleet.views.documents import BelongingRow, Results, TaskResult

CHUNK = 1000
"""Tasks an event: large enough to be few, small enough to read one by one."""


def resolve_request(
    workspace: Workspace,
    request: RunRequest,
    *,
    dry: bool = False,
    only_setup: bool = False,
    secrets_elsewhere: bool = False,
) -> Resolved:
    """The request with everything settled, checked before anything starts.

    `dry`: nothing is written. `only_setup`: machines are set up, and no attempt is run. `secrets_elsewhere`:
    it will run on another computer, which has the values of secrets.
    """
    resolved = resolve(
        request,
        environ=workspace.environ,
        cwd=workspace.cwd,
        now=workspace.now(),
        home=workspace.home,
        facts=lambda: _facts(workspace, dry),
        pool=_lent(workspace, request, dry),
        only_setup=only_setup,
        secrets_elsewhere=secrets_elsewhere,
        earlier=functools.partial(_earlier_tasks, workspace),
    )
    return resolved if resolved.cap_usd is None else within_cap(workspace, resolved, resolved.cap_usd)


def _refuse_spent(state: RunState, budget_usd: float | None) -> None:
    """A budget that pays nothing more would end the run again as soon as it began."""
    if budget_usd is None:
        return
    spent = state.closed_usd + state.model_usd.spent + state.model_usd.lost
    already = f"--budget {budget_usd:g}: run {state.plan.run!r} has cost ${spent:.2g} already"
    if budget_usd <= spent:
        raise RequestError(f"{already}; give more")
    call_usd = state.model_usd.spent / max(1, state.metered_calls)
    if budget_usd - spent < call_usd:
        raise RequestError(f"{already}, and the rest does not pay one call of a model (${call_usd:.2g})")


def _earlier_tasks(workspace: Workspace, name: str, only: Sequence[str]) -> list[str]:
    went = tasks_that_went(open_run(workspace, name), only)
    return list(dict.fromkeys(task["origin"] for task in went))


def tasks_that_went(run: Run, only: Sequence[str]) -> list[TaskResult]:
    """The run's tasks that went in one of these ways. Raises RequestError if none did."""
    chosen = by_outcome(run.tasks(), only)
    if not chosen:
        raise RequestError(f"run {run.name!r} has no tasks that are {' or '.join(only)}")
    return chosen


def _facts(workspace: Workspace, dry: bool) -> HomeFacts:
    """The home is made if need be; when nothing may be written, it may be that there is none."""
    store = workspace.records_if_any() if dry else workspace.store()
    if store is None:
        return HomeFacts()
    taken = {info.name for info in store.streams()}
    return HomeFacts(store.home_id, taken, functools.partial(known_durations, workspace.home))


def _lent(workspace: Workspace, request: RunRequest, dry: bool) -> LentPool | None:
    """The pool that the request names. Raises RequestError if it cannot be borrowed from."""
    options = request.options
    pool = options.get("pool")
    if not pool:
        return None
    if "on" in options:
        raise RequestError("--on and --pool exclude each other: a pool's machines are where they are")
    view, now = read_pool(workspace.records(), pool), workspace.now()
    if options.get("keep"):
        raise RequestError(f"--keep makes a pool, and {pool!r} is one: leave --keep out")
    if options.get("spot"):
        raise RequestError(f"--spot: the machines of pool {pool!r} are there already: leave it out")
    if not dry and (problem := view.unusable(now)):
        raise RequestError(problem)
    return LentPool(view.state.plan, len(view.machines), view.warning(now))


async def vet(resolved: Resolved, *, dry: bool = False) -> Resolved:
    """Ask the benchmark whether this can work (a model's key), and the store whether it can have the run,
    before anything is made or written down here. `dry`: nothing is written there, either."""
    doubts = await vetted(resolved.plan, resolved.secrets)
    await _reserve(resolved, dry=dry)
    return replace(resolved, warnings=(*resolved.warnings, *doubts))


async def _reserve(resolved: Resolved, *, dry: bool) -> None:
    """Raises RequestError if the run's store cannot be written, or has a run of this name."""
    plan, home = resolved.plan, resolved.home
    if plan.store and (not dry or (home / FILE).exists()):
        store = Store.open(home, create=not dry, read_only=dry)
        folder = folder_of(home, plan.run)
        try:
            mirror = Mirror(plan.store, resolved.environ, store, plan.run, folder, claims=False)
            await mirror.reserve(dry=dry)
        except StoreAway as err:
            raise RequestError(str(err)) from err


def plan_run(workspace: Workspace, resolved: Resolved) -> Resolved:
    """Write the run down, and return it as it was written. From here on it exists, whoever runs it.

    What its machines get is copied first, so that nothing is written down that could not be run.
    """
    store = Store.open(resolved.home)
    with tempfile.TemporaryDirectory(prefix=".planned-", dir=resolved.home) as scratch:
        keep_files(resolved.plan, resolved.tasks, resolved.home, Path(scratch))
        resolved = _written_down(workspace, store, resolved)
        folder = folder_of(resolved.home, resolved.plan.run)
        folder.mkdir(parents=True, exist_ok=True)
        if (kept := Path(scratch) / KEPT_FILES).exists():
            shutil.rmtree(folder / KEPT_FILES, ignore_errors=True)  # of a folder that nobody knew
            kept.rename(folder / KEPT_FILES)
    return resolved


def _written_down(workspace: Workspace, store: Store, resolved: Resolved) -> Resolved:
    plan = resolved.plan
    with granting(workspace, plan.owner, "", plan.limits.budget_usd):
        while True:
            try:
                store.create_streams(WallClock().now(), _streams(resolved))
                return resolved
            except RequestError:
                if not resolved.made_up:
                    raise
                # another process made up the same name at the same time, and was faster
                taken = {info.name for info in store.streams()}
                resolved = resolved.named(free_name(resolved.plan.run, taken))


def _streams(resolved: Resolved) -> list[tuple[str, StreamKind, Sequence[Event]]]:
    """The run's, after that of the pool which it makes and leaves, if any."""
    run: tuple[str, StreamKind, Sequence[Event]] = (resolved.plan.run, "run", _first_events(resolved))
    if not resolved.keep:
        return [run]
    return [(resolved.plan.pool, "pool", [PoolPlanned(keep_plan(resolved.plan, resolved.plan.pool))]), run]


def _first_events(resolved: Resolved) -> list[Event]:
    tasks = resolved.tasks
    chunks = [TasksPlanned(tasks[i : i + CHUNK]) for i in range(0, len(tasks), CHUNK)]
    return [RunPlanned(resolved.plan, len(tasks)), *chunks]


def order_of(resolved: Resolved) -> Order:
    plan, notify = resolved.plan, resolved.notify
    return Order(resolved.home, plan.run, resolved.secrets, resolved.environ, notify=notify)


async def start(workspace: Workspace, resolved: Resolved) -> Run:
    """Write the run down, take it and run it, in a thread of this process."""
    return await control(workspace, order_of(plan_run(workspace, resolved)))


async def control(workspace: Workspace, order: Order) -> Run:
    """Take the run and run it, in a thread of this process."""
    controller = Controller(order)
    await asyncio.to_thread(_start, workspace, order, controller)
    run = Run(order.home, order.run, controller)
    state = run.state()
    if state.plan.pool and state.stop is None:
        await tend(workspace, state.plan.pool)
    return run


def _start(workspace: Workspace, order: Order, controller: Controller) -> None:
    """The budget of a run that is taken up again counts for the month of its owner as a new one does."""
    if not workspace.config.owners:
        controller.start()
        return
    state = Run(order.home, order.run).state()
    with granting(workspace, state.plan.owner, order.run, _resumed_usd(state, order.first)):
        controller.start()


def _resumed_usd(state: RunState, first: Sequence[Event]) -> float | None:
    """The budget of a run that was over and goes on; None if it was not over, and has its budget still."""
    resumed = next((event for event in first if isinstance(event, RunResumed)), None)
    return None if resumed is None else (resumed.limits or state.limits).budget_usd


def open_run(workspace: Workspace, name: str | None = None) -> Run:
    """A past or live run by its name, or by a beginning that only one has. Raises RequestError.

    Without a name, and for `latest` and `-`: the run that was started last.
    """
    name = _run_name(workspace, name)
    if workspace.records().stream(name).kind == "pool":
        raise RequestError(f"{name!r} is a pool, not a run: `evalfleet pool status {name}` shows it")
    return Run(workspace.home, name)


def compare_runs(workspace: Workspace, names: Sequence[str]) -> list[Comparison]:
    """Each other run beside the first; a run of several models counts as one of each. Raises RequestError."""
    return compare_results([open_run(workspace, name).results() for name in names])


def compare_results(documents: Sequence[Results]) -> list[Comparison]:
    """As `compare_runs`, of results documents."""
    from evalfleet.views.compare import compare, sides_of

    sides = [side for document in documents for side in sides_of(document)]
    if len(sides) < 2:
        raise RequestError("name two runs to compare, or one in which several models ran (--model a,b)")
    if len({(results["run"], model) for results, model in sides}) < len(sides):
        raise RequestError("a run cannot be compared with itself: name two different ones")
    return compare(sides)


def _run_name(workspace: Workspace, name: str | None) -> str:
    if name is None:
        return latest(workspace.home)
    streams = [info.name for info in workspace.records().streams()]
    if name in streams:
        return name
    if name in ("latest", "-"):
        return latest(workspace.home)
    alike = [stream for stream in streams if name and stream.startswith(name)]
    if len(alike) > 1:
        shown = ", ".join(alike[:3]) + (", ..." if len(alike) > 3 else "")
        raise RequestError(f"{name!r} may be {shown}: write more of the name")
    return alike[0] if alike else name


def open_run_or_task(workspace: Workspace, run: str | None, task: str | None) -> tuple[Run, str | None]:
    """As `open_run`, and what to look at in it. A single word may be a task, or a machine, of the latest run.

    Raises RequestError.
    """
    try:
        return open_run(workspace, run), task
    except RequestError:
        newest = open_run(workspace) if run is not None and task is None else None
        state = newest.state() if newest is not None else None
        if newest is None or state is None:
            raise
        machines = {machine.name for machine in state.machines.values()}
        if run not in (*state.tasks, *state.attempts, *newest.origins(), *machines):
            raise
        return newest, run


def latest(home: Path) -> str:
    runs = [info for info in Store.open(home, create=False, read_only=True).streams() if info.kind == "run"]
    if not runs:
        raise RequestError(f"there are no runs in {home}; start one with `evalfleet run BENCHMARK`")
    return max(runs, key=lambda info: info.created_at).name


def resume_order(
    workspace: Workspace,
    name: str | None = None,
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
    found = open_run(workspace, name)
    state = found.state()
    if state.plan.places == (IMPORTED,):
        raise RequestError(
            f"run {found.name!r} was imported, and cannot be taken up: start a run of its tasks"
        )
    here = Store.open(found.home, create=False, read_only=True).home_id
    if state.plan.home and state.plan.home != here and not state.plan.store:
        raise RequestError(
            f"run {found.name!r} was made in another home, where its machines are: take it up there"
        )
    _refuse_spent(state, (limits or {}).get("budget_usd"))
    first = tuple(_resumption(state, only_broken, limits or {}))
    with granting(workspace, state.plan.owner, found.name, _resumed_usd(state, first)):
        pass  # it is asked again when the run is taken: here, so that nothing else is done in vain
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
    elif unsettled:
        check_files(plan, unsettled, found.folder)
    secrets, environ = workspace.secrets(plan, env_file)
    settings, notify = workspace.changed_settings(plan), workspace.notify(env_file)
    return Order(
        *(found.home, found.name, secrets, environ, take_over, first, notify),
        settings=settings,
        claims=claims,
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
            journal = await mirror.open(local, holder, lambda: None)
            await journal.close()
            tell(f"the last {missing} events of {run.name} are in {mirror.sequence.where} now")
    except StoreAway as err:
        raise RequestError(str(err)) from err


async def fetch_run(workspace: Workspace, url: str, name: str | None, tell: Callable[[str], None]) -> str:
    """Bring a run here from the store that has it, and return its name. Nobody else's right to it ends yet.

    Raises RequestError.
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
        await mirror.files.fetch_kept_files()
        collected = [each.id for each in state.attempts.values() if each.collected is not None]
        await mirror.files.fetch_artefacts(collected)
    except StoreAway as err:
        raise RequestError(str(err)) from err
    if state.ended_at is None and mirror.newest is not None:
        tell(f"run {run}, which {mirror.newest.who} had last, is taken over from {url}")
    return run


def _unsettled(state: RunState) -> list[Task]:
    return [known.task for known in state.tasks.values() if known.status not in ("scored", "answered")]


async def ready_to_resume(
    workspace: Workspace,
    name: str | None,
    *,
    tell: Callable[[str], None],
    with_new_files: bool,
    take_over: bool,
    from_url: str | None = None,
    **more: Any,
) -> Order:
    """As `resume_order`, with its other arguments. Machines that have files of before are let go first.

    `tell` is told what there is to know about new files. `from_url`: the store that has the run, which may be
    another home's.
    """
    await tell_overdue(workspace)
    if from_url is not None:
        name, more["claims"] = await fetch_run(workspace, from_url, name, tell), True
    else:
        await _put_rest(workspace, open_run(workspace, name), tell)
    order_now = functools.partial(
        resume_order, workspace, name, with_new_files=with_new_files, take_over=take_over, **more
    )
    order = order_now()
    run = open_run(workspace, order.run)
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
    elif (left := _unsettled(run.state())) and has_changed(run.state().plan, left, run.home):
        tell(
            f"the benchmark has changed since: {run.name} goes on with its files as they were; "
            "`--with-new-files` takes the new ones"
        )
    return order


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


def _with_new_files(state: RunState, first: Sequence[Event], new: NewFiles) -> Iterator[Event]:
    resumed = next((event for event in first if isinstance(event, RunResumed)), RunResumed())
    # a machine must not give up a task that has become longer while nobody controls it
    longest_s = max((task.limit_s for task in new.tasks), default=0.0)
    limits = resumed.limits or state.limits
    limits = msgspec.structs.replace(limits, lease_s=max(limits.lease_s, 2 * longest_s + 600))
    yield from (event for event in first if event is not resumed)
    yield msgspec.structs.replace(resumed, limits=limits, new_files=new)


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
        hint = "; `--again` grades once more what has a score" if scored and not again else ""
        raise RequestError(f"run {found.name!r} has no answers to grade{hint}")
    if benchmark_of(state.plan).grader is None:
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


async def tell_overdue(workspace: Workspace) -> None:
    """Tell whom [notify] names of runs of this home that ended when nobody was there to tell it."""
    await asyncio.to_thread(notify.overdue, workspace.notify(), workspace.home, workspace.now())


async def tell_reaped(workspace: Workspace, found: Sequence[BelongingRow], problems: Sequence[str]) -> None:
    """Tell whom [notify] names that something was left behind, and deleted, or not."""
    await asyncio.to_thread(notify.reaped, workspace.notify(), found, problems, workspace.now())


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
    return [RunSteered("unpause", whoami(), "resumed")] if state.paused is not None else []


def _ungradable(state: RunState) -> tuple[AttemptId, ...]:
    """The answers on which the grader failed: it is asked again, and no agent is."""
    decided = (known.decided_by for known in state.tasks.values() if is_ungradable(known))
    return tuple(attempt for attempt in decided if attempt is not None)


def _limits(state: RunState, changes: Mapping[str, float]) -> Limits | None:
    return msgspec.structs.replace(state.limits, **changes) if changes else None
