"""The text and the document of `run --dry-run`: a plan and its estimate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.views.format import plural, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evalfleet.api.survey import Survey
    from evalfleet.model import Offer, Plan
    from evalfleet.planning.forecast import Estimate
    from evalfleet.planning.plan import Resolved
    from evalfleet.ports import Made
    from evalfleet.views.fleet_documents import EstimateDocument, PlanDocument

MACHINES_SHOWN = OFFERS_SHOWN = 8


def describe(
    resolved: Resolved, seen: Survey, expected: Estimate, warnings: Sequence[str], *, as_json: bool
) -> str:
    if as_json:
        return json.dumps(_document(resolved, seen, expected, warnings))
    plan, limits = resolved.plan, resolved.plan.limits
    rows = [
        ("run", plan.run),
        ("benchmark", plan.benchmark),
        ("tasks", f"{len(resolved.tasks)} in {plural(len({t.domain for t in resolved.tasks}), 'domain')}"),
        ("on", f"{_where(resolved)}, {plural(limits.workers, 'worker')}, {plan.schedule} schedule"),
        ("attempts", f"{limits.attempts} a task"),
        ("model", plan.model or "-"),
        *_settings(plan),
        ("secrets", ", ".join(resolved.secrets) or "-"),
        ("limits", _limits(resolved)),
        ("offers", _offers(seen.offers)),
        ("estimate", _figures(resolved, seen, expected)),
        *_models(resolved),
        *_metered(resolved),
        ("home", str(resolved.home)),
    ]
    lines = [f"{name:<11}{value}" for name, value in rows]
    for place, made in seen.made.items():
        lines += ["", _made(place, made)]
    return "\n".join((*lines, "", "Nothing was started. Leave out --dry-run to run it."))


def _settings(plan: Plan) -> list[tuple[str, str]]:
    spec: Mapping[str, Any] = plan.benchmark_spec.get("spec") or {}
    rows = {"settings": {**spec.get("settings", {}), **plan.settings}, "agent": plan.agent}
    shown = {
        row: ", ".join(f"{name}={value}" for name, value in given.items() if value not in (None, "", [], {}))
        for row, given in rows.items()
    }
    return [(row, values) for row, values in shown.items() if values]


def _made(place: str, made: Sequence[Made]) -> str:
    """A table of what would be made; of many machines the first few."""
    shared = [each for each in made if each.kind != "machine"]
    machines = [each for each in made if each.kind == "machine"]
    shown = [*shared, *machines[:MACHINES_SHOWN]]
    rows = [(each.kind, each.name, each.where or None, each.detail) for each in shown]
    more = len(machines) - MACHINES_SHOWN
    lines = [table((f"{place} would make", "name", "where", "what"), rows)]
    lines += [f"... and {plural(more, 'machine')} more like these"] if more > 0 else []
    return "\n".join((*lines, f"`evalfleet doctor {place}` looks whether they can be had"))


def _flat(offer: Offer) -> dict[str, Any]:
    """Return what the offer is, what it costs and how long it lives, as one object."""
    fields: dict[str, Any] = msgspec.to_builtins(offer)
    parts: dict[str, Any] = {**fields.pop("cost", {}), **fields.pop("life", {})}
    return {**fields, **parts}


def _offers(offers: Sequence[Offer]) -> str:
    if not offers:
        return "none"
    more = len(offers) - OFFERS_SHOWN
    return "; ".join([*map(_offer, offers[:OFFERS_SHOWN]), *([f"and {more} more"] if more > 0 else [])])


def _where(resolved: Resolved) -> str:
    places = ", ".join(resolved.plan.places)
    return f"pool {resolved.borrowed} ({places})" if resolved.borrowed else places


def _offer(offer: Offer) -> str:
    words = (offer.place, offer.region, offer.size, "spot" if offer.spot else "")
    of_when = f" (price of {offer.cost.priced})" if offer.cost.priced else ""
    return f"{' '.join(word for word in words if word)} at ${offer.cost.usd_per_hour:g}/h{of_when}"


def _limits(resolved: Resolved) -> str:
    limits = resolved.plan.limits
    budget = f"budget ${limits.budget_usd:g}" if limits.budget_usd is not None else "no budget"
    time = f"at most {limits.max_duration_s:g} s" if limits.max_duration_s is not None else "no time limit"
    task = f", ${limits.task_budget_usd:g} for an attempt's models" if limits.task_budget_usd else ""
    tokens = f", {limits.max_tokens:,} tokens" if limits.max_tokens is not None else ""
    return f"{budget}{task}{tokens}, {time}"


def _metered(resolved: Resolved) -> list[tuple[str, str]]:
    """Which model calls are counted, and by which prices."""
    metering, usual_usd = resolved.plan.metering, resolved.plan.attempt_usd
    if metering is None:
        return []
    apis = ", ".join(f"{api.url} ({api.secret})" for api in metering.apis)
    prices = f"; prices of {metering.priced}" if metering.priced else "; no prices"
    usual = f"; an attempt has cost up to ${usual_usd:.2g}" if usual_usd is not None else ""
    return [("metered", f"{apis}{prices}{usual}")]


def _figures(resolved: Resolved, seen: Survey, expected: Estimate) -> str:
    """Return tasks over workers times the minutes of a task, and those of a machine."""
    usd = f"${expected.usd:.2f}" if expected.usd is not None else "unknown cost"
    tasks, task_s = len(resolved.tasks), expected.task_s
    sum_up = f"{plural(tasks, 'task')} / {expected.at_once} at once x {task_s / 60:.1f} min a task"
    if expected.machine_s >= 3:  # what shows
        sum_up += f" + {expected.machine_s / 60:.1f} min a machine ({expected.machine_basis})"
    figures = f"{expected.duration_s / 60:.1f} min, {expected.machine_hours:.2f} machine-hours, {usd}"
    priced = seen.offers[0].cost.priced if seen.offers else ""
    basis = f"{expected.basis}; prices of {priced}" if priced else expected.basis
    return f"{figures} ({basis}; {sum_up})"


def _models(resolved: Resolved) -> list[tuple[str, str]]:
    """Beside the machines' price: what nobody can tell beforehand is not nothing."""
    span = models_span(resolved)
    return [] if span is None else [("models", f"unknown; by experience ${span[0]:.2f} to ${span[1]:.2f}")]


def models_span(resolved: Resolved) -> tuple[float, float] | None:
    each = resolved.plan.model_usd
    return None if each is None else (len(resolved.tasks) * each[0], len(resolved.tasks) * each[1])


def _document(resolved: Resolved, seen: Survey, expected: Estimate, warnings: Sequence[str]) -> PlanDocument:
    figures: EstimateDocument = {
        "at_once": expected.at_once,
        "task_seconds": round(expected.task_s, 1),
        "machine_seconds": round(expected.machine_s, 1),
        "machine_basis": expected.machine_basis if expected.machine_s else None,
        "duration_seconds": round(expected.duration_s, 1),
        "machine_hours": round(expected.machine_hours, 3),
        "usd": None if expected.usd is None else round(expected.usd, 4),
        "prices_as_of": (seen.offers[0].cost.priced if seen.offers else "") or None,
        "basis": expected.basis,
    }
    if (span := models_span(resolved)) is not None:
        figures["models_usd_range"] = list(span)
    return {
        "plan": msgspec.to_builtins(resolved.plan),
        "tasks": [task.id for task in resolved.tasks],
        "offers": [_flat(offer) for offer in seen.offers],
        "creates": {place: msgspec.to_builtins(made) for place, made in seen.made.items()},
        "estimate": figures,
        "home": str(resolved.home),
        "warnings": list(warnings),
    }
