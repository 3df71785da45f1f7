"""What a run would take and cost in each of the ways in which it could be run, by drawing runs by chance."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from evalfleet.cost import billed_usd
from evalfleet.effects.machines import offers_by_kind
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import SECOND, Limits, Offer, Plan, Task
from evalfleet.planning.plan import Resolved, benchmark_of, specs_of
from evalfleet.planning.plugins import place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.policy.scale import task_without_offer
from evalfleet.policy.tiers import in_order
from evalfleet.ports import Hosts, Preflight
from evalfleet.sim.montecarlo import draw_run
from evalfleet.toml_tables import convert
from evalfleet.views.format import plural, table, usd, whole_duration

from .experience import GUESSED_SHARE, Basis, Chances, MachineTimes, chances_of, experience_of

if TYPE_CHECKING:
    from evalfleet.views.fleet_documents import ForecastDocument, OptionDocument, RangeDocument

DRAWS = 60
WORKERS = (1, 2, 5, 10, 20, 40)
SIZES = 2
"""So many sizes are looked at, the cheapest ones."""
HERE = 15_000
"""So many attempts are drawn in this process before it is worth to start others."""
UNIT = 20
"""So many draws are given to a process at once."""
LONG_LEASE_S = 30 * 86_400.0


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

    @property
    def offer(self) -> Offer:
        return self.offers[0]


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


@dataclass(frozen=True)
class Outlook:
    """All ways that were looked at, and what the figures rest on."""

    forecasts: tuple[Forecast, ...]
    chances: Chances


@dataclass(frozen=True)
class OptionDraws:
    """Draws of one option, for any process."""

    plan: Plan
    tasks: tuple[Task, ...]
    option: Option
    chances: Chances


class Draw(NamedTuple):
    seconds: float
    machines_usd: float
    models_usd: float | None
    evictions: int
    done: bool


def draw(job: OptionDraws, seed: int) -> Draw:
    """One drawn run."""
    fate = job.chances.fate(seed, job.option.workers)
    drawn = draw_run(job.plan, job.tasks, job.option.offers, fate)
    seconds, usd = drawn.seconds + fate.lead_s, drawn.machines_usd
    if job.option.pool:  # all of its machines are paid from the start to the end
        usd = job.option.workers * billed_usd(job.option.offer, 0, round(seconds * SECOND))
    return Draw(seconds, usd, fate.models_usd(drawn.attempts), drawn.evictions, drawn.done)


def forecasts(jobs: Sequence[OptionDraws], draws: int = DRAWS) -> list[Forecast]:
    """The draws of all jobs, each taken together; in several processes if they are many."""
    units = [(job, range(n, min(n + UNIT, draws))) for job in jobs for n in range(0, draws, UNIT)]
    if draws * sum(len(job.tasks) for job in jobs) <= HERE or (os.cpu_count() or 1) < 2:
        parts = [_draw_unit(unit) for unit in units]
    else:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(units)), get_context("spawn")) as pool:
            parts = list(pool.map(_draw_unit, units))
    drawn = [each for part in parts for each in part]
    found = [
        _forecast(job.option, drawn[index * draws : (index + 1) * draws]) for index, job in enumerate(jobs)
    ]
    return [replace(each, best=_is_best(each, found)) for each in found]


def _draw_unit(unit: tuple[OptionDraws, range]) -> list[Draw]:
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
    seconds, usd = forecast.seconds.middle, forecast.usd.middle
    return not any(
        other.seconds.middle <= seconds
        and other.usd.middle <= usd
        and (other.seconds.middle, other.usd.middle) != (seconds, usd)
        for other in others
    )


# -- the ways in which a run could be run -------------------------------------------------------------------


@dataclass(frozen=True)
class _Sight:
    """What the places say."""

    offers: tuple[Offer, ...]
    machine_s: Mapping[str, tuple[float, float]]
    """Place -> between which seconds a machine is ready that is made anew."""
    start_s: Mapping[str, tuple[float, float]]
    """The same of one that was only stopped, where machines can be."""


async def outlook(
    workspace: Workspace,
    resolved: Resolved,
    spot: Resolved | None,
    workers: Sequence[int],
    draws: int = DRAWS,
) -> Outlook:
    """What comes of the request with each of these numbers of workers, and of each other way to run it.

    `spot` is the same request with spot machines, where the place has them.
    """
    plan, tasks = resolved.plan, resolved.tasks
    experience = experience_of(workspace, plan.benchmark)
    sight = await _look(workspace, resolved)
    seen = [sight] if spot is None else [sight, await _look(workspace, spot)]
    every = {offer.key: offer for each in seen for offer in each.offers}
    believe = functools.partial(
        chances_of,
        experience,
        tasks,
        list(every.values()),
        model=plan.model,
        model_range=plan.model_usd,
    )
    chances = believe(machine_s=sight.machine_s)
    jobs = [
        job_of(plan, tasks, option, chances)
        for each in seen
        for sized in _by_size(each.offers, spot=each is not sight)
        for option in _options(sized, workers, plan.slots, len(tasks), pool=bool(resolved.borrowed))
    ]
    if sight.start_s and not resolved.borrowed:
        stopped = believe(machine_s=sight.start_s)
        stopped = replace(stopped, machines=_started(every.values(), sight.start_s))
        sized = _by_size(sight.offers, spot=False)[:1]
        jobs += [
            job_of(plan, tasks, option, stopped)
            for offers in sized
            for option in _options(offers, workers, plan.slots, len(tasks), pool=True)
        ]
    if not jobs:
        raise RequestError("--workers: the place offers no machine; `evalfleet doctor` says more")
    found = sorted(forecasts(jobs, draws), key=lambda each: (each.usd.middle, each.seconds.middle))
    return Outlook(tuple(found), chances)


def _started(offers: Iterable[Offer], start_s: Mapping[str, tuple[float, float]]) -> dict[str, MachineTimes]:
    return {offer.key: MachineTimes.guessed(*start_s.get(offer.place, (0.0, 0.0))) for offer in offers}


async def _look(workspace: Workspace, resolved: Resolved) -> _Sight:
    needs, special = benchmark_of(resolved.plan).needs, [task for task in resolved.tasks if task.needs]
    kinds = list(dict.fromkeys(task.needs for task in special if task.needs is not None))
    offers: list[Offer] = []
    machine_s: dict[str, tuple[float, float]] = {}
    start_s: dict[str, tuple[float, float]] = {}
    setup_s = max(0.0, resolved.plan.limits.boot_timeout_s - Limits().boot_timeout_s)
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            offers += await offers_by_kind(place.offers, needs, kinds)
            boot_s = place.machine_s if isinstance(place, Preflight) else 0.0
            machine_s[name] = guessed_machine_s(boot_s, setup_s)
            if boot_s and isinstance(place, Hosts):
                start_s[name] = (0.3 * boot_s, 1.2 * boot_s)
    if (without := task_without_offer(special, offers)) is not None:
        raise PlaceError(without, transient=False)
    if resolved.borrowed:
        machine_s = {name: start_s.get(name, (0.0, 2.0)) for name in machine_s}
    return _Sight(tuple(in_order(resolved.plan, offers)), machine_s, start_s)


def guessed_machine_s(boot_s: float, setup_s: float) -> tuple[float, float]:
    """Between which seconds a machine is ready, by what its place says of its boot, and by the time that its
    benchmark allows for the set-up."""
    return 0.7 * boot_s + 0.05 * setup_s, 1.5 * boot_s + 0.5 * setup_s + 2.0


def _by_size(offers: Sequence[Offer], *, spot: bool) -> list[tuple[Offer, ...]]:
    """The offers of each of the cheapest sizes. `spot`: with regular ones to fall back to."""
    first = [offer for offer in offers if offer.spot or not spot]
    sizes = list(dict.fromkeys((offer.place, offer.size) for offer in first))[:SIZES]
    return [tuple(each for each in offers if (each.place, each.size) == size) for size in sizes]


def _options(
    offers: tuple[Offer, ...], workers: Sequence[int], slots: int, tasks: int, *, pool: bool
) -> list[Option]:
    """One for each number of workers that there can be, and that have something to do."""
    if pool:
        offers = tuple(offer for offer in offers if not offer.spot) or offers
    capacities = [offer.capacity for offer in offers if offer.capacity is not None]
    most = min(-(-tasks // slots), sum(capacities) if len(capacities) == len(offers) else 10**9)
    counts = dict.fromkeys(min(count, most) for count in workers)
    return [Option(count, offers, pool) for count in counts if count > 0]


def job_of(plan: Plan, tasks: tuple[Task, ...], option: Option, chances: Chances) -> OptionDraws:
    """The run as it would be planned, without what would end it early: that is what is asked about."""
    limits = msgspec.structs.replace(
        plan.limits,
        workers=option.workers,
        auto=False,
        canary=0 if option.pool else plan.limits.canary,
        budget_usd=None,
        max_duration_s=None,
        deadline_s=None,
        lease_s=max(plan.limits.lease_s, LONG_LEASE_S),
    )
    bare = msgspec.structs.replace(plan, limits=limits, metering=None, home=plan.home or "0")
    return OptionDraws(bare, tasks, option, chances)


# -- which one to take --------------------------------------------------------------------------------------


def chosen(
    forecasts: Sequence[Forecast], deadline_s: float | None, budget_usd: float | None
) -> Forecast | None:
    """The cheapest that will be done by the deadline, or the quickest that the budget pays; None: none is.

    A promise holds if it does in nineteen of twenty drawn runs.
    """
    holding = [
        each
        for each in forecasts
        if (deadline_s is None or each.seconds.high <= deadline_s)
        and (budget_usd is None or each.usd.high <= budget_usd)
    ]
    if deadline_s is not None:
        return min(holding, key=lambda each: (each.usd.middle, each.seconds.middle), default=None)
    return min(holding, key=lambda each: (each.seconds.middle, each.usd.middle), default=None)


def size_setting(plan: Plan, offer: Offer) -> str | None:
    """What to `--set` so that only this size is used; None if there is nothing to choose."""
    spec = specs_of(plan)[offer.place]
    kind = place_kind(spec.kind)
    settings = msgspec.structs.asdict(convert(spec.settings, kind.Settings, f"place {offer.place!r}"))
    lists = (key for key, value in settings.items() if isinstance(value, tuple) and offer.size in value)
    key = next(lists, None)
    return None if key is None or len(settings[key]) == 1 else f"{key}={offer.size}"


async def doubts(workspace: Workspace, resolved: Resolved, workers: int) -> list[str]:
    """Whether so many machines can be had, quota above all: what the places find wrong. Spends nothing."""
    needs, told = benchmark_of(resolved.plan).needs, list[str]()
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            if isinstance(place, Preflight):
                checks = await place.examine(needs, workers)
                wrong = [check for check in checks if check.verdict != "good"]
                told += [f"{name}: {'; '.join(filter(None, (each.found, each.remedy)))}" for each in wrong]
    return told


# -- for people and programs --------------------------------------------------------------------------------

BASES: Mapping[Basis, str] = {
    "task": "by earlier attempts at them",
    "other model": "by earlier attempts with another model",
    "domain": "by others of their domain",
    "benchmark": "by others of the benchmark",
    "default": "by what the benchmark says",
    "guess": f"guessed: {GUESSED_SHARE[0]:.0%} to {GUESSED_SHARE[1]:.0%} of their time limit",
}


def basis_lines(chances: Chances) -> list[str]:
    """What the figures rest on."""
    runs = f"{plural(chances.runs, 'earlier run')} here" if chances.runs else "no earlier runs here"
    tasks = ", ".join(f"{count} {BASES[basis]}" for basis, count in chances.bases.items())
    machines = "as in earlier runs" if chances.known_machines else "guessed"
    if chances.model_usd:
        models = "as attempts have cost before"
    else:
        models = "unknown" if chances.model_range is None else "by what the benchmark says"
    return [
        f"{runs}; durations of tasks: {tasks}",
        f"time until a machine is ready: {machines}; models: {models}",
    ]


def described(resolved: Resolved, found: Outlook, draws: int) -> str:
    """A table of all ways, for people."""
    plan, spots = resolved.plan, any(each.option.offer.spot for each in found.forecasts)
    head = ["", "workers", "on", "time", "90%", "machines", "90%", "models", "evicted"]
    rows = [
        (
            "*" if each.best else "",
            each.option.workers,
            where(each.option),
            whole_duration(each.seconds.middle),
            span(whole_duration(each.seconds.low), whole_duration(each.seconds.high)),
            usd(each.machines_usd.middle),
            span(usd(each.machines_usd.low), usd(each.machines_usd.high)),
            None if each.models_usd is None else span(usd(each.models_usd.low), usd(each.models_usd.high)),
            f"{each.evictions:.1f}",
        )
        for each in found.forecasts
    ]
    columns = [i for i, name in enumerate(head) if name != "evicted" or spots]
    dates = {each.option.offer.priced for each in found.forecasts} - {""}
    lines = [
        f"{plural(len(resolved.tasks), 'task')} of {plan.benchmark}: {draws} simulated runs each way",
        "",
        table([head[i] for i in columns], [[row[i] for i in columns] for row in rows], right=("workers",)),
        "",
        "* no other way is both quicker and cheaper",
        *basis_lines(found.chances),
    ]
    lines += [f"prices of {', '.join(sorted(dates))}"] if dates else []
    unfinished = max(each.unfinished for each in found.forecasts)
    if unfinished > 0.05:
        lines.append(f"in up to {unfinished:.0%} of the runs a task is left broken: see --attempts")
    return "\n".join(lines)


def where(option: Option) -> str:
    """What machines, in words."""
    offer = option.offer
    words = [offer.place, offer.size if offer.size != offer.place else "", "spot" if offer.spot else ""]
    return " ".join(filter(None, (*words, "(stopped pool)" if option.pool else "")))


def in_words(forecast: Forecast) -> str:
    seconds, cost = forecast.seconds, forecast.usd
    times = span(whole_duration(seconds.low), whole_duration(seconds.high))
    return (
        f"{plural(forecast.option.workers, 'worker')} of {where(forecast.option)}: "
        f"{whole_duration(seconds.middle)} (90%: {times}), "
        f"{usd(cost.middle)} (90%: {span(usd(cost.low), usd(cost.high))})"
        + ("" if forecast.models_usd is not None else ", models not counted")
    )


def span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def out_of_reach(found: Outlook, deadline_s: float | None, budget_usd: float | None) -> str:
    """Why nothing was chosen, and what to do."""
    quickest = min(found.forecasts, key=lambda each: each.seconds.high)
    cheapest = min(found.forecasts, key=lambda each: each.usd.high)
    if deadline_s is not None and quickest.seconds.high > deadline_s:
        told = f"no way is done in {whole_duration(deadline_s)}: the quickest is {in_words(quickest)}"
        return f"{told}; allow more time, run fewer tasks, or look at more --workers or another place"
    if budget_usd is not None and cheapest.usd.high > budget_usd:
        told = f"no way costs {usd(budget_usd)} at most: the cheapest is {in_words(cheapest)}"
        return f"{told}; allow more, run fewer tasks, or look at --spot or another place"
    return (
        f"no way keeps both promises: the quickest is {in_words(quickest)}, the cheapest "
        f"{in_words(cheapest)}; allow more time or more money"
    )


def document(
    resolved: Resolved, found: Outlook, best: Forecast | None, command: str | None, notes: Sequence[str]
) -> ForecastDocument:
    """`plan --json`."""
    chances = found.chances
    return {
        "benchmark": resolved.plan.benchmark,
        "model": resolved.plan.model or None,
        "tasks": len(resolved.tasks),
        "options": [_option(each) for each in found.forecasts],
        "chosen": None if best is None else _option(best),
        "command": command,
        "basis": {
            "runs": chances.runs,
            "tasks": {str(basis): count for basis, count in chances.bases.items()},
            "machines_known": chances.known_machines,
            "models_known": bool(chances.model_usd),
        },
        "notes": [*resolved.warnings, *notes],
    }


def _option(forecast: Forecast) -> OptionDocument:
    option, offer = forecast.option, forecast.option.offer
    return {
        "workers": option.workers,
        "place": offer.place,
        "size": offer.size,
        "region": offer.region or None,
        "spot": offer.spot,
        "stopped_pool": option.pool,
        "usd_per_hour": offer.usd_per_hour,
        "prices_as_of": offer.priced or None,
        "seconds": range_document(forecast.seconds, 1),
        "machines_usd": range_document(forecast.machines_usd, 4),
        "models_usd": None if forecast.models_usd is None else range_document(forecast.models_usd, 4),
        "usd": range_document(forecast.usd, 4),
        "evictions": round(forecast.evictions, 2),
        "unfinished": round(forecast.unfinished, 3),
        "best": forecast.best,
    }


def range_document(figures: Range, digits: int) -> RangeDocument:
    low, middle, high = figures.rounded(digits)
    return {"low": low, "middle": middle, "high": high}
