"""A first run at Azure: how soon another region is found when one is empty, and a refused delete is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import clouds
from .result import Figures, Result, at_most
from .workspace import EVALFLEET, Workspace, wait_until

if TYPE_CHECKING:
    from standins.azure import StandIn

BENCH = "azure-first-run"
WORKERS, QUICK_WORKERS = 8, 2
REGIONS = ["eastus", "westus2", "centralus", "eastus2"]
SIZES = ["Standard_D4ds_v5", "Standard_D4s_v5", "Standard_D4ds_v4", "Standard_D4s_v3", "Standard_D8ds_v5"]
EMPTY = "eastus"
VM = "Microsoft.Compute/virtualMachines"
LIMIT_S = 240.0
COUNTED = (
    "the stand-in has no room for any size in the region of the cheapest offers, of four regions and five "
    "sizes as evalfleet has them by default; deployments are counted until as many machines exist as were "
    "asked for: one for the canary, or all at once. The ideal is one deployment that is refused, and then "
    "one a machine. A refused delete is timed in the journal, from the decision to delete until it is told: "
    "under a lock on the resource group, without the right to delete, and taken by Azure but failing later"
)


def run(quick: bool) -> Result:
    return clouds.where_it_can(BENCH, quick, measure)


def measure(quick: bool) -> Result:
    workers = QUICK_WORKERS if quick else WORKERS
    load = os.getloadavg()[0]
    canary = _deployments(1, "1")
    at_once = _deployments(workers, "0")
    told = {
        "lock_s": _told_s(_lock),
        "rights_s": _told_s(lambda azure: azure.faults.denied_actions.append(f"{VM}/delete")),
        "failing_s": _told_s(_failing),
    }
    figures: Figures = {
        "deployments_canary": canary,
        "deployments_at_once": at_once,
        "workers": workers,
        "refused_delete_told": told,
        "load": round(load, 1),
        "counted": COUNTED,
    }
    aims = {
        "deployments_canary": at_most(canary, 2),
        "deployments_at_once": at_most(at_once, workers + 1),
        "refused_delete_told_s": at_most(max(told.values()), 60),
    }
    return Result(BENCH, figures, aims, {"ideal": {"canary": 2, "at_once": workers + 1}})


def _stand_in() -> StandIn:
    from standins.azure import StandIn, Timing

    quick = (0.0, 0.02)
    return StandIn(timing=Timing(quick, quick, (0.05, 0.1), quick, quick))


def _begin(azure: StandIn, space: Workspace, workers: int, canary: str) -> subprocess.Popen[bytes]:
    # machines are records only: nothing is reached by SSH
    more = {"jump": "127.0.0.1:1", "sizes": SIZES, "regions": REGIONS, "settle_s": 0.5}
    clouds.write_place(space.folder, azure, azure.endpoint, more)
    bench = space.benchmark(["true"], [{"id": f"t_{n}"} for n in range(workers)])
    words = ("run", str(bench), "--on", clouds.PLACE, "--workers", str(workers), "--name", "run")
    return space.start(*EVALFLEET, *words, "--canary", canary)


def _deployments(workers: int, canary: str) -> int:
    """How many it takes until there are so many machines."""
    with _stand_in() as azure, Workspace() as space:
        azure.cloud.capacity.limits[EMPTY, "", ""] = 0
        _begin(azure, space, workers, canary)
        wait_until(lambda: _running(azure) >= workers, LIMIT_S)
        return sum(method == "PUT" and "/deployments/" in path for method, path, _ in azure.server.calls)


def _running(azure: StandIn) -> int:
    return sum(each.state == "Succeeded" for each in azure.resources(VM))


def _told_s(refuse: Callable[[StandIn], object]) -> float:
    """From the decision to delete a machine until the journal has that it is refused."""
    from evalfleet.errors import FleetError
    from evalfleet.events import MachineCondemned, MachineDeleteRefused, Record
    from evalfleet.journal import Store

    with _stand_in() as azure, Workspace() as space:

        def records() -> list[Record]:
            try:
                return list(Store.open(space.home, create=False, read_only=True).read("run"))
            except FleetError:
                return []

        def at(kind: type) -> int | None:
            return next((record.at for record in records() if isinstance(record.event, kind)), None)

        _begin(azure, space, 1, "0")
        wait_until(lambda: _running(azure) == 1, LIMIT_S)
        azure.do(lambda: refuse(azure))
        space.start(*EVALFLEET, "cancel", "run")
        wait_until(lambda: at(MachineDeleteRefused) is not None, LIMIT_S, 0.1)
        condemned, told = at(MachineCondemned), at(MachineDeleteRefused)
        assert condemned is not None
        assert told is not None
        return round((told - condemned) / 1e6, 2)


def _lock(azure: StandIn) -> None:
    scope = f"/subscriptions/{azure.subscription}/resourceGroups/{clouds.GROUP}"
    id = f"{scope}/providers/Microsoft.Authorization/locks/keep"
    azure.cloud.locks[id.lower()] = {"id": id, "name": "keep", "properties": {"level": "CanNotDelete"}}


def _failing(azure: StandIn) -> None:
    azure.faults.failing_deletes.append(VM)
