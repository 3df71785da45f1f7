"""Starting runs, and finding them: what the command line calls. `resumption.py` takes them up again."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.clock import WallClock
from evalfleet.controller import Controller, Order
from evalfleet.errors import FleetError, RequestError
from evalfleet.events import (
    Event,
    PoolPlanned,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Store
from evalfleet.journal.database import FILE
from evalfleet.journal.sqlite import StreamKind
from evalfleet.mirror import Mirror, StoreAway
from evalfleet.model import Notify
from evalfleet.named_pools import read_pool
from evalfleet.names import folder_of
from evalfleet.planning.load import HomeFacts, LentPool, load
from evalfleet.planning.past import loads_of
from evalfleet.planning.plan import Resolved, decide, free_name
from evalfleet.planning.plan_parts import KEPT_FILES, keep_files, vetted
from evalfleet.planning.request import Purpose, RunRequest, read
from evalfleet.planning.workspace import Workspace
from evalfleet.views import notify
from evalfleet.views.tasks import by_outcome

from .pools import keep_plan, tend
from .run import Run

if TYPE_CHECKING:
    from evalfleet.views.compare import Comparison
    from evalfleet.views.documents import Results, TaskResult
    from evalfleet.views.fleet_documents import BelongingRow

CHUNK = 1000
"""Tasks an event: large enough to be few, small enough to read one by one."""


def resolve_request(workspace: Workspace, request: RunRequest, purpose: Purpose = "run") -> Resolved:
    """Return the plan of a request, checked before anything starts. RequestError says what to change."""
    options = read(
        request, environ=workspace.environ, cwd=workspace.cwd, home=workspace.home, purpose=purpose
    )
    home = HomeFacts(
        names=lambda: _names(workspace, purpose),
        tasks=functools.partial(_earlier_tasks, workspace),
        loads=lambda past: loads_of(workspace.records_if_any(), past),
        pool=_lent(workspace, request, purpose),
    )
    return decide(options, load(options, home), workspace.now())


def _earlier_tasks(workspace: Workspace, name: str, only: Sequence[str]) -> list[str]:
    went = tasks_that_went(open_run(workspace, name), only)
    return list(dict.fromkeys(task["origin"] for task in went))


def tasks_that_went(run: Run, only: Sequence[str]) -> list[TaskResult]:
    """The run's tasks that went in one of these ways. Raises RequestError if none did."""
    chosen = by_outcome(run.tasks(), only)
    if not chosen:
        raise RequestError(f"run {run.name!r} has no tasks that are {' or '.join(only)}")
    return chosen


def _names(workspace: Workspace, purpose: Purpose) -> tuple[str, Collection[str]]:
    """Return the home's id and the names that it has. A run makes the home if there is none."""
    store = workspace.store() if purpose == "run" else workspace.records_if_any()
    return ("", ()) if store is None else (store.home_id, {info.name for info in store.streams()})


def _lent(workspace: Workspace, request: RunRequest, purpose: Purpose) -> LentPool | None:
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
    if purpose == "run" and (problem := view.unusable(now)):
        raise RequestError(problem)
    return LentPool(view.state.plan, len(view.machines), view.warning(now))


async def vet(resolved: Resolved, *, dry: bool = False) -> list[str]:
    """Ask the benchmark whether this can work (a model's key), and the store whether it can have the run,
    before anything is made or written down here. Return the benchmark's doubts.

    `dry`: nothing is written in the store, either.
    """
    doubts = await vetted(resolved.plan, resolved.secrets)
    await _reserve(resolved, dry=dry)
    return doubts


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


def plan_run(resolved: Resolved) -> Resolved:
    """Write the run down, and return it as it was written. From here on it exists, whoever runs it.

    What its machines get is copied first, so that nothing is written down that could not be run.
    """
    store = Store.open(resolved.home)
    with tempfile.TemporaryDirectory(prefix=".planned-", dir=resolved.home) as scratch:
        keep_files(resolved.plan, resolved.tasks, resolved.home, Path(scratch))
        resolved = _written_down(store, resolved)
        folder = folder_of(resolved.home, resolved.plan.run)
        folder.mkdir(parents=True, exist_ok=True)
        if (kept := Path(scratch) / KEPT_FILES).exists():
            shutil.rmtree(folder / KEPT_FILES, ignore_errors=True)  # of a folder that nobody knew
            kept.rename(folder / KEPT_FILES)
    return resolved


def _written_down(store: Store, resolved: Resolved) -> Resolved:
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
    return await control(workspace, order_of(plan_run(resolved)))


async def control(workspace: Workspace, order: Order, known: Run | None = None) -> Run:
    """Take the run and run it, in a thread of this process. `known`: the run, if it was opened before."""
    controller = Controller(order)
    await asyncio.to_thread(controller.start)
    run = Run(order.home, order.run, controller) if known is None else known.controlled_by(controller)
    state = run.state()
    if state.plan.pool and state.stop is None:
        await tend(workspace, state.plan.pool)
    return run


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
    """Does what `compare_runs` does, with results documents."""
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


async def tell_overdue(workspace: Workspace) -> None:
    """Tell whom [notify] names of runs of this home that ended when nobody was there to tell it."""
    await asyncio.to_thread(notify.overdue, workspace.notify(), workspace.home, workspace.now())


async def tell_reaped(workspace: Workspace, found: Sequence[BelongingRow], problems: Sequence[str]) -> None:
    """Tell whom [notify] names that something was left behind, and deleted, or not."""
    await asyncio.to_thread(notify.reaped, workspace.notify(), found, problems, workspace.now())


# -- runs that outlive the terminal -------------------------------------------------------------------------

TAKEN = "taken"


class ControllerInput(msgspec.Struct, frozen=True):
    """What the controller's process is told on standard input: secrets are seen by no `ps`."""

    home: str
    run: str
    secrets: dict[str, str]
    environ: dict[str, str]
    take_over: bool
    first: tuple[Event, ...]
    notify: Notify
    settings: dict[str, dict[str, Any]]
    claims: bool = False

    def order(self) -> Order:
        return Order(
            Path(self.home),
            self.run,
            self.secrets,
            self.environ,
            self.take_over,
            self.first,
            self.notify,
            settings=self.settings,
            claims=self.claims,
        )


async def detach(order: Order) -> int:
    """Start the controller in a process of its own, whose id is returned once the run is its own."""
    return await asyncio.to_thread(_detach, order)


def _detach(order: Order) -> int:
    folder = folder_of(order.home, order.run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "controller.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "evalfleet", "controller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    errand = ControllerInput(
        str(order.home.absolute()),
        order.run,
        dict(order.secrets),
        dict(order.environ),
        order.take_over,
        order.first,
        order.notify,
        {name: dict(given) for name, given in order.settings.items()},
        order.claims,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(errand))
    process.stdin.close()
    answer = process.stdout.readline().decode().strip()
    process.stdout.close()
    if answer != TAKEN:
        refusal = FleetError(answer or f"the controller did not start: see {folder / 'controller.log'}")
        refusal.exit_code = process.wait() or 1
        raise refusal
    process.returncode = 0  # it outlives us, and is nobody's to wait for
    return process.pid


def let_go_of_output() -> None:
    """The caller waits for one line only; from then on nothing may be written to a pipe nobody reads."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
