"""What `evalfleet plan` found, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evalfleet.planning.forecast import GUESSED_SHARE, Basis, Chances, Forecast, Option, Range
from evalfleet.views.format import plural, table, usd, whole_duration

if TYPE_CHECKING:
    from evalfleet.api.survey import Outlook
    from evalfleet.planning.plan import Resolved
    from evalfleet.views.fleet_documents import ForecastDocument, OptionDocument, RangeDocument

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
    return [
        f"{runs}; durations of tasks: {tasks}",
        f"time until a machine is ready: {'as in earlier runs' if chances.known_machines else 'guessed'}",
    ]


def _models_line(found: Outlook) -> str:
    """What models cost, which is much the same however it is run."""
    ranges = [each.models_usd for each in found.forecasts if each.models_usd is not None]
    if not ranges:
        return "models: unknown, and not counted"
    told = span(usd(min(each.low for each in ranges)), usd(max(each.high for each in ranges)))
    basis = "as attempts have cost before" if found.chances.model_usd else "by what the benchmark says"
    return f"models cost {told} beside the machines, {basis}"


HEAD = ("", "workers", "time", "90% of runs", "machines", "90% of runs", "evicted")


def described(resolved: Resolved, found: Outlook, draws: int) -> str:
    """A table of all ways, for people: those with the same machines together, the cheapest first."""
    groups: dict[str, list[Forecast]] = {}
    for each in sorted(found.forecasts, key=lambda each: each.option.workers):
        groups.setdefault(where(each.option), []).append(each)
    cheapest_first = sorted(groups, key=lambda name: min(each.middle_usd for each in groups[name]))
    shown = [each for name in cheapest_first for each in groups[name]]
    spots = any(each.option.offer.spot for each in shown)
    rows = [row if spots else row[:-1] for row in map(_row, shown)]
    head = HEAD if spots else HEAD[:-1]
    drawn = iter(table(head, rows, right=("workers", "evicted")).splitlines())
    tasks = f"{plural(len(resolved.tasks), 'task')} of {resolved.plan.benchmark}"
    lines = [f"{tasks}: {draws} simulated runs each way", "", next(drawn)]
    for name in cheapest_first:
        lines += [_heading(groups[name]), *(next(drawn) for _ in groups[name])]
    lines += ["", "* no other way is both quicker and cheaper"]
    if not all(each.option.within_quota for each in shown):
        lines.append("! more machines than the quota lasts for")
    lines += [*basis_lines(found.chances), _models_line(found)]
    dates = {each.option.offer.cost.priced for each in shown} - {""}
    lines += [f"prices of {', '.join(sorted(dates))}"] if dates else []
    unfinished = max(each.unfinished for each in shown)
    if unfinished > 0.05:
        lines.append(f"in up to {unfinished:.0%} of the runs a task is left broken: see --attempts")
    return "\n".join(lines)


def _row(forecast: Forecast) -> Sequence[object]:
    seconds, machines = forecast.seconds, forecast.machines_usd
    return (
        "*" * forecast.best if forecast.option.within_quota else "!",
        forecast.option.workers,
        whole_duration(seconds.middle),
        span(whole_duration(seconds.low), whole_duration(seconds.high)),
        usd(machines.middle),
        span(usd(machines.low), usd(machines.high)),
        f"{forecast.evictions:.1f}",
    )


def _heading(group: Sequence[Forecast]) -> str:
    """What machines these are, what one costs, and how many more there can be."""
    option = group[0].option
    parts = [where(option)]
    if option.offer.cost.usd_per_hour:
        parts.append(f"${option.offer.cost.usd_per_hour:g} an hour")
    if option.pool:
        names = dict.fromkeys(each.option.pool_name for each in group if each.option.pool_name)
        parts.append(", ".join(f"pool {name}" for name in names) or "no such pool is here yet")
    elif option.quota is not None:
        parts.append(f"quota for {option.quota} more")
    return ", ".join(parts)


def where(option: Option) -> str:
    """What machines, in words."""
    offer = option.offer
    words = [offer.place, offer.size if offer.size != offer.place else "", "spot" if offer.spot else ""]
    words.append("(right-sized)" if option.right_sized else "")
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
    possible = [each for each in found.forecasts if each.option.available]
    if not possible:
        most = max(each.option.quota or 0 for each in found.forecasts)
        return f"the quota lasts for {plural(most, 'machine')}; ask for more, or look at fewer --workers"
    quickest = min(possible, key=lambda each: each.seconds.high)
    cheapest = min(possible, key=lambda each: each.usd.high)
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
        "pool": option.pool_name or None,
        "usd_per_hour": offer.cost.usd_per_hour,
        "prices_as_of": offer.cost.priced or None,
        "seconds": range_document(forecast.seconds, 1),
        "machines_usd": range_document(forecast.machines_usd, 4),
        "models_usd": None if forecast.models_usd is None else range_document(forecast.models_usd, 4),
        "usd": range_document(forecast.usd, 4),
        "evictions": round(forecast.evictions, 2),
        "unfinished": round(forecast.unfinished, 3),
        "quota": option.quota,
        "right_sized": option.right_sized,
        "best": forecast.best,
    }


def range_document(figures: Range, digits: int) -> RangeDocument:
    low, middle, high = figures.rounded(digits)
    return {"low": low, "middle": middle, "high": high}
