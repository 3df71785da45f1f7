"""A controller is killed at 200 moments: what is left in Azure, and costs money, after `reap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import clouds, leak
from .leak import QUICK, SEED
from .result import Figures, Result, at_most, rounded

if TYPE_CHECKING:
    from standins.azure import StandIn

BENCH = "azure-leak"
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
COUNTED = (
    "a process that makes, extends, stops, starts and deletes two machines through the place is killed (kill "
    "-9) at a request chosen by a seed, which is either never carried out or carried out unheard; the "
    f"stand-in's clock then moves to {REAP_AFTER_S:g} s after the last expiry that was decided, `reap` runs "
    "on a computer without a home, and a day later the stand-in's books are read; vm: billed after the "
    "expiry, whoever stopped it; disk, address: billed after reap had ended, since they are billed until "
    "then; "
    "records: of deployments, which cost nothing"
)


class AzureVms:
    """Azure's virtual machines, which auto-shutdown deallocates."""

    kind = "azure_vm"
    modules = ("azure.identity.aio", "azure.mgmt.resource.resources.aio", "evalfleet.places.azure")

    def __init__(self) -> None:
        from standins.azure import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, (0.05, 0.1), QUICK, QUICK), seed=SEED)

    def settings(self) -> dict[str, Any]:
        # nothing is reached by SSH, nor looked for elsewhere than on this computer
        return {
            **clouds.settings(self.standin, self.standin.endpoint),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return clouds.credentials(self.standin, self.standin.endpoint)

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        azure = self.standin
        azure.jump(max(0.0, expires_at + REAP_AFTER_S - azure.clock.now()))
        reap()
        reaped_at = azure.clock.now()
        azure.jump(LOOK_AFTER_S)
        now, seconds = azure.clock.now(), azure.meters.seconds
        return {
            "left": len(azure.left()),
            "records": _records(azure),
            "vm_s": seconds("vm", now, since=expires_at),
            "disk_s": seconds("disk", now, since=reaped_at),
            "address_s": seconds("address", now, since=reaped_at),
            "waiting_s": seconds("disk", now, since=expires_at) + seconds("address", now, since=expires_at),
        }


def _records(azure: StandIn) -> int:
    from tests.cloud.rest import Rest

    path = f"/resourceGroups/{clouds.GROUP}/providers/Microsoft.Resources/deployments"
    told = Rest(azure).get(path)
    return len(told.body["value"]) if told.status == 200 else 0


def run(quick: bool) -> Result:
    return clouds.where_it_can(BENCH, quick, measure)


def measure(quick: bool) -> Result:
    leaks = leak.measure(AzureVms, quick)
    billed = {kind: rounded(leaks.total(f"{kind}_s")) for kind in ("vm", "disk", "address")}
    figures: Figures = {
        **leaks.figures(),
        "records_left": leaks.total("records"),
        "billed_s_past_expiry": billed,
        "disk_and_address_s_from_expiry_to_reap": rounded(leaks.total("waiting_s")),
        "counted": COUNTED,
    }
    aims = {
        "resources_left": at_most(figures["resources_left"], 0),
        **{f"{kind}_s_past_expiry": at_most(seconds, 0) for kind, seconds in billed.items()},
    }
    return Result(BENCH, figures, aims)
