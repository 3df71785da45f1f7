"""The stand-ins of clouds in which `leak` kills a controller, and what is counted in each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .hosts import GROUP, azure_credentials, azure_settings

if TYPE_CHECKING:
    from standins import azure_batch, azure_ml
    from standins.azure import StandIn

SEED = 11
QUICK = (0.0, 0.02)
"""Seconds that a stand-in takes for each step that nothing waits for, from and to."""
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
QUEUE_S = 600.0
LATEST_S = 7200.0
"""After the last expiry; by then the service's own limits have ended everything."""
AZURE_MODULES = ("azure.identity.aio", "azure.mgmt.resource.resources.aio")


class AzureVms:
    """Azure's virtual machines, which auto-shutdown deallocates."""

    kind = "azure_vm"
    modules = (*AZURE_MODULES, "evalfleet.places.azure")

    def __init__(self) -> None:
        from standins.azure import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, (0.05, 0.1), QUICK, QUICK), seed=SEED)

    def settings(self) -> dict[str, Any]:
        # nothing is reached by SSH, nor looked for elsewhere than on this computer
        return {
            **azure_settings(self.standin, self.standin.endpoint),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return azure_credentials(self.standin, self.standin.endpoint)

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

    path = f"/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments"
    told = Rest(azure).get(path)
    return len(told.body["value"]) if told.status == 200 else 0


class ComputeEngine:
    """Compute Engine, where machines end by a limit that Google knows."""

    kind = "gce"
    modules = ("evalfleet.places.gce",)

    def __init__(self) -> None:
        from standins.gce import StandIn, Timing

        timing = Timing(insert=(0.05, 0.1), boot=QUICK, delete=QUICK, power=QUICK, other=QUICK, wait=5.0)
        self.standin = StandIn(timing=timing, seed=SEED)

    def settings(self) -> dict[str, Any]:
        google = self.standin
        return {
            "project": google.project,
            "types": ["e2-standard-4"],
            "zones": ["us-central1-a"],
            "ssh_from": ["*"],
            "owner": "bench",
            "endpoint": google.endpoint,
            "ca": str(google.ca),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return self.standin.environment

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        google = self.standin
        lives = sum((instance.ends_at or 0.0) > expires_at for instance in google.instances())
        google.jump(max(0.0, expires_at + REAP_AFTER_S - google.clock.now()))
        reap()
        reaped_at = google.clock.now()
        google.jump(LOOK_AFTER_S)
        now, seconds = google.clock.now(), google.meters.seconds
        return {
            "left": len(google.left()),
            "vm_s": seconds("vm", now, since=expires_at),
            "disk_s": seconds("disk", now, since=reaped_at),
            "address_s": seconds("address", now, since=expires_at),
            "lives": lives,
        }


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
