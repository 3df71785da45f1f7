"""The time and money that a run would take: one estimate, and ranges from runs that are drawn at random.

A drawn run is a short list scheduling: workers in a heap take tasks in the order of the plan's schedule. Its
figures are those of earlier runs. Pure: places, files and clocks are read elsewhere.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean, median, pstdev
from typing import Literal, NamedTuple

from evalfleet.cost import billed_usd
from evalfleet.model import BORROWED, SECOND, Limits, Needs, Offer, Plan, Task, TaskId
from evalfleet.policy.schedule import does
from evalfleet.schedules import is_static, orders

from .past import Past

DRAWS = 60
LEAST_S = 0.01
"""Nothing takes less."""
HOUR_S = 3600.0
QUEUE_S = 600.0
"""How long a machine waits in a queue whose length is not known."""
EVICTED_EVERY_H = 20.0
"""How long a spot machine lasts on average, before earlier runs show it."""
SPOT_LEFT = 3
"""After so many evictions, machines that replace spot ones are regular, where there are such offers."""
GUESSED_SHARE = (0.01, 1.0)
"""Between which shares of their time limit tasks take of which nothing is known."""
FEW = 5
"""Fewer attempts than this do not show what a model costs."""

Basis = Literal["task", "other model", "domain", "benchmark", "default", "guess"]
"""The source of a task's duration: earlier attempts at it with this model, or with another one, at tasks of
its domain, or of its benchmark, the benchmark's own figures, or only its time limit."""
SHARED: Mapping[Basis, float] = {
    "task": 0.25,
    "other model": 0.4,
    "domain": 0.3,
    "benchmark": 0.35,
    "default": 0.4,
    "guess": 0.0,
}
"""How far all tasks of a run may be off together, as a standard deviation of logarithms. A guess is drawn
from `GUESSED_SHARE` instead."""
OWN, UNLIKE = 0.3, 0.5
"""The same for one task by itself: where earlier attempts at it are known, and where only others are."""


# -- what is expected of tasks and machines -----------------------------------------------------------------


class Expected(NamedTuple):
    """The duration of one task."""

    seconds: float
    """The middle; of a guess, the time limit."""
    spread: float
    """The standard deviation of its logarithm."""
    basis: Basis


@dataclass(frozen=True)
class Chances:
    """The figures that runs are drawn from."""

    tasks: Mapping[TaskId, Expected]
    shared: float
    """The standard deviation of the logarithm of the pace that all tasks of a run have in common."""
    machines: Mapping[str, Sequence[Sequence[float]]]
    """Offer -> for each earlier run, how long its machines took until they were ready."""
    evictions_an_hour: float
    breaks: float
    """The share of attempts that break."""
    model_usd: Sequence[float] = ()
    """What earlier attempts cost; empty if too few are known."""
    model_range: tuple[float, float] | None = None
    """The benchmark's own range of the cost of an attempt."""
    runs: int = 0
    known_machines: bool = False
    """Earlier runs show how long machines take."""
    bases: Mapping[Basis, int] = field(default_factory=dict[Basis, int])
    """How many tasks rest on what."""


def chances_of(
    past: Past,
    plan: Plan,
    tasks: Sequence[Task],
    offers: Iterable[Offer],
    machine_s: Mapping[str, tuple[float, float]],
) -> Chances:
    """Return what earlier runs show of such a run, and else guesses.

    `machine_s`: place -> the range of a guess at how long its machines take until they are ready.
    """
    durations = _Durations(past, plan)
    expected = {task.id: durations.of(task) for task in tasks}
    bases: Counter[Basis] = Counter(task.basis for task in expected.values())
    paces = durations.paces() if bases.keys() <= {"task"} else []
    charged = sum(task.charged for run in past.runs for task in run.tasks)
    attempts = sum(task.attempts for run in past.runs for task in run.tasks)
    spot = [machine for run in past.runs for machine in run.machines if machine.spot]
    evicted = sum(machine.cause == "evicted" for machine in spot)
    hours = sum(machine.uptime_seconds or 0.0 for machine in spot) / HOUR_S
    models = {task.model or plan.model for task in tasks}
    costs = [usd for model in sorted(models) for usd in past.attempt_costs(model)]
    offers = list(offers)
    known = {offer.key: _ready_s(past, offer) for offer in offers}
    guess = {offer.key: _spaced(*machine_s.get(offer.place, (0.0, 0.0))) for offer in offers}
    return Chances(
        tasks=expected,
        shared=max([*(SHARED[basis] for basis in bases), pstdev(paces) if len(paces) > 1 else 0.0]),
        machines={offer.key: known[offer.key] or guess[offer.key] for offer in offers},
        evictions_an_hour=(1 + evicted) / (EVICTED_EVERY_H + hours),
        breaks=min(0.5, charged / attempts) if attempts else 0.0,
        model_usd=costs if len(costs) >= FEW else (),
        model_range=plan.model_usd,
        runs=len(past.runs),
        known_machines=any(known.values()),
        bases=bases,
    )


def _ready_s(past: Past, offer: Offer) -> list[list[float]]:
    """Return how long machines of this size took, else those of the same place, by earlier run."""
    if offer.size == BORROWED:
        return []
    for sizes in ({offer.size}, None):
        runs = [
            [
                max(LEAST_S, machine.ready_s)
                for machine in run.machines
                if machine.place == offer.place and (sizes is None or machine.size in sizes)
                if machine.ready_s is not None
            ]
            for run in past.runs
        ]
        if any(runs):
            return [seconds for seconds in runs if seconds]
    return []


def _spaced(low: float, high: float) -> list[list[float]]:
    """Return times between two bounds, as if each were of another run."""
    return [[low + (high - low) * step / 10] for step in range(11)]


class _Durations:
    """The logarithms of the durations of earlier tasks, by what they have in common."""

    def __init__(self, past: Past, plan: Plan) -> None:
        self._plan = plan
        self._by: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        self._runs: list[list[tuple[tuple[str, ...], float]]] = []
        for run in past.runs:
            self._runs.append([])
            for task in run.tasks:
                if task.seconds is None:
                    continue
                log, model = math.log(max(LEAST_S, task.seconds)), task.model or run.model or ""
                same = ("task", task.own_id, model)
                self._runs[-1].append((same, log))
                for key in (
                    same,
                    ("other model", task.own_id),
                    ("domain", task.domain, model),
                    ("domain", task.domain),
                    ("benchmark",),
                ):
                    self._by[key].append(log)

    def of(self, task: Task) -> Expected:
        own, model = task.origin or task.id, task.model or self._plan.model
        nearest: tuple[tuple[Basis, tuple[str, ...], float], ...] = (
            ("task", ("task", own, model), OWN),
            ("other model", ("other model", own), OWN),
            ("domain", ("domain", task.domain, model), UNLIKE),
            ("domain", ("domain", task.domain), UNLIKE),
            ("benchmark", ("benchmark",), UNLIKE),
        )
        for basis, key, spread in nearest:
            if logs := self._by.get(key):
                if spread == UNLIKE:
                    spread = max(UNLIKE, pstdev(logs))
                return Expected(math.exp(fmean(logs)), spread, basis)
        usual_s = self._plan.usual_s
        usual = task.weight_s or usual_s.get(task.domain) or usual_s.get("")
        if usual:
            return Expected(min(usual, task.limit_s), UNLIKE, "default")
        return Expected(task.limit_s, UNLIKE, "guess")

    def paces(self) -> list[float]:
        """Return how much slower each run was than the mean of all, as a logarithm."""
        offs = [
            [log - fmean(self._by[key]) for key, log in run if len(self._by[key]) > 1] for run in self._runs
        ]
        return [fmean(off) for off in offs if off]


# -- one estimate, as people reckon -------------------------------------------------------------------------

EARLIER = "what earlier runs took"


@dataclass(frozen=True)
class Estimate:
    """The expected cost and time of a run. `basis` and `machine_basis` say what the figures rest on.

    `task_s` is the mean of all tasks, `machine_s` the time until a machine is ready. `usd` is None if no
    place has an offer.
    """

    at_once: int
    task_s: float
    machine_s: float
    duration_s: float
    machine_hours: float
    usd: float | None
    basis: str
    machine_basis: str


def estimate(plan: Plan, tasks: Sequence[Task], machines: Sequence[Offer], chances: Chances) -> Estimate:
    """Return tasks over workers times the time of a task, and the time of a machine, at these prices.

    Without earlier runs, every task is expected to take all of its time limit.
    """
    weights = [task.weight_s for task in tasks if task.weight_s is not None]
    mean_weight = fmean(weights) if weights else 0.0
    seconds = [task.weight_s or (mean_weight if weights else task.timeout_s) for task in tasks]
    guess = f"a guess, {'with' if allowed_setup_s(plan) else 'without'} its set-up"
    at_once = max(1, min(plan.limits.workers * plan.slots, len(tasks), max(1, len(machines)) * plan.slots))
    ready_s = [seconds for offer in machines[:1] for run in chances.machines[offer.key] for seconds in run]
    machine_s = median(ready_s) if ready_s else 0.0
    duration_s = max(sum(seconds) / at_once, max(seconds)) + machine_s
    hours = duration_s / HOUR_S
    return Estimate(
        at_once,
        fmean(seconds),
        machine_s,
        duration_s,
        hours * max(1, len(machines)),
        sum(offer.cost.usd_per_hour * hours for offer in machines) if machines else None,
        EARLIER if weights else "at most: every task at its time limit, tried once",
        EARLIER if chances.known_machines else guess,
    )


def own_needs(plan: Plan, tasks: Sequence[Task]) -> list[Needs | None]:
    """Return what each task needs beyond the others. A static schedule has one kind of machine."""
    return [None if is_static(plan.schedule) else task.needs for task in tasks]


def machines_of(offers: Sequence[Offer], plan: Plan, tasks: Sequence[Task], workers: int) -> list[Offer]:
    """Return an offer for each machine, the cheapest that has one left. Fewer, if there are no more.

    As large a share of the machines as of the tasks has what some tasks need beyond the others.
    """
    left = {offer.key: workers if offer.capacity is None else offer.capacity for offer in offers}
    kinds = Counter(needs for needs in own_needs(plan, tasks) if needs is not None)
    wanted: list[Needs | None] = [
        kind for kind, many in kinds.items() for _ in range(-(-workers * many // len(tasks)))
    ]
    machines: list[Offer] = []
    for kind in (*wanted, *[None] * (workers - len(wanted)))[:workers]:
        offer = next((each for each in offers if left[each.key] > 0 and does(each, kind)), None)
        if offer is not None:
            left[offer.key] -= 1
            machines.append(offer)
    return machines


def allowed_setup_s(plan: Plan) -> float:
    """Return the time that the benchmark allows for a machine's set-up, beside its boot."""
    return max(0.0, plan.limits.boot_timeout_s - Limits().boot_timeout_s)


def guessed_machine_s(boot_s: float, setup_s: float) -> tuple[float, float]:
    """Return the range of times until a machine is ready, from its place's figure for its boot and the time
    that its benchmark allows for its set-up."""
    return 0.7 * boot_s + 0.05 * setup_s, 1.3 * boot_s + 0.5 * setup_s


# -- drawn runs ---------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The range of nine in ten drawn runs, and the middle one."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(ordered[math.floor(0.05 * last)], ordered[last // 2], ordered[math.ceil(0.95 * last)])

    def rounded(self, digits: int) -> Range:
        return Range(*(round(value, digits) for value in self))


@dataclass(frozen=True)
class Option:
    """One way to run a plan."""

    workers: int
    offers: tuple[Offer, ...]
    """Of one size, the cheapest first; with spot machines, regular ones come after them."""
    pool: bool = False
    """On machines of a pool that was prepared and stopped, instead of new ones."""
    pool_name: str = ""
    """The name of such a pool; empty if there is none."""
    quota: int | None = None
    """How many more machines of this size are available; None if the place does not say."""
    right_sized: bool = False
    """Machines have the size that earlier runs needed, not that which the benchmark asks for."""

    @property
    def offer(self) -> Offer:
        return self.offers[0]

    @property
    def within_quota(self) -> bool:
        return self.pool or self.quota is None or self.workers <= self.quota

    @property
    def available(self) -> bool:
        """Return True if it can run now: the quota suffices, and a pool exists."""
        return self.within_quota and (not self.pool or bool(self.pool_name))


@dataclass(frozen=True)
class Forecast:
    """The ranges of one way to run a plan."""

    option: Option
    seconds: Range
    """Until the last result."""
    machines_usd: Range
    models_usd: Range | None
    """None if the cost of models is unknown."""
    usd: Range
    evictions: float
    """How many machines are taken back, on average."""
    unfinished: float
    """The share of drawn runs in which a task was left without a score."""
    best: bool = False
    """No other way is both quicker and cheaper."""

    @property
    def middle_usd(self) -> float:
        """The cost that ways are compared by: that of machines and models in the middle."""
        return self.machines_usd.middle + (0.0 if self.models_usd is None else self.models_usd.middle)


class Draw(NamedTuple):
    """One drawn run."""

    seconds: float
    machines_usd: float
    models_usd: float | None
    evictions: int
    done: bool


class Way(NamedTuple):
    """A plan with one way to run it, and the figures that its runs are drawn from."""

    plan: Plan
    tasks: Sequence[Task]
    option: Option
    chances: Chances


def forecasts(ways: Sequence[Way], draws: int = DRAWS) -> list[Forecast]:
    """Return the ranges of each way. Each has the same luck, so that chance does not decide between them."""
    ranges = [_forecast(way, [*map(_Runs(way).draw, range(draws))]) for way in ways]
    return [replace(each, best=_is_best(each, ranges)) for each in ranges]


def _forecast(way: Way, drawn: Sequence[Draw]) -> Forecast:
    models = [each.models_usd for each in drawn if each.models_usd is not None]
    return Forecast(
        way.option,
        Range.of(each.seconds for each in drawn),
        Range.of(each.machines_usd for each in drawn),
        Range.of(models) if models else None,
        Range.of(each.machines_usd + (each.models_usd or 0.0) for each in drawn),
        sum(each.evictions for each in drawn) / len(drawn),
        sum(not each.done for each in drawn) / len(drawn),
    )


def _is_best(forecast: Forecast, others: Sequence[Forecast]) -> bool:
    """Return True if it is on the Pareto front of time and money."""
    seconds, usd = forecast.seconds.middle, forecast.middle_usd
    return not any(
        other.seconds.middle <= seconds
        and other.middle_usd <= usd
        and (other.seconds.middle, other.middle_usd) != (seconds, usd)
        for other in others
    )


def draw(way: Way, seed: int) -> Draw:
    """Return one run of the plan, drawn at random."""
    return _Runs(way).draw(seed)


@dataclass(eq=False)
class _Worker:
    """A machine of a drawn run."""

    offer: Offer
    lane: int
    asked_at: float
    billed_from: float
    evicted_at: float
    """When its place takes it back; infinity if it does not."""
    until: float
    """When it was asked for, or when its newest attempt ended."""
    replaced: bool = False


NO_TASK = -1


class _Runs:
    """The runs of one way, drawn one after another: slots take tasks in the order in which they are free."""

    def __init__(self, way: Way) -> None:
        self._plan, tasks, self._option, self._chances = way
        self._expected = [(self._chances.tasks[task.id], task.limit_s) for task in tasks]
        self._needs = own_needs(self._plan, tasks)
        self._alike = not any(self._needs)
        self._all_orders = orders(self._plan.schedule, tasks, self._option.workers)
        self._offers = machines_of(self._option.offers, self._plan, tasks, self._option.workers)

    def draw(self, seed: int) -> Draw:
        self._rng = random.Random(seed)
        self._seconds = self._draw_durations()
        self._day = self._rng.random()
        self._orders = [order[::-1] for order in self._all_orders]
        self._free: list[tuple[float, int, _Worker, int, bool]] = []
        """When a slot is free, the task whose attempt ended then, and whether it was scored."""
        self._count = count()
        self._workers: list[_Worker] = []
        self._tries, self._broken = Counter[int](), Counter[int]()
        self._evictions = self._scored = 0
        self._emptied_at = 0.0
        """When the last task was taken."""
        last = self._run()
        machines_usd, models_usd = self._machines_usd(last), self._models_usd(seed)
        return Draw(last, machines_usd, models_usd, self._evictions, self._scored == len(self._seconds))

    def _draw_durations(self) -> list[float]:
        gauss, exp = self._rng.gauss, math.exp
        pace = exp(self._chances.shared * gauss(0.0, 1.0))
        low, high = GUESSED_SHARE
        guess = exp(self._rng.uniform(math.log(low), math.log(high)))
        drawn = (
            (middle * (guess if basis == "guess" else pace) * exp(gauss(0.0, spread)), limit_s)
            for (middle, spread, basis), limit_s in self._expected
        )
        return [min(max(LEAST_S, seconds), limit_s) for seconds, limit_s in drawn]

    def _run(self) -> float:
        """Return when the last attempt ended."""
        canary, offers = self._plan.limits.canary, self._offers
        self._ask_for(range(1 if canary else len(offers)), offers, 0.0)
        last = 0.0
        while self._free:
            now, _, worker, task, scored = heapq.heappop(self._free)
            if task != NO_TASK:
                last = worker.until = max(worker.until, now)
                self._scored += scored
                if not scored:
                    self._try_again(worker, task, now)
                elif self._scored == canary:
                    self._ask_for(range(1, len(offers)), offers, now)
            if now >= worker.evicted_at:
                self._replace(worker)
            elif (next_task := self._take(worker)) != NO_TASK:
                self._start(worker, next_task, now)
            elif task == NO_TASK:  # it came too late
                worker.until = max(worker.asked_at, min(now, self._emptied_at))
        return last

    def _ask_for(self, lanes: range, offers: Sequence[Offer], now: float) -> None:
        """Ask for machines, as many a minute as their places allow."""
        asked = Counter[str]()
        for lane in lanes[: len(offers)]:
            offer = offers[lane]
            minutes = 0 if offer.creates_a_minute is None else asked[offer.area_key] // offer.creates_a_minute
            asked[offer.area_key] += 1
            self._ask(offer, lane, now + 60.0 * minutes)

    def _ask(self, offer: Offer, lane: int, now: float) -> None:
        rng, begins, evicted_at = self._rng, now, math.inf
        if offer.life.queues and not self._option.pool:
            queue_s = QUEUE_S if offer.life.queue_s is None else offer.life.queue_s
            begins += rng.expovariate(1 / queue_s) if queue_s else 0.0
        if offer.spot:
            evicted_at = begins + HOUR_S * rng.expovariate(self._chances.evictions_an_hour)
        runs = self._chances.machines[offer.key]
        ready_at = begins + rng.choice(runs[int(self._day * len(runs))])  # one day's machines are alike
        worker = _Worker(offer, lane, now, begins, evicted_at, now)
        self._workers.append(worker)
        for _ in range(self._plan.slots):
            self._push(min(ready_at, evicted_at), worker, NO_TASK, False)

    def _push(self, at: float, worker: _Worker, task: int, scored: bool) -> None:
        heapq.heappush(self._free, (at, next(self._count), worker, task, scored))

    def _order(self, worker: _Worker) -> list[int]:
        return self._orders[worker.lane % len(self._orders)]

    def _take(self, worker: _Worker) -> int:
        """Take the next task that the machine has everything for out of its order."""
        order = self._order(worker)
        if self._alike:
            return order.pop() if order else NO_TASK
        for place in range(len(order) - 1, -1, -1):
            if does(worker.offer, self._needs[order[place]]):
                return order.pop(place)
        return NO_TASK

    def _start(self, worker: _Worker, task: int, now: float) -> None:
        self._emptied_at = now
        self._tries[task] += 1
        end = now + self._seconds[task]
        if end > worker.evicted_at:
            self._push(worker.evicted_at, worker, task, False)
        else:
            self._push(end, worker, task, self._rng.random() >= self._chances.breaks)

    def _try_again(self, worker: _Worker, task: int, now: float) -> None:
        limits = self._plan.limits
        self._broken[task] += now < worker.evicted_at
        if self._broken[task] < limits.attempts and self._tries[task] < limits.attempts_ceiling:
            self._order(worker).append(task)

    def _replace(self, worker: _Worker) -> None:
        """Ask for another machine instead of one that was taken back, if anything is left to do."""
        if worker.replaced:
            return
        worker.replaced, worker.until = True, worker.evicted_at
        self._evictions += 1
        if self._order(worker):
            regular = [offer for offer in self._option.offers if not offer.spot]
            offer = regular[0] if regular and self._evictions > SPOT_LEFT else worker.offer
            self._ask(offer, worker.lane, worker.evicted_at)

    def _machines_usd(self, last: float) -> float:
        if self._option.pool:  # all of its machines are paid from the start to the end
            return self._option.workers * billed_usd(self._option.offer, 0, round(last * SECOND))
        return sum(
            billed_usd(worker.offer, 0, round((worker.until - worker.billed_from) * SECOND))
            for worker in self._workers
            if worker.until > worker.billed_from
        )

    def _models_usd(self, seed: int) -> float | None:
        """Return what all attempts cost at their models, alike in each way; None if that is unknown."""
        chances, rng, attempts = self._chances, random.Random(f"models {seed}"), sum(self._tries.values())
        if chances.model_usd:
            return math.exp(rng.gauss(0.0, 0.1)) * sum(rng.choices(chances.model_usd, k=attempts))
        return None if chances.model_range is None else attempts * rng.uniform(*chances.model_range)


# -- the way to take ----------------------------------------------------------------------------------------


def chosen(
    forecasts: Sequence[Forecast], deadline_s: float | None, budget_usd: float | None
) -> Forecast | None:
    """Return the cheapest way that meets the deadline, or the quickest that the budget pays; None: none does.

    It must be available now (quotas, a pool). A promise holds if it does in nineteen of twenty drawn runs.
    """
    holding = [
        each
        for each in forecasts
        if each.option.available
        and (deadline_s is None or each.seconds.high <= deadline_s)
        and (budget_usd is None or each.usd.high <= budget_usd)
    ]
    if deadline_s is not None:
        return min(holding, key=lambda each: (each.middle_usd, each.seconds.middle), default=None)
    return min(holding, key=lambda each: (each.seconds.middle, each.middle_usd), default=None)
