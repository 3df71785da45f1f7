"""One controller of one run: takes the stream, makes the parts from the plan, runs the engine."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .clock import RunClock, WallClock
from .engine import Engine
from .errors import FleetError, JournalError, LeaseLost, RequestError
from .events import ControllerStarted, Event, RunPlanned, StopRequested
from .journal import Holder, Holds, SqliteJournal, Store
from .mirror import Mirror, MirroredJournal, StoreAway, StoreRefused, collected_in
from .model import NOBODY, MachineId, Micros, Notify, Plan, seconds_between
from .named_pools import Bare, Change, LentPlace, PoolView, fence_of, look_at
from .names import folder_of
from .planning.plan_parts import PlaceSettings, benchmark_of, check_files, places_of
from .planning.plugins import KindFields
from .policy import POOL, RUN
from .ports import Place, PlaceContext
from .state import RunState, apply, fold
from .version import __version__
from .views import notify
from .views.alert_watch import AlertWatch
from .views.follow import Follower
from .views.live import PoolScribe, Scribe
from .views.results import RunSummary, summarised

SCRIBE_S = 0.4
PROGRAM_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What a controller is started with. `first` are events to record before anything else.

    `change` says it for a pool, once nobody else can change that, and which machines it must have to itself.
    `settings` of places are those that have changed since the plan was made. `claims`: the run is taken from
    another home, through the store that has a copy of it.
    """

    home: Path
    run: str
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    take_over: bool = False
    first: tuple[Event, ...] = ()
    notify: Notify = NOBODY
    change: Callable[[PoolView, Micros], Change] | None = None
    settings: PlaceSettings = field(default_factory=dict[str, Mapping[str, Any]])
    claims: bool = False

    @property
    def stops(self) -> bool:
        """Is the run to be stopped at once?"""
        return any(isinstance(event, StopRequested) and not event.drain for event in self.first)


class Controller:
    """The one writer of a run. It is a thread of its own, so that it works beside a terminal, a script or a
    notebook."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._store = Store.open(order.home, create=False)
        self._thread = threading.Thread(target=self._main, name=f"controller {order.run}")
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._life_s: Callable[[], float | None] = lambda: None
        self.failure: BaseException | None = None
        self.left = False

    def start(self) -> None:
        """Returns once the run is this controller's. Raises what kept it from taking the run."""
        self._thread.start()
        self._started.wait()
        if self._engine is None and self.failure is not None:
            self._thread.join()
            raise self.failure

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end. True: it has ended, and `failure` says if that was against its will."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self) -> None:
        """Hand out no more tasks; what runs may end by itself."""
        self._call(self._report, StopRequested("user", "interrupted", drain=True))

    def leave(self) -> None:
        """Stop now, without a word to the machines: attempts go on, and the run can be resumed."""
        self.left = True
        self._call(self._cancel)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # its loop has just ended, and so has the run or our part in it
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *args)

    def _report(self, event: Event) -> None:
        if self._engine is not None:
            self._engine.report(event)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- in the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._run())
            self._tell()
        except asyncio.CancelledError:
            self.left = True
        except LeaseLost as err:
            self.failure = err  # whoever has the run now tells how it went
        except FleetError as err:
            self.failure = err
            self._tell(str(err))
        except BaseException as err:  # a defect of ours, in a thread: nobody else would tell of it
            log.exception("the controller of %s fell over", self._order.run)
            self.failure = err
            self._tell(f"its controller fell over ({type(err).__name__})")
        finally:
            self._started.set()

    def _tell(self, failure: str = "") -> None:
        """Notify whoever wants to know. If that fails, the run is none the worse for it."""
        order = self._order
        if self._engine is None:
            return  # the run is not ours
        try:
            notify.run_over(order.notify, order.home, order.run, WallClock().now(), failure)
        except (FleetError, OSError) as err:
            log.warning("the notification was not sent: %s", err)

    async def _run(self) -> None:
        order, wall = self._order, WallClock()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        async with AsyncExitStack() as stack:
            holder = Holder.here(wall.now())
            journal = await self._acquire(holder)
            stack.push_async_callback(journal.close)
            state = fold(journal.read())
            is_pool = self._store.stream(order.run).kind == "pool"
            clock = clock_of(state, is_pool)
            first = order.first
            if order.change is not None:
                change = order.change(look_at(self._store, order.run), clock.now())
                self._hold(change.holds, journal.epoch, stack)
                first = (*first, *change.events)
            if first:
                now = clock.now()
                await journal.append(now, first)
                for event in first:
                    apply(state, now, event)
            plan = state.plan
            # what exists carries the id of the home that the run was planned in, whoever has it now
            home_id = plan.home or self._store.home_id
            context = PlaceContext(order.home, home_id, order.secrets, order.environ)
            places = {
                name: self._borrowed(plan, place, journal.epoch) if plan.pool else place
                for name, place in places_of(plan, context, order.settings).items()
            }
            for place in places.values():
                stack.push_async_callback(place.close)
            copy = journal if isinstance(journal, MirroredJournal) else None
            if copy is not None and copy.lacks_files:
                copy.fetch(collected_in(state), self._check_of_files(state))
            self._engine = Engine(
                journal,
                places,
                Bare() if is_pool else benchmark_of(plan, folder_of(order.home, order.run)),
                clock,
                folder_of(order.home, order.run),
                controller=ControllerStarted(holder.host, holder.pid, __version__, clock.boot, clock.zero),
                rules=POOL if is_pool else RUN,
                fence_of=functools.partial(fence_of, Holds(self._store, plan.run)) if is_pool else None,
                secrets=order.secrets,
                state=state,
                copy=copy,
            )
            self._life_s = functools.partial(shortest_life_s, state, clock)
            stack.push_async_callback(self._start_scribe(is_pool, clock))
            if not is_pool:
                notify.expect(order.notify, order.home, order.run)
            self._loop.create_task(self._leave_with_the_program())
            self._started.set()
            state = await self._engine.run()
            if copy is not None:
                await copy.fetched()
            if not is_pool:
                self._keep_summary(state)

    def _check_of_files(self, state: RunState) -> Callable[[], None]:
        """What raises RequestError if machines cannot get what they need for the tasks that are left."""
        left = [known.task for known in state.tasks.values() if known.status not in ("scored", "answered")]
        folder = folder_of(self._order.home, self._order.run)
        return lambda: check_files(state.plan, left, folder) if left else None

    async def _acquire(self, holder: Holder) -> SqliteJournal | MirroredJournal:
        """The stream, under the next epoch; and in its store, too, if it has one."""
        order, store = self._order, self._store

        def here() -> SqliteJournal:
            return store.acquire(order.run, holder, WallClock().now(), order.take_over)

        if not (url := store_of(store, order.run)):
            return here()
        folder = folder_of(order.home, order.run)
        folder.mkdir(parents=True, exist_ok=True)
        mirror = Mirror(url, order.environ, store, order.run, folder, claims=order.claims)
        try:
            await mirror.catch_up(holder)
        except (StoreAway, StoreRefused) as err:
            if order.stops:
                return MirroredJournal.open_alone(here(), mirror, holder, lambda: self._life_s(), err)
            if order.claims:  # it is another home's still
                raise RequestError(str(err)) from err
            raise RequestError(f"{err}; `evalfleet cancel {order.run}` works without it") from err
        local = here()
        try:
            return await MirroredJournal.open(local, mirror, holder, lambda: self._life_s())
        except BaseException:
            await local.close()
            raise

    def _keep_summary(self, state: RunState) -> None:
        """Keep a summary for `ls`. If it cannot be written, `ls` folds the journal instead."""
        summary = msgspec.json.encode(summarised(state, WallClock().now())).decode()
        with suppress(JournalError):
            self._store.keep_summaries(RunSummary.VERSION, [(self._order.run, state.events, summary)])

    def _borrowed(self, plan: Plan, place: Place, epoch: int) -> Place:
        """The pool's machines there, as this run may use them."""
        holds, follower = Holds(self._store, plan.pool), Follower(self._store, plan.pool)

        def look() -> PoolView:
            follower.poll()  # a pool may be old, and is looked at for each machine
            return PoolView(plan.pool, follower.state, holds.all())

        return LentPlace(place, holds, look, plan.run, epoch, WallClock().now, plan.benchmark)

    def _hold(self, machines: Sequence[MachineId], epoch: int, stack: AsyncExitStack) -> None:
        """Have the pool's machines until the end. Raises RequestError, which names the run that has one."""
        holds = Holds(self._store, self._order.run)
        holds.take_all(machines, epoch, WallClock().now())
        stack.callback(holds.give_back, machines, self._order.run, epoch)

    async def _leave_with_the_program(self) -> None:
        """Leave in time when the program ends before the run: Python takes threads and executors away
        then."""
        while threading.main_thread().is_alive():
            await asyncio.sleep(PROGRAM_S)
        log.warning(
            "the program has ended before run %s; `evalfleet resume` goes on with it", self._order.run
        )
        self._cancel()

    def _start_scribe(self, is_pool: bool, clock: RunClock) -> Callable[[], Awaitable[None]]:
        """Live files and alerts are written beside the engine, from the journal: they never hold it up.

        Returns how to have the last of them written.
        """
        kind = PoolScribe if is_pool else Scribe
        store, name = self._store, self._order.run
        scribe = kind(
            self._order.home,
            store,
            name,
            clock.now,
            is_newest=lambda: store.newest() == name,
            fields=KindFields(),
        )
        alerts = None if is_pool else AlertWatch(self._order.home, store, name, self._order.notify, clock.now)
        done = threading.Event()

        def write() -> None:
            while not done.wait(SCRIBE_S):
                scribe.tick()
                if (problem := scribe.problem()) is not None:
                    log.warning("live files: %s", problem)
                if alerts is not None:
                    alerts.tick(scribe.state)
            scribe.close()
            if alerts is not None:
                alerts.close(scribe.state)

        thread = threading.Thread(target=write, name=f"scribe {self._order.run}")
        thread.start()

        async def finish() -> None:
            done.set()
            while thread.is_alive():
                await asyncio.sleep(0.005)

        return finish


def store_of(store: Store, run: str) -> str:
    """The URL of the object store that has a copy of the run; empty if none has."""
    first = store.first(run)
    return first.plan.store if isinstance(first, RunPlanned) else ""


def shortest_life_s(state: RunState, clock: RunClock) -> float | None:
    """For how long the machine lives that expires first; None if there is none."""
    ends = [state.machines[machine].ends_at for machine in state.undeleted]
    return max(0.0, seconds_between(clock.now(), min(ends))) if ends else None


def clock_of(state: RunState, is_pool: bool) -> RunClock:
    """A run's time goes on as its last controller had it.

    The times of a pool's machines are compared with the wall clock by whoever borrows them: each of its
    controllers is anchored to that anew.
    """
    if is_pool:
        return RunClock(last_at=state.last_at)
    last = state.controller
    return RunClock(boot=last.boot, zero=last.zero, last_at=state.last_at)
