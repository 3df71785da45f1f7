"""What evalfleet has left anywhere in the project, by its labels, and how it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from evalfleet.errors import PlaceError
from evalfleet.model import SECOND, MachineId
from evalfleet.places.vm.answers import Json, table
from evalfleet.ports import Belonging

from .answers import GoogleFault
from .client import ComputeClient, last_word, path_of
from .names import EXPIRES, HOME, KIND, MACHINE, OWNER, label, machine_in, seconds

OURS = f"labels.{HOME}:*"


async def belongings(client: ComputeClient) -> Sequence[Belonging]:
    """What is evalfleet's, of all homes. Raises GoogleFault."""
    instances, disks = await asyncio.gather(
        client.everywhere("instances", filter=OURS), client.everywhere("disks", filter=OURS)
    )
    return read([*instances, *disks], client.skew_s)


def read(resources: list[Json], skew_s: float = 0.0) -> Sequence[Belonging]:
    """Make belongings of the lists as Google gives them. Pure.

    `skew_s`: by how much this computer's clock, by which expiries are told, is behind Google's.
    """
    ours = [(_owner(each), each) for each in resources if machine_in(each) is not None]
    ours = [(key, each) for key, each in ours if key[0]]
    grouped = groupby(sorted(ours, key=lambda pair: pair[0]), lambda pair: pair[0])
    return tuple(
        _belonging(home, machine, [each for _, each in some], skew_s) for (home, machine), some in grouped
    )


def _owner(shown: Json) -> tuple[str, str]:
    return str(table(shown.get("labels")).get(HOME, "")), str(machine_in(shown) or "")


def _belonging(home: str, machine: str, some: list[Json], skew_s: float) -> Belonging:
    labels = [table(each.get("labels")) for each in some]
    moments = [at for each in labels if (at := seconds(each.get(EXPIRES, ""))) is not None]
    instances = [str(each["name"]) for each in some if "/instances/" in path_of(each)]
    protected = any(each.get("deletionProtection") for each in some)
    remedy = "`gcloud compute instances update NAME --no-deletion-protection` removes it"
    return Belonging(
        machine=MachineId(machine),
        home=home,
        owner=str(labels[0].get(OWNER, "")),
        where=last_word(some[0].get("zone")),
        expires_at=round((max(moments) - skew_s) * SECOND) if moments else None,
        parts=tuple(path_of(each) for each in some),
        node=instances[0] if instances else "",
        of_pool=any(each.get(KIND) == "pool" for each in labels),
        kept_by=f"its protection against deletion; {remedy}" if protected else "",
    )


async def reap(client: ComputeClient, belonging: Belonging) -> None:
    """Delete it, instances first. The labels of each part are read again before it goes.

    Raises GoogleFault, PlaceError.
    """
    instances = [part for part in belonging.parts if "/instances/" in part]
    for parts in (instances, [part for part in belonging.parts if part not in instances]):
        await asyncio.gather(*(_remove(client, belonging, part) for part in parts))


async def _remove(client: ComputeClient, belonging: Belonging, path: str) -> None:
    shown = await client.find(path)
    if shown is None:
        return
    labels = table(shown.get("labels"))
    if (labels.get(HOME), labels.get(MACHINE)) != (belonging.home, label(belonging.machine)):
        raise PlaceError(f"{path} is no longer ours; it is left alone", transient=False, scope="machine")
    try:
        await client.change("DELETE", path)
    except GoogleFault as fault:
        if fault.status != 404 and not fault.has("notFound", "RESOURCE_NOT_FOUND"):
            raise
