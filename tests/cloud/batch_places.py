"""Places `azure_batch` against the stand-in, as a controller would have them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from evalfleet.mirror import open_bucket
from evalfleet.model import Lifetime, MachineId, Needs, Offer
from evalfleet.places.azure_batch import AzureBatchPlace, AzureBatchSettings
from evalfleet.ports import Check, PlaceContext
from standins.azure_batch import StandIn, Timing
from tests.cloud import mail_desk
from tests.cloud.places import SETTLE_S

HOME = "abc123def456"
SIZE = "Standard_D4s_v5"
QUICK = (0.0, 0.02)
FAST = Timing(QUICK, QUICK, QUICK)


def settings(batch: StandIn, *, inside: bool = False, **more: Any) -> AzureBatchSettings:
    endpoint = batch.endpoint_inside if inside else batch.endpoint
    given = {
        "account": f"{batch.account}.{batch.region}",
        "endpoint": endpoint,
        "management": endpoint,
        "ca": str(batch.ca),
        "storage_endpoint": batch.storage_endpoint,
        "ssh_from": ("198.18.0.0/15",),
        "sizes": (SIZE,),
        "owner": "tester",
        "settle_s": SETTLE_S,
        "poll_s": 0.1,
        **more,
    }
    return AzureBatchSettings(**given)


def place(
    batch: StandIn,
    home: Path,
    *,
    inside: bool = False,
    home_id: str = HOME,
    name_of_place: str = "batch",
    **more: Any,
) -> AzureBatchPlace:
    context = PlaceContext(
        home, home_id, {}, batch.service_principal(inside=inside), home, open_bucket=open_bucket
    )
    return AzureBatchPlace.make(name_of_place, settings(batch, inside=inside, **more), context)


def play(batch: StandIn, home: Path, act: Callable[[AzureBatchPlace], Awaitable[None]], **more: Any) -> None:
    mail_desk.play(lambda: place(batch, home, **more), act)


def offer(*, spot: bool = False) -> Offer:
    return Offer("batch", SIZE, "eastus", spot=spot, life=Lifetime(queues=True, extendable=False))


def machine_id(n: int = 1) -> MachineId:
    return MachineId(f"run-{HOME[:6]}-{n}")


def examine(batch: StandIn, home: Path, workers: int = 1, **more: Any) -> dict[str, Check]:
    """What `doctor` finds."""

    async def main() -> dict[str, Check]:
        made = place(batch, home, **more)
        try:
            return {check.name: check for check in await made.examine(Needs(cpus=4), workers)}
        finally:
            await made.close()

    return asyncio.run(main())
