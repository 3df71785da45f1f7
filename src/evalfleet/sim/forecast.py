"""What a run takes and costs in one of the ways in which it could be run, by drawing it many times."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import NamedTuple

from evalfleet.cost import billed_usd
from evalfleet.model import SECOND, Offer, Plan, Task

from .chances import Chances
from .montecarlo import draw_run

DRAWS = 60
HERE = 15_000
"""So many attempts are drawn in this process before it is worth to start others."""
UNIT = 5
"""So many draws are given to a process at once."""


class Range(NamedTuple):
    """In which nine of ten drawn runs are, and the middle one."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(ordered[math.floor(0.05 * last)], ordered[last // 2], ordered[math.ceil(0.95 * last)])

    def rounded(self, digits: int) -> Range:
        return Range(*(round(each, digits) for each in self))


@dataclass(frozen=True)
class Option:
    """One way to run it."""

    workers: int
    offers: tuple[Offer, ...]
    """Of one size, the cheapest first; with spot machines, regular ones come after them."""
    pool: bool = False
    """On machines of a pool that was prepared and stopped, instead of new ones."""
    pool_name: str = ""
    """Such a pool that there is already; empty: there is none."""
    quota: int | None = None
    """How many more machines of this size can be had, as its place tells; None: it does not."""
    right_sized: bool = False
    """Machines have the size that earlier runs needed, not that which the benchmark asks for."""

    @property
    def offer(self) -> Offer:
        return self.offers[0]

    @property
    def within_quota(self) -> bool:
        return self.pool or self.quota is None or self.workers <= self.quota

    @property
    def can_be_had(self) -> bool:
        """Whether it can be run now: the quota lasts for it, and a pool is there."""
        return self.within_quota and (not self.pool or bool(self.pool_name))


@dataclass(frozen=True)
class Forecast:
    """What is expected of one way to run it."""

    option: Option
    seconds: Range
    """Until the last result."""
    machines_usd: Range
    models_usd: Range | None
    """None: nothing is known of that."""
    usd: Range
    evictions: float
    """How many machines are taken back, on average."""
    unfinished: float
    """In what share of the drawn runs a task was left without a score."""
    best: bool = False
    """No other way is both quicker and cheaper."""

    @property
    def middle_usd(self) -> float:
        """What ways are compared by: machines, and models, as each costs in the middle."""
        return self.machines_usd.middle + (0.0 if self.models_usd is None else self.models_usd.middle)


@dataclass(frozen=True)
class OptionDraws:
    """Draws of one option, for any process."""

    plan: Plan
    tasks: tuple[Task, ...]
    option: Option
    chances: Chances


Unit = tuple[OptionDraws, range]
"""A job, and the seeds to draw it with."""


class Draw(NamedTuple):
    seconds: float
    machines_usd: float
    models_usd: float | None
    evictions: int
    done: bool


def draw(job: OptionDraws, seed: int) -> Draw:
    """One drawn run."""
    fate = job.chances.fate(seed)
    drawn = draw_run(job.plan, job.tasks, job.option.offers, fate)
    seconds = drawn.seconds + fate.lead_s
    usd = drawn.machines_usd * fate.price_factor(job.option.offer)
    if job.option.pool:  # all of its machines are paid from the start to the end
        usd = job.option.workers * billed_usd(job.option.offer, 0, round(seconds * SECOND))
    return Draw(seconds, usd, fate.models_usd(drawn.attempts), drawn.evictions, drawn.done)


def forecasts(jobs: Sequence[OptionDraws], draws: int = DRAWS) -> list[Forecast]:
    """The draws of all jobs, each taken together; in several processes if they are many."""
    units = [(job, range(n, min(n + UNIT, draws))) for job in jobs for n in range(0, draws, UNIT)]
    helpers = min(os.cpu_count() or 1, len(units)) - 1
    alone = helpers < 1 or draws * sum(len(job.tasks) for job in jobs) <= HERE
    parts = [_draw_unit(unit) for unit in units] if alone else _draw_together(units, helpers)
    drawn = [each for part in parts for each in part]
    found = [
        _forecast(job.option, drawn[index * draws : (index + 1) * draws]) for index, job in enumerate(jobs)
    ]
    return [replace(each, best=_is_best(each, found)) for each in found]


def _draw_together(units: Sequence[Unit], helpers: int) -> list[list[Draw]]:
    """Other processes begin with the first units, once they have started. This one begins with the last, and
    takes from them what they have not begun."""
    with ProcessPoolExecutor(helpers, get_context("spawn")) as pool:
        begun = [pool.submit(_draw_unit, unit) for unit in units]
        own = {
            index: _draw_unit(units[index]) for index in reversed(range(len(units))) if begun[index].cancel()
        }
        return [own[index] if index in own else begun[index].result() for index in range(len(units))]


def _draw_unit(unit: Unit) -> list[Draw]:
    job, seeds = unit
    return [draw(job, seed) for seed in seeds]


def _forecast(option: Option, drawn: Sequence[Draw]) -> Forecast:
    models = [each.models_usd for each in drawn if each.models_usd is not None]
    return Forecast(
        option,
        Range.of(each.seconds for each in drawn),
        Range.of(each.machines_usd for each in drawn),
        Range.of(models) if models else None,
        Range.of(each.machines_usd + (each.models_usd or 0.0) for each in drawn),
        sum(each.evictions for each in drawn) / len(drawn),
        sum(not each.done for each in drawn) / len(drawn),
    )


def _is_best(forecast: Forecast, others: Sequence[Forecast]) -> bool:
    """Is it on the Pareto front of time and money?"""
    seconds, usd = forecast.seconds.middle, forecast.middle_usd
    return not any(
        other.seconds.middle <= seconds
        and other.middle_usd <= usd
        and (other.seconds.middle, other.middle_usd) != (seconds, usd)
        for other in others
    )
