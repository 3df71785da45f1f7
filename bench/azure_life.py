"""A controller's dealings with Azure, in a process that may be killed; and who cleans up after it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import asyncssh  # noqa: F401 - these three: what a forked process needs is loaded before the fork
import azure.identity.aio
import azure.mgmt.resource.resources.aio  # noqa: F401
import msgspec

from evalfleet.api import places
from evalfleet.effects.machines import CALL_MARGIN_S
from evalfleet.errors import PlaceError
from evalfleet.model import Limits, MachineId, Micros, Needs, Offer
from evalfleet.places.azure import AzurePlace, AzureSettings
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import PlaceContext

HOME = "be9c4a11ea4b"
MACHINES = tuple(MachineId(f"pool-{HOME[:6]}-{n}") for n in (1, 2))
LEASE_S = Limits().lease_s


class Life:
    """Two machines are made, looked at, extended, stopped, started and deleted.

    Machines are records that no SSH reaches, so each create ends with giving up: all that Azure is asked for
    has been asked by then. `phase` and `expires_at`, the last expiry decided, are for who watches.
    """

    def __init__(
        self, place: AzurePlace, offer: Offer, phase: Synchronized[int], expires_at: Synchronized[float]
    ) -> None:
        self._place = place
        self._offer = offer
        self._phase = phase
        self._expires_at = expires_at

    async def live(self) -> None:
        self._phase.value = 1
        await asyncio.gather(*(self._create(each) for each in MACHINES))
        self._phase.value = 2
        await self._place.list("pool")
        await asyncio.gather(*(_tried(self._place.extend(each, self._lease_s())) for each in MACHINES))
        await self._place.stop(MACHINES[0])
        await self._create(MACHINES[0])
        await self._place.list("pool")
        self._phase.value = 3
        await asyncio.gather(*(self._place.delete(each) for each in MACHINES))
        await self._place.list("pool")
        self._phase.value = 4

    async def _create(self, machine: MachineId) -> None:
        await _tried(self._place.create(machine, self._offer, self._lease_s()))

    def _lease_s(self) -> float:
        """As the engine does it: the expiry is decided first, and the place is given a little less."""
        self._expires_at.value = time.time() + LEASE_S
        return LEASE_S - min(CALL_MARGIN_S, self._offer.teardown_s / 4)


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
        given = msgspec.convert(settings, AzureSettings)
        context = PlaceContext(Path(home), HOME, {}, environ, Path(home))
        place = AzurePlace.make("azure", given, context)
        try:
            offer = (await place.offers(Needs()))[0]
            await Life(place, offer, phase, expires_at).live()
        finally:
            await place.close()

    asyncio.run(main())


@dataclass(frozen=True)
class StoppedClock:
    """A clock that stands still."""

    at: Micros

    def now(self) -> Micros:
        return self.at


def clean_up(folder: str, now: float, answer: str) -> None:
    """`evalfleet reap` at a later time, on a computer that has the place in evalfleet.toml and no home."""
    os.chdir(folder)
    os.environ["EVALFLEET_HOME"] = f"{folder}/nowhere"
    workspace = replace(Workspace.here(), clock=StoppedClock(round(now * 1e6)))
    found = asyncio.run(places.machines(workspace))
    problems = asyncio.run(places.reap(workspace, [each for each in found if each.why]))
    Path(answer).write_text(json.dumps({"found": len(found), "problems": problems}))
