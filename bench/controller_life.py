"""A controller's dealings with a cloud, in a process that may be killed; and who cleans up after it."""

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

import msgspec

from evalfleet.api import places
from evalfleet.effects.machines import CALL_MARGIN_S
from evalfleet.errors import PlaceError
from evalfleet.model import Limits, MachineId, Micros, Needs, Offer
from evalfleet.planning.plugins import place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Extendable, Place, PlaceContext, Stoppable

HOME = "be9c4a11ea4b"
MACHINES = tuple(MachineId(f"pool-{HOME[:6]}-{n}") for n in (1, 2))
LEASE_S = Limits().lease_s


class Life:
    """Two machines, from their creation to their deletion. They are records that no SSH reaches.

    `phase`, and `expires_at`, the last expiry decided, are for who watches.
    """

    def __init__(
        self, place: Place, offer: Offer, phase: Synchronized[int], expires_at: Synchronized[float]
    ) -> None:
        self._place = place
        self._offer = offer
        self._phase = phase
        self._expires_at = expires_at

    async def live(self) -> None:
        self._phase.value = 1
        await asyncio.gather(*map(self._create, MACHINES))
        self._phase.value = 2
        await (self._await_start() if self._offer.queues else self._use())
        await self._place.list("pool")
        self._phase.value = 3
        await asyncio.gather(*(self._place.delete(machine) for machine in MACHINES))
        while await self._place.list("pool") and self._offer.queues:
            pass
        self._phase.value = 4

    async def _use(self) -> None:
        """They are looked at and extended, and one is stopped and started."""
        await self._place.list("pool")
        if self._offer.extendable:
            assert isinstance(self._place, Extendable)
            await asyncio.gather(
                *(_tried(self._place.extend(machine, self._lease_s())) for machine in MACHINES)
            )
        assert isinstance(self._place, Stoppable)
        await self._place.stop(MACHINES[0])
        await self._create(MACHINES[0])

    async def _await_start(self) -> None:
        """A service's machines live from their start."""
        while not all(machine.start for machine in await self._place.list("pool")):
            self._expires_at.value = time.time() + LEASE_S

    async def _create(self, machine: MachineId) -> None:
        """A virtual machine is given up, since SSH does not reach it: all is asked for by then."""
        work = self._place.create(machine, self._offer, self._lease_s())
        await (work if self._offer.queues else _tried(work))

    def _lease_s(self) -> float:
        """As the engine does it: the expiry is decided first, and the place is given a little less."""
        self._expires_at.value = time.time() + LEASE_S
        return LEASE_S - min(CALL_MARGIN_S, self._offer.teardown_s / 4)


async def _tried(work: Awaitable[None]) -> None:
    with suppress(PlaceError):  # nothing answers SSH
        await work


def live(
    kind: str,
    settings: dict[str, Any],
    environ: dict[str, str],
    home: str,
    phase: Synchronized[int],
    expires_at: Synchronized[float],
) -> None:
    """The process that is killed, with a place of this kind."""

    async def main() -> None:
        found = place_kind(kind)
        given = msgspec.convert(settings, found.Settings)
        place = found.make(kind, given, PlaceContext(Path(home), HOME, {}, environ, Path(home)))
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
