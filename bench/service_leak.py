"""A controller is killed at 200 moments: what is left at Azure's managed compute, and costs money, without
it and after `reap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import clouds, leak
from .leak import QUICK, SEED, LeakyCloud
from .result import Aim, Figures, Result, at_most, rounded

if TYPE_CHECKING:
    from standins import azure_batch, azure_ml

BENCH = "service-leak"
QUEUE_S = 600.0
SWEPT_S, OWN_POOL_SWEPT_S = 300.0, 600.0
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


S = TypeVar("S", bound="azure_batch.StandIn | azure_ml.StandIn")


class Service(Generic[S]):
    """A stand-in of managed compute, whose nodes are what costs money."""

    kind: str
    standin: S

    @property
    def modules(self) -> Sequence[str]:
        return (*AZURE_MODULES, f"evalfleet.places.{self.kind}")

    def own_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        standin = self.standin
        common = {"endpoint": standin.endpoint, "ca": str(standin.ca), "owner": "bench"}
        return {**common, "queue_s": QUEUE_S, "poll_s": 0.05, **self.own_settings()}

    def environment(self) -> dict[str, str]:
        return self.standin.service_principal()

    def alone(self) -> int:
        """What nobody has ended: its own limits should have."""
        raise NotImplementedError

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        standin = self.standin
        standin.jump(max(0.0, expires_at + LATEST_S - standin.clock.now()))
        alone = self.alone()
        late_s = standin.meters.latest_s("vm", standin.clock.now(), expires_at)
        reap()
        standin.jump(60.0)
        return {"alone": alone, "late_s": late_s, "left": len(standin.left())}


class Batch(Service["azure_batch.StandIn"]):
    """Azure Batch, whose nodes are in pools of their own."""

    kind = "azure_batch"

    def __init__(self) -> None:
        from standins.azure_batch import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, QUICK), seed=SEED)

    def own_settings(self) -> dict[str, Any]:
        return {"account": f"{self.standin.account}.{self.standin.region}", "ssh_from": ["*"]}

    def alone(self) -> int:
        batch = self.standin
        return batch.do(lambda: len(batch.service.pools))


class BatchByMailbox(Batch):
    """The same, where nothing can connect to nodes: requests to the storage count, too."""

    def own_settings(self) -> dict[str, Any]:
        batch = self.standin
        own = {"management": batch.endpoint, "storage_endpoint": batch.storage_endpoint}
        return {**super().own_settings(), **own, "reach": "mailbox"}


class BatchInOwnPool(Batch):
    """In a pool of the user's that rests at zero, which is not for us to delete."""

    pool = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.standin.service.scaled_s = (
            1.0  # Batch wants 30 s between two formulas: nobody waits for that here
        )
        self._is_there = False

    def own_settings(self) -> dict[str, Any]:
        if not self._is_there:
            self._is_there = True
            body = {"vmSize": "Standard_D4s_v5", "virtualMachineConfiguration": {}}
            self.standin.do(lambda: self.standin.service.add_pool(self.pool, body))
        sizes = {"sizes": ["Standard_D4s_v5"], "pool": self.pool}
        return {**super().own_settings(), **sizes}

    def alone(self) -> int:
        batch = self.standin
        return batch.do(lambda: len(batch.service.pools[self.pool].nodes))

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        counts = super().account(expires_at, reap)
        return {**counts, "left": counts["left"] - 1 + self.alone()}


class MachineLearning(Service["azure_ml.StandIn"]):
    """Azure Machine Learning; a cluster without nodes costs nothing."""

    kind = "azure_ml"

    def __init__(self) -> None:
        from standins.azure_ml import StandIn, Timing

        timing = Timing(*[QUICK] * 6)
        self.standin = StandIn(ml_timing=timing, seed=SEED)

    def own_settings(self) -> dict[str, Any]:
        ml = self.standin
        own = {"workspace": ml.workspace, "resource_group": ml.group}
        return {**own, "storage_endpoint": ml.storage_endpoint}

    def alone(self) -> int:
        return len(self.standin.living()) + len(self.standin.meters.running())


class Instances(MachineLearning):
    """Its compute instances, which SSH does not reach here. What is stopped may stay until it is reaped."""

    def own_settings(self) -> dict[str, Any]:
        return {**super().own_settings(), "compute": "instances", "answer_s": 0.1}

    def alone(self) -> int:
        return len(self.standin.meters.running())


SERVICES: Mapping[str, Callable[[], LeakyCloud]] = {
    "azure_batch": Batch,
    "azure_batch_mailbox": BatchByMailbox,
    "azure_batch_own_pool": BatchInOwnPool,
    "azure_ml": MachineLearning,
    "azure_ml_instances": Instances,
}


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
            f"{name}_billed_s_past_expiry": at_most(
                rounded(leaks.worst("late_s")), OWN_POOL_SWEPT_S if make is BatchInOwnPool else SWEPT_S
            ),
        }
    return Result(BENCH, figures, aims)
