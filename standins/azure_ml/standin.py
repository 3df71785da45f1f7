"""The stand-in as tests hold it: Azure with one workspace, its clusters, its jobs and its storage account."""

from __future__ import annotations

import socket
import ssl
import time

from lab.network import GATEWAY
from standins.azure.blobs import ACCOUNT, BlobContainer, BlobStorage
from standins.azure.standin import StandIn as AzureStandIn
from standins.azure.store import Group
from standins.azure.words import SUBSCRIPTION
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Machines
from standins.cloud.standin import LOOPBACK, bound
from standins.cloud.words import Call

from .api import CONTAINER, GROUP, WORKSPACE, MachineLearning
from .metrics import Metrics
from .nodes import Nodes, Paper
from .service import OVER, REGION, JobTroubles, MlJob, Service, Timing


class StandIn(AzureStandIn):
    """The stand-in for one workspace. Tests set faults and the like through `service`, or with `do`."""

    group, workspace, region = GROUP, WORKSPACE, REGION

    def __init__(
        self,
        nodes: Nodes | None = None,
        *,
        machines: Machines | None = None,
        ml_timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(machines, speed=speed, seed=seed)
        self.storage = BlobStorage(time.time, self.identity)  # as the `Date` of the Resource Manager tells it
        self.storage.script = self._script
        self.storage.containers[CONTAINER] = BlobContainer({})
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._storage_socket: socket.socket | None = listener
        self._storage_port: int = listener.getsockname()[1]
        self.storage_endpoint = f"https://{LOOPBACK}:{self._storage_port}/{ACCOUNT}"
        self.storage_endpoint_inside = f"https://{GATEWAY}:{self._storage_port}/{ACCOUNT}"
        self.service = Service(self.cloud, self.storage, nodes or Paper(), ml_timing or Timing(), self.ca)
        self.service.node_environ = {"SSL_CERT_FILE": str(self.ca)}
        MachineLearning(self.cloud, self.arm, self.service)
        Metrics(self.arm, self.service)
        id = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
        self.cloud.store.groups[GROUP] = Group(id, GROUP, REGION, {})

    def _script(self, call: Call) -> object:
        script = self.cloud.faults.script
        return None if script is None else script(call)

    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        await super()._listen(sock, context)
        if context is not None and self._storage_socket is not None:
            await self.storage.listen(self._storage_socket, context)
            self._storage_socket = None
            if isinstance(self._machines, Hosts):
                inside = bound(self._machines.lab.socket(), GATEWAY, self._storage_port)
                await self.storage.listen(inside, context)

    async def _close(self) -> None:
        await super()._close()
        await self.storage.close()
        await self.service.nodes.close()

    # -- for tests -----------------------------------------------------------------------------

    def _machine(self, name: str) -> str:
        return next(each.name for each in self.service.instances.all.values() if name in each.name)

    @property
    def paper(self) -> Paper:
        """The containers, where they are records."""
        assert isinstance(self.service.nodes, Paper)
        return self.service.nodes

    @property
    def troubles_of_jobs(self) -> JobTroubles:
        return self.service.troubles

    def left(self) -> list[str]:
        """Clusters, jobs that are not over, and mailboxes. Containers of the workspace's own stay."""
        service = self.service
        return self.do(
            lambda: [
                *(cluster.name for cluster in service.clusters.values()),
                *(instance.name for instance in service.instances.all.values()),
                *(job.name for job in service.jobs.values()),
                *(
                    name
                    for name in self.storage.containers[CONTAINER].blobs
                    if name.startswith(("evalfleet/mail/", "evalfleet/instances/"))
                ),
            ]
        )

    def living(self) -> list[str]:
        """Jobs that are not over."""
        jobs = self.service.jobs
        return self.do(lambda: [job.name for job in jobs.values() if job.status not in OVER])

    def job(self, name: str) -> MlJob:
        """The job whose name has this in it. Raises KeyError."""
        for job in self.do(lambda: list(self.service.jobs.values())):
            if name in job.name:
                return job
        raise KeyError(name)

    def preempt(self, name: str) -> None:
        """Take the node of a job back: Azure runs the job anew on another one."""
        job = self.job(name)
        self.do(lambda: self.service.preempt(job))

    def kill(self, name: str) -> None:
        """The container of a job dies, while the job goes on to say that it runs."""
        job = self.job(name)
        self.do(lambda: self.service.kill(job))

    def spoil(self, name: str) -> None:
        """The node of a job becomes unusable, while the job goes on to say that it runs."""
        job = self.job(name)
        self.do(lambda: self.service.spoil(job))
