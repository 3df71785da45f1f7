"""A place that lets us ask for so many machines in a minute is asked for no more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from msgspec import structs

from evalfleet.clock import RunClock
from evalfleet.engine import Engine
from evalfleet.events import MachineRequested, MachineStopped, PoolPlanned
from evalfleet.model import Cost, Limits, MachineId, Offer, Plan, Task, TaskId
from evalfleet.named_pools import PoolView, changes
from evalfleet.policy import POOL, next_deadline
from evalfleet.policy.pace import MINUTE_S, workers
from evalfleet.state import RunState, fold
from sim.checks import violations
from sim.journal import SimJournal, SimStore
from sim.loop import SimComputer, SimLoop
from sim.places import SimVms
from sim.scenario import OFFERS, Scenario, SimBenchmark
from sim.simulate import SIM_TEMPO, simulate
from sim.world import Faults, Life, World

from .runs import Run, tasks_of

SLOW = Offer("cloud", "D4", "east", creates_a_minute=3, cost=Cost(usd_per_hour=0.36))
ELSEWHERE = structs.replace(SLOW, region="west", cost=structs.replace(SLOW.cost, usd_per_hour=0.4))


def asked(run: Run) -> int:
    return sum(isinstance(event, MachineRequested) for event in run.log)


def weighed(count: int, seconds: float) -> list[Task]:
    return [structs.replace(task, weight_s=seconds) for task in tasks_of(count)]


def test_the_others_are_asked_for_a_minute_after_the_first() -> None:
    run = Run(20, [SLOW], workers=8)
    run.turn()
    assert asked(run) == 3
    due = next_deadline(run.state, run.now)
    assert due is not None
    assert due - run.now == MINUTE_S * 1e6, "it is known when the next may be asked for"
    run.wait(MINUTE_S - 1)
    assert asked(run) == 3
    run.wait(1)
    assert asked(run) == 6
    run.wait(MINUTE_S)
    assert asked(run) == 8, "and not more than there are workers"


def test_a_dearer_region_is_not_taken_for_a_minutes_wait() -> None:
    run = Run(20, [SLOW, ELSEWHERE], workers=4)
    run.turn()
    assert {run.machine(machine).offer.region for machine in run.state.coming} == {"east"}
    assert asked(run) == 3


def test_a_machine_that_would_come_too_late_by_its_turn_is_not_asked_for() -> None:
    run = Run(weighed(8, 20.0), [SLOW], workers=8)
    run.turn()
    run.wait(30)
    run.ready()
    while run.open():
        run.wait(20)
        for attempt in run.open():
            run.score(attempt)
    assert run.state.scored == 8
    assert asked(run) == 3, "the first three have done all before a fourth could have done anything"


def test_by_a_deadline_more_are_asked_for_if_they_come_one_after_another() -> None:
    run = Run(weighed(60, 60.0), [SLOW], workers=60, auto=True, deadline_s=700.0)
    numbers = [
        workers(run.state, run.now, [structs.replace(SLOW, creates_a_minute=most)]) for most in (None, 3, 1)
    ]
    assert numbers == sorted(set(numbers)), "the slower they come, the more of them are needed"


def test_the_simulated_cloud_never_has_to_refuse() -> None:
    vms = tuple(structs.replace(offer, spot=False, creates_a_minute=4) for offer in OFFERS["vms"][:1])
    plan = Plan("rate", "sim", ("vms",), limits=Limits(workers=20), home="abc123")
    tasks = tuple(Task(TaskId(f"t_{n:03d}"), "t", timeout_s=1500.0) for n in range(100))
    scenario = Scenario(1, plan, tasks, Faults(), offers={**OFFERS, "vms": vms})
    sim = simulate(scenario)
    assert violations(sim) == []
    assert sim.state.scored == 100
    assert sim.world.throttled == 0
    times = [machine.requested_at for machine in sim.state.machines.values()]
    assert len(times) == 20
    assert all(later - first >= 60_000_000 for first, later in zip(times, times[4:], strict=False))
    assert all(one <= other for one, other in pairwise(times))
    crashing = simulate(replace(scenario, faults=Faults(controller_crashes=3, crash_every_s=60.0)))
    assert violations(crashing) == []
    assert crashing.state.scored == 100


# -- pools ---------------------------------------------------------------------------------------


class CountingVms(SimVms):
    """Knows when each machine was asked for, be it to be made or started."""

    asked_s: ClassVar[list[float]] = []

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        self.asked_s.append(self._world.loop.time())
        await super().create(machine, offer, expires_s)


class SimPool:
    """A pool whose controllers are the real engine, in the simulated world."""

    def __init__(self, workers: int, offer: Offer) -> None:
        self.loop, self.offer = SimLoop(), offer
        self.world = World(1, self.loop, Faults(), 1)
        self.store = SimStore(self.world)
        plan = Plan("p", "", ("vms",), limits=Limits(workers=workers, lease_s=86_400.0), home="h")
        self.store.write(0, self.loop.now(), [PoolPlanned(plan)])

    @property
    def state(self) -> RunState:
        return fold(self.store.read())

    def control(self, for_s: float | None = None) -> RunState:
        """One controller, until all is as it shall be, or until it is killed."""
        life, state = Life(), self.state
        engine = Engine(
            SimJournal(self.store, life),
            {"vms": CountingVms(self.world, life, "vms", [self.offer])},
            SimBenchmark(),
            RunClock(SimComputer(self.loop), last_at=state.last_at),
            Path("artefacts"),
            tempo=SIM_TEMPO,
            rules=POOL,
        )

        async def live() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    await engine.run()

        self.loop.run_until_complete(live())
        return self.state


def test_a_pools_controllers_never_have_to_be_refused() -> None:
    vms = structs.replace(OFFERS["vms"][0], spot=False, creates_a_minute=4)
    pool, asked_s = SimPool(10, vms), CountingVms.asked_s
    pool.control(for_s=30.0)
    assert len(pool.state.machines) == len(asked_s) == 4, "the controller was killed before the next ones"
    state = pool.control()
    assert [machine.phase for machine in state.machines.values()] == ["ready"] * 10
    assert pool.world.throttled == 0

    now = pool.loop.now()
    stopped = changes.stopped(PoolView("p", state, {}), now).events
    pool.store.write(pool.store.epoch, now, [*stopped, *map(MachineStopped, state.machines)])
    pool.store.write(pool.store.epoch, now, changes.started(PoolView("p", pool.state, {}), now).events)
    asked_s.clear()
    state = pool.control()
    assert [machine.phase for machine in state.machines.values()] == ["ready"] * 10
    assert len(asked_s) == 10
    assert all(later - first >= 60.0 for first, later in zip(asked_s, asked_s[4:], strict=False))
    pool.loop.close()
