"""What evalfleet has made anywhere in the subscription, by tags alone, and how it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from evalfleet.errors import ProviderError
from evalfleet.model import SECOND, MachineId
from evalfleet.ports import Belonging

from .arm import Arm
from .builds import ORDER
from .names import EXPIRES, HOME, MACHINE, OWNER, moment
from .refusals import ArmFault
from .template import API, RESOURCES, VM
from .words import Json, tags_in

GONE_S = 300.0
LONGEST_PAUSE_S = 5.0


async def belongings(arm: Arm) -> Sequence[Belonging]:
    """Raises ArmFault."""
    tagged = {"$filter": f"tagName eq '{MACHINE}'"}
    return read(await arm.all(f"{arm.root}/resources", RESOURCES, **tagged))


def read(resources: list[Json]) -> Sequence[Belonging]:
    """Pure: of the list as Azure gives it. What has no home's tag is nobody's, and none of our business."""
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
        where=str(some[0][1].get("location", "")),
        expires_at=round(max(known) * SECOND) if known else None,
        parts=tuple(str(each["id"]) for _, each in some),
        node=vms[0] if vms else "",
    )


async def reap(arm: Arm, belonging: Belonging) -> None:
    """The machine first: its switch must outlive it. Each part's tags are read again before it goes."""
    vms = [part for part in belonging.parts if _type(part) == VM.lower()]
    await asyncio.gather(*(_remove(arm, belonging, vm, VM) for vm in vms))
    for kinds in ORDER:
        going = [(part, kind) for kind in kinds for part in belonging.parts if _type(part) == kind.lower()]
        await asyncio.gather(*(_remove(arm, belonging, part, kind) for part, kind in going))
    for vm in vms:
        group, name = vm.split("/providers/")[0], vm.rsplit("/", 1)[1]
        record = f"{group}/providers/Microsoft.Resources/deployments/evalfleet-{name}"
        shown = await arm.find(record, RESOURCES)
        if shown is not None and _is_of(shown, belonging):
            await arm.send("DELETE", record, RESOURCES)


async def _remove(arm: Arm, belonging: Belonging, id: str, kind: str) -> None:
    """Until it is gone."""
    pause, waited = 0.3, 0.0
    while (shown := await arm.find(id, API[kind])) is not None:
        if not _is_of(shown, belonging):
            raise ProviderError(f"{id} is no longer ours; it is left alone", transient=False, scope="machine")
        if waited > GONE_S:
            raise ProviderError(f"{id} is still there after {GONE_S:g} s", transient=True, scope="machine")
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
