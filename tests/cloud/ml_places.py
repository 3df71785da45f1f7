"""Places `azure_ml` against the stand-in, as a controller would have them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import obstore
from obstore.store import MemoryStore

from evalfleet.mirror import open_bucket
from evalfleet.model import Lifetime, MachineId, Needs, Offer
from evalfleet.places.azure_ml import AzureMlPlace, AzureMlSettings
from evalfleet.places.azure_ml.instances import AzureMlInstances
from evalfleet.ports import Check, PlaceContext
from standins.azure_ml import StandIn, Timing
from tests.cloud.places import SETTLE_S

HOME = "abc123def456"
SIZE = "Standard_D4s_v5"
QUICK = (0.0, 0.02)
FAST = Timing(QUICK, QUICK, QUICK, QUICK, QUICK, QUICK)


def settings(ml: StandIn, **more: Any) -> AzureMlSettings:
    given = {
        "workspace": ml.workspace,
        "resource_group": ml.group,
        "endpoint": ml.endpoint,
        "storage_endpoint": ml.storage_endpoint,
        "ca": str(ml.ca),
        "sizes": (SIZE,),
        "owner": "tester",
        "settle_s": SETTLE_S,
        "poll_s": 0.1,
        "isolation": "none",
        **more,
    }
    return AzureMlSettings(**given)


def place(
    ml: StandIn, home: Path, *, home_id: str = HOME, name_of_place: str = "ml", **more: Any
) -> AzureMlPlace:
    context = PlaceContext(home, home_id, {}, ml.service_principal(), home, open_bucket=open_bucket)
    made = AzureMlPlace.make(name_of_place, settings(ml, **more), context)
    assert isinstance(made, AzureMlPlace)
    return made


# threads of obstore's stay in the network in which the first call was made: not in one of a lab's
obstore.put(MemoryStore(), "first", b"")


def instances(ml: StandIn, home: Path, *, inside: bool = True, **more: Any) -> AzureMlInstances:
    """The place whose machines are compute instances. `inside`: the caller is in the machines' network."""
    environ = ml.service_principal()
    if inside:
        environ = {**environ, "AZURE_AUTHORITY_HOST": ml.endpoint_inside}
        more = {"endpoint": ml.endpoint_inside, **more}
    context = PlaceContext(home, HOME, {}, environ, home, open_bucket=open_bucket)
    made = AzureMlPlace.make("ml", settings(ml, compute="instances", **more), context)
    assert isinstance(made, AzureMlInstances)
    return made


def offer(*, spot: bool = False) -> Offer:
    return Offer("ml", SIZE, "eastus", spot=spot, life=Lifetime(queues=True, extendable=False))


def machine_id(n: int = 1) -> MachineId:
    return MachineId(f"run-{HOME[:6]}-{n}")


def examine(ml: StandIn, home: Path, workers: int = 1, **more: Any) -> dict[str, Check]:
    """What `doctor` finds."""

    async def main() -> dict[str, Check]:
        made = place(ml, home, **more)
        try:
            return {check.name: check for check in await made.examine(Needs(cpus=4), workers)}
        finally:
            await made.close()

    return asyncio.run(main())
