"""What a plan would do and cost, before anything is started."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.effects.machines import offers_by_kind
from evalfleet.errors import PlaceError
from evalfleet.model import Limits
from evalfleet.named_pools.pool_places import SIZE as BORROWED
from evalfleet.names import NO_HOME, machine_id
from evalfleet.planning.history import known_machine_s
from evalfleet.planning.workspace import Workspace
from evalfleet.policy.scale import task_without_offer
from evalfleet.policy.schedule import does
from evalfleet.policy.tiers import in_order
from evalfleet.ports import Preflight
from evalfleet.schedules import is_dealt
from evalfleet.views.format import plural, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evalfleet.model import MachineId, Needs, Offer, Plan
    from evalfleet.planning.plan import Resolved
    from evalfleet.ports import Made
    from evalfleet.views.fleet_documents import EstimateDocument, PlanDocument


MACHINES_SHOWN = OFFERS_SHOWN = 8
HOUR_S = 3600.0
USUAL_SHARE = 0.275
"""Of the time that a benchmark allows for a set-up, what it usually takes: the middle of the range that
`evalfleet plan` draws from."""
EARLIER = "what earlier runs took"


@dataclass(frozen=True)
class Estimate:
    """What a run is expected to cost and to take. `basis` says what the figures rest on: earlier runs, or
    every task at its time limit.

    `made`: what places would make. `task_s` is the mean of all tasks, `machine_s` until a machine is ready,
    and `machine_basis` says what that rests on.
    """

    offers: tuple[Offer, ...]
    made: Mapping[str, Sequence[Made]]
    at_once: int
    task_s: float
    machine_s: float
    duration_s: float
    machine_hours: float
    usd: float | None
    basis: str
    machine_basis: str

    @property
    def priced(self) -> str:
        """When the price that `usd` rests on was listed."""
        return self.offers[0].priced if self.offers else ""


async def estimate(workspace: Workspace, resolved: Resolved) -> Estimate:
    """Tasks over workers times the time of a task, and the time of a machine, at the cheapest prices."""
    tasks, limits = resolved.tasks, resolved.plan.limits
    known = [task.weight_s for task in tasks if task.weight_s is not None]
    mean_known = sum(known) / len(known) if known else 0.0
    seconds = [task.weight_s or (mean_known if known else task.timeout_s) for task in tasks]
    slots = max(1, min(limits.workers * resolved.plan.slots, len(tasks)))
    prospect = await _ask(workspace, resolved, -(-slots // resolved.plan.slots))
    machines = len(prospect.machines) or 1  # the place may have fewer than were asked for
    slots = min(slots, machines * resolved.plan.slots)
    duration_s = max(sum(seconds) / slots, max(seconds)) + prospect.machine_s
    hours = duration_s / HOUR_S
    usd = sum(offer.usd_per_hour * hours for _, offer in prospect.machines) if prospect.offers else None
    basis = EARLIER if known else "at most: every task at its time limit, tried once"
    mean = sum(seconds) / len(seconds)
    return Estimate(
        prospect.offers,
        prospect.made,
        slots,
        mean,
        prospect.machine_s,
        duration_s,
        hours * machines,
        usd,
        basis,
        prospect.machine_basis,
    )


@dataclass(frozen=True)
class _Prospect:
    """What the places say."""

    offers: tuple[Offer, ...]
    machines: Sequence[tuple[MachineId, Offer]]
    made: Mapping[str, Sequence[Made]]
    machine_s: float
    machine_basis: str


async def _ask(workspace: Workspace, resolved: Resolved, count: int) -> _Prospect:
    needs = resolved.needs
    special = [task for task in resolved.tasks if task.needs and not is_dealt(resolved.plan.schedule)]
    kinds = Counter(task.needs for task in special if task.needs is not None)
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        found = [
            offer
            for place in places.values()
            for offer in await offers_by_kind(place.offers, needs, list(kinds))
        ]
        if (without := task_without_offer(special, found)) is not None:
            raise PlaceError(without, transient=False)
        offers = tuple(in_order(resolved.plan, found))
        pool = resolved.plan.pool if resolved.keep else resolved.plan.run
        share = {kind: -(-count * many // len(resolved.tasks)) for kind, many in kinds.items()}
        chosen = _chosen(offers, share, count)
        machines = [
            (machine_id(pool, resolved.plan.home or NO_HOME, n), offer) for n, offer in enumerate(chosen, 1)
        ]
        made: dict[str, Sequence[Made]] = {}
        for name, place in places.items():
            own = [(machine, offer) for machine, offer in machines if offer.place == name]
            outline = place.outline(own) if isinstance(place, Preflight) and own else ()
            if outline and not resolved.borrowed:
                made[name] = outline
        waits = [p.machine_s for name, p in places.items() if name in made and isinstance(p, Preflight)]
        if (known := _known_machine_s(resolved)) is not None:
            return _Prospect(offers, machines, made, known, EARLIER)
        boot_s = max(waits, default=0.0)
        setup_s = USUAL_SHARE * allowed_setup_s(resolved.plan) if made else 0.0
        basis = "a guess, with its set-up" if setup_s else "a guess, without its set-up"
        return _Prospect(offers, machines, made, boot_s + setup_s, basis)


def allowed_setup_s(plan: Plan) -> float:
    """Return the time that the benchmark allows for a machine's set-up, beside its boot."""
    return max(0.0, plan.limits.boot_timeout_s - Limits().boot_timeout_s)


def _known_machine_s(resolved: Resolved) -> float | None:
    """How long machines that are to be made take, by what is known of them."""
    if resolved.borrowed:
        return None
    return known_machine_s(resolved.home, resolved.plan.benchmark, resolved.plan.places, BORROWED)


def _chosen(offers: Sequence[Offer], share: Mapping[Needs, int], count: int) -> Sequence[Offer]:
    """An offer for each machine, the cheapest that has one left. Fewer, if there are no more.

    `share`: of how many it must have what some tasks need.
    """
    left = Counter({offer.key: count if offer.capacity is None else offer.capacity for offer in offers})
    wanted: list[Needs | None] = [kind for kind, many in share.items() for _ in range(many)]
    chosen: list[Offer] = []
    for kind in (*wanted, *(None for _ in range(count - len(wanted))))[:count]:
        offer = next((each for each in offers if left[each.key] > 0 and does(each, kind)), None)
        if offer is not None:
            left[offer.key] -= 1
            chosen.append(offer)
    return chosen


async def forewarned(workspace: Workspace, resolved: Resolved, expected: Estimate) -> Sequence[str]:
    """What may go wrong with it, as its places tell: looked up before it is started.

    Raises PlaceError if all of its places refuse us.
    """
    limit = resolved.plan.limits.max_duration_s
    lasts_s = limit if limit is not None else expected.duration_s
    told: list[str] = []
    refusals: list[PlaceError] = []
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for place in places.values():
            if isinstance(place, Preflight):
                try:
                    told += await place.doubts(lasts_s)
                except PlaceError as err:
                    refusals.append(err)
    if refusals and len(refusals) == len(places):
        raise refusals[0]
    return [*told, *map(str, refusals)]


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
        *_settings(plan),
        ("secrets", ", ".join(resolved.secrets) or "-"),
        ("limits", _limits(resolved)),
        ("offers", _offers(expected.offers)),
        ("estimate", _figures(resolved, expected)),
        *_models(resolved),
        *_metered(resolved),
        ("home", str(resolved.home)),
    ]
    lines = [f"{name:<11}{value}" for name, value in rows]
    for place, made in expected.made.items():
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
    of_when = f" (price of {offer.priced})" if offer.priced else ""
    return f"{' '.join(word for word in words if word)} at ${offer.usd_per_hour:g}/h{of_when}"


def _limits(resolved: Resolved) -> str:
    limits = resolved.plan.limits
    budget = f"budget ${limits.budget_usd:g}" if limits.budget_usd is not None else "no budget"
    time = f"at most {limits.max_duration_s:g} s" if limits.max_duration_s is not None else "no time limit"
    task = f", ${limits.task_budget_usd:g} for a task's models at first" if limits.task_budget_usd else ""
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


def _figures(resolved: Resolved, expected: Estimate) -> str:
    """Figures as people reckon them: tasks over workers times a task's minutes, and those of a machine."""
    usd = f"${expected.usd:.2f}" if expected.usd is not None else "unknown cost"
    tasks, task_s = len(resolved.tasks), expected.task_s
    sum_up = f"{plural(tasks, 'task')} / {expected.at_once} at once x {task_s / 60:.1f} min a task"
    if expected.machine_s >= 3:  # what shows
        sum_up += f" + {expected.machine_s / 60:.1f} min a machine ({expected.machine_basis})"
    figures = f"{expected.duration_s / 60:.1f} min, {expected.machine_hours:.2f} machine-hours, {usd}"
    basis = f"{expected.basis}; prices of {expected.priced}" if expected.priced else expected.basis
    return f"{figures} ({basis}; {sum_up})"


def _models(resolved: Resolved) -> list[tuple[str, str]]:
    """Beside the machines' price: what nobody can tell beforehand is not nothing."""
    span = models_span(resolved)
    return [] if span is None else [("models", f"unknown; by experience ${span[0]:.2f} to ${span[1]:.2f}")]


def models_span(resolved: Resolved) -> tuple[float, float] | None:
    each = resolved.plan.model_usd
    return None if each is None else (len(resolved.tasks) * each[0], len(resolved.tasks) * each[1])


def _document(resolved: Resolved, expected: Estimate) -> PlanDocument:
    figures: EstimateDocument = {
        "at_once": expected.at_once,
        "task_seconds": round(expected.task_s, 1),
        "machine_seconds": round(expected.machine_s, 1),
        "machine_basis": expected.machine_basis if expected.machine_s else None,
        "duration_seconds": round(expected.duration_s, 1),
        "machine_hours": round(expected.machine_hours, 3),
        "usd": None if expected.usd is None else round(expected.usd, 4),
        "prices_as_of": expected.priced or None,
        "basis": expected.basis,
    }
    if (span := models_span(resolved)) is not None:
        figures["models_usd_range"] = list(span)
    return {
        "plan": msgspec.to_builtins(resolved.plan),
        "tasks": [task.id for task in resolved.tasks],
        "offers": msgspec.to_builtins(expected.offers),
        "creates": {place: msgspec.to_builtins(made) for place, made in expected.made.items()},
        "estimate": figures,
        "home": str(resolved.home),
        "warnings": list(resolved.warnings),
    }
