"""What evalfleet has left anywhere in the subscription, by tags alone, and how it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from evalfleet.errors import PlaceError
from evalfleet.model import SECOND, MachineId
from evalfleet.ports import Belonging

from .answers import ArmFault, Json, tags_in
from .arm import ArmClient
from .inventory import ACTIVE
from .lifecycle import ORDER
from .names import EXPIRES, HOME, KIND, MACHINE, OWNER, moment
from .template import API, DEPLOYMENT, RESOURCES, VM

GONE_S = 300.0
LONGEST_PAUSE_S = 5.0


async def belongings(arm: ArmClient, group: str) -> Sequence[Belonging]:
    """What is evalfleet's, of all homes, in the whole subscription. Raises ArmFault.

    Deployments, which are no resources, are looked for in the group alone.
    """
    tagged = {"$filter": f"tagName eq '{MACHINE}'"}
    resources, records = await asyncio.gather(
        arm.all(f"{arm.root}/resources", RESOURCES, **tagged),
        _records(arm, f"{arm.root}/resourceGroups/{group}"),
    )
    return read([*resources, *records])


async def _records(arm: ArmClient, group: str) -> list[Json]:
    try:
        found = await arm.all(f"{group}/providers/{DEPLOYMENT}", RESOURCES)
    except ArmFault as fault:
        if fault.status != 404:
            raise
        return []  # there is no such group
    return [{**each, "type": DEPLOYMENT} for each in found]


def read(resources: list[Json]) -> Sequence[Belonging]:
    """Make belongings of the list as Azure gives it. Pure.

    What has no home's tag is nobody's, and none of our business.
    """
    ours = [(tags_in(each), each) for each in resources if HOME in tags_in(each)]

    def key(pair: tuple[dict[str, str], Json]) -> tuple[str, str]:
        return pair[0][HOME], pair[0].get(MACHINE, "")

    found = [(owner, list(some)) for owner, some in groupby(sorted(ours, key=key), key)]
    return tuple(_belonging(home, machine, some) for (home, machine), some in found if machine)


def _belonging(home: str, machine: str, some: list[tuple[dict[str, str], Json]]) -> Belonging:
    """It expires when the last of its parts does: tags of some may not have been moved on."""
    moments = [moment(tags.get(EXPIRES, "")) for tags, _ in some]
    known = [each for each in moments if each is not None]
    vms = [str(each["name"]) for _, each in some if str(each["type"]).lower() == VM.lower()]
    return Belonging(
        machine=MachineId(machine),
        home=home,
        owner=some[0][0].get(OWNER, ""),
        where=next((str(each["location"]) for _, each in some if each.get("location")), ""),
        expires_at=round(max(known) * SECOND) if known else None,
        parts=tuple(str(each["id"]) for _, each in some),
        node=vms[0] if vms else "",
        of_pool=any(tags.get(KIND) == "pool" for tags, _ in some),
    )


async def reap(arm: ArmClient, belonging: Belonging) -> None:
    """Delete it: the machine first, since its switch must outlive it. Raises ArmFault, PlaceError.

    Each part's tags are read again before it goes. Nothing may be under way that makes it anew; the record of
    that goes last.
    """
    records = [part for part in belonging.parts if _type(part) == DEPLOYMENT.lower()]
    await asyncio.gather(*(_cancel(arm, belonging, record) for record in records))
    vms = [part for part in belonging.parts if _type(part) == VM.lower()]
    await asyncio.gather(*(_remove(arm, belonging, vm, VM) for vm in vms))
    for kinds in ORDER:
        going = [(part, kind) for kind in kinds for part in belonging.parts if _type(part) == kind.lower()]
        await asyncio.gather(*(_remove(arm, belonging, part, kind) for part, kind in going))
    await asyncio.gather(*(_remove(arm, belonging, record, DEPLOYMENT) for record in records))


async def _cancel(arm: ArmClient, belonging: Belonging, record: str) -> None:
    shown = await arm.find(record, RESOURCES)
    active = shown is not None and str(shown["properties"]["provisioningState"]).lower() in ACTIVE
    if shown is not None and active and _is_of(shown, belonging):
        with suppress(ArmFault):  # it may have ended just now
            await arm.send("POST", f"{record}/cancel", RESOURCES)


async def _remove(arm: ArmClient, belonging: Belonging, id: str, kind: str) -> None:
    """Delete it, and wait until it is gone."""
    pause, waited = 0.3, 0.0
    while (shown := await arm.find(id, API[kind])) is not None:
        if not _is_of(shown, belonging):
            raise PlaceError(f"{id} is no longer ours; it is left alone", transient=False, scope="machine")
        if waited > GONE_S:
            raise PlaceError(f"{id} is still there after {GONE_S:g} s", transient=True, scope="machine")
        try:
            await arm.send("DELETE", id, API[kind])
        except ArmFault as fault:
            if fault.status not in (400, 404, 409):
                raise  # else something else must go first
        await asyncio.sleep(pause)
        waited += pause
        pause = min(pause * 1.5, LONGEST_PAUSE_S)


def _is_of(shown: Json, belonging: Belonging) -> bool:
    tags = tags_in(shown)
    return (tags.get(HOME), tags.get(MACHINE)) == (belonging.home, belonging.machine)


def _type(id: str) -> str:
    """`microsoft.compute/virtualmachines` of an id."""
    return "/".join(id.lower().split("/providers/")[-1].split("/")[:2])
