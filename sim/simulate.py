"""Runs a scenario to its end, through as many controllers as it takes."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from evalfleet.clock import RunClock
from evalfleet.engine import Engine, Tempo
from evalfleet.errors import LeaseLost
from evalfleet.events import (
    ControllerStarted,
    Event,
    RunPlanned,
    RunResumed,
    RunSteered,
    StopRequested,
    TasksPlanned,
    TasksReopened,
)
from evalfleet.model import Micros, seconds_between
from evalfleet.ports import Clock, Place
from evalfleet.state import RunState, fold

from .journal import SimJournal, SimStore
from .loop import SimComputer, SimLoop
from .scenario import PLACES, PlaceClass, Resumption, Scenario, SimBenchmark, SimGrader, Steer
from .world import Life, World

H = TypeVar("H", bound=asyncio.Handle)

COLLECTIONS = (50_000, 20, 20)
"""How many new objects make Python look for cycles, and how many looks a longer one."""

LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class NapLoop(SimLoop):
    """A loop on which one controller can be put to sleep, as a laptop is, while the world goes on without it.

    Nothing of a sleeping life runs. When it wakes, all that was due comes at once, in its order.
    """

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self._gated(super().call_soon, partial(callback, *args), context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._gated(partial(super().call_at, when), partial(callback, *args), context)

    def _gated(
        self, schedule: Callable[..., H], callback: Callable[[], object], context: contextvars.Context | None
    ) -> H:
        context = contextvars.copy_context() if context is None else context
        life = context.get(LIFE)
        if life is None:
            return schedule(callback, context=context)
        handles: list[H] = []

        def fire() -> None:
            if life.held is not None:
                life.held.append(partial(SimLoop.call_soon, self, fire, context=context))
            elif not handles[0].cancelled():  # a timer that fired asleep may be cancelled on waking
                callback()

        handles.append(schedule(fire, context=context))
        return handles[0]


def fall_asleep(life: Life) -> None:
    if life.held is None:
        life.held = []


def wake(life: Life) -> None:
    held, life.held = life.held or [], None
    for due in held:
        due()


SIM_TEMPO = Tempo(
    requests_s=30.0, survey_s=60.0, poll_s=2.0, poll_cap_s=30.0, linger_s=2.0, longest_wait_s=3600.0
)


def clock_of(computer: SimComputer, state: RunState) -> RunClock:
    """The clock as a real controller makes it."""
    last = state.controller
    return RunClock(computer, boot=last.boot, zero=last.zero, last_at=state.last_at)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts under test. Tests exchange one for a broken one, to see that the checks see it."""

    engine: type[Engine] = Engine
    journal: type[SimJournal] = SimJournal
    world: type[World] = World
    places: Mapping[str, PlaceClass] | None = None
    clock: Callable[[SimComputer, RunState], Clock] = clock_of


@dataclass(frozen=True, slots=True)
class Simulated:
    """A finished simulation: the world as it is then, and the journal that tells how it came about."""

    scenario: Scenario
    world: World
    store: SimStore
    state: RunState
    crashes: int
    virtual_s: float


def steered(state: RunState, steer: Steer) -> RunSteered | None:
    """What is asked; None if there is nothing that it could be about."""
    by, choice = "somebody", steer.choice
    match steer.verb:
        case "set":
            limits = state.limits
            budget = None if limits.budget_usd is None else round(limits.budget_usd * 2 * choice, 3)
            workers, attempts = 1 + int(8 * choice), 1 + int(40 * choice) % 4
            return RunSteered("set", by, workers=workers, budget_usd=budget, attempts=attempts)
        case "pause":
            return RunSteered("set", by, workers=0, release=choice > 0.5)
        case "unpause":
            return RunSteered("set", by, workers=state.limits.workers)
        case "end":
            running = [attempt.id for attempt in state.attempts.values() if attempt.outcome is None]
            return RunSteered("end", by, attempt=running[int(choice * len(running))]) if running else None
        case "drain" | "replace":
            machines = list(state.undeleted)
            if not machines:
                return None
            return RunSteered(steer.verb, by, machine=machines[int(choice * len(machines))])
        case _:
            return RunSteered(steer.verb, by)


class _Simulation:
    def __init__(self, scenario: Scenario, parts: Parts, tempo: Tempo) -> None:
        self.scenario, self.parts, self.tempo = scenario, parts, tempo
        self.loop = NapLoop() if scenario.nap else SimLoop()
        self.world = parts.world(scenario.seed, self.loop, scenario.faults, scenario.plan.slots)
        self.store = SimStore(self.world)
        self.computer = SimComputer(self.loop)
        self.ahead: Micros = 0  # by how much the run's time is
        self.rng = random.Random(f"fate {scenario.seed}")
        self.crashes = 0
        self._lives: list[Life] = []
        self._tasks: dict[Life, set[asyncio.Task[Any]]] = {}

    def run(self) -> Simulated:
        with _sim_loop(self.loop, self._make_task):
            self.loop.run_until_complete(self._history())
        state = fold(self.store.read())
        return Simulated(self.scenario, self.world, self.store, state, self.crashes, self.loop.time())

    # -- controllers -----------------------------------------------------------------------------

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Tasks remember which controller they belong to, so that it can be killed whole."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **kwargs)
        if (life := LIFE.get()) is not None:
            mine = self._tasks.setdefault(life, set())
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    async def _history(self) -> None:
        plan, tasks = self.scenario.plan, self.scenario.tasks
        self.store.write(0, self.loop.now(), [RunPlanned(plan, len(tasks)), TasksPlanned(tasks)])
        if self.scenario.cancel_after_s is not None:
            self.loop.call_later(self.scenario.cancel_after_s, self.store.ask, StopRequested("user"))
        for steer in self.scenario.steering:
            self.loop.call_later(steer.at_s, self._steer, steer)
        self._schedule_trouble()
        await self._until_ended()
        for what in self.scenario.resumes:
            if not self.scenario.abandoned and self._resume(what):
                await self._until_ended()
        for life in self._lives:
            await self._kill(life)
        await self._let_late_things_happen()

    def _steer(self, steer: Steer) -> None:
        """Steer the run as somebody would who looks at it at this time, and may come too late."""
        state = fold(self.store.read())
        if (event := steered(state, steer)) is not None:
            self.store.ask(event)

    def _schedule_trouble(self) -> None:
        if (outage := self.scenario.outage) is not None:
            self.loop.call_later(outage.start_s, self.world.cut_off, outage.length_s)
        if (loss := self.scenario.api_loss) is not None:
            self.loop.call_later(loss.start_s, self.world.lose_api, loss.length_s)
        for trouble in self.scenario.troubles:
            self.world.troubles[trouble.place] = trouble
            for start_s, _ in trouble.away:
                self.loop.call_later(start_s, self.world.lose_place, trouble.place)
        self.computer.strobe = self.scenario.strobe
        for step in self.scenario.steps:
            self.loop.call_later(step.at_s, setattr, self.computer, "ahead_s", step.ahead_s)
        if (nap := self.scenario.nap) is not None:
            self.loop.call_later(nap.start_s, self._nap, nap.length_s)

    def _nap(self, seconds: float) -> None:
        if self._lives and (life := self._lives[-1]).alive:
            fall_asleep(life)
            self.loop.call_later(seconds, wake, life)

    def _resume(self, what: Resumption) -> bool:
        """Resume the run as the user would. False: there is nothing to do, so it would be refused."""
        state = fold(self.store.read())
        broken = tuple(task for task, known in state.tasks.items() if known.status == "broken")
        if what == "broken" and broken:
            events: list[Event] = [TasksReopened(broken), RunResumed(only=broken)]
        elif what == "unrun" and (state.waiting or state.answered or state.counts["held"]):
            workers = self.rng.randint(1, 8)
            events = [RunResumed(structs.replace(state.limits, workers=workers))]
        else:
            return False
        self.store.epoch += 1
        self.store.write(self.store.epoch, self._clock(state).now(), events)
        return True

    def _clock(self, state: RunState) -> Clock:
        """The next controller's clock. Time that it cannot know to have passed is noted."""
        clock = self.parts.clock(self.computer, state)
        ahead = clock.now() - self.loop.now()
        self.world.untold_s += max(0.0, seconds_between(ahead, self.ahead))
        self.ahead = ahead
        return clock

    async def _until_ended(self) -> None:
        while True:
            life, task = self._start_controller()
            self._lives.append(life)
            if await self._outlives(life, task):
                break
            self.crashes += 1
            zombie = self.rng.random() < self.scenario.faults.take_over
            if not zombie:
                await self._kill(life)
            if self.scenario.abandoned and self.crashes >= max(1, self.scenario.faults.controller_crashes):
                await self._kill(life)
                break
            await asyncio.sleep(self.rng.expovariate(1 / (60.0 if zombie else 600.0)))
            if not zombie and self.world.chance(self.scenario.faults.reboots):
                await self._reboot()

    async def _reboot(self) -> None:
        for life in self._lives:
            await self._kill(life)
        self.computer.reboot()

    def _start_controller(self) -> tuple[Life, asyncio.Task[RunState]]:
        life = Life()
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        journal = self.parts.journal(self.store, life)
        classes = self.parts.places or PLACES
        places: dict[str, Place] = {
            name: classes[name](self.world, life, name, self.scenario.offers[name])
            for name in self.scenario.plan.places
        }
        state = fold(journal.read())
        clock = self._clock(state)
        grader = SimGrader(self.world, life) if self.scenario.answers else None
        engine = self.parts.engine(
            journal,
            places,
            SimBenchmark(self.scenario.durations, grader),
            clock,
            Path("artefacts"),
            controller=ControllerStarted(boot=self.computer.boot, zero=clock.now() - self.computer.steady()),
            tempo=self.tempo,
            state=state,
        )
        task = context.run(self.loop.create_task, engine.run())
        task.add_done_callback(self._heed)
        return life, task

    def _heed(self, task: asyncio.Task[RunState]) -> None:
        """A controller may be killed or replaced; anything else that ends it is a bug."""
        err = None if task.cancelled() else task.exception()
        if err is not None and not isinstance(err, LeaseLost):
            self.world.violations.append(f"a controller fell over: {type(err).__name__}: {err}")

    async def _outlives(self, life: Life, task: asyncio.Task[RunState]) -> bool:
        """Did this controller finish the run? False: the moment of its crash has come."""
        if self.crashes >= self.scenario.faults.controller_crashes and not self.scenario.abandoned:
            await self._finish(task)
            return True
        crash = asyncio.Event()
        timer: asyncio.TimerHandle | None = None
        if self.rng.random() < 0.5:  # at a random call, on its way there or back
            self.world.crash_at_tick = self.world.ticks + self.rng.randint(1, 400)
            self.world.on_crash = lambda: self._drop_dead(life, crash)
        else:
            timer = self.loop.call_later(
                self.rng.expovariate(1 / self.scenario.faults.crash_every_s), crash.set
            )
        waiting = asyncio.ensure_future(crash.wait())
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        self.world.crash_at_tick = None
        waiting.cancel()
        if timer is not None:
            timer.cancel()
        if crash.is_set() or not life.alive:
            return False
        await self._finish(task)
        return True

    async def _finish(self, task: asyncio.Task[RunState]) -> None:
        with suppress(LeaseLost):
            await task

    def _drop_dead(self, life: Life, crash: asyncio.Event) -> None:
        life.alive = False
        crash.set()

    async def _kill(self, life: Life) -> None:
        """kill -9: whatever its tasks still try, the world does not hear of it."""
        life.alive = False
        wake(life)
        while tasks := list(self._tasks.get(life, ())):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # heard; a dead controller has nothing more to say

    async def _let_late_things_happen(self) -> None:
        """Creates that land late, expiries of what an abandoned run left."""
        lease_s, offers = self.scenario.plan.limits.lease_s, self.scenario.offers.values()
        longest_s = max([lease_s, *(offer.life.max_life_s or 0.0 for some in offers for offer in some)])
        await asyncio.sleep(lease_s + longest_s + 3600)


@contextmanager
def _sim_loop(loop: SimLoop, factory: Callable[..., asyncio.Task[Any]]) -> Generator[None]:
    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(None)
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(_gather(pending))
        loop.close()


async def _gather(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _rare_collections() -> Generator[None]:
    """A simulated run makes very many objects, keeps them to its end, and leaves hardly a cycle: looking for
    those as often as usual is a fifth of all that a large one costs."""
    usual = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def simulate(scenario: Scenario, parts: Parts | None = None, tempo: Tempo = SIM_TEMPO) -> Simulated:
    with _rare_collections():
        return _Simulation(scenario, parts or Parts(), tempo).run()
