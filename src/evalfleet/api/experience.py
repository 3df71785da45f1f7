"""What earlier runs of a home tell of how long tasks and machines take, what they cost, and what is lost.

It is read from journals: there, an attempt's time is all the time that its machine was taken.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from evalfleet.errors import JournalForeign
from evalfleet.model import Answered, Broken, Cause, Offer, Scored, Task, seconds_between
from evalfleet.named_pools.pool_places import SIZE as BORROWED
from evalfleet.planning.workspace import Workspace
from evalfleet.sim.chances import (
    LEAST_S,
    USUAL_RUNS,
    Basis,
    Chances,
    MachineSeconds,
    SpotRecord,
    guessed_machines,
)
from evalfleet.state import AttemptState, RunState
from evalfleet.views.follow import Follower

from .home import list_runs

LATEST = 10
"""So many of the newest runs of a benchmark count: older ones may be of another agent."""
FEW = 5
"""Fewer attempts than this tell nothing of what a model costs."""


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


def experience_of(workspace: Workspace, benchmark: str) -> Experience:
    """Return what the newest runs of the benchmark in this home took; empty if there are none."""
    return gathered(earlier_states(workspace, benchmark))


def earlier_states(workspace: Workspace, benchmark: str) -> list[RunState]:
    """Return the newest runs of the benchmark in this home that have a result."""
    if workspace.records_if_any() is None:
        return []
    runs = [each for each in list_runs(workspace, benchmark=benchmark) if each.scored or each.answered]
    states: list[RunState] = []
    store = workspace.records()
    for each in runs[:LATEST]:
        follower = Follower(store, each.run)
        try:
            follower.poll()
        except JournalForeign:
            continue  # `evalfleet verify` tells what is wrong with it
        states.append(follower.state)
    return states


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


def chances_of(
    experience: Experience,
    tasks: Sequence[Task],
    offers: Sequence[Offer],
    *,
    model: str,
    model_range: tuple[float, float] | None,
    usual_s: Mapping[str, float],
    machine_s: Mapping[str, tuple[float, float]],
) -> Chances:
    """What is believed of a run of these tasks on machines of these offers.

    Where no earlier run tells, `usual_s` is domain -> what a task usually takes, and `machine_s` is place ->
    between which seconds its machines are ready.
    """
    logs = _Logs(experience.times)
    found = {task.id: logs.of(task, task.model or model, usual_s) for task in tasks}
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
) -> MachineSeconds:
    """The times of machines of this size, else of others of the place, else a spread around a guess."""
    alike = experience.machines.get((offer.place, offer.size))
    if alike:
        return alike
    others = [run for (place, _), runs in experience.machines.items() if place == offer.place for run in runs]
    return others or guessed_machines(*guesses.get(offer.place, (0.0, 0.0)))


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

    def of(self, task: Task, model: str, usual_s: Mapping[str, float]) -> tuple[float, float, Basis]:
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
        usual = task.weight_s or usual_s.get(task.domain) or usual_s.get("")
        if usual:
            return min(usual, task.limit_s), UNLIKE, "default"
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


FEW_RUNS = 0.25
"""How much whole runs differ as a rule."""
