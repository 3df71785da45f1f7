"""One controller of one run: takes the stream, makes the parts from the plan, runs the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .engine import Engine
from .errors import FleetError
from .events import ControllerStarted, Event, StopRequested
from .journal import Holder, Store
from .model import Micros, Plan
from .names import safe_name
from .plan import benchmark_of, places_of
from .registry import PlaceContext
from .state import RunState, fold
from .views.live import Scribe

SCRIBE_S = 0.4

log = logging.getLogger(__name__)


class WallClock:
    def now(self) -> Micros:
        return time.time_ns() // 1000


def folder_of(home: Path, run: str) -> Path:
    return home / safe_name(run)


@dataclass(frozen=True)
class Order:
    """What a controller is started with. `first` are events to record before anything else."""

    home: Path
    run: str
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    take_over: bool = False
    first: tuple[Event, ...] = ()


class Controller:
    """Runs in a thread of its own, so that it works beside a terminal, a script or a notebook."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._store = Store.open(order.home, create=False)
        self._thread = threading.Thread(target=self._main, name=f"controller {order.run}")
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[RunState] | None = None
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

    def _call(self, function: object, *args: object) -> None:
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]

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
        journal = self._store.acquire(order.run, Holder.here(clock.now()), clock.now(), order.take_over)
        places = {}
        scribe: threading.Thread | None = None
        done = threading.Event()
        try:
            plan = _plan_of(self._store, order.run)
            if order.first:
                await journal.append(clock.now(), order.first)
            context = PlaceContext(order.home, self._store.home_id, order.secrets, order.environ)
            places = places_of(plan, context)
            self._engine = Engine(
                journal,
                places,
                benchmark_of(plan),
                clock,
                folder_of(order.home, order.run),
                controller=ControllerStarted(socket.gethostname(), os.getpid()),
            )
            scribe = self._start_scribe(done)
            self._task = asyncio.current_task()  # type: ignore[assignment]
            self._started.set()
            await self._engine.run()
        finally:
            for place in places.values():
                await place.close()
            await journal.close()
            done.set()
            if scribe is not None:
                await asyncio.to_thread(scribe.join)

    def _start_scribe(self, done: threading.Event) -> threading.Thread:
        """Live files are written beside the engine, from the journal: they never hold it up."""
        scribe = Scribe(self._order.home, self._store, self._order.run)

        def write() -> None:
            while not done.wait(SCRIBE_S):
                scribe.tick()
            scribe.close()

        thread = threading.Thread(target=write, name=f"scribe {self._order.run}")
        thread.start()
        return thread


def _plan_of(store: Store, run: str) -> Plan:
    records = store.read(run)
    return fold([next(iter(records))]).plan
