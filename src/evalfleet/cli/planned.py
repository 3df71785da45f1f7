"""What a plan would do and cost, before anything is started."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.plan import benchmark_of, places_of
from evalfleet.ports import PlaceContext
from evalfleet.views.words import plural

if TYPE_CHECKING:
    from evalfleet.model import Offer
    from evalfleet.plan import Resolved


@dataclass(frozen=True)
class Estimate:
    """`basis` says what the figures rest on: earlier runs, or every task at its time limit."""

    offers: tuple[Offer, ...]
    duration_s: float
    machine_hours: float
    usd: float | None
    basis: str


def estimate(resolved: Resolved) -> Estimate:
    """Tasks over workers times the time of a task, at the price of the cheapest offer."""
    offers = asyncio.run(_offers(resolved))
    tasks, limits = resolved.tasks, resolved.plan.limits
    known = [task.weight_s for task in tasks if task.weight_s is not None]
    mean_known = sum(known) / len(known) if known else 0.0
    seconds = [task.weight_s or (mean_known if known else task.timeout_s) for task in tasks]
    slots = max(1, min(limits.workers * resolved.plan.slots, len(tasks)))
    machines = -(-slots // resolved.plan.slots)
    duration_s = max(sum(seconds) / slots, max(seconds))
    hours = duration_s * machines / 3600
    usd = hours * offers[0].usd_per_hour if offers else None
    basis = "what earlier runs took" if known else "at most: every task at its time limit, tried once"
    return Estimate(offers, duration_s, hours, usd, basis)


async def _offers(resolved: Resolved) -> tuple[Offer, ...]:
    context = PlaceContext(resolved.home, resolved.plan.home, resolved.secrets, resolved.environ)
    needs = benchmark_of(resolved.plan).needs
    found: list[Offer] = []
    for place in places_of(resolved.plan, context).values():
        found.extend(await place.offers(needs))
        await place.close()
    return tuple(sorted(found, key=lambda offer: (offer.usd_per_hour, offer.key)))


def describe(resolved: Resolved, expected: Estimate, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(_document(resolved, expected))
    plan, limits = resolved.plan, resolved.plan.limits
    rows = [
        ("run", plan.run),
        ("benchmark", plan.benchmark),
        ("tasks", f"{len(resolved.tasks)} in {plural(len({t.domain for t in resolved.tasks}), 'domain')}"),
        ("on", f"{_where(resolved)}, {plural(limits.workers, 'worker')}, {plan.schedule} schedule"),
        ("attempts", f"{limits.attempts} a task"),
        ("model", plan.model or "-"),
        ("secrets", ", ".join(resolved.secrets) or "-"),
        ("limits", _limits(resolved)),
        ("offers", "; ".join(map(_offer, expected.offers)) or "none"),
        ("estimate", _figures(expected)),
        ("home", str(resolved.home)),
    ]
    lines = [f"{name:<11}{value}" for name, value in rows]
    return "\n".join((*lines, "", "Nothing was started. Leave out --dry-run to run it."))


def _where(resolved: Resolved) -> str:
    places = ", ".join(resolved.plan.places)
    return f"pool {resolved.plan.pool} ({places})" if resolved.plan.pool else places


def _offer(offer: Offer) -> str:
    words = (offer.place, offer.region, offer.size, "spot" if offer.spot else "")
    return f"{' '.join(word for word in words if word)} at ${offer.usd_per_hour:g}/h"


def _limits(resolved: Resolved) -> str:
    limits = resolved.plan.limits
    budget = f"budget ${limits.budget_usd:g}" if limits.budget_usd is not None else "no budget"
    time = f"at most {limits.max_duration_s:g} s" if limits.max_duration_s is not None else "no time limit"
    return f"{budget}, {time}"


def _figures(expected: Estimate) -> str:
    usd = f"${expected.usd:.2f}" if expected.usd is not None else "unknown cost"
    minutes = expected.duration_s / 60
    return f"{minutes:.1f} min, {expected.machine_hours:.2f} machine-hours, {usd} ({expected.basis})"


def _document(resolved: Resolved, expected: Estimate) -> dict[str, Any]:
    return {
        "plan": msgspec.to_builtins(resolved.plan),
        "tasks": [task.id for task in resolved.tasks],
        "offers": msgspec.to_builtins(expected.offers),
        "estimate": {
            "duration_seconds": round(expected.duration_s, 1),
            "machine_hours": round(expected.machine_hours, 3),
            "usd": None if expected.usd is None else round(expected.usd, 4),
            "basis": expected.basis,
        },
        "home": str(resolved.home),
        "warnings": list(resolved.warnings),
    }
