"""The checks see what they are for: each planted bug is found within a few seeds, by its invariant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from evalfleet.engine import Engine
from evalfleet.events import AttemptEnded, AttemptGraded, AttemptStarted, Event
from evalfleet.model import SECOND, Ended, Job, Machine, MachineId, Micros, Needs, Offer, Scored
from evalfleet.names import attempt_id
from evalfleet.policy import changed_effects
from evalfleet.ports import Journal
from evalfleet.state import RunState
from sim import checks
from sim.journal import SimJournal
from sim.loop import SimComputer
from sim.places import SimService, SimVms
from sim.scenario import PLACES, Scenario, draw
from sim.simulate import Parts, Simulated, simulate
from sim.world import Life, SimJob, SimMachine, World

SEEDS = range(150)


# -- the journal ---------------------------------------------------------------------------------


class LosesAnEvent(SimJournal):
    """Acknowledges every third end of an attempt without writing it."""

    ends = 0

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        kept: list[Event] = []
        for event in events:
            self.ends += isinstance(event, AttemptEnded)
            if not isinstance(event, AttemptEnded) or self.ends % 3:
                kept.append(event)
        return await super().append(at, kept, answered)


class OverwritesScores(SimJournal):
    """Writes each score a second time, as a failure."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        again = [
            AttemptEnded(event.attempt, Scored(0.25))
            for event in events
            if isinstance(event, AttemptEnded) and isinstance(event.outcome, Scored)
        ]
        return await super().append(at, [*events, *again], answered)


class RacesAttempts(SimJournal):
    """Writes that another attempt at a task starts beside each first one."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        others = [
            AttemptStarted(attempt_id(event.task, 9), event.task, event.machine)
            for event in events
            if isinstance(event, AttemptStarted) and event.attempt.endswith(".0")
        ]
        return await super().append(at, [*events, *others], answered)


class GradesTwice(SimJournal):
    """Writes each grade a second time, as another one."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        again = [
            AttemptGraded(each.attempt, Scored(0.25)) for each in events if isinstance(each, AttemptGraded)
        ]
        return await super().append(at, [*events, *again], answered)


class LosesGrades(SimJournal):
    """Acknowledges grades without writing them."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        kept = [each for each in events if not isinstance(each, AttemptGraded)]
        return await super().append(at, kept, answered)


class AcknowledgesEarly(SimJournal):
    """Says that it is durable while it is still on its way."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        self._writing = asyncio.ensure_future(super().append(at, events, answered))
        # nobody hears that the lease was lost, which is the bug; asyncio need not complain of it as well
        self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
        await asyncio.sleep(0)
        return True


class GoesBackInTime(SimJournal):
    """The second controller's clock is an hour behind, and nobody minds."""

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        return await super().append(at - 3600 * SECOND if self.epoch > 1 else at, events, answered)


class LetsTwoWrite(SimJournal):
    """Forgets that another controller has taken the run."""

    def _commit(
        self, done: asyncio.Future[None], at: Micros, events: Sequence[Event], answered: Sequence[int]
    ) -> None:
        self._store.write(self._epoch, at, events)
        if not done.done():
            done.set_result(None)


# -- the engine ----------------------------------------------------------------------------------


class ActsFirst(Engine):
    """Starts effects, then writes down why."""

    def __init__(self, journal: Journal, *args: Any, **kwargs: Any) -> None:
        super().__init__(journal, *args, **kwargs)
        self._journal = _Before(journal, self._start_effects)

    def _start_effects(self) -> None:
        for owner, wanted in changed_effects(self.state):
            self._sync(owner, wanted)


class _Before:
    def __init__(self, journal: Journal, act: Callable[[], None]) -> None:
        self._journal, self._act = journal, act

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        self._act()
        return await self._journal.append(at, events, answered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)


class IgnoresTheBudget(Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state.limits = structs.replace(self.state.limits, budget_usd=None)


class CrowdsSlots(Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state.plan = structs.replace(self.state.plan, slots=self.state.plan.slots + 1)


# -- the hosts -----------------------------------------------------------------------------------


class ForgetsStarts(World):
    """A host that starts whatever it is told to, however often."""

    def start(
        self, machine: SimMachine, job: Job, length_s: float, end: Ended, marks: tuple[str, str] = ("", "")
    ) -> None:
        machine.jobs.pop(job.id, None)
        super().start(machine, job, length_s, end, marks)


class ObeysAnybody(World):
    def fence(self, machine: SimMachine, epoch: int) -> None:
        return


class MixesResults(World):
    """Every tenth job is told to have ended as another one did."""

    def end_job(self, job: SimJob, ended: Ended) -> None:
        super().end_job(job, ended)
        if len(self.ended) % 10 == 0:
            job.ended = Ended("exited", 0, 1.0, b'{"score": 0.5}')


class NeverExpires(World):
    def _expire(self, machine: SimMachine) -> None:
        return


class CountsByTheWallClock(World):
    """Hosts whose supervisors count how long jobs run by the time of day."""

    def seconds_of(self, machine: SimMachine) -> float:
        return machine.clock.wall()


class ExpiresByTheWallClock(World):
    def life_left_s(self, machine: SimMachine) -> float:
        return (
            super().life_left_s(machine) if machine.expiry is None else self._by_wall(machine.expiry, machine)
        )

    def _by_wall(self, expiry: dict[str, Any], machine: SimMachine) -> float:
        return float(expiry["wall"]) - machine.clock.wall()


# -- the places ----------------------------------------------------------------------------------


class HastyVms(SimVms):
    """Lets a tear-down believe the first listing: it says that creates never land late."""

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        return [
            structs.replace(offer, life=structs.replace(offer.life, settle_s=0.0))
            for offer in await super().offers(needs)
        ]


class LyingVms(SimVms):
    """Answers a delete with yes, shows the machine no more, and keeps it."""

    def __init__(self, world: World, life: Life, name: str, offers: Sequence[Offer]) -> None:
        super().__init__(world, life, name, offers)
        self._hidden: set[MachineId] = set()

    async def delete(self, machine: MachineId) -> None:
        await self._world.place_call(self._life)
        self._hidden.add(machine)

    async def list(self, pool: str) -> Sequence[Machine]:
        return [seen for seen in await super().list(pool) if seen.id not in self._hidden]


class BillsTheQueue(World):
    """A service that bills its machines while they wait."""

    def enqueue(self, machine: MachineId, offer: Offer, life_s: float) -> None:
        known = machine in self.machines
        super().enqueue(machine, offer, life_s)
        if not known:
            self.meters.append(self.machines[machine].meter)

    def _allocate(self, machine: SimMachine, life_s: float) -> None:
        machine.meter.expires_at = machine.meter.end = self.loop.now()
        super()._allocate(machine, life_s)


class BoastingService(SimService):
    """Says that it can give its machines more time, and cannot."""

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        return [
            structs.replace(offer, life=structs.replace(offer.life, extendable=True))
            for offer in await super().offers(needs)
        ]


class DearerService(SimService):
    """Bills twice what it offered."""

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        dearer = structs.replace(
            offer, cost=structs.replace(offer.cost, usd_per_hour=2 * offer.cost.usd_per_hour)
        )
        await super().create(machine, dearer, expires_s)


def places(**changed: Any) -> Mapping[str, Any]:
    return {**PLACES, **changed}


# -- which check must see which bug --------------------------------------------------------------


class ByTheWallClock:
    """The time of a run as its computer's wall clock tells it."""

    def __init__(self, computer: SimComputer, state: RunState) -> None:
        self.now = computer.wall


def seen_by_the_world(sim: Simulated) -> Iterator[str]:
    yield from sim.world.violations


@dataclass(frozen=True)
class Bug:
    parts: Parts
    check: checks.Check
    says: str
    place: str | None = None
    budget_usd: float | None = None
    one_controller: bool = False
    answers: bool | None = None
    seeds: range = SEEDS
    """Where to look for it: from the first one on that shows it, as others only take time."""

    def scenario(self, seed: int) -> Scenario:
        """The seed's, in a place that has the bug; a fold of a damaged journal need not get far."""
        drawn = draw(seed)
        if self.answers is not None:
            drawn = replace(drawn, answers=self.answers)
        plan = drawn.plan
        if self.place is not None:
            plan = structs.replace(plan, places=(self.place,))
        if self.budget_usd is not None:
            plan = structs.replace(plan, limits=structs.replace(plan.limits, budget_usd=self.budget_usd))
        if not self.one_controller:
            return replace(drawn, plan=plan)
        return replace(
            drawn,
            plan=plan,
            abandoned=False,
            resumes=(),
            faults=replace(drawn.faults, controller_crashes=0),
        )


BUGS = {
    "a lost event": Bug(
        Parts(journal=LosesAnEvent), checks.every_task_is_accounted_for, "running", one_controller=True
    ),
    "a score overwritten": Bug(
        Parts(journal=OverwritesScores), checks.one_score_a_task, "was overwritten", one_controller=True
    ),
    "a race of attempts": Bug(
        Parts(journal=RacesAttempts), checks.one_score_a_task, "was started while", one_controller=True
    ),
    "a second grade": Bug(
        Parts(journal=GradesTwice), checks.one_score_a_task, "was graded twice", answers=True
    ),
    "a lost grade": Bug(
        Parts(journal=LosesGrades),
        checks.every_task_is_accounted_for,
        "answered and never graded",
        one_controller=True,
        answers=True,
    ),
    "acknowledged before durable": Bug(
        Parts(journal=AcknowledgesEarly), seen_by_the_world, "before it was durable"
    ),
    "acted before durable": Bug(Parts(engine=ActsFirst), seen_by_the_world, "before it was durable"),
    "time goes back": Bug(Parts(journal=GoesBackInTime), checks.one_writer_at_a_time, "goes back"),
    "two writers": Bug(
        Parts(journal=LetsTwoWrite),
        checks.one_writer_at_a_time,
        "goes back",
        seeds=range(46, 80),  # what two write at once may have no end, which takes long to see
    ),
    "a double start": Bug(Parts(world=ForgetsStarts), seen_by_the_world, "started twice"),
    "no fence": Bug(Parts(world=ObeysAnybody), seen_by_the_world, "obeyed the stale epoch", seeds=SEEDS[14:]),
    "no dead-man switch": Bug(
        Parts(world=NeverExpires), checks.nothing_left_behind, "outlived its expiry", seeds=SEEDS[10:]
    ),
    "durations by the time of day": Bug(
        Parts(world=CountsByTheWallClock), seen_by_the_world, "but its machine counted"
    ),
    "expiries by the time of day": Bug(
        Parts(world=ExpiresByTheWallClock), seen_by_the_world, "too early", place="hosts", seeds=SEEDS[10:]
    ),
    "a hasty tear-down": Bug(
        Parts(places=places(vms=HastyVms)),
        checks.nothing_left_behind,
        "was left behind",
        place="vms",
        seeds=SEEDS[8:],
    ),
    "a delete that lies": Bug(
        Parts(places=places(vms=LyingVms)), checks.nothing_left_behind, "was left behind", place="vms"
    ),
    "a budget ignored": Bug(
        Parts(engine=IgnoresTheBudget),
        checks.within_limits,
        "of a budget of",
        place="service",
        budget_usd=0.1,
    ),
    "a cost unaccounted": Bug(
        Parts(places=places(service=DearerService)),
        checks.within_limits,
        "but the journal accounts",
        place="service",
    ),
    "a queue that is billed": Bug(
        Parts(world=BillsTheQueue), checks.within_limits, "but the journal accounts", place="service"
    ),
    "a life that cannot be extended": Bug(
        Parts(places=places(service=BoastingService)),
        checks.no_task_outlives_its_machine,
        "which it could outlive",
        place="service",
    ),
    "durations by the wall clock": Bug(
        Parts(clock=ByTheWallClock),
        checks.within_limits,
        "of a budget of",
        place="vms",
        budget_usd=0.1,
        seeds=SEEDS[18:],
    ),
    "a result of another": Bug(
        Parts(world=MixesResults), checks.no_score_is_forged, "did not get", seeds=SEEDS[7:]
    ),
    "a crowded slot": Bug(Parts(engine=CrowdsSlots), seen_by_the_world, "attempts at once"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in bug.seeds:
        sim = simulate(bug.scenario(seed), bug.parts)
        if any(bug.says in found for found in bug.check(sim)):
            return
    pytest.fail(f"{len(bug.seeds)} seeds do not show it")


def ways() -> list[Any]:
    """A bug of each way of changing scenarios: many change them in the same one."""
    names: dict[Any, str] = {}
    for name, bug in BUGS.items():
        names.setdefault((bug.place, bug.budget_usd, bug.one_controller, bug.answers), name)
    return list(names.values())


@pytest.mark.parametrize("name", ways())
def test_without_the_bug_the_same_seeds_are_clean(name: str) -> None:
    for seed in SEEDS[:4]:
        assert checks.violations(simulate(BUGS[name].scenario(seed))) == []
