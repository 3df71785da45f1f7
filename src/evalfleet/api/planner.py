"""What a run would take and cost in each of the ways in which it could be run, by drawing runs by chance."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from evalfleet.effects.machines import offers_by_kind
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Needs, Offer, Plan, Task
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import specs_of
from evalfleet.planning.plugins import place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.policy.scale import task_without_offer
from evalfleet.policy.tiers import in_order
from evalfleet.ports import Check, Hosts, Preflight
from evalfleet.sim.chances import Chances, guessed_machines
from evalfleet.sim.forecast import DRAWS, Forecast, Option, OptionDraws, forecasts
from evalfleet.toml_tables import convert
from evalfleet.views.format import whole_duration

from .estimate import allowed_setup_s
from .experience import chances_of, experience_of
from .pools import pools

WORKERS = (1, 2, 5, 10, 20, 40)
SIZES = 2
"""So many sizes are looked at, the cheapest ones."""
QUOTA_S = 20.0
"""Longer than this nobody waits to be told of quotas."""
UNKNOWN_QUOTA = 1 << 30
LATE_DRAWS, LATE_TASKS = 20, 300
"""A run with more tasks starts without a forecast for its deadline: it would wait too long for it."""
LONG_LEASE_S = 30 * 86_400.0
Examinations = dict[tuple[str, bool], Sequence[Check]]
"""(place, with spot machines) -> what it finds before machines are asked for."""


@dataclass(frozen=True)
class Outlook:
    """All ways that were looked at, and what the figures rest on."""

    forecasts: tuple[Forecast, ...]
    chances: Chances


# -- the ways in which a run could be run -------------------------------------------------------------------


@dataclass(frozen=True)
class _Sight:
    """What the places say."""

    offers: tuple[Offer, ...]
    machine_s: Mapping[str, tuple[float, float]]
    """Place -> between which seconds a machine is ready that is made anew."""
    start_s: Mapping[str, tuple[float, float]]
    """The same of one that was only stopped, where machines can be."""
    special: tuple[Offer, ...]
    """Those offers whose machines have what some tasks need beyond the others."""
    checks: Mapping[str, Sequence[Check]]
    """Place -> what it finds before machines are asked for, quotas among it."""

    @property
    def has_spot(self) -> bool:
        return any(offer.spot for offer in self.offers)

    def by_size(self, *, spot: bool) -> list[tuple[Offer, ...]]:
        """The offers of each size, the cheapest first, and after them those that single tasks need.

        `spot`: with regular ones to fall back to.
        """
        first = [offer for offer in self.offers if offer.spot or not spot]
        sizes = list(dict.fromkeys((offer.place, offer.size) for offer in first))
        found = [[each for each in self.offers if (each.place, each.size) == size] for size in sizes]
        return [(*each, *(offer for offer in self.special if offer not in each)) for each in found]

    def quota(self, offers: Sequence[Offer]) -> int | None:
        """How many more machines there can be of offers of one size; None: nobody tells."""
        place, size = offers[0].place, offers[0].size
        rooms = [check.room for check in self.checks.get(place, ())]
        own, all_sizes = [[room[name] for room in rooms if name in room] for name in (size, "")]
        most = min([sum(own)] * bool(own) + all_sizes, default=UNKNOWN_QUOTA)
        return most if most < UNKNOWN_QUOTA else None


async def outlook(
    workspace: Workspace,
    resolved: Resolved,
    others: Sequence[Resolved],
    workers: Sequence[int],
    draws: int = DRAWS,
) -> Outlook:
    """What comes of the request with each of these numbers of workers, and of each other way to run it.

    `others` are the same request with other machines: spot ones, and those of the size that was needed.
    """
    plan, tasks = resolved.plan, resolved.tasks
    experience = experience_of(workspace, plan.benchmark)
    seen = await _looks(workspace, (resolved, *others), max(workers))
    sight = seen[0][1]
    every = {offer.key: offer for _, each in seen for offer in each.offers}
    believe = functools.partial(
        chances_of,
        experience,
        tasks,
        list(every.values()),
        model=plan.model,
        model_range=plan.model_usd,
        usual_s=plan.usual_s,
    )
    chances = believe(machine_s=sight.machine_s)
    jobs = [
        job_of(variant.plan, variant.tasks, option, chances)
        for variant, each in seen
        for sized in each.by_size(spot=variant is not resolved and each.has_spot)[: _sizes(variant)]
        for option in _options(each, sized, workers, variant)
    ]
    if sight.start_s and not resolved.borrowed:
        stopped = believe(machine_s=sight.start_s)
        starts = {
            key: guessed_machines(*sight.start_s.get(offer.place, (0.0, 0.0))) for key, offer in every.items()
        }
        stopped = replace(stopped, machines=starts)
        sized = sight.by_size(spot=False)[:1]
        jobs += [
            job_of(plan, tasks, _in_a_pool(workspace, option), stopped)
            for offers in sized
            if not offers[0].queues  # jobs of a service cannot be stopped and kept
            for option in _options(sight, offers, workers, resolved, pool=True)
        ]
    if not jobs:
        places = ", ".join(plan.places)
        wanted = f" that has {needs}" if (needs := resolved.needs.in_words()) else ""
        raise RequestError(f"{places} offers no machine{wanted}; `evalfleet doctor` says more")
    found = sorted(forecasts(jobs, draws), key=lambda each: (each.middle_usd, each.seconds.middle))
    return Outlook(tuple(found), chances)


def _sizes(resolved: Resolved) -> int:
    """How many sizes are looked at. Of those that are as large as needed, the cheapest is meant."""
    return SIZES if resolved.plan.needs is None else 1


async def _looks(
    workspace: Workspace, variants: Sequence[Resolved], workers: int
) -> list[tuple[Resolved, _Sight]]:
    """What places say to each way to run it. A place is examined once for regular machines, and once for spot
    ones: those who need the least see the most sizes, and are told of all."""
    examined: Examinations = {}
    least_first = sorted(range(len(variants)), key=lambda index: variants[index].plan.needs is None)
    sights: dict[int, _Sight] = {}
    for index in least_first:
        try:
            sights[index] = await _look(workspace, variants[index], workers, examined)
        except RequestError:
            if index == 0:
                raise
            # its places have no such machines: compute instances are never spot ones
    return [(variants[index], sights[index]) for index in sorted(sights)]


async def _look(workspace: Workspace, resolved: Resolved, workers: int, examined: Examinations) -> _Sight:
    needs, special = resolved.needs, [task for task in resolved.tasks if task.needs]
    kinds = list(dict.fromkeys(task.needs for task in special if task.needs is not None))
    offers: list[Offer] = []
    machine_s: dict[str, tuple[float, float]] = {}
    start_s: dict[str, tuple[float, float]] = {}
    checks: dict[str, Sequence[Check]] = {}
    setup_s = allowed_setup_s(resolved.plan)
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            own = await offers_by_kind(place.offers, needs, kinds)
            offers += own
            boot_s = place.machine_s if isinstance(place, Preflight) else 0.0
            machine_s[name] = guessed_machine_s(boot_s, setup_s)
            if boot_s and isinstance(place, Hosts):
                start_s[name] = (0.3 * boot_s, 1.2 * boot_s)
            made = any(offer.usd_per_hour > 0 and offer.capacity is None for offer in own)
            if made and isinstance(place, Preflight) and not resolved.borrowed:
                kind = name, any(offer.spot for offer in own)
                if kind not in examined:
                    examined[kind] = await _examined(place, needs, workers)
                checks[name] = examined[kind]
    if (without := task_without_offer(special, offers)) is not None:
        raise PlaceError(without, transient=False)
    if resolved.borrowed:
        machine_s = {name: start_s.get(name, (0.0, 2.0)) for name in machine_s}
    ordered = tuple(in_order(resolved.plan, offers))
    needed = tuple(offer for offer in ordered if any(offer.has.covers(kind) for kind in kinds))
    return _Sight(ordered, machine_s, start_s, needed, checks)


async def _examined(place: Preflight, needs: Needs, workers: int) -> Sequence[Check]:
    with suppress(TimeoutError):
        async with asyncio.timeout(QUOTA_S):
            return await place.examine(needs, workers)
    return ()


def guessed_machine_s(boot_s: float, setup_s: float) -> tuple[float, float]:
    """Between which seconds a machine is ready, by what its place says of its boot, and by the time that its
    benchmark allows for the set-up."""
    return 0.7 * boot_s + 0.05 * setup_s, 1.5 * boot_s + 0.5 * setup_s + 2.0


def _in_a_pool(workspace: Workspace, option: Option) -> Option:
    """The option with the name of a pool that is stopped, and has such machines enough; if there is one."""
    now = workspace.now()
    for pool in pools(workspace):
        machines = [
            machine
            for machine in pool.machines
            if (machine.offer.place, machine.offer.size) == (option.offer.place, option.offer.size)
            and pool.standing(machine, now) == "stopped"
        ]
        if len(machines) >= option.workers:
            return replace(option, pool_name=pool.name)
    return option


def _options(
    sight: _Sight,
    offers: tuple[Offer, ...],
    workers: Sequence[int],
    resolved: Resolved,
    *,
    pool: bool = False,
) -> list[Option]:
    """One for each number of workers that there can be, and that have something to do."""
    pool = pool or bool(resolved.borrowed)
    if pool:
        offers = tuple(offer for offer in offers if not offer.spot) or offers
    slots, tasks = resolved.plan.slots, len(resolved.tasks)
    capacities = [offer.capacity for offer in offers if offer.capacity is not None]
    most = min(-(-tasks // slots), sum(capacities) if len(capacities) == len(offers) else 10**9)
    counts = dict.fromkeys(min(count, most) for count in workers)
    quota, sized = sight.quota(offers), resolved.plan.needs is not None
    name = resolved.borrowed or ""
    return [Option(count, offers, pool, name, quota, sized) for count in counts if count > 0]


def job_of(plan: Plan, tasks: tuple[Task, ...], option: Option, chances: Chances) -> OptionDraws:
    """The run as it would be planned, without what would end it early: that is what is asked about."""
    limits = msgspec.structs.replace(
        plan.limits,
        workers=option.workers,
        auto=False,
        budget_usd=None,
        max_duration_s=None,
        deadline_s=None,
        lease_s=max(plan.limits.lease_s, LONG_LEASE_S),
    )
    bare = msgspec.structs.replace(plan, limits=limits, metering=None, home=plan.home or "0")
    return OptionDraws(bare, tasks, option, chances)


def late_line(workspace: Workspace, resolved: Resolved, offers: Sequence[Offer]) -> str:
    """Return why the run will probably miss its deadline; empty if it will not, or if too little is known."""
    plan, tasks = resolved.plan, tuple(resolved.tasks)
    deadline_s = plan.limits.deadline_s
    if deadline_s is None or not offers or resolved.borrowed or len(tasks) > LATE_TASKS:
        return ""
    boots = {name: getattr(place_kind(spec.kind), "machine_s", 0.0) for name, spec in specs_of(plan).items()}
    setup_s = allowed_setup_s(plan)
    chances = chances_of(
        experience_of(workspace, plan.benchmark),
        tasks,
        offers,
        model=plan.model,
        model_range=plan.model_usd,
        usual_s=plan.usual_s,
        machine_s={name: guessed_machine_s(boot_s, setup_s) for name, boot_s in boots.items()},
    )
    if chances.guessed or "default" in chances.bases:
        return ""  # earlier runs do not show how long these tasks take
    workers = min(plan.limits.workers, -(-len(tasks) // plan.slots))
    job = job_of(plan, tasks, Option(workers, tuple(offers)), chances)
    seconds = forecasts([job], LATE_DRAWS)[0].seconds
    if seconds.middle <= deadline_s:
        return ""
    low, middle, high = map(whole_duration, seconds)
    between = low if low == high else f"{low} to {high}"
    return (
        f"--deadline {whole_duration(deadline_s)}: it will take about {middle} (90%: {between}); "
        "`evalfleet plan` shows which ways are quicker"
    )


# -- which one to take --------------------------------------------------------------------------------------


def chosen(
    forecasts: Sequence[Forecast], deadline_s: float | None, budget_usd: float | None
) -> Forecast | None:
    """The cheapest that will be done by the deadline, or the quickest that the budget pays; None: none is.

    It must be possible now (quotas, a pool). A promise holds if it does in nineteen of twenty drawn runs.
    """
    holding = [
        each
        for each in forecasts
        if each.option.can_be_had
        and (deadline_s is None or each.seconds.high <= deadline_s)
        and (budget_usd is None or each.usd.high <= budget_usd)
    ]
    if deadline_s is not None:
        return min(holding, key=lambda each: (each.middle_usd, each.seconds.middle), default=None)
    return min(holding, key=lambda each: (each.seconds.middle, each.middle_usd), default=None)


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
    needs, told = resolved.needs, list[str]()
    async with workspace.places(resolved.plan, resolved.secrets, resolved.environ) as places:
        for name, place in places.items():
            if isinstance(place, Preflight):
                checks = await place.examine(needs, workers)
                wrong = [check for check in checks if check.verdict != "good"]
                told += [f"{name}: {'; '.join(filter(None, (each.found, each.remedy)))}" for each in wrong]
    return told
