"""What evalfleet has left anywhere in the subscription, by its tags, and how it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from evalfleet.clock import pauses
from evalfleet.errors import PlaceError
from evalfleet.model import SECOND, MachineId
from evalfleet.places.vm.answers import Json, table
from evalfleet.ports import Belonging

from .answers import ArmFault, tags_in
from .arm import ArmClient
from .inventory import ACTIVE
from .lifecycle import ORDER, parts_of
from .names import EXPIRES, HOME, KIND, MACHINE, OWNER, moment
from .template import ADDRESS, API, DEPLOYMENT, DISK, NIC, RESOURCES, SCHEDULE, VM

LOCK, LOCKS = "Microsoft.Authorization/locks", "2020-05-01"
UNLOCK = "`az lock delete` removes it"
TYPES = (VM, DISK, NIC, ADDRESS, SCHEDULE)
GONE_S = 300.0
LONGEST_PAUSE_S = 5.0


async def belongings(arm: ArmClient, group: str) -> Sequence[Belonging]:
    """What is evalfleet's, of all homes, in the whole subscription, or where we may look. Raises ArmFault.

    Lists that are filtered by a tag need not show tags, so that everything of the types that we make is
    looked at. Deployments, which are no resources, are looked for in the group alone.
    """
    where = f"{arm.root}/resourceGroups/{group}"
    resources, records, locks = await asyncio.gather(
        resources_of(arm, where, TYPES), _records(arm, where), all_locks(arm, where)
    )
    return read([*resources, *records], locks, arm.skew_s)


async def resources_of(arm: ArmClient, group: str, types: Sequence[str]) -> list[Json]:
    """With their tags: those of the subscription, or of the group alone where we may see no more."""
    try:
        return await _of_types(arm, arm.root, types)
    except ArmFault as fault:
        if fault.status != 403:
            raise
    try:
        return await _of_types(arm, group, types)
    except ArmFault as fault:
        if fault.status != 404:
            raise
        return []  # there is no such group


async def _of_types(arm: ArmClient, scope: str, types: Sequence[str]) -> list[Json]:
    lists = await asyncio.gather(
        *(
            arm.all(f"{scope}/resources", RESOURCES, **{"$filter": f"resourceType eq '{kind}'"})
            for kind in types
        )
    )
    return [each for some in lists for each in some]


async def _records(arm: ArmClient, group: str) -> list[Json]:
    try:
        found = await arm.all(f"{group}/providers/{DEPLOYMENT}", RESOURCES)
    except ArmFault as fault:
        if fault.status != 404:
            raise
        return []  # there is no such group
    return [{**each, "type": DEPLOYMENT} for each in found]


async def all_locks(arm: ArmClient, group: str) -> list[Json]:
    """The locks of the subscription and of all in it; of the group where we may see no more; else none."""
    for scope in (arm.root, group):
        try:
            return await arm.all(f"{scope}/providers/{LOCK}", LOCKS)
        except ArmFault as fault:
            if fault.status not in (403, 404):
                raise
    return []


def read(resources: list[Json], locks: list[Json] | None = None, skew_s: float = 0.0) -> Sequence[Belonging]:
    """Make belongings of the lists as Azure gives them. Pure.

    What has no home's tag is nobody's, and none of our business. `skew_s`: by how much this computer's clock,
    by which expiries are told, is behind Azure's.
    """
    ours = [(tags_in(each), each) for each in resources if HOME in tags_in(each)]

    def key(pair: tuple[dict[str, str], Json]) -> tuple[str, str]:
        return pair[0][HOME], pair[0].get(MACHINE, "")

    found = [(owner, list(some)) for owner, some in groupby(sorted(ours, key=key), key)]
    return tuple(
        _belonging(home, machine, some, locks or [], skew_s) for (home, machine), some in found if machine
    )


def lock_on(id: str, locks: Sequence[Json]) -> str:
    """The lock that keeps this, or anything in it, from being deleted, in words; empty if there is none."""
    for lock in locks:
        scope = lock_scope(lock)
        if f"{id.lower()}/".startswith(f"{scope}/") or scope.startswith(f"{id.lower()}/"):
            level = table(lock.get("properties")).get("level")
            return f"the lock {lock.get('name')!r} ({level}) on {'/'.join(scope.split('/')[-2:])}"
    return ""


def lock_scope(lock: Json) -> str:
    """The id of what it is on, in lower case."""
    return str(lock["id"]).lower().rsplit(f"/providers/{LOCK}/".lower(), 1)[0]


def _belonging(
    home: str,
    machine: str,
    some: list[tuple[dict[str, str], Json]],
    locks: Sequence[Json],
    skew_s: float,
) -> Belonging:
    """It expires when the last of its parts does: tags of some may not have been moved on."""
    moments = [moment(tags.get(EXPIRES, "")) for tags, _ in some]
    known = [each for each in moments if each is not None]
    vms = [str(each["name"]) for _, each in some if str(each["type"]).lower() == VM.lower()]
    kept = next(filter(None, (lock_on(str(each["id"]), locks) for _, each in some)), "")
    return Belonging(
        machine=MachineId(machine),
        home=home,
        owner=some[0][0].get(OWNER, ""),
        where=next((str(each["location"]) for _, each in some if each.get("location")), ""),
        expires_at=round((max(known) - skew_s) * SECOND) if known else None,
        parts=tuple(str(each["id"]) for _, each in some),
        node=vms[0] if vms else "",
        of_pool=any(tags.get(KIND) == "pool" for tags, _ in some),
        kept_by=f"{kept}; {UNLOCK}" if kept else "",
    )


async def reap(arm: ArmClient, belonging: Belonging) -> None:
    """Delete it: the machine first, since its switch must outlive it. Raises ArmFault, PlaceError.

    Each part's tags are read again before it goes. Nothing may be under way that makes it anew; the record of
    that goes last, and only if nothing exists any more of what it says was made, whatever the lists showed.
    """
    records = [part for part in belonging.parts if _type(part) == DEPLOYMENT.lower()]
    await asyncio.gather(*(_cancel(arm, belonging, record) for record in records))
    made = [id for record in records for _, id in parts_of(_group(record), record.rsplit("/", 1)[-1])]
    # by its id in lower case: a list may write it otherwise than we do
    parts = {each.lower(): each for each in (*made, *belonging.parts)}.values()
    for kinds in ((VM,), *ORDER):
        going = [(part, kind) for kind in kinds for part in parts if _type(part) == kind.lower()]
        await asyncio.gather(
            *(_remove(arm, belonging, id, kind, listed=id in belonging.parts) for id, kind in going)
        )
    await asyncio.gather(*(_remove(arm, belonging, record, DEPLOYMENT) for record in records))


async def _cancel(arm: ArmClient, belonging: Belonging, record: str) -> None:
    shown = await arm.find(record, RESOURCES)
    active = shown is not None and str(shown["properties"]["provisioningState"]).lower() in ACTIVE
    if shown is not None and active and _is_of(shown, belonging):
        with suppress(ArmFault):  # it may have ended just now
            await arm.send("POST", f"{record}/cancel", RESOURCES)


async def _remove(arm: ArmClient, belonging: Belonging, id: str, kind: str, *, listed: bool = True) -> None:
    """Delete it, and wait until it is gone. What no list showed and is not ours is left alone."""
    waited, answer = 0.0, ""
    rests = pauses(0.3, LONGEST_PAUSE_S)
    while (shown := await arm.find(id, API[kind])) is not None:
        if not _is_of(shown, belonging) and not _is_its_disk(shown, kind):
            if not listed:
                return
            raise PlaceError(f"{id} is no longer ours; it is left alone", transient=False, scope="machine")
        if waited > GONE_S:
            why = f"{id} is still there after {GONE_S:g} s{answer}"
            raise PlaceError(why, transient=True, scope="machine")
        try:
            if str(table(shown.get("properties")).get("provisioningState")) != "Deleting":
                await arm.send("DELETE", id, API[kind])
        except ArmFault as fault:
            if fault.status not in (400, 404, 409) or fault.has("ScopeLocked"):
                raise  # else something else must go first
            answer = f": {fault.told}"
        pause_s = next(rests)
        await asyncio.sleep(pause_s)
        waited += pause_s


def _is_of(shown: Json, belonging: Belonging) -> bool:
    tags = tags_in(shown)
    return (tags.get(HOME), tags.get(MACHINE)) == (belonging.home, belonging.machine)


def _is_its_disk(shown: Json, kind: str) -> bool:
    """Is it a disk without any tag of ours? Azure need not give the machine's to the disk it makes for it."""
    return kind == DISK and HOME not in tags_in(shown)


def _group(id: str) -> str:
    """The id of the resource group that a resource is in."""
    return "/".join(id.split("/")[:5])


def _type(id: str) -> str:
    """`microsoft.compute/virtualmachines` of an id."""
    return "/".join(id.lower().split("/providers/")[-1].split("/")[:2])
