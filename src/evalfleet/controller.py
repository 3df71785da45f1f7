"""One controller of one run: takes the stream, makes the parts from the plan, runs the engine."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .engine import Engine
from .errors import FleetError
from .events import ControllerStarted, Event, StopRequested
from .journal import Holder, Holds, Store
from .model import MachineId, Micros, Plan
from .names import safe_name
from .plan import benchmark_of, places_of
from .policy import POOL, RUN
from .pools import Bare, LentPlace, OwnPlace, read_pool
from .ports import PlaceContext, Provider
from .state import fold
from .version import __version__
from .views.live import PoolScribe, Scribe

SCRIBE_S = 0.4
PROGRAM_S = 0.2

log = logging.getLogger(__name__)


class WallClock:
    def now(self) -> Micros:
        return time.time_ns() // 1000


def folder_of(home: Path, run: str) -> Path:
    return home / safe_name(run)


@dataclass(frozen=True)
class Order:
    """What a controller is started with. `first` are events to record before anything else.

    `holds` are the machines of a pool that its controller must have to itself.
    """

    home: Path
    run: str
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    take_over: bool = False
    first: tuple[Event, ...] = ()
    holds: tuple[MachineId, ...] = ()


class Controller:
    """Runs in a thread of its own, so that it works beside a terminal, a script or a notebook."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._store = Store.open(order.home, create=False)
        self._thread = threading.Thread(target=self._main, name=f"controller {order.run}")
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
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
        except asyncio.CancelledError:
            self.left = True
        except FleetError as err:
            self.failure = err
        except BaseException as err:
            log.exception("the controller of %s fell over", self._order.run)
            self.failure = err
        finally:
            self._started.set()

    async def _run(self) -> None:
        order, clock = self._order, WallClock()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        async with AsyncExitStack() as stack:
            holder = Holder.here(clock.now())
            journal = self._store.acquire(order.run, holder, clock.now(), order.take_over)
            stack.push_async_callback(journal.close)
            if order.holds:
                holds = Holds(self._store, order.run)
                holds.take_all(order.holds, journal.epoch, clock.now())
                stack.callback(self._give_back, holds)
            if order.first:
                await journal.append(clock.now(), order.first)
            plan = _plan_of(self._store, order.run)
            context = PlaceContext(order.home, self._store.home_id, order.secrets, order.environ)
            is_pool = self._store.stream(order.run).kind == "pool"
            places = {
                name: self._borrowed(plan, place, journal.epoch, is_pool)
                for name, place in places_of(plan, context).items()
            }
            for place in places.values():
                stack.push_async_callback(place.close)
            self._engine = Engine(
                journal,
                places,
                Bare() if is_pool else benchmark_of(plan),
                clock,
                folder_of(order.home, order.run),
                controller=ControllerStarted(holder.host, holder.pid, __version__),
                rules=POOL if is_pool else RUN,
            )
            stack.push_async_callback(self._start_scribe(is_pool))
            self._loop.create_task(self._leave_with_the_program())
            self._started.set()
            await self._engine.run()

    def _borrowed(self, plan: Plan, place: Provider, epoch: int, is_pool: bool) -> Provider:
        """The place as this stream may use it."""
        if is_pool:
            return OwnPlace(place, Holds(self._store, plan.run))
        if not plan.pool:
            return place
        holds, clock = Holds(self._store, plan.pool), WallClock()
        look = functools.partial(read_pool, self._store, plan.pool)
        return LentPlace(place, holds, look, plan.run, epoch, clock.now)

    def _give_back(self, holds: Holds) -> None:
        """What still exists: a machine that is gone stays the pool's, so that nobody borrows it."""
        state = fold(self._store.read(self._order.run))
        holds.give_back([machine for machine in self._order.holds if machine in state.undeleted])

    async def _leave_with_the_program(self) -> None:
        """When the program ends before the run, Python takes threads and executors away: go in time."""
        while threading.main_thread().is_alive():
            await asyncio.sleep(PROGRAM_S)
        log.warning(
            "the program has ended before run %s; `evalfleet resume` goes on with it", self._order.run
        )
        self._cancel()

    def _start_scribe(self, is_pool: bool) -> Callable[[], Awaitable[None]]:
        """Live files are written beside the engine, from the journal: they never hold it up.

        Returns how to have the last of them written.
        """
        kind = PoolScribe if is_pool else Scribe
        scribe = kind(self._order.home, self._store, self._order.run)
        done = threading.Event()

        def write() -> None:
            while not done.wait(SCRIBE_S):
                scribe.tick()
                if (problem := scribe.problem()) is not None:
                    log.warning("live files: %s", problem)
            scribe.close()

        thread = threading.Thread(target=write, name=f"scribe {self._order.run}")
        thread.start()

        async def finish() -> None:
            done.set()
            while thread.is_alive():
                await asyncio.sleep(0.005)

        return finish


def _plan_of(store: Store, run: str) -> Plan:
    return fold([next(iter(store.read(run)))]).plan
