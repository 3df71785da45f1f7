"""A controller is killed at 200 moments: what is left at Azure's managed compute, and costs money, without
it and after `reap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import clouds, leak
from .leak import QUICK, SEED, LeakyCloud
from .result import Aim, Figures, Result, at_most, rounded

BENCH = "service-leak"
QUEUE_S = 600.0
SWEPT_S = 300.0
"""So long after its end the budget pays for a machine: `Offer.sweep_s`."""
LATEST_S = 7200.0
"""After the last expiry; by then the service's own limits have ended everything."""
AZURE_MODULES = ("azure.identity.aio", "azure.mgmt.resource.resources.aio")
COUNTED = (
    "a process that asks for two machines through the place, looks at them until their nodes run and deletes "
    "them is killed (kill -9) at a request chosen by a seed, which is either never carried out or carried "
    "out unheard; then the stand-in's clock moves on, and nobody asks: left_alone, and billed_s_past_expiry "
    "of the worst machine, are what the service's own limits leave; after `reap` on another computer, "
    "without a home, all that is there is counted as left; pilots are records, which never end by themselves"
)


class Batch:
    """Azure Batch. Pools are what costs money."""

    kind = "azure_batch"
    modules = (*AZURE_MODULES, "evalfleet.places.azure_batch")

    def __init__(self) -> None:
        from standins.azure_batch import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, QUICK), seed=SEED)

    def settings(self) -> dict[str, Any]:
        batch = self.standin
        return {
            "account": f"{batch.account}.{batch.region}",
            "endpoint": batch.endpoint,
            "ca": str(batch.ca),
            "ssh_from": ["*"],
            "owner": "bench",
            "queue_s": QUEUE_S,
            "poll_s": 0.05,
        }

    def environment(self) -> dict[str, str]:
        return self.standin.service_principal()

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        batch = self.standin
        batch.jump(max(0.0, expires_at + LATEST_S - batch.clock.now()))
        alone = batch.do(lambda: len(batch.service.pools))
        late_s = batch.meters.latest_s("vm", batch.clock.now(), expires_at)
        reap()
        batch.jump(60.0)
        return {"alone": alone, "late_s": late_s, "left": len(batch.left())}


class MachineLearning:
    """Azure Machine Learning. Nodes are what costs money; a cluster without nodes costs nothing."""

    kind = "azure_ml"
    modules = (*AZURE_MODULES, "evalfleet.places.azure_ml")

    def __init__(self) -> None:
        from standins.azure_ml import StandIn, Timing

        self.standin = StandIn(ml_timing=Timing(QUICK, QUICK, QUICK, QUICK, QUICK), seed=SEED)

    def settings(self) -> dict[str, Any]:
        ml = self.standin
        return {
            "workspace": ml.workspace,
            "resource_group": ml.group,
            "endpoint": ml.endpoint,
            "storage_endpoint": ml.storage_endpoint,
            "ca": str(ml.ca),
            "owner": "bench",
            "queue_s": QUEUE_S,
            "poll_s": 0.05,
        }

    def environment(self) -> dict[str, str]:
        return self.standin.service_principal()

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        ml = self.standin
        ml.jump(max(0.0, expires_at + LATEST_S - ml.clock.now()))
        alone = len(ml.living()) + len(ml.meters.running())
        late_s = ml.meters.latest_s("vm", ml.clock.now(), expires_at)
        reap()
        ml.jump(60.0)
        return {"alone": alone, "late_s": late_s, "left": len(ml.left())}


SERVICES: Mapping[str, Callable[[], LeakyCloud]] = {"azure_batch": Batch, "azure_ml": MachineLearning}


def run(quick: bool) -> Result:
    return clouds.where_it_can(BENCH, quick, measure)


def measure(quick: bool) -> Result:
    figures: Figures = {"counted": COUNTED}
    aims: dict[str, Aim] = {}
    for name, make in SERVICES.items():
        leaks = leak.measure(make, quick)
        figures[name] = {
            **leaks.figures(),
            "left_alone": leaks.total("alone"),
            "billed_s_past_expiry": rounded(leaks.worst("late_s")),
        }
        aims |= {
            f"{name}_left_alone": at_most(leaks.total("alone"), 0),
            f"{name}_resources_left": at_most(leaks.total("left"), 0),
            f"{name}_billed_s_past_expiry": at_most(rounded(leaks.worst("late_s")), SWEPT_S),
        }
    return Result(BENCH, figures, aims)
