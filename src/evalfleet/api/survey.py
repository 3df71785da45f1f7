"""The offers of a planned run's places, and the ways in which the run could be run there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from evalfleet.effects.machines import offers_by_kind
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Needs, Offer, Plan
from evalfleet.names import NO_HOME, machine_id
from evalfleet.planning.forecast import (
    DRAWS,
    HOUR_S,
    Chances,
    Estimate,
    Forecast,
    Option,
    Way,
    allowed_setup_s,
    chances_of,
    estimate,
    forecasts,
    guessed_machine_s,
    machines_of,
    own_needs,
)
from evalfleet.planning.past import Past, past_of
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import specs_of
from evalfleet.planning.plugins import place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.policy.scale import task_without_offer
from evalfleet.policy.tiers import in_order
from evalfleet.ports import Check, Checked, Doubted, Made, Outlined, Place, Stoppable
from evalfleet.toml_tables import convert
from evalfleet.views.format import whole_duration

from .pools import pools

WORKERS = (1, 2, 5, 10, 20, 40)
SIZES = 2
"""How many sizes are compared, the cheapest ones."""
QUOTA_S = 20.0
"""The longest time that a place has to report its quotas."""
UNKNOWN_QUOTA = 1 << 30
LATE_DRAWS, LATE_TASKS = 20, 300
"""A run with more tasks starts without a forecast for its deadline, which would take too long."""


@dataclass(frozen=True)
class Survey:
    """The offers of the places of one planned run."""

    offers: tuple[Offer, ...]
    """The one to take first in front."""
    special: tuple[Offer, ...]
    """Those whose machines have what some tasks need beyond the others."""
    machine_s: Mapping[str, tuple[float, float]]
    """Place -> the range of a guess at how long a new machine takes until it is ready."""
    start_s: Mapping[str, tuple[float, float]]
    """The same for a machine that was only stopped, where machines can be."""
    made: Mapping[str, Sequence[Made]]
    """Place -> what it would make."""
    checks: Mapping[str, Sequence[Check]]
    """Place -> its findings before machines are asked for, quotas among them."""

    @property
    def has_spot(self) -> bool:
        return any(offer.spot for offer in self.offers)

    def by_size(self, *, spot: bool) -> list[tuple[Offer, ...]]:
        """Return the offers of each size, the cheapest first, and after them those that single tasks need.

        `spot`: with regular ones to fall back to.
        """
        first = [offer for offer in self.offers if offer.spot or not spot]
        sizes = list(dict.fromkeys((offer.place, offer.size) for offer in first))
        alike = [[offer for offer in self.offers if (offer.place, offer.size) == size] for size in sizes]
        return [(*own, *(offer for offer in self.special if offer not in own)) for own in alike]

    def quota(self, offers: Sequence[Offer]) -> int | None:
        """Return how many more machines of one size are available; None if the place does not say."""
        place, size = offers[0].place, offers[0].size
        rooms = [check.room for check in self.checks.get(place, ())]
        own, all_sizes = [[room[name] for room in rooms if name in room] for name in (size, "")]
        most = min([sum(own)] * bool(own) + all_sizes, default=UNKNOWN_QUOTA)
        return most if most < UNKNOWN_QUOTA else None


class Examiner:
    """Asks each place once for its quotas of regular machines, and once for those of spot ones."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._checks: dict[tuple[str, bool], Sequence[Check]] = {}

    async def checks(self, place: Checked, needs: Needs, offers: Sequence[Offer]) -> Sequence[Check]:
        kind = offers[0].place, any(offer.spot for offer in offers)
        if kind not in self._checks:
            self._checks[kind] = ()
            with suppress(TimeoutError):
                async with asyncio.timeout(QUOTA_S):
                    self._checks[kind] = await place.examine(needs, self._workers)
        return self._checks[kind]


async def survey(workspace: Workspace, resolved: Resolved, examiner: Examiner | None = None) -> Survey:
    """Ask the plan's places for their offers. Raises PlaceError if no machine does for a task."""
    plan, needs = resolved.plan, resolved.needs
    kinds = list(dict.fromkeys(own for own in own_needs(plan, resolved.tasks) if own is not None))
    offers: list[Offer] = []
    specs = specs_of(plan)
    machine_s: dict[str, tuple[float, float]] = {}
    start_s: dict[str, tuple[float, float]] = {}
    checks: dict[str, Sequence[Check]] = {}
    async with workspace.places(plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            own = await offers_by_kind(place.offers, needs, kinds)
            offers += own
            boot_s = 0.0 if resolved.borrowed else place_kind(specs[name].kind).machine_s
            machine_s[name] = guessed_machine_s(boot_s, allowed_setup_s(plan) if boot_s else 0.0)
            if boot_s and isinstance(place, Stoppable):
                start_s[name] = (0.3 * boot_s, 1.2 * boot_s)
            new = any(offer.cost.usd_per_hour > 0 and offer.capacity is None for offer in own)
            if examiner is not None and new and isinstance(place, Checked) and not resolved.borrowed:
                checks[name] = await examiner.checks(place, needs, own)
        special = [task for task in resolved.tasks if task.needs is not None and kinds]
        if (without := task_without_offer(special, offers)) is not None:
            raise PlaceError(without, transient=False)
        ordered = tuple(in_order(plan, offers))
        made = {} if resolved.borrowed else _outlines(places, resolved, machines(resolved, ordered))
    needed = tuple(offer for offer in ordered if any(offer.has.covers(kind) for kind in kinds))
    return Survey(ordered, needed, machine_s, start_s, made, checks)


def machines(resolved: Resolved, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offer of each machine that the run can use."""
    plan, tasks = resolved.plan, resolved.tasks
    useful = -(-len(tasks) // plan.slots)
    return machines_of(offers, plan, tasks, max(1, min(plan.limits.workers, useful)))


def _outlines(
    places: Mapping[str, Place], resolved: Resolved, offers: Sequence[Offer]
) -> dict[str, Sequence[Made]]:
    """Return what each place would make for these machines."""
    plan = resolved.plan
    pool = plan.pool if resolved.keep else plan.run
    named = [(machine_id(pool, plan.home or NO_HOME, n), offer) for n, offer in enumerate(offers, 1)]
    outlines = {
        name: place.outline([(machine, offer) for machine, offer in named if offer.place == name])
        for name, place in places.items()
        if isinstance(place, Outlined) and any(offer.place == name for offer in offers)
    }
    return {name: outline for name, outline in outlines.items() if outline}


# -- before a run is started --------------------------------------------------------------------------------


def estimated(resolved: Resolved, seen: Survey) -> Estimate:
    """Return what the run is expected to take and cost."""
    plan, tasks = resolved.plan, resolved.tasks
    chances = chances_of(past_of(resolved.home, plan.benchmark), plan, tasks, seen.offers, seen.machine_s)
    return estimate(plan, tasks, machines(resolved, seen.offers), chances)


async def forewarned(workspace: Workspace, resolved: Resolved, expected: Estimate) -> Sequence[str]:
    """Return the doubts of the run's places about it. Raises PlaceError if all of its places refuse us."""
    limit = resolved.plan.limits.max_duration_s
    lasts_s = limit if limit is not None else expected.duration_s
    doubts: list[str] = []
    refusals: list[PlaceError] = []
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for place in places.values():
            if isinstance(place, Doubted):
                try:
                    doubts += await place.doubts(lasts_s)
                except PlaceError as err:
                    refusals.append(err)
    if refusals and len(refusals) == len(places):
        raise refusals[0]
    return [*doubts, *map(str, refusals)]


def short_budget(resolved: Resolved, seen: Survey, expected: Estimate) -> str:
    """Return a warning if the budget may be spent before a machine is ready; else empty."""
    budget_usd = resolved.plan.limits.budget_usd
    if budget_usd is None or not seen.made:
        return ""
    ready_usd = seen.offers[0].cost.usd_per_hour * expected.machine_s / HOUR_S
    if ready_usd < budget_usd:
        return ""
    return (
        f"--budget {budget_usd:g} may not pay one machine until it is ready: about ${ready_usd:.2f} for "
        f"{expected.machine_s / 60:.0f} min ({expected.machine_basis})"
    )


def late_line(resolved: Resolved, seen: Survey) -> str:
    """Return why the run will probably miss its deadline; empty if it will not, or if too little is known."""
    plan, tasks = resolved.plan, resolved.tasks
    deadline_s = plan.limits.deadline_s
    if deadline_s is None or not seen.offers or resolved.borrowed or len(tasks) > LATE_TASKS:
        return ""
    chances = chances_of(past_of(resolved.home, plan.benchmark), plan, tasks, seen.offers, seen.machine_s)
    if chances.bases.keys() & {"guess", "default"}:
        return ""  # earlier runs do not show how long these tasks take
    workers = min(plan.limits.workers, -(-len(tasks) // plan.slots))
    (forecast,) = forecasts([Way(plan, tasks, Option(workers, seen.offers), chances)], LATE_DRAWS)
    if forecast.seconds.middle <= deadline_s:
        return ""
    low, middle, high = map(whole_duration, forecast.seconds)
    between = low if low == high else f"{low} to {high}"
    return (
        f"--deadline {whole_duration(deadline_s)}: it will take about {middle} (90%: {between}); "
        "`evalfleet plan` shows which ways are quicker"
    )


# -- the ways in which a run could be run -------------------------------------------------------------------


@dataclass(frozen=True)
class Outlook:
    """All ways that were compared, and the figures that they rest on."""

    forecasts: tuple[Forecast, ...]
    chances: Chances


async def outlook(
    workspace: Workspace,
    resolved: Resolved,
    others: Sequence[Resolved],
    workers: Sequence[int],
    draws: int = DRAWS,
) -> Outlook:
    """Return a forecast of the request with each of these numbers of workers, and of each other way.

    `others` are the same request with other machines: spot ones, and those of the size that was needed.
    """
    plan, tasks = resolved.plan, resolved.tasks
    surveys = await _surveys(workspace, (resolved, *others), max(workers))
    own = surveys[0][1]
    past = past_of(resolved.home, plan.benchmark)
    offers = {offer.key: offer for _, seen in surveys for offer in seen.offers}
    chances = chances_of(past, plan, tasks, offers.values(), own.machine_s)
    ways = [
        Way(variant.plan, variant.tasks, option, chances)
        for variant, seen in surveys
        for alike in seen.by_size(spot=variant is not resolved and seen.has_spot)[: _sizes(variant)]
        for option in _options(seen, alike, workers, variant)
    ]
    if own.start_s and not resolved.borrowed:
        starts = chances_of(Past(), plan, tasks, offers.values(), own.start_s)
        stopped = replace(chances, machines=starts.machines)
        ways += [
            Way(plan, tasks, _in_a_pool(workspace, option), stopped)
            for alike in own.by_size(spot=False)[:1]
            if not alike[0].life.queues  # jobs of a service cannot be stopped and kept
            for option in _options(own, alike, workers, resolved, pool=True)
        ]
    if not ways:
        places = ", ".join(plan.places)
        wanted = f" that has {needs}" if (needs := resolved.needs.in_words()) else ""
        raise RequestError(f"{places} offers no machine{wanted}; `evalfleet doctor` says more")
    ranges = sorted(forecasts(ways, draws), key=lambda each: (each.middle_usd, each.seconds.middle))
    return Outlook(tuple(ranges), chances)


def _sizes(resolved: Resolved) -> int:
    """Return how many sizes are compared. Of those that are as large as needed, only the cheapest is."""
    return SIZES if resolved.plan.needs is None else 1


async def _surveys(
    workspace: Workspace, variants: Sequence[Resolved], workers: int
) -> list[tuple[Resolved, Survey]]:
    """Survey the places for each way to run it. The way that needs the least is first: it sees the quotas of
    the most sizes, and those serve for the others."""
    examiner = Examiner(workers)
    least_first = sorted(range(len(variants)), key=lambda index: variants[index].plan.needs is None)
    surveys: dict[int, Survey] = {}
    for index in least_first:
        try:
            surveys[index] = await survey(workspace, variants[index], examiner)
        except RequestError:
            if index == 0:
                raise
            # its places have no such machines: compute instances are never spot ones
    return [(variants[index], surveys[index]) for index in sorted(surveys)]


def _in_a_pool(workspace: Workspace, option: Option) -> Option:
    """Return the option with the name of a stopped pool that has enough such machines, if there is one."""
    now = workspace.now()
    for pool in pools(workspace):
        stopped = [
            machine
            for machine in pool.machines
            if (machine.offer.place, machine.offer.size) == (option.offer.place, option.offer.size)
            and pool.standing(machine, now) == "stopped"
        ]
        if len(stopped) >= option.workers:
            return replace(option, pool_name=pool.name)
    return option


def _options(
    seen: Survey,
    offers: tuple[Offer, ...],
    workers: Sequence[int],
    resolved: Resolved,
    *,
    pool: bool = False,
) -> list[Option]:
    """Return one for each number of workers that is available and has something to do."""
    pool = pool or bool(resolved.borrowed)
    if pool:
        offers = tuple(offer for offer in offers if not offer.spot) or offers
    slots, tasks = resolved.plan.slots, len(resolved.tasks)
    capacities = [offer.capacity for offer in offers if offer.capacity is not None]
    most = min(-(-tasks // slots), sum(capacities) if len(capacities) == len(offers) else 10**9)
    counts = dict.fromkeys(min(count, most) for count in workers)
    quota, sized = seen.quota(offers), resolved.plan.needs is not None
    name = resolved.borrowed or ""
    return [Option(count, offers, pool, name, quota, sized) for count in counts if count > 0]


def size_setting(plan: Plan, offer: Offer) -> str | None:
    """Return the setting for `--set` that leaves only this size; None if there is nothing to choose."""
    spec = specs_of(plan)[offer.place]
    kind = place_kind(spec.kind)
    settings = msgspec.structs.asdict(convert(spec.settings, kind.Settings, f"place {offer.place!r}"))
    lists = (key for key, value in settings.items() if isinstance(value, tuple) and offer.size in value)
    key = next(lists, None)
    return None if key is None or len(settings[key]) == 1 else f"{key}={offer.size}"


async def doubts(workspace: Workspace, resolved: Resolved, workers: int) -> list[str]:
    """Return the findings of the places about so many machines, quota above all. Spends nothing."""
    notes: list[str] = []
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            if isinstance(place, Checked):
                checks = await place.examine(resolved.needs, workers)
                wrong = [(check.found, check.remedy) for check in checks if check.verdict != "good"]
                notes += [f"{name}: {'; '.join(filter(None, words))}" for words in wrong]
    return notes
