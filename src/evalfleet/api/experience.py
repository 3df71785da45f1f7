"""What earlier runs of a home tell of how long tasks and machines take, what they cost, and what is lost.

It is read from journals: there, an attempt's time is all the time that its machine was taken.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

from evalfleet.errors import JournalForeign
from evalfleet.model import Answered, Broken, Cause, Offer, Scored, Task, TaskId, seconds_between
from evalfleet.named_pools.pool_places import SIZE as BORROWED
from evalfleet.planning.workspace import Workspace
from evalfleet.state import AttemptState, RunState
from evalfleet.views.follow import Follower

from .home import list_runs

LATEST = 10
"""So many of the newest runs of a benchmark count: older ones may be of another agent."""
FEW = 5
"""Fewer attempts than this tell nothing of what a model costs."""
LEAST_S = 0.01


@dataclass(frozen=True, slots=True)
class TaskTime:
    """How long one attempt took its machine."""

    run: str
    task: str
    domain: str
    model: str
    place: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SpotRecord:
    """What earlier runs tell of the spot machines of one offer."""

    hours: float = 0.0
    """How long they lived, all together."""
    evictions: int = 0
    prices: Sequence[float] = ()
    """What an hour cost, in each run that had some."""


@dataclass(frozen=True)
class Experience:
    """Earlier runs of one benchmark, taken to pieces."""

    runs: int = 0
    times: Sequence[TaskTime] = ()
    """Of attempts with a score or an answer."""
    machines: Mapping[tuple[str, str], Sequence[Sequence[float]]] = field(
        default_factory=dict[tuple[str, str], Sequence[Sequence[float]]]
    )
    """(place, size) -> of each run, the seconds from the request of a machine until it was ready."""
    spot: Mapping[str, SpotRecord] = field(default_factory=dict[str, "SpotRecord"])
    """Offer -> what became of its spot machines."""
    broken: int = 0
    """Attempts that broke while their machine was well."""
    attempts: int = 0
    model_usd: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Model -> what attempts cost, as their meter says, or else as they told."""
    leads: Sequence[float] = ()
    """Seconds from the start of a run until its first machine was asked for."""


def experience_of(workspace: Workspace, benchmark: str, tasks: int | None = None) -> Experience:
    """What the newest runs of the benchmark in this home tell; nothing, if there are none.

    `tasks`: read no more runs than have so many tasks together, for somebody who cannot wait.
    """
    if workspace.records_if_any() is None:
        return Experience()
    runs = [each for each in list_runs(workspace, benchmark=benchmark) if each.scored or each.answered]
    states: list[RunState] = []
    store, read = workspace.records(), 0
    for each in runs[:LATEST]:
        read += each.total_tasks
        if tasks is not None and read > tasks:
            break
        follower = Follower(store, each.run)
        try:
            follower.poll()
        except JournalForeign:
            continue  # `evalfleet verify` tells what is wrong with it
        states.append(follower.state)
    return gathered(states)


def gathered(states: Iterable[RunState]) -> Experience:
    """What these runs tell."""
    times: list[TaskTime] = []
    machines: defaultdict[tuple[str, str], list[Sequence[float]]] = defaultdict(list)
    spot: dict[str, SpotRecord] = {}
    model_usd: defaultdict[str, list[float]] = defaultdict(list)
    count: Counter[str] = Counter()
    leads: list[float] = []
    for state in states:
        count["runs"] += 1
        times += _times(state)
        first = next(iter(state.machines.values()), None)
        if first is not None:
            leads.append(max(0.0, seconds_between(state.started_at, first.requested_at)))
        for key, seconds in _machine_seconds(state).items():
            machines[key].append(seconds)
        spot = _with_spot(spot, state)
        for attempt in state.attempts.values():
            count["attempts"] += attempt.outcome is not None
            count["broken"] += isinstance(attempt.outcome, Broken) and not attempt.outcome.is_free
            if (usd := _model_usd(attempt)) is not None:
                model = state.tasks[attempt.task].task.model or state.plan.model
                model_usd[model].append(usd)
    return Experience(
        runs=count["runs"],
        times=times,
        machines=machines,
        spot=spot,
        broken=count["broken"],
        attempts=count["attempts"],
        model_usd=model_usd,
        leads=leads,
    )


def _machine_seconds(state: RunState) -> Mapping[tuple[str, str], Sequence[float]]:
    """How long the run's machines took until they were ready, by place and size."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for machine in state.machines.values():
        if machine.ready_at is not None and machine.offer.size != BORROWED and not machine.mends:
            seconds = max(LEAST_S, seconds_between(machine.billed_at, machine.ready_at))
            found[machine.offer.place, machine.offer.size].append(seconds)
    return found


def _with_spot(earlier: Mapping[str, SpotRecord], state: RunState) -> dict[str, SpotRecord]:
    """What was known of spot machines, and what one more run tells."""
    known, priced = dict(earlier), set[str]()
    for machine in state.machines.values():
        offer = machine.offer
        if not offer.spot:
            continue
        end = machine.gone_at or machine.condemned_at or state.last_at
        record = known.get(offer.key, SpotRecord())
        known[offer.key] = SpotRecord(
            record.hours + max(0.0, seconds_between(machine.billed_at, end)) / 3600,
            record.evictions + (machine.cause is Cause.EVICTED),
            record.prices if offer.key in priced else (*record.prices, offer.usd_per_hour),
        )
        priced.add(offer.key)
    return known


def _model_usd(attempt: AttemptState) -> float | None:
    if attempt.metered is not None:
        return attempt.metered.usd
    return attempt.outcome.cost_usd if isinstance(attempt.outcome, Scored) else None


def _times(state: RunState) -> Iterable[TaskTime]:
    for attempt in state.attempts.values():
        if attempt.ended_at is not None and isinstance(attempt.outcome, Scored | Answered):
            task = state.tasks[attempt.task].task
            place = state.machines[attempt.machine].offer.place
            seconds = max(LEAST_S, seconds_between(attempt.started_at, attempt.ended_at))
            own = task.origin or task.id.rpartition("~")[0] or task.id
            yield TaskTime(state.plan.run, own, task.domain, task.model or state.plan.model, place, seconds)


# -- what is believed of a run that is planned --------------------------------------------------------------

Basis = Literal["task", "other model", "domain", "benchmark", "default", "guess"]
"""What a task's duration rests on: earlier attempts at it with this model, or with another; at tasks of its
domain, or of its benchmark; what the benchmark itself says; or nothing but its time limit."""

SHARED: Mapping[Basis, float] = {
    "task": 0.05,
    "other model": 0.4,
    "domain": 0.15,
    "benchmark": 0.25,
    "default": 0.4,
    "guess": 0.0,
}
"""How far off all tasks of a run may be together, as a standard deviation of logarithms; of one run in a row.
What a guess may be off is drawn from its limit."""
OWN = 0.3
"""The same, of one task by itself, where no task was run twice."""
UNLIKE = 0.5
"""The same, of a task of which only others tell."""
ELSEWHERE = 0.3
"""The same as `SHARED`, where the earlier runs were on other places."""
GUESSED_SHARE = (0.01, 1.0)
"""Between which shares of their time limit tasks take, as far as anybody knows."""
EVICTED_EVERY_H = 20.0
"""How long a spot machine lasts on average, where nobody knows better."""


@dataclass(frozen=True)
class Chances:
    """What a planned run is drawn from. It can be sent to another process."""

    tasks: Mapping[TaskId, tuple[float, float]]
    """(seconds, the standard deviation of their logarithm); of a guess, the time limit."""
    guessed: frozenset[TaskId]
    shared: float
    """The standard deviation of the logarithm of what all tasks have in common."""
    machines: Mapping[str, MachineTimes]
    """Offer -> how long until a machine is ready."""
    spot: Mapping[str, SpotRecord]
    """Offer -> what became of its spot machines."""
    breaks: float
    leads: Sequence[float]
    """Seconds until the first machine is asked for, to choose from; empty: none."""
    model_usd: Sequence[float] = ()
    """What attempts cost, to choose from; empty where `model_range` tells, or nobody."""
    model_range: tuple[float, float] | None = None
    """Between what an attempt's model is said to cost."""
    bases: Mapping[Basis, int] = field(default_factory=dict[Basis, int])
    """How many tasks rest on what."""
    runs: int = 0
    """How many earlier runs there were."""
    known_machines: bool = False
    """Whether earlier runs tell how long machines take."""

    def fate(self, seed: int, machines: int = 1) -> DrawnFate:
        """What happens in one run with so many machines at once."""
        return DrawnFate(self, random.Random(seed), machines)

    def evictions_an_hour(self, offer: Offer) -> tuple[float, float]:
        """Shape and scale of what is believed of the rate (a gamma distribution, as of a Poisson process).

        All spot offers together, beginning with one eviction in 20 hours, tell what is to be expected of an
        offer before it is known itself; that counts as much as 20 hours of its own.
        """
        hours = EVICTED_EVERY_H + sum(each.hours for each in self.spot.values())
        usual = (1 + sum(each.evictions for each in self.spot.values())) / hours
        own = self.spot.get(offer.key, SpotRecord())
        return EVICTED_EVERY_H * usual + own.evictions, 1 / (EVICTED_EVERY_H + own.hours)


class DrawnFate:
    """What happens in one drawn run. Some of it is alike for all its tasks, some for all its machines."""

    def __init__(self, chances: Chances, rng: random.Random, machines: int) -> None:
        self._chances, self._rng, self._machines = chances, rng, machines
        self._all_tasks = math.exp(chances.shared * _student_t(rng, chances.runs))
        self.lead_s = rng.choice(chances.leads) if chances.leads else 0.0
        low, high = GUESSED_SHARE
        self._guessed = math.exp(rng.uniform(math.log(low), math.log(high)))
        self._all_machines = _student_t(rng, chances.runs)
        self._evictions_an_hour: dict[str, float] = {}

    def task_s(self, task: Task, offer: Offer) -> float:
        middle, spread = self._chances.tasks[task.id]
        in_common = self._guessed if task.id in self._chances.guessed else self._all_tasks
        seconds = middle * in_common * math.exp(self._rng.gauss(0.0, spread))
        return min(max(LEAST_S, seconds), task.limit_s)

    def machine_s(self, offer: Offer) -> float:
        times = self._chances.machines[offer.key]
        in_common = times.middle(self._machines) + self._all_machines * times.shared(self._machines)
        return self._rng.choice(times.own) * math.exp(in_common)

    def queue_s(self, offer: Offer) -> float:
        expected = QUEUE_S if offer.queue_s is None else offer.queue_s
        return self._rng.expovariate(1 / expected) if expected else 0.0

    def evicted_s(self, offer: Offer) -> float:
        if not offer.spot:
            return math.inf
        rate = self._evictions_an_hour.get(offer.key)
        if rate is None:
            rate = self._rng.gammavariate(*self._chances.evictions_an_hour(offer))
            self._evictions_an_hour[offer.key] = rate
        return 3600 * self._rng.expovariate(max(rate, 1e-12))

    def breaks(self) -> bool:
        return self._rng.random() < self._chances.breaks

    def models_usd(self, attempts: int) -> float | None:
        """What so many attempts cost at their models; None if nothing is known of that."""
        chances, rng = self._chances, self._rng
        if chances.model_usd:
            return math.exp(rng.gauss(0.0, 0.1)) * sum(rng.choices(chances.model_usd, k=attempts))
        return None if chances.model_range is None else attempts * rng.uniform(*chances.model_range)


def _student_t(rng: random.Random, runs: int) -> float:
    """How far a run is off, in standard deviations that are themselves known from a few runs only."""
    freedom = USUAL_RUNS + runs
    return rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(freedom / 2, 2 / freedom))


ALL_MACHINES = 0.3
"""How far off all machines of a run may be together, as a standard deviation of logarithms."""
SLOWED = 0.5
"""How much longer machines may take for being many, as the standard deviation of a power of their number."""


@dataclass(frozen=True)
class MachineTimes:
    """How long machines of one offer take until they are ready.

    Machines of one run are much alike: the place, or the computer that they share, is quick or slow that day,
    and may be slower the more are asked for at once. So a run is drawn as a whole, from a regression over
    earlier runs: the logarithm of their time over that of their number.
    """

    own: Sequence[float]
    """By which factors machines of one run differ, to choose from; where nothing is known, seconds."""
    runs: int = 0
    mean: float = 0.0
    """Of the logarithms of the seconds, over runs."""
    mean_count: float = 0.0
    """Of the logarithms of the numbers of machines."""
    slope: float = 0.0
    """How the one grows with the other."""
    weight: float = 1.0
    """How well the slope is known: the sum of squares of what it is learned from."""
    spread: float = ALL_MACHINES
    """How much runs differ, as a standard deviation of logarithms."""

    def middle(self, machines: int) -> float:
        """The logarithm of the factor to expect with so many machines."""
        return self.mean + self.slope * (math.log(machines) - self.mean_count)

    def shared(self, machines: int) -> float:
        """The standard deviation of that in a run to come: a prediction is less sure than a mean."""
        if not self.runs:
            return self.spread
        far = (math.log(machines) - self.mean_count) ** 2 / self.weight
        return self.spread * math.sqrt(1 + 1 / self.runs + far)

    @classmethod
    def guessed(cls, low: float, high: float) -> MachineTimes:
        return cls([low + (high - low) * step / 10 for step in range(11)])

    @classmethod
    def learned(cls, runs: Sequence[Sequence[float]]) -> MachineTimes:
        """From the seconds of each run's machines."""
        logs = [[math.log(each) for each in seconds] for seconds in runs]
        counts = [math.log(len(seconds)) for seconds in runs]
        means = [fmean(each) for each in logs]
        mean, mean_count = fmean(means), fmean(counts)
        # what is usual counts as some runs do: of few runs neither a slope nor a deviation is certain
        weight = sum((count - mean_count) ** 2 for count in counts) + (ALL_MACHINES / SLOWED) ** 2
        steep = sum((count - mean_count) * (each - mean) for count, each in zip(counts, means, strict=True))
        slope = min(1.0, max(0.0, steep / weight))
        off = (y - mean - slope * (x - mean_count) for x, y in zip(counts, means, strict=True))
        squares = USUAL_RUNS * ALL_MACHINES**2 + sum(each**2 for each in off)
        return cls(
            [math.exp(each - means[n]) for n, run in enumerate(logs) for each in run],
            len(runs),
            mean,
            mean_count,
            slope,
            weight,
            math.sqrt(squares / (USUAL_RUNS + len(runs) - 1)),
        )


QUEUE_S = 600.0
"""How long a machine waits in a queue of which nobody can tell."""


def chances_of(
    experience: Experience,
    tasks: Sequence[Task],
    offers: Sequence[Offer],
    *,
    model: str,
    model_range: tuple[float, float] | None,
    machine_s: Mapping[str, tuple[float, float]],
) -> Chances:
    """What is believed of a run of these tasks on machines of these offers.

    `machine_s`: place -> between which seconds its machines are ready, where no earlier run tells.
    """
    logs = _Logs(experience.times)
    found = {task.id: logs.of(task, task.model or model) for task in tasks}
    bases: Counter[Basis] = Counter(basis for _, _, basis in found.values())
    places = {offer.place for offer in offers}
    shared = max(SHARED[basis] for basis in bases)
    if bases.keys() <= {"task"}:
        shared = max(shared, logs.between_runs)
    if not places & {each.place for each in experience.times}:
        shared = math.hypot(shared, ELSEWHERE)
    models = {task.model or model for task in tasks}
    told = [usd for each in models for usd in experience.model_usd.get(each, ())]
    return Chances(
        tasks={name: (seconds, spread) for name, (seconds, spread, _) in found.items()},
        guessed=frozenset(name for name, (_, _, basis) in found.items() if basis == "guess"),
        shared=shared,
        machines={offer.key: _machine_times(experience, offer, machine_s) for offer in offers},
        spot=experience.spot,
        breaks=min(0.5, experience.broken / experience.attempts) if experience.attempts else 0.0,
        leads=experience.leads,
        model_usd=told if len(told) >= FEW else (),
        model_range=model_range,
        bases=bases,
        runs=experience.runs,
        known_machines=any(place in places for place, _ in experience.machines),
    )


def _machine_times(
    experience: Experience, offer: Offer, guesses: Mapping[str, tuple[float, float]]
) -> MachineTimes:
    """Of machines of this size, else of others of the place, else spread over what is guessed."""
    alike = experience.machines.get((offer.place, offer.size))
    if alike:
        return MachineTimes.learned(alike)
    others = [run for (place, _), runs in experience.machines.items() if place == offer.place for run in runs]
    if others:
        return MachineTimes.learned(others)
    return MachineTimes.guessed(*guesses.get(offer.place, (0.0, 0.0)))


class _Logs:
    """The logarithms of what attempts took, by what they have in common."""

    def __init__(self, times: Sequence[TaskTime]) -> None:
        self._by: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for each in times:
            log = math.log(each.seconds)
            for key in (
                ("task", each.task, each.model),
                ("other model", each.task),
                ("domain", each.domain, each.model),
                ("domain", each.domain),
                ("benchmark",),
            ):
                self._by[key].append(log)
        self.between_runs, self._own = self._spreads(times)

    def of(self, task: Task, model: str) -> tuple[float, float, Basis]:
        """Seconds, the standard deviation of their logarithm, and what both rest on."""
        own = task.origin or task.id
        nearest: tuple[tuple[Basis, tuple[str, ...], bool], ...] = (
            ("task", ("task", own, model), True),
            ("other model", ("other model", own), True),
            ("domain", ("domain", task.domain, model), False),
            ("domain", ("domain", task.domain), False),
            ("benchmark", ("benchmark",), False),
        )
        for basis, key, alike in nearest:
            if logs := self._by.get(key):
                spread = self._own if alike else max(UNLIKE, stdev(logs) if len(logs) > 1 else 0.0)
                return math.exp(fmean(logs)), spread, basis
        if task.weight_s:
            return task.weight_s, UNLIKE, "default"
        return task.limit_s, UNLIKE, "guess"

    def _spreads(self, times: Sequence[TaskTime]) -> tuple[float, float]:
        """How much whole runs differ, and how much a task does by itself from one run to the next."""
        off_by_run: defaultdict[str, list[float]] = defaultdict(list)
        for each in times:
            logs = self._by["task", each.task, each.model]
            if len(logs) > 1:
                off_by_run[each.run].append(math.log(each.seconds) - fmean(logs))
        middles = {run: fmean(offs) for run, offs in off_by_run.items()}
        own = [off - middles[run] for run, offs in off_by_run.items() for off in offs]
        runs = max(1, len(middles))
        # of few runs a standard deviation is uncertain: it is mixed with what is usual
        squares = USUAL_RUNS * FEW_RUNS**2 + sum(middle**2 for middle in middles.values())
        between = math.sqrt(squares / (USUAL_RUNS + runs - 1) * (1 + 1 / runs))
        if len(own) < FEW or runs < 2:
            return between, OWN
        return between, min(1.0, stdev(own) * math.sqrt((runs + 1) / (runs - 1)))


FEW_RUNS, USUAL_RUNS = 0.25, 4
"""How much whole runs differ as a rule, and how many runs that counts for."""
