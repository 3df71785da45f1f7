"""What `evalfleet plan` found, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evalfleet.planning.plan import Resolved
from evalfleet.sim.chances import GUESSED_SHARE, Basis, Chances
from evalfleet.sim.forecast import Forecast, Option, Range
from evalfleet.views.format import plural, table, usd, whole_duration

from .planner import Outlook

if TYPE_CHECKING:
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
    machines = "as in earlier runs" if chances.known_machines else "guessed"
    if chances.model_usd:
        models = "as attempts have cost before"
    else:
        models = "unknown" if chances.model_range is None else "by what the benchmark says"
    lines = [
        f"{runs}; durations of tasks: {tasks}",
        f"time until a machine is ready: {machines}; models: {models}",
    ]
    if chances.placement:
        scores = ", ".join(f"{offer} {score}" for offer, score in chances.placement.items())
        lines.append(f"placement of spot machines, as the cloud says: {scores}")
    return lines


def described(resolved: Resolved, found: Outlook, draws: int) -> str:
    """A table of all ways, for people."""
    plan, spots = resolved.plan, any(each.option.offer.spot for each in found.forecasts)
    quotas = any(each.option.quota is not None for each in found.forecasts)
    head = ["", "workers", "on", "time", "90%", "machines", "90%", "models", "evicted", "quota"]
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
            _quota(each.option),
        )
        for each in found.forecasts
    ]
    hidden = {name for name, shown in (("evicted", spots), ("quota", quotas)) if not shown}
    columns = [i for i, name in enumerate(head) if name not in hidden]
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


def _quota(option: Option) -> str:
    """For how many machines the quota lasts."""
    if option.quota is None or option.pool:
        return "-"
    return f"{option.quota}" if option.within_quota else f"{option.quota}: too few"


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
    possible = [each for each in found.forecasts if each.option.within_quota]
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
        "usd_per_hour": offer.usd_per_hour,
        "prices_as_of": offer.priced or None,
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
