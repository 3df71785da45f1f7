"""Places looked at from outside any run: can machines be had there, what of ours exists, what must go.

Nothing here needs a journal: what exists is what places say. A journal, if there is one, only adds which runs
of this home have ended and which pools still live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from evalfleet.errors import FleetError, PlaceError, RequestError
from evalfleet.model import Micros, Needs
from evalfleet.planning.plan import PoolRequest, resolve_pool
from evalfleet.planning.plugins import known, place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Belonging, Check, Estate, Image, Place, Preflight, Priced, PriceTable
from evalfleet.state import fold


@dataclass(frozen=True)
class FoundBelonging:
    """Something that exists at a place, and what is to be done about it. `why`: it may go."""

    place: str
    belonging: Belonging
    is_own: bool
    why: str = ""
    trouble: str = ""
    """Why it cannot be deleted, and what to do; empty if nothing is known against it."""


@dataclass(frozen=True)
class Local:
    """What this home's journal adds: names of runs that have ended, and of pools that have not."""

    home_id: str = ""
    ended: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Machine -> why its place did not delete it."""


# -- examine -------------------------------------------------------------------------------------


def examine(
    names: Sequence[str], needs: Needs, settings: Mapping[str, str] | None = None, workers: int = 1
) -> dict[str, Sequence[Check]]:
    """Place -> what was found about so many machines. Of all places of evalfleet.toml if none is named.

    Raises RequestError.
    """
    return asyncio.run(_examine(names or configured() or ("local",), needs, settings or {}, workers))


async def _examine(
    names: Sequence[str], needs: Needs, settings: Mapping[str, str], workers: int
) -> dict[str, Sequence[Check]]:
    found: dict[str, Sequence[Check]] = {}
    home_id = _local_id()
    for name in names:
        try:
            async with _opened(name, home_id, settings) as place:
                found[name] = await _checks(place, needs, workers)
        except RequestError as err:
            found[name] = (Check("settings", "bad", str(err)),)
    return found


async def _checks(place: Place, needs: Needs, workers: int) -> Sequence[Check]:
    if isinstance(place, Preflight):
        return await place.examine(needs, workers)
    try:
        offers = await place.offers(needs)
    except PlaceError as err:
        return (Check("offers", "bad", str(err)),)
    told = "; ".join(f"{each.size} {each.region}".strip() for each in offers) or "nothing that would do"
    return (Check("offers", "good" if offers else "bad", told),)


# -- what exists ---------------------------------------------------------------------------------


def machines(now: Micros, *, all_owners: bool = False, pools: bool = False) -> list[FoundBelonging]:
    """All that evalfleet has made at the places of evalfleet.toml. Raises RequestError, PlaceError."""
    return asyncio.run(_machines(now, all_owners, pools))


async def _machines(now: Micros, all_owners: bool, pools: bool) -> list[FoundBelonging]:
    local = _local()
    found: list[FoundBelonging] = []
    for name in configured():
        async with _opened(name, local.home_id) as place:
            if isinstance(place, Estate):
                owner = place.owner
                for each in await place.belongings():
                    own = each.home == local.home_id or each.owner == owner
                    why = reason(each, local, now, own or all_owners, pools)
                    refused = local.refused.get(each.machine, "") if each.home == local.home_id else ""
                    found.append(FoundBelonging(name, each, own, why, each.kept_by or refused))
    return found


def reason(belonging: Belonging, local: Local, now: Micros, may: bool, pools: bool) -> str:
    """Why it is to be deleted; empty if it is not. Pure."""
    pool = belonging.machine.rsplit("-", 2)[0]
    here = belonging.home == local.home_id
    kept = (here and pool in local.pools) or (belonging.of_pool and not (here and pool in local.ended))
    if kept and not pools:
        return ""  # `pool delete` deletes it, at its own home
    if may and belonging.expires_at is not None and now > belonging.expires_at:
        return "expired"
    return "its run has ended" if here and pool in local.ended else ""


def reap(found: Sequence[FoundBelonging]) -> dict[str, str]:
    """Delete them, all at once. Machine -> what went wrong, empty if nothing."""
    return asyncio.run(_reap(found))


async def _reap(found: Sequence[FoundBelonging]) -> dict[str, str]:
    answers: dict[str, str] = {}
    home_id = _local_id()
    for name in dict.fromkeys(each.place for each in found):
        async with _opened(name, home_id) as place:
            if isinstance(place, Estate):
                these = [each.belonging for each in found if each.place == name]
                told = await asyncio.gather(*(_reap_one(place, each) for each in these))
                answers |= dict(zip((each.machine for each in these), told, strict=True))
    return answers


async def _reap_one(place: Estate, belonging: Belonging) -> str:
    try:
        await place.reap(belonging)
    except FleetError as err:
        return str(err)
    return ""


# -- images --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundImage:
    """An image that exists at a place. `is_own`: this home's, or ours by its owner."""

    place: str
    image: Image
    is_own: bool


def images() -> list[FoundImage]:
    """All that evalfleet has captured at the places of evalfleet.toml. Raises RequestError, PlaceError."""
    return asyncio.run(_images(_local_id()))


async def _images(home_id: str) -> list[FoundImage]:
    found: list[FoundImage] = []
    for name in configured():
        async with _opened(name, home_id) as place:
            if isinstance(place, Estate):
                owner = place.owner
                for each in await place.images():
                    found.append(FoundImage(name, each, each.home == home_id or each.owner == owner))
    seen: dict[tuple[str, ...], FoundImage] = {}
    for one in found:
        seen.setdefault(one.image.parts, one)  # two places may look at the same subscription
    return list(seen.values())


def delete_image(found: FoundImage) -> None:
    """Raises PlaceError."""
    asyncio.run(_delete_image(found))


async def _delete_image(found: FoundImage) -> None:
    async with _opened(found.place, _local_id()) as place:
        if isinstance(place, Estate):
            await place.drop_image(found.image)


# -- here ----------------------------------------------------------------------------------------


def configured() -> tuple[str, ...]:
    """The places of evalfleet.toml."""
    return tuple(Workspace.here().config.places)


@asynccontextmanager
async def _opened(
    name: str, home_id: str, settings: Mapping[str, str] | None = None
) -> AsyncGenerator[Place]:
    """One place by name, closed afterwards. Raises RequestError."""
    workspace = Workspace.here()
    request = PoolRequest(name="survey", on=name, settings=settings or {})
    plan, environ = resolve_pool(request, environ=workspace.environ, cwd=workspace.cwd, home_id=home_id)
    async with workspace.places(plan, environ=environ) as places:
        yield places[name]


def _local_id() -> str:
    store = Workspace.here().records_if_any()
    return store.home_id if store is not None else ""


def _local() -> Local:
    store = Workspace.here().records_if_any()
    if store is None:
        return Local()
    states = {info.name: fold(store.read(info.name)) for info in store.streams()}
    over = {name: state.ended_at is not None for name, state in states.items()}
    refused = {
        str(machine): state.machines[machine].delete_refused
        for state in states.values()
        for machine in state.undeleted
        if state.machines[machine].delete_refused
    }
    pools = frozenset(info.name for info in store.streams() if info.kind == "pool" and not over[info.name])
    return Local(store.home_id, frozenset(name for name, ended in over.items() if ended), pools, refused)


@dataclass(frozen=True)
class Listed:
    """The prices of one kind of place, and which of them (what, region) our places would use."""

    kind: str
    table: PriceTable
    wanted: frozenset[tuple[str, str]]


def prices() -> list[Listed]:
    """Of every kind of place that has prices. Nothing is asked."""
    home = Workspace.here().home
    return [
        Listed(name, kind.prices(home), frozenset(kind.wanted(_tables(name))))
        for name, kind in _kinds().items()
    ]


def update_prices(today: str, source: str | None) -> None:
    """Raises PlaceError, RequestError; then the prices are what they were."""
    home = Workspace.here().home
    for name, kind in _kinds().items():
        kind.update_prices(home, _tables(name), source or kind.price_source, today)


def _kinds() -> dict[str, Priced]:
    found: dict[str, Priced] = {}
    for name in known("place"):
        try:
            kind: object = place_kind(name)
        except RequestError:
            continue  # a plug-in that cannot be imported has no prices, either
        if isinstance(kind, Priced):
            found[name] = kind
    return found


def _tables(kind: str) -> list[Mapping[str, Any]]:
    """The settings of our places of this kind."""
    places = Workspace.here().config.places
    return [table for name, table in places.items() if table.get("kind", name) == kind]
