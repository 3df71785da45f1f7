"""Places `gce` against the stand-in, as a controller would have them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from evalfleet.model import Lifetime, MachineId, Needs, Offer
from evalfleet.places.gce import GcePlace, GceSettings
from evalfleet.ports import Check, PlaceContext
from standins.gce import StandIn, Timing
from tests.cloud.places import SETTLE_S, lost_s

HOME = "abc123def456"
TYPE, ZONE = "e2-standard-4", "us-central1-a"
QUICK = (0.0, 0.02)
FAST = Timing(
    insert=(0.02, 0.1), boot=QUICK, delete=QUICK, power=QUICK, other=QUICK, limit_late=QUICK, wait=5.0
)


def settings(google: StandIn, *, inside: bool = False, **more: Any) -> GceSettings:
    given = {
        "project": google.project,
        "ssh_from": ("*",),
        "types": (TYPE,),
        "zones": (ZONE,),
        "endpoint": google.endpoint_inside if inside else google.endpoint,
        "ca": str(google.ca),
        "owner": "tester",
        "settle_s": SETTLE_S,
        "lost_s": lost_s(),
        **more,
    }
    return GceSettings(**given)


def place(
    google: StandIn,
    home: Path,
    *,
    inside: bool = False,
    home_id: str = HOME,
    name: str = "gce",
    for_pool: bool = False,
    environ: dict[str, str] | None = None,
    **more: Any,
) -> GcePlace:
    known = google.environment_inside if inside else google.environment
    context = PlaceContext(home, home_id, {}, known if environ is None else environ, home, for_pool)
    return GcePlace.make(name, settings(google, inside=inside, **more), context)


def offer(zone: str = ZONE, type: str = TYPE, *, spot: bool = False) -> Offer:
    area = zone.rpartition("-")[0]
    return Offer("gce", type, zone, spot=spot, area=area, life=Lifetime(extendable=False))


def machine_id(n: int = 1) -> MachineId:
    return MachineId(f"run-{HOME[:6]}-{n}")


def examine(
    google: StandIn, home: Path, workers: int = 1, *, needs: Needs | None = None, **more: Any
) -> dict[str, Check]:
    """What `doctor` finds."""

    async def main() -> dict[str, Check]:
        made = place(google, home, **more)
        try:
            return {check.name: check for check in await made.examine(needs or Needs(cpus=4), workers)}
        finally:
            await made.close()

    return asyncio.run(main())
