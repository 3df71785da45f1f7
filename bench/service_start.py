"""From asking for a machine of managed compute until it can be used: how much of that is our own doing."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from . import clouds
from .result import Result, below, rounded
from .workspace import Workspace

if TYPE_CHECKING:
    from pathlib import Path

    from standins.azure_ml import StandIn

BENCH = "service-start"
PUBLISHED_S = {"cluster": 8.0, "node": 150.0, "image": 60.0}
"""What people report of Azure Machine Learning: a cluster without nodes, its first node, the pull of an image
of some GB from a registry in the same region."""
QUICK_S = {"cluster": 0.2, "node": 0.5, "image": 0.5}
COUNTED = (
    "one machine of azure_ml on the stand-in, whose containers are processes of this computer: from the call "
    "of create to the look that shows it as up; service_s: what the stand-in takes by itself, as published "
    "(cluster, node, image); own_s: the rest, which is requests, looks every 5 s, or 2 s once it has a node, "
    "and the start of the pilot; submit_s: until Azure has the job"
)


def run(quick: bool) -> Result:
    return clouds.where_it_can(BENCH, quick, measure)


def measure(quick: bool) -> Result:
    from standins.azure_ml import Processes, StandIn, Timing

    delays = QUICK_S if quick else PUBLISHED_S
    cluster, node, image = ((delays[name], delays[name]) for name in ("cluster", "node", "image"))
    timing = Timing(cluster, node, image, (0.0, 0.1), (0.0, 0.1))
    load = os.getloadavg()[0]
    with StandIn(Processes(), ml_timing=timing) as ml, Workspace() as space:
        submitted_s, up_s = asyncio.run(_start(ml, space.folder))
    service_s = sum(delays.values())
    figures = {
        "counted": COUNTED,
        "service_s": rounded(service_s),
        "submit_s": rounded(submitted_s - delays["cluster"]),
        "up_s": rounded(up_s),
        "own_s": rounded(up_s - service_s),
        "load_before": load,
    }
    return Result(BENCH, figures, {} if quick else {"own_s": below(up_s - service_s, 5.0)})


async def _start(ml: StandIn, home: Path) -> tuple[float, float]:
    """Seconds until the job was taken, and until the machine was up."""
    from evalfleet.model import MachineId, Needs
    from evalfleet.places.azure_ml import AzureMlPlace, AzureMlSettings
    from evalfleet.ports import PlaceContext

    settings = AzureMlSettings(
        workspace=ml.workspace,
        resource_group=ml.group,
        endpoint=ml.endpoint,
        storage_endpoint=ml.storage_endpoint,
        ca=str(ml.ca),
        isolation="none",
    )
    context = PlaceContext(home, "be9c4a11ea4b", {}, ml.service_principal(), home)
    place, machine = AzureMlPlace.make("ml", settings, context), MachineId("start-be9c4a-1")
    try:
        offer = (await place.offers(Needs()))[0]
        begun = time.monotonic()
        await place.create(machine, offer, 600.0)
        submitted = time.monotonic()
        while not any(seen.phase == "up" for seen in await place.list("start")):
            pass
        up = time.monotonic()
        await place.delete(machine)
        return submitted - begun, up - begun
    finally:
        await place.close()
