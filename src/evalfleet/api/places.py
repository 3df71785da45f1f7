"""Places looked at from outside any run: can machines be had there, what of ours exists, what must go.

Nothing here needs a journal: what exists is what places say. A journal, if there is one, only adds which runs
of this home have ended and which pools still live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evalfleet.errors import FleetError, PlaceError, RequestError
from evalfleet.journal import Store
from evalfleet.mirror import Mirror, open_objects, store_url, try_out
from evalfleet.model import SECOND, Micros, Needs
from evalfleet.names import folder_of, hint
from evalfleet.planning.plugins import known, place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import (
    Belonging,
    Check,
    Checked,
    Estate,
    HostKey,
    Image,
    ImageMaker,
    LeavesRemains,
    Place,
    PriceList,
    PriceTable,
    TriedOut,
    TrustsKeys,
)
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
    taken: frozenset[str] = frozenset()
    """Runs that another home has taken over. It deletes their machines, but for those of this computer."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Machine -> why its place did not delete it."""


# -- examine -------------------------------------------------------------------------------------


async def examine(
    workspace: Workspace,
    names: Sequence[str],
    needs: Needs,
    settings: Mapping[str, str] | None = None,
    workers: int = 1,
) -> dict[str, Sequence[Check]]:
    """Place -> what was found about so many machines. Of all places of evalfleet.toml if none is named.
    The store that runs have by default is looked at, too.

    Raises RequestError.
    """
    wanted = names or tuple(workspace.config.places) or ("local",)
    looks = (_examined(workspace, name, needs, settings, workers) for name in wanted)
    found = dict(zip(wanted, await asyncio.gather(*looks), strict=True))
    environ = workspace.environment()
    if store := environ.get("EVALFLEET_STORE") or workspace.config.defaults.get("store"):
        found[store] = [await _examined_store(str(store), workspace.cwd, environ)]
    return found


async def _examined_store(given: str, cwd: Path, environ: Mapping[str, str]) -> Check:
    try:
        await try_out(open_objects(store_url(given, cwd), environ))
    except FleetError as err:
        return Check("store", "bad", str(err))
    return Check("store", "good", "runs can have a copy there")


async def _examined(
    workspace: Workspace, name: str, needs: Needs, settings: Mapping[str, str] | None, workers: int
) -> Sequence[Check]:
    try:
        async with workspace.place(name, settings) as place:
            return await _checks(place, needs, workers)
    except RequestError as err:
        return (Check("settings", "bad", str(err)),)


async def trust(
    workspace: Workspace,
    name: str,
    settings: Mapping[str, str] | None,
    agreed: Callable[[Sequence[HostKey]], bool],
) -> int:
    """Make the keys of a place's hosts known once somebody has agreed. Returns how many; -1: nobody agreed.

    Behind an unknown jump host may be others: they are looked at once it is known. Raises RequestError.
    """
    trusted: set[str] = set()
    more = True
    while more:
        async with workspace.place(name, settings) as place:
            if not isinstance(place, TrustsKeys):
                raise RequestError(f"place {name!r} has no host keys to trust; leave out --trust")
            keys = [key for key in await place.unknown_keys() if key.line not in trusted]
            more = any(key.is_jump for key in keys)
            if keys and not agreed(keys):
                return -1
            try:
                place.trust(keys)
            except OSError as err:
                raise RequestError(f"the host keys cannot be written down: {err}; mend that") from err
            trusted |= {key.line for key in keys}
    return len(trusted)


async def _checks(place: Place, needs: Needs, workers: int) -> Sequence[Check]:
    if isinstance(place, Checked):
        checks = await place.examine(needs, workers)
        if isinstance(place, TriedOut) and not any(check.verdict == "bad" for check in checks):
            return (*checks, *await place.try_out(needs))
        return checks
    try:
        offers = await place.offers(needs)
    except PlaceError as err:
        return (Check("offers", "bad", str(err)),)
    told = "; ".join(f"{each.size} {each.region}".strip() for each in offers) or "nothing that would do"
    return (Check("offers", "good" if offers else "bad", told),)


# -- what exists ---------------------------------------------------------------------------------


async def machines(
    workspace: Workspace, *, all_owners: bool = False, pools: bool = False
) -> list[FoundBelonging]:
    """All that evalfleet has made at the places of evalfleet.toml. Raises RequestError, PlaceError."""
    local, now = await _local(workspace), workspace.now()
    found: list[FoundBelonging] = []
    for name in dict.fromkeys((*workspace.config.places, "local")):
        async with workspace.place(name) as place:
            if isinstance(place, Estate):
                owner = place.owner
                for each in await place.belongings():
                    if any(each.of_this_computer and each == other.belonging for other in found):
                        continue  # several places may be this computer
                    own = each.home == local.home_id or each.owner == owner
                    why = reason(each, local, now, own or all_owners, pools)
                    refused = local.refused.get(each.machine, "") if each.home == local.home_id else ""
                    found.append(FoundBelonging(name, each, own, why, each.kept_by or refused))
            elif isinstance(place, LeavesRemains) and place.remains():
                await place.list("")  # hosts that answer again are cleaned; somebody may have done it by hand
        if isinstance(place, LeavesRemains):  # it was closed when that was done
            found += [FoundBelonging(name, each, True, "", each.kept_by) for each in place.remains()]
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
    if belonging.of_this_computer and pool in local.taken:
        return "its run was taken over"
    return "its run has ended" if here and pool in local.ended else ""


async def reap(workspace: Workspace, found: Sequence[FoundBelonging]) -> dict[str, str]:
    """Delete them, all at once. Machine -> what went wrong, empty if nothing."""
    answers: dict[str, str] = {}
    for name in dict.fromkeys(each.place for each in found):
        async with workspace.place(name) as place:
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


async def images(workspace: Workspace) -> list[FoundImage]:
    """All that evalfleet has captured at the places of evalfleet.toml. Raises RequestError, PlaceError."""
    found: list[FoundImage] = []
    home_id = workspace.home_id
    for name in workspace.config.places:
        async with workspace.place(name) as place:
            if isinstance(place, ImageMaker):
                owner = place.owner
                for each in await place.images():
                    found.append(FoundImage(name, each, each.home == home_id or each.owner == owner))
    seen: dict[tuple[str, ...], FoundImage] = {}
    for one in found:
        seen.setdefault(one.image.parts, one)  # two places may look at the same subscription
    return list(seen.values())


async def delete_image(workspace: Workspace, found: FoundImage) -> None:
    """Raises PlaceError."""
    async with workspace.place(found.place) as place:
        if isinstance(place, ImageMaker):
            await place.drop_image(found.image)


async def _local(workspace: Workspace) -> Local:
    store = workspace.records_if_any()
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
    taken = {
        name
        for name, state in states.items()
        if state.plan.store and not over[name] and await _is_taken(workspace, store, name, state.plan.store)
    }
    ended = frozenset(name for name, ended in over.items() if ended)
    return Local(store.home_id, ended, pools, frozenset(taken), refused)


async def _is_taken(workspace: Workspace, store: Store, run: str, url: str) -> bool:
    folder = folder_of(workspace.home, run)
    try:
        return await Mirror(url, workspace.environment(), store, run, folder, claims=False).is_taken()
    except FleetError:  # the store is away, or we may not look into it: nothing is known
        return False


# -- prices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """The prices of kinds of places that share them, and which (what, region) our places would use."""

    kinds: tuple[str, ...]
    table: PriceTable
    wanted: frozenset[tuple[str, str]]


def prices(workspace: Workspace, kind: str | None = None) -> list[Listed]:
    """Prices of every kind of place that has some, or of this one; no cloud is asked. Raises RequestError."""
    return [
        Listed(
            kinds if kind is None else (kind,),
            listed.prices(workspace.home),
            frozenset(listed.wanted(_tables(workspace, kinds))),
        )
        for kinds, listed in _price_lists(kind)
    ]


async def update_prices(workspace: Workspace, kind: str | None, source: str | None) -> None:
    """Fetch today's, of this kind of place or of all that our places are of.

    Raises PlaceError, RequestError; then the prices of that kind are what they were.
    """
    lists, environ = _price_lists(kind), workspace.environment()
    chosen = [each for each in lists if kind or _tables(workspace, each[0])] or lists[:1]
    if source is not None and len(chosen) > 1:
        raise RequestError(f"--from is one list: say of which kind of place, such as {chosen[0][0][0]}")
    today = datetime.fromtimestamp(workspace.now() // SECOND, UTC).date().isoformat()
    errors: list[PlaceError] = []
    for kinds, listed in chosen:
        tables, url = _tables(workspace, kinds), source or listed.source
        try:
            await listed.update(workspace.home, tables, url, today, environ)
        except PlaceError as err:
            errors.append(err)
    for error in errors:
        raise error


def _price_lists(kind: str | None) -> list[tuple[tuple[str, ...], PriceList]]:
    """Each with the kinds of places that share it, which have one of the same class."""
    found: dict[str, PriceList] = {}
    for name in known("place"):
        try:
            listed = place_kind(name).price_list
        except RequestError:
            continue  # a plug-in that cannot be imported has no prices, either
        if listed is not None:
            found[name] = listed
    if kind is not None and kind not in found:
        raise RequestError(f"{kind!r} is no kind of place with list prices; {hint(kind, found)}")
    sharing: dict[type[PriceList], list[str]] = {}
    for name, listed in found.items():
        sharing.setdefault(type(listed), []).append(name)
    return [(tuple(names), found[names[0]]) for names in sharing.values() if kind is None or kind in names]


def _tables(workspace: Workspace, kinds: Collection[str]) -> list[Mapping[str, Any]]:
    """The settings of our places of these kinds."""
    places = workspace.config.places
    return [table for name, table in places.items() if table.get("kind", name) in kinds]
