"""What is counted of a run, beside what the stand-in for Azure has billed for it: `evalfleet cost reconcile`.

The stand-in's meters are written as a FOCUS export: machines, disks and addresses, each for as
long as it existed, at the prices of the run's offers. So what differs is time: ours is from the request until
the machine was seen to be gone.
"""

from __future__ import annotations

import csv
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalfleet.events import MachineRequested
from evalfleet.journal import Store
from evalfleet.model import Offer

from .hosts import AZURE, cannot, write_azure
from .result import Figures, Result, at_most, rounded
from .workspace import EVALFLEET, Workspace, environment

if TYPE_CHECKING:
    from standins.cloud.meters import Span

BENCH = "reconcile"
RUN, MACHINES, TASKS, TASK_S = "billed", 3, 9, 100.0
AIM = 0.05
LIMIT_S = 900.0
COLUMNS = ("ChargePeriodStart", "BilledCost", "BillingCurrency", "SubAccountId", "ServiceName", "Tags")


def run(quick: bool) -> Result:
    if (error := cannot(BENCH)) is not None:
        return Result(BENCH, dict(error), {})
    from standins.azure import Hosts, StandIn, Timing

    machines, tasks, task_s = (1, 1, 1.0) if quick else (MACHINES, TASKS, TASK_S)
    with StandIn(Hosts(), timing=Timing(boot_s=(3.0, 6.0)), seed=1) as azure, Workspace() as space:
        write_azure(space.folder, azure, azure.endpoint_inside, {"settle_s": 1.0})
        path = space.benchmark(["sleep", str(task_s)], [{"id": f"t_{n}"} for n in range(tasks)])
        words = ("--on", AZURE, "--workers", str(machines), "--name", RUN, "--canary", "0", "--yes")
        argv = (*azure.hosts.lab.prefix, *EVALFLEET, "run", str(path), *words)
        space.finish(space.start(*argv), LIMIT_S)
        store = Store.open(space.home, create=False)
        offers = [each.event.offer for each in store.read(RUN) if isinstance(each.event, MachineRequested)]
        _export(space.folder / "bill.csv", azure.meters.spans, offers[0], store.home_id)
        found = _reconciled(space)
    off = abs(found["counted_usd"] / found["billed_usd"] - 1)
    figures: Figures = {
        "machines": machines,
        "counted_usd": found["counted_usd"],
        "billed_usd": found["billed_usd"],
        "counted_over_billed": rounded(found["counted_usd"] / found["billed_usd"]),
        "rows": [row["why"] or "agrees" for row in found["rows"]],
    }
    return Result(BENCH, figures, {"off": at_most(rounded(off), AIM)})


def _export(path: Path, spans: list[Span], offer: Offer, home: str) -> None:
    """The machine itself is what is left of an offer's price when its disk and address are paid."""
    kinds = {"vm": "Virtual Machines", "disk": "Storage", "address": "Virtual Network"}
    idle = offer.cost.idle_usd_per_hour
    rates = {"vm": offer.cost.usd_per_hour - idle, "disk": 0.8 * idle, "address": 0.2 * idle}
    tags = json.dumps({"evalfleet-home": home, "evalfleet-pool": RUN})
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for span in spans:
            if span.kind not in kinds or span.end is None:
                continue
            day = datetime.fromtimestamp(span.start, UTC).date().isoformat()
            usd = rates[span.kind] * (span.end - span.start) / 3600
            rows.writerow((day, f"{usd:.8f}", "USD", "sub", kinds[span.kind], tags))


def _reconciled(space: Workspace) -> Any:
    done = subprocess.run(
        [*EVALFLEET, "cost", "reconcile", RUN, "--export", "bill.csv", "--json"],
        cwd=space.folder,
        env=environment(EVALFLEET_HOME=str(space.home)),
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)
