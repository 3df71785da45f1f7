"""What a planned run is drawn from: what is believed of its tasks, its machines and its luck.

It can be sent to another process, and knows nothing of homes and journals: `api.experience` reads those.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evalfleet.model import Offer, Task, TaskId

EVICTED_EVERY_H = 20.0
"""How long a spot machine lasts on average, where nobody knows better."""
LEAST_S = 0.01
"""Nothing takes less."""
USUAL_RUNS = 4
"""So many runs count what is usual, beside those that there were."""
Basis = Literal["task", "other model", "domain", "benchmark", "default", "guess"]
"""What a task's duration rests on: earlier attempts at it with this model, or with another; at tasks of its
domain, or of its benchmark; what the benchmark itself says; or nothing but its time limit."""

MachineSeconds = Sequence[Sequence[float]]
"""Of each earlier run, how long its machines took until they were ready. A guess is one run each."""
GUESSED_SHARE = (0.01, 1.0)
"""Between which shares of their time limit tasks take, as far as anybody knows."""
FEW_PRICES = 3


@dataclass(frozen=True, slots=True)
class SpotRecord:
    """What earlier runs tell of the spot machines of one offer."""

    hours: float = 0.0
    """How long they lived, all together."""
    evictions: int = 0
    prices: Sequence[float] = ()
    """What an hour cost, in each run that had some."""


@dataclass(frozen=True)
class Chances:
    """What a planned run is drawn from. It can be sent to another process."""

    tasks: Mapping[TaskId, tuple[float, float]]
    """(seconds, the standard deviation of their logarithm); of a guess, the time limit."""
    guessed: frozenset[TaskId]
    shared: float
    """The standard deviation of the logarithm of what all tasks have in common."""
    machines: Mapping[str, MachineSeconds]
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

    def fate(self, seed: int) -> DrawnFate:
        """What happens in one run."""
        return DrawnFate(self, seed)

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

    def __init__(self, chances: Chances, seed: int) -> None:
        self._chances, self._seed = chances, seed
        self._rng = rng = random.Random(seed)
        self._all_tasks = math.exp(chances.shared * _student_t(rng, chances.runs))
        self.lead_s = rng.choice(chances.leads) if chances.leads else 0.0
        low, high = GUESSED_SHARE
        self._guessed = math.exp(rng.uniform(math.log(low), math.log(high)))
        self._day = rng.random()
        self._evictions_an_hour: dict[str, float] = {}

    def task_s(self, task: Task, offer: Offer) -> float:
        middle, spread = self._chances.tasks[task.id]
        in_common = self._guessed if task.id in self._chances.guessed else self._all_tasks
        seconds = middle * in_common * math.exp(self._rng.gauss(0.0, spread))
        return min(max(LEAST_S, seconds), task.limit_s)

    def machine_s(self, offer: Offer) -> float:
        """Machines of one run are much alike, so all are drawn from those of one earlier run."""
        runs = self._chances.machines[offer.key]
        return self._rng.choice(runs[int(self._day * len(runs))])

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

    def price_factor(self, offer: Offer) -> float:
        """What an hour of a spot machine will cost, over what it does now: its price was others before."""
        prices = self._chances.spot.get(offer.key, SpotRecord()).prices
        if not offer.spot or len(prices) < FEW_PRICES or not offer.usd_per_hour:
            return 1.0
        return self._rng.choice((*prices, offer.usd_per_hour)) / offer.usd_per_hour

    def breaks(self) -> bool:
        return self._rng.random() < self._chances.breaks

    def models_usd(self, attempts: int) -> float | None:
        """What so many attempts cost at their models; None if nothing is known of that.

        That is the same luck in each way to run it: else chance would tell which of them is cheaper.
        """
        chances, rng = self._chances, random.Random(f"models {self._seed}")
        if chances.model_usd:
            return math.exp(rng.gauss(0.0, 0.1)) * sum(rng.choices(chances.model_usd, k=attempts))
        return None if chances.model_range is None else attempts * rng.uniform(*chances.model_range)


def _student_t(rng: random.Random, runs: int) -> float:
    """How far a run is off, in standard deviations that are themselves known from a few runs only."""
    freedom = USUAL_RUNS + runs
    return rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(freedom / 2, 2 / freedom))


def guessed_machines(low: float, high: float) -> MachineSeconds:
    """Return times between two bounds, for machines that no earlier run had."""
    return [[low + (high - low) * step / 10] for step in range(11)]


QUEUE_S = 600.0
"""How long a machine waits in a queue of which nobody can tell."""
