"""A controller's dealings with Azure Batch, in a process that may be killed."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import asyncssh  # noqa: F401 - these three: what a forked process needs is loaded before the fork
import azure.identity.aio
import azure.mgmt.resource.resources.aio  # noqa: F401
import msgspec

from evalfleet.model import Limits, MachineId, Needs
from evalfleet.places.azure_batch import AzureBatchPlace, AzureBatchSettings
from evalfleet.ports import PlaceContext

HOME = "be9c4a11ea4b"
MACHINES = tuple(MachineId(f"pool-{HOME[:6]}-{n}") for n in (1, 2))
LEASE_S = Limits().lease_s


async def _live(place: AzureBatchPlace, phase: Synchronized[int], expires_at: Synchronized[float]) -> None:
    """Two machines are asked for, looked at until their nodes run, and deleted.

    Nodes are records that no SSH reaches. `phase`, and `expires_at`, when the last machine ends if it starts
    now, are for who watches.
    """
    offer = (await place.offers(Needs()))[0]
    phase.value = 1
    expires_at.value = time.time() + LEASE_S
    await asyncio.gather(*(place.create(each, offer, LEASE_S) for each in MACHINES))
    phase.value = 2
    while not all(each.start for each in await place.list("pool")):
        expires_at.value = time.time() + LEASE_S
    await place.list("pool")
    phase.value = 3
    await asyncio.gather(*(place.delete(each) for each in MACHINES))
    while await place.list("pool"):
        pass
    phase.value = 4


def live(
    settings: dict[str, Any],
    environ: dict[str, str],
    home: str,
    phase: Synchronized[int],
    expires_at: Synchronized[float],
) -> None:
    """The process that is killed."""

    async def main() -> None:
        given = msgspec.convert(settings, AzureBatchSettings)
        context = PlaceContext(Path(home), HOME, {}, environ, Path(home))
        place = AzureBatchPlace.make("batch", given, context)
        try:
            await _live(place, phase, expires_at)
        finally:
            await place.close()

    asyncio.run(main())
