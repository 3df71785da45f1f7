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
from evalfleet.named_pools.lending import SIZE as BORROWED
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


@dataclass(frozen=True)
class Experience:
    """Earlier runs of one benchmark, taken to pieces."""

    runs: int = 0
    times: Sequence[TaskTime] = ()
    """Of attempts with a score or an answer."""
    machines: Mapping[tuple[str, str], Sequence[float]] = field(
        default_factory=dict[tuple[str, str], Sequence[float]]
    )
    """(place, size) -> seconds from the request of a machine until it was ready."""
    spot_hours: float = 0.0
    evictions: int = 0
    broken: int = 0
    """Attempts that broke while their machine was well."""
    attempts: int = 0
    model_usd: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Model -> what attempts cost, as their meter says, or else as they told."""
    leads: Sequence[float] = ()
    """Seconds from the start of a run until its first machine was asked for."""


def experience_of(workspace: Workspace, benchmark: str) -> Experience:
    """What the newest runs of the benchmark in this home tell; nothing, if there are none."""
    if workspace.records_if_any() is None:
        return Experience()
    names = [each.run for each in list_runs(workspace, benchmark=benchmark) if each.scored or each.answered]
    states: list[RunState] = []
    store = workspace.records()
    for name in names[:LATEST]:
        follower = Follower(store, name)
        try:
            follower.poll()
        except JournalForeign:
            continue  # `evalfleet verify` tells what is wrong with it
        states.append(follower.state)
    return gathered(states)


def gathered(states: Iterable[RunState]) -> Experience:
    """What these runs tell."""
    times: list[TaskTime] = []
    machines: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    model_usd: defaultdict[str, list[float]] = defaultdict(list)
    count: Counter[str] = Counter()
    leads: list[float] = []
    hours = 0.0
    for state in states:
        count["runs"] += 1
        times += _times(state)
        first = next(iter(state.machines.values()), None)
        if first is not None:
            leads.append(max(0.0, seconds_between(state.started_at, first.requested_at)))
        for machine in state.machines.values():
            if machine.ready_at is not None and machine.offer.size != BORROWED and not machine.mends:
                seconds = seconds_between(machine.billed_at, machine.ready_at)
                machines[machine.offer.place, machine.offer.size].append(seconds)
            if machine.offer.spot:
                end = machine.gone_at or machine.condemned_at or state.last_at
                hours += max(0.0, seconds_between(machine.billed_at, end)) / 3600
                count["evictions"] += machine.cause is Cause.EVICTED
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
        spot_hours=hours,
        evictions=count["evictions"],
        broken=count["broken"],
        attempts=count["attempts"],
        model_usd=model_usd,
        leads=leads,
    )


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
    machines: Mapping[str, Sequence[float]]
    """Offer -> seconds until a machine is ready, to choose from."""
    spot_hours: float
    evictions: int
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

    def fate(self, seed: int) -> DrawnFate:
        return DrawnFate(self, random.Random(seed))


class DrawnFate:
    """What happens in one drawn run. Some of it is alike for all its tasks, some for all its machines."""

    def __init__(self, chances: Chances, rng: random.Random) -> None:
        self._chances, self._rng = chances, rng
        # Student's t: how much runs differ is itself known from a few of them only
        freedom = USUAL_RUNS + chances.runs
        unsure = math.sqrt(rng.gammavariate(freedom / 2, 2 / freedom))
        self._all_tasks = math.exp(rng.gauss(0.0, chances.shared) / unsure)
        self.lead_s = rng.choice(chances.leads) if chances.leads else 0.0
        low, high = GUESSED_SHARE
        self._guessed = math.exp(rng.uniform(math.log(low), math.log(high)))
        self._all_machines = math.exp(rng.gauss(0.0, ALL_MACHINES))
        # the rate of a Poisson process after so many events in so many hours, and one before that
        hours = EVICTED_EVERY_H + chances.spot_hours
        self._evictions_an_hour = rng.gammavariate(1 + chances.evictions, 1 / hours)

    def task_s(self, task: Task, offer: Offer) -> float:
        middle, spread = self._chances.tasks[task.id]
        in_common = self._guessed if task.id in self._chances.guessed else self._all_tasks
        seconds = middle * in_common * math.exp(self._rng.gauss(0.0, spread))
        return min(max(LEAST_S, seconds), task.limit_s)

    def machine_s(self, offer: Offer) -> float:
        return self._rng.choice(self._chances.machines[offer.key]) * self._all_machines

    def queue_s(self, offer: Offer) -> float:
        expected = QUEUE_S if offer.queue_s is None else offer.queue_s
        return self._rng.expovariate(1 / expected) if expected else 0.0

    def evicted_s(self, offer: Offer) -> float:
        if not offer.spot:
            return math.inf
        return 3600 * self._rng.expovariate(self._evictions_an_hour)

    def breaks(self) -> bool:
        return self._rng.random() < self._chances.breaks

    def models_usd(self, attempts: int) -> float | None:
        """What so many attempts cost at their models; None if nothing is known of that."""
        chances, rng = self._chances, self._rng
        if chances.model_usd:
            return math.exp(rng.gauss(0.0, 0.1)) * sum(rng.choices(chances.model_usd, k=attempts))
        return None if chances.model_range is None else attempts * rng.uniform(*chances.model_range)


ALL_MACHINES = 0.3
"""How far off all machines of a run may be together, as a standard deviation of logarithms."""
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
        spot_hours=experience.spot_hours,
        evictions=experience.evictions,
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
) -> Sequence[float]:
    """Of machines of this size, else of others of the place, else spread over what is guessed."""
    alike = experience.machines.get((offer.place, offer.size))
    if alike:
        return alike
    others = [s for (place, _), took in experience.machines.items() if place == offer.place for s in took]
    if others:
        return others
    low, high = guesses.get(offer.place, (0.0, 0.0))
    return [low + (high - low) * step / 10 for step in range(11)]


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
