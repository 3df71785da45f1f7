"""What one seed simulates: the run, the places, the faults. All drawn from the seed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from evalfleet.benchmarks.results import outcome_of
from evalfleet.events import SteeringVerb
from evalfleet.model import (
    Answered,
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Command,
    Cost,
    Ended,
    Grade,
    Lifetime,
    Limits,
    Needs,
    Offer,
    Outcome,
    Plan,
    ScheduleName,
    Scored,
    Task,
    TaskId,
)
from evalfleet.ports import Answer, Place

from .places import SimHosts, SimService, SimVms
from .world import Faults, Life, Trouble, World, draw_clocks, draw_faults


class PlaceClass(Protocol):
    def __call__(self, world: World, life: Life, name: str, offers: Sequence[Offer]) -> Place: ...


PLACES: dict[str, PlaceClass] = {"vms": SimVms, "hosts": SimHosts, "service": SimService}

MENDS = ("restart", "redeploy")
_JOB = Offer(
    *("service", "job"),
    cost=Cost(usd_per_hour=0.5),
    life=Lifetime(
        teardown_s=30.0, queues=True, extendable=False, max_life_s=14_400.0, silent_s=20.0, lost_s=60.0
    ),
)
PATIENCE = ((None, None), (None, 300.0), (1800.0, None), (300.0, 300.0), (30.0, None))
"""How long a job may wait in its queue, and take from its start until it is up."""
OFFERS: dict[str, tuple[Offer, ...]] = {
    "vms": tuple(
        Offer(
            *("vms", "D4", region, spot),
            mends=MENDS,
            cost=Cost(usd_per_hour=price, billing_step_s=60.0),
            life=Lifetime(teardown_s=120.0, settle_s=60.0),
        )
        for region, price, spot in (
            *(("east", 0.2, True), ("south", 0.21, True)),
            *(("west", 0.36, False), ("north", 0.38, False)),
        )
    ),
    "hosts": (Offer("hosts", "host", capacity=4),),
    "service": (_JOB,),
}

LEFTOVERS: dict[str, tuple[Offer, ...]] = {
    **OFFERS,
    "vms": tuple(
        msgspec.structs.replace(
            offer,
            cost=msgspec.structs.replace(offer.cost, idle_usd_per_hour=0.03, sweep_s=3600.0),
            life=msgspec.structs.replace(offer.life, least_life_s=2400.0),
        )
        for offer in OFFERS["vms"]
    ),
    "service": (msgspec.structs.replace(_JOB, life=msgspec.structs.replace(_JOB.life, extendable=True)),),
}
"""Machines whose disk costs on when they are off, and whose place cannot end them soon; jobs that can be
given more time."""


NEEDS = (Needs(gpus=1), Needs(memory_gb=64.0))
"""What some tasks need that ordinary machines have not."""


def _with_larger(offers: Mapping[str, tuple[Offer, ...]]) -> dict[str, tuple[Offer, ...]]:
    """The same offers, and dearer ones of machines that have more. Hosts are as they are."""

    def larger(offer: Offer, has: Needs, size: str, times: float) -> Offer:
        price = offer.cost.usd_per_hour * times
        return msgspec.structs.replace(
            offer,
            size=f"{offer.size}-{size}",
            has=has,
            cost=msgspec.structs.replace(offer.cost, usd_per_hour=price),
        )

    kinds = ((NEEDS[0], "gpu", 3.0), (NEEDS[1], "large", 2.0), (NEEDS[0].joined(NEEDS[1]), "both", 4.0))
    return {
        place: (*given, *(larger(offer, *kind) for kind in kinds for offer in given if place != "hosts"))
        for place, given in offers.items()
    }


class SimGrader:
    """A grader of answers one by one, slowly. Some it cannot grade, some it forgets, and it may fall over."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life

    async def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncGenerator[tuple[AttemptId, Grade]]:
        world = self._world
        for answer in answers:
            await world.call(self._life)
            await asyncio.sleep(world.rng.uniform(1.0, 600.0))
            world.tick(self._life)
            fate = world.rng.random()
            if fate < world.faults.grader_fails:
                raise OSError("the grader's environment is gone")
            if fate < 0.05:
                yield answer.attempt, Broken(Cause.RESULT, "the answer cannot be read")
            elif fate > 0.05 + world.faults.grader_fails:
                yield answer.attempt, Scored(float(fate > 0.5), fate > 0.5)


class SimBenchmark:
    """Tasks whose command means nothing, or `sleep N` when the scenario gives durations."""

    def __init__(self, durations: Sequence[float] = (), grader: SimGrader | None = None) -> None:
        self._durations = durations
        self.grader = grader

    @property
    def name(self) -> str:
        return "sim"

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def bundle(self) -> Bundle:
        return Bundle("sim")

    @property
    def probe(self) -> Command | None:
        return None

    def command(self, task: Task, attempt: AttemptId) -> Command:
        if not self._durations:
            return Command(("work",))
        index: int = task.params["index"]
        return Command(("sleep", str(self._durations[index])))

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        if ended.result is not None and self.grader is not None:
            return Answered()
        return outcome_of(task, ended, healthy)


@dataclass(frozen=True, slots=True)
class Period:
    """A time in a run: seconds from its start, and for how long."""

    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class ClockStep:
    """The wall clock of the controllers' computer is set at `at_s`: so far from the truth it is then."""

    at_s: float
    ahead_s: float


@dataclass(frozen=True, slots=True)
class Steer:
    """Somebody does this to the run at `at_s`, to what `choice` (0 to 1) picks of what there is then."""

    at_s: float
    verb: SteeringVerb
    choice: float = 0.0


Resumption = Literal["unrun", "broken"]
"""What the user asks for once the run has ended."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    `outage`: our own network is down. `api_loss`: the service answers nobody, nor do its machines through it.
    `nap`: the controller's computer sleeps. `steps`: its wall clock is set, and with `strobe` (every, by) it
    jumps to and fro all the time. `answers`: attempts are graded after the last task.
    """

    seed: int
    plan: Plan
    tasks: tuple[Task, ...]
    faults: Faults
    cancel_after_s: float | None = None
    abandoned: bool = False
    outage: Period | None = None
    api_loss: Period | None = None
    nap: Period | None = None
    steps: tuple[ClockStep, ...] = ()
    strobe: tuple[float, float] | None = None
    resumes: tuple[Resumption, ...] = ()
    steering: tuple[Steer, ...] = ()
    durations: tuple[float, ...] = ()
    answers: bool = False
    offers: dict[str, tuple[Offer, ...]] = field(default_factory=lambda: OFFERS)
    troubles: tuple[Trouble, ...] = ()


def draw(seed: int) -> Scenario:
    """The scenario of a seed: small runs in bad worlds."""
    rng = random.Random(f"scenario {seed}")
    places = rng.choice((("vms",), ("vms",), ("hosts",), ("service",), ("hosts", "vms"), ("vms", "service")))
    schedule: ScheduleName = rng.choice(("dynamic", "dynamic", "dynamic", "round-robin", "slices"))
    limits = Limits(
        workers=rng.randint(1, 8),
        attempts=rng.randint(1, 4),
        canary=rng.choice((0, 1)),
        budget_usd=rng.choice((None, None, 0.1, 0.5, 2.0)),
        max_duration_s=rng.choice((None, None, 3600.0, 4 * 3600.0)),
        lease_s=rng.choice((3600.0, 14_400.0)),
    )
    plan = Plan(
        f"sim{seed}",
        "sim",
        places,
        schedule=schedule,
        slots=rng.choice((1, 1, 2)),
        limits=limits,
        home="abc123",
    )
    tasks = _tasks(rng, stall_s=random.Random(f"stalls {seed}").choice((0.0, 0.0, 300.0)))
    cancel_after_s = rng.uniform(10, 8000) if rng.random() < 0.15 else None
    offers = random.Random(f"leftovers {seed}").choice((OFFERS, LEFTOVERS))
    max_queue_s, boot_s = random.Random(f"queue {seed}").choice(PATIENCE)
    jobs = (
        msgspec.structs.replace(
            _JOB, life=msgspec.structs.replace(_JOB.life, max_queue_s=max_queue_s, boot_s=boot_s)
        ),
    )
    creates = random.Random(f"creates {seed}").choice((None, None, 1, 3))
    vms = tuple(msgspec.structs.replace(offer, creates_a_minute=creates) for offer in offers["vms"])
    offers = {**offers, "vms": vms, "service": jobs}
    needs = random.Random(f"needs {seed}")
    if schedule == "dynamic" and needs.random() < 0.25:
        tasks, offers = _with_needs(needs, tasks), _with_larger(offers)
    return Scenario(
        seed,
        plan,
        tasks,
        draw_clocks(draw_faults(rng), random.Random(f"clocks {seed}")),
        cancel_after_s,
        abandoned=rng.random() < 0.1,
        outage=_span(rng, 0.2, (30.0, 420.0)),
        api_loss=_span(random.Random(f"api {seed}"), 0.4, (30.0, 420.0)),
        nap=_span(rng, 0.1, (600.0, 30_000.0)),
        steps=_steps(random.Random(f"wall {seed}")),
        strobe=random.Random(f"strobe {seed}").choice((None, None, (0.7, 7200.0), (40.0, -9000.0))),
        resumes=rng.choice(((), (), ("broken",), ("unrun",), ("broken", "unrun"))),
        steering=_steering(random.Random(f"steering {seed}")),
        answers=random.Random(f"answers {seed}").random() < 0.25,
        offers=offers,
    )


def draw_tiers(seed: int) -> Scenario:
    """Two or three places, of which one fails half its jobs, goes away and comes back; all else as drawn."""
    rng, usual = random.Random(f"tiers {seed}"), draw(seed)
    places = rng.sample(("service", "vms", "hosts"), rng.choice((2, 3)))
    plan = msgspec.structs.replace(usual.plan, places=tuple(places), ordered=rng.random() < 0.8)
    leaves_s = rng.uniform(0, 4000)
    away = ((leaves_s, leaves_s + rng.choice((120.0, 900.0, 5000.0))),) if rng.random() < 0.8 else ()
    trouble = Trouble(rng.choice(places[:2]), 0.5, rng.choice((0.0, 0.5)), away)
    return dataclasses.replace(usual, plan=plan, troubles=(trouble,))


def half_fail(seed: int) -> Scenario:
    """A run of nothing but tasks and two or three places, of which the first fails half its jobs, and may go
    away."""
    rng = random.Random(f"half {seed}")
    places = rng.choice((("service", "vms"), ("vms", "service"), ("hosts", "service", "vms")))
    workers, count = rng.choice((4, 10, 20)), rng.choice((20, 40, 80))
    limits = Limits(workers=workers, canary=rng.choice((0, 1)))
    plan = Plan(f"half{seed}", "sim", places, limits=limits, home="abc123", ordered=True)
    tasks = tuple(Task(TaskId(f"t_{i:03d}"), "t", timeout_s=1500.0) for i in range(count))
    leaves_s = rng.uniform(600, 4000)
    away = ((leaves_s, leaves_s + rng.choice((900.0, 8000.0))),) if rng.random() < 0.7 else ()
    faults = Faults(queue_s=(0.0, 60.0))
    return Scenario(seed, plan, tasks, faults, troubles=(Trouble(places[0], 0.5, away=away),))


def _with_needs(rng: random.Random, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Some of the tasks need more than others."""
    rare = rng.choice((0.1, 0.4, 0.9))
    return tuple(
        msgspec.structs.replace(task, needs=rng.choice(NEEDS)) if rng.random() < rare else task
        for task in tasks
    )


def _tasks(rng: random.Random, stall_s: float) -> tuple[Task, ...]:
    weights = rng.random() < 0.3

    def make(i: int) -> Task:
        weight_s = rng.uniform(60, 1200) if weights else None
        return Task(TaskId(f"t_{i:03d}"), "t", timeout_s=1500.0, weight_s=weight_s, stall_s=stall_s)

    return tuple(make(i) for i in range(rng.randint(1, 40)))


def _span(rng: random.Random, chance: float, length_s: tuple[float, float]) -> Period | None:
    return Period(rng.uniform(100, 4000), rng.uniform(*length_s)) if rng.random() < chance else None


def _steps(rng: random.Random) -> tuple[ClockStep, ...]:
    """Hours either way, days now and then."""
    hours = rng.choice((0.0, 2.0, 5.0, 100.0)) * 3600
    return tuple(
        ClockStep(rng.uniform(0, 8000), rng.uniform(-hours, hours)) for _ in range(rng.randint(0, 4))
    )


def _steering(rng: random.Random) -> tuple[Steer, ...]:
    """Whoever pauses a run lets it go on some time."""
    steers: list[Steer] = []
    for _ in range(rng.choice((0, 0, 1, 3, 8))):
        at_s = rng.uniform(30, 6000)
        verb: SteeringVerb = rng.choice(("pause", "set", "set", "end", "end", "drain", "replace", "replace"))
        steers.append(Steer(at_s, verb, rng.random()))
        if verb == "pause":
            steers.append(Steer(at_s + rng.uniform(1, 3000), "unpause"))
    return tuple(steers)
