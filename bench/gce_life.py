"""A controller's dealings with Compute Engine, in a process that may be killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401 - these two: what a forked process needs is loaded before the fork
import asyncssh  # noqa: F401
import msgspec

from evalfleet.effects.machines import CALL_MARGIN_S
from evalfleet.errors import PlaceError
from evalfleet.model import Limits, MachineId, Needs, Offer
from evalfleet.places.gce import GcePlace, GceSettings
from evalfleet.ports import PlaceContext

HOME = "be9c4a11ea4b"
MACHINES = tuple(MachineId(f"pool-{HOME[:6]}-{n}") for n in (1, 2))
LEASE_S = Limits().lease_s


async def _live(
    place: GcePlace, offer: Offer, phase: Synchronized[int], expires_at: Synchronized[float]
) -> None:
    """Two machines are made, looked at, one of them is stopped and started, and all are deleted.

    Machines are records that no SSH reaches, so each create ends with giving up: all that Google is asked for
    has been asked by then. `phase` and `expires_at`, the last expiry decided, are for who watches.
    """

    async def create(machine: MachineId) -> None:
        expires_at.value = time.time() + LEASE_S
        await _tried(place.create(machine, offer, LEASE_S - min(CALL_MARGIN_S, offer.teardown_s / 4)))

    phase.value = 1
    await asyncio.gather(*(create(each) for each in MACHINES))
    phase.value = 2
    await place.list("pool")
    await place.stop(MACHINES[0])
    await create(MACHINES[0])
    await place.list("pool")
    phase.value = 3
    await asyncio.gather(*(place.delete(each) for each in MACHINES))
    await place.list("pool")
    phase.value = 4


async def _tried(work: Awaitable[None]) -> None:
    with suppress(PlaceError):  # nothing answers SSH
        await work


def live(
    settings: dict[str, Any],
    environ: dict[str, str],
    home: str,
    phase: Synchronized[int],
    expires_at: Synchronized[float],
) -> None:
    """The process that is killed."""

    async def main() -> None:
        given = msgspec.convert(settings, GceSettings)
        place = GcePlace.make("gce", given, PlaceContext(Path(home), HOME, {}, environ, Path(home)))
        try:
            await _live(place, (await place.offers(Needs()))[0], phase, expires_at)
        finally:
            await place.close()

    asyncio.run(main())
