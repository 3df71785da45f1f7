"""Places `azure_vm` against the stand-in, as a controller would have them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from evalfleet.model import Needs, Offer
from evalfleet.places.azure import AzurePlace, AzureSettings
from evalfleet.ports import Check, PlaceContext
from standins.azure import StandIn
from tests.waiting import slowness

HOME = "abc123def456"
GROUP = "rg"
SIZE = "Standard_D4ds_v5"
SETTLE_S = 0.5


def lost_s() -> float:
    """After so much silence a machine is lost. Tests do not wait as long as Azure may pause one."""
    return 12.0 * slowness()


def settings(azure: StandIn, *, inside: bool = False, **more: Any) -> AzureSettings:
    given = {
        "subscription": azure.subscription,
        "resource_group": GROUP,
        "ssh_from": ("*",),
        "sizes": (SIZE,),
        "regions": ("eastus",),
        "endpoint": azure.endpoint_inside if inside else azure.endpoint,
        "ca": str(azure.ca),
        "owner": "tester",
        "settle_s": SETTLE_S,
        "lost_s": lost_s(),
        **more,
    }
    return AzureSettings(**given)


def environment(azure: StandIn, *, inside: bool = False) -> dict[str, str]:
    """A service principal's."""
    return {
        "AZURE_TENANT_ID": azure.tenant,
        "AZURE_CLIENT_ID": azure.client_id,
        "AZURE_CLIENT_SECRET": azure.client_secret,
        "AZURE_AUTHORITY_HOST": azure.endpoint_inside if inside else azure.endpoint,
    }


def place(
    azure: StandIn,
    home: Path,
    *,
    inside: bool = False,
    home_id: str = HOME,
    name: str = "azure",
    for_pool: bool = False,
    **more: Any,
) -> AzurePlace:
    context = PlaceContext(home, home_id, {}, environment(azure, inside=inside), home, for_pool)
    return AzurePlace.make(name, settings(azure, inside=inside, **more), context)


def offer(region: str = "eastus", size: str = SIZE, *, spot: bool = False) -> Offer:
    return Offer("azure", size, region, spot=spot)


def examine(azure: StandIn, home: Path, workers: int = 1, **more: Any) -> dict[str, Check]:
    """What `doctor` finds."""

    async def main() -> dict[str, Check]:
        made = place(azure, home, **more)
        try:
            return {check.name: check for check in await made.examine(Needs(cpus=4), workers)}
        finally:
            await made.close()

    return asyncio.run(main())
