"""The state of a workspace: clusters with nodes, jobs on them, and how they live."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from standins.azure.blobs import BlobContainer, BlobStorage
from standins.azure.cloud import Cloud
from standins.azure.words import ArmError
from standins.cloud.words import Json

from .instances import Instances
from .nodes import ContainerRun, Nodes

Span = tuple[float, float]
REGION = "eastus"
CORES = {"standard_d2s_v3": 2, "standard_d4s_v3": 4, "standard_d4s_v5": 4, "standard_d8s_v5": 8}
UNKNOWN_CORES = 4
KVM = "/dev/kvm"
OVER = ("Completed", "Failed", "Canceled")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")


def seconds(text: object, name: str) -> float:
    """The seconds of an ISO 8601 duration. Raises ArmError."""
    found = _DURATION.fullmatch(str(text))
    if found is None or str(text) in ("P", "PT"):
        raise ArmError(400, "UserError", f"The value {text!r} of {name} is no duration.")
    days, hours, minutes, secs = (float(each or 0) for each in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds, from and to."""

    cluster: Span = (5.0, 10.0)
    """Until a cluster is made, without nodes."""
    allocate: Span = (90.0, 240.0)
    """From a job that waits to a node."""
    pull: Span = (20.0, 90.0)
    """From a node to its container: `Preparing`."""
    end: Span = (5.0, 20.0)
    """`Finalizing`, `CancelRequested`, and until what is deleted is gone."""
    scale_down: Span = (5.0, 30.0)
    """Until a node that was idle for long enough is given back."""
    instance: Span = (60.0, 180.0)
    """Until a compute instance is made, started, stopped or deleted."""


@dataclass(eq=False)
class MlNode:
    """A node of a cluster."""

    id: str
    cluster: Cluster
    state: str = "idle"
    job: MlJob | None = None
    idle_since: float = 0.0
    leaving: asyncio.Task[None] | None = None


@dataclass(eq=False)
class Cluster:
    """A compute of the kind AmlCompute. `body`: what the client sent."""

    name: str
    body: Json
    created: float
    state: str = "Creating"
    resizing: bool = False
    changed: float = 0.0
    errors: list[Json] = field(default_factory=list[Json])
    nodes: dict[str, MlNode] = field(default_factory=dict[str, MlNode])

    @property
    def settings(self) -> Json:
        found: Json = self.body["properties"].get("properties") or {}
        return found

    @property
    def size(self) -> str:
        return str(self.settings.get("vmSize"))

    @property
    def spot(self) -> bool:
        return str(self.settings.get("vmPriority") or "Dedicated").lower() == "lowpriority"

    @property
    def most(self) -> int:
        return int((self.settings.get("scaleSettings") or {}).get("maxNodeCount") or 1)

    @property
    def idle_s(self) -> float:
        told = (self.settings.get("scaleSettings") or {}).get("nodeIdleTimeBeforeScaleDown") or "PT120S"
        return seconds(told, "nodeIdleTimeBeforeScaleDown")


@dataclass(eq=False)
class MlJob:
    """A command job. `body`: its properties, as the client sent them."""

    name: str
    body: Json
    created: float
    cluster: str
    status: str = "NotStarted"
    node: MlNode | None = None
    run: ContainerRun | None = None
    life: asyncio.Task[None] | None = None
    ended_by: str = ""
    """What it becomes at its end, whatever its container says."""
    starts: int = 0


class JobTroubles:
    """What goes wrong with jobs, though every call is answered. Set it before they come that far."""

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        """Statuses that jobs do not leave: `Queued`, `Preparing`, `Running` (without its container),
        `Finalizing`, `CancelRequested`."""
        self.pull_error = ""
        """What a registry answers to each pull."""
        self.only: Callable[[str], bool] = lambda name: True
        """The jobs that it happens to."""

    def sticks(self, job: MlJob) -> bool:
        return job.status in self.stuck and self.only(job.name)


class Service:
    """Everything there is, and what Azure does by itself. Belongs to the server's thread."""

    def __init__(self, cloud: Cloud, storage: BlobStorage, nodes: Nodes, timing: Timing, ca: Path) -> None:
        self.cloud, self.storage, self.nodes, self.timing = cloud, storage, nodes, timing
        self.clock, self.meters = cloud.clock, cloud.meters
        self.troubles = JobTroubles()
        self.clusters: dict[str, Cluster] = {}
        self.jobs: dict[str, MlJob] = {}
        self.instances = Instances(cloud, timing.instance, ca, REGION)
        self.environments: dict[tuple[str, str], Json] = {}
        self.connections: dict[str, Json] = {}
        """By name, what the client sent."""
        self.registries: dict[str, Json] = {}
        """Private ones, by address: the credentials that each takes."""
        self.quota = {False: 100, True: 100}
        """Cores: dedicated by False, low-priority by True."""
        self.family_quota = 100
        """Cores of the family DSv5, in the subscription."""
        self.room = {False: 10_000, True: 10_000}
        """How many nodes the region has left."""
        self.node_environ: dict[str, str] = {}
        """What containers find in their environment besides what the job says."""
        self.prelude = ""
        """What containers run before the command of their job."""
        self.has_key = True
        """Has the default datastore the key of its storage account?"""
        self.has_kvm = True
        """Have nodes a device /dev/kvm that containers can be given?"""
        self.loads: dict[str, dict[str, float]] = {}
        """What Azure Monitor tells of the node of a job, by metric. Of other jobs it tells nothing."""
        self._numbers = itertools.count(1)

    async def take(self, span: Span) -> None:
        await self.cloud.pause(span)

    def used_cores(self, spot: bool) -> int:
        return sum(
            cores_of(each.size) * len(each.nodes) for each in self.clusters.values() if each.spot == spot
        ) + (0 if spot else sum(cores_of(each.size) for each in self.instances.all.values()))

    # -- clusters ------------------------------------------------------------------------------

    def add_cluster(self, name: str, body: Json) -> Cluster:
        now = self.clock.now()
        cluster = self.clusters[name.lower()] = Cluster(name, body, now, changed=now)
        return cluster

    async def make_cluster(self, cluster: Cluster) -> Json | None:
        await self.take(self.timing.cluster)
        if cluster.state == "Creating":
            cluster.state = "Succeeded"
        return None

    async def delete_cluster(self, cluster: Cluster) -> Json | None:
        """With its nodes; what runs there ends."""
        cluster.state = "Deleting"
        for job in [job for job in self.jobs.values() if job.cluster.lower() == cluster.name.lower()]:
            if job.status not in OVER:
                self._stop(job, "Canceled")
        for node in list(cluster.nodes.values()):
            self._drop(node)
        await self.take(self.timing.end)
        if self.clusters.get(cluster.name.lower()) is cluster:
            del self.clusters[cluster.name.lower()]
        return None

    def scale(self, cluster: Cluster) -> None:
        """Ask for nodes for the jobs that wait, as far as the cluster may have them."""
        waiting = [job for job in self._jobs_of(cluster) if job.status == "Queued" and job.node is None]
        coming = sum(node.state == "preparing" for node in cluster.nodes.values())
        wanted = min(len(waiting), cluster.most - len(cluster.nodes) + coming)
        for _ in range(wanted - coming):
            if (error := self._refused(cluster)) is not None:
                cluster.errors = [{"error": error}]
                cluster.resizing = False
                return
            node_id = f"tvmps_{next(self._numbers):032x}_{'p' if cluster.spot else 'd'}"
            node = cluster.nodes[node_id] = MlNode(node_id, cluster, "preparing")
            cluster.resizing, cluster.changed, cluster.errors = True, self.clock.now(), []
            self.cloud.operations.spawn(self._allocate(node))

    def _jobs_of(self, cluster: Cluster) -> list[MlJob]:
        return [job for job in self.jobs.values() if job.cluster.lower() == cluster.name.lower()]

    def _refused(self, cluster: Cluster) -> Json | None:
        if self.used_cores(cluster.spot) + cores_of(cluster.size) > self.quota[cluster.spot]:
            words = "Operation results in exceeding quota limits of Core"
            return {"code": "ClusterCoreQuotaReached", "message": f"{words}. Size: {cluster.size}."}
        if self.room[cluster.spot] <= 0:
            return {
                "code": "AllocationFailed",
                "message": "Allocation failed. We do not have sufficient capacity for the requested VM size",
            }
        self.room[cluster.spot] -= 1
        return None

    async def _allocate(self, node: MlNode) -> None:
        cluster = node.cluster
        await self.take(self.timing.allocate)
        if cluster.nodes.get(node.id) is not node:
            return
        self.meters.start("vm", node.id, cluster.size, REGION, self.clock.now(), spot=cluster.spot)
        self._make_idle(node)

    def _make_idle(self, node: MlNode) -> None:
        node.state, node.idle_since = "idle", self.clock.now()
        node.cluster.resizing = any(each.state == "preparing" for each in node.cluster.nodes.values())
        node.leaving = self.cloud.operations.spawn(self._leave(node))
        self.schedule(node.cluster)

    async def _leave(self, node: MlNode) -> None:
        await self.clock.sleep(node.cluster.idle_s)
        node.state = "leaving"
        await self.take(self.timing.scale_down)
        self._drop(node)

    def _drop(self, node: MlNode) -> None:
        self.meters.stop("vm", node.id, self.clock.now())
        node.cluster.nodes.pop(node.id, None)
        if node.leaving is not None:
            node.leaving.cancel()

    def schedule(self, cluster: Cluster) -> None:
        """Give each job that waits a node that is idle; ask for more nodes for the others."""
        idle = [node for node in cluster.nodes.values() if node.state == "idle"]
        for job in self._jobs_of(cluster):
            waits = job.status == "Queued" and job.node is None and not self.troubles.sticks(job)
            if waits and idle:
                node = idle.pop()
                if node.leaving is not None:
                    node.leaving.cancel()
                node.state, node.job, job.node = "running", job, node
                job.life = self.cloud.operations.spawn(self._live(job, node))
        self.scale(cluster)

    # -- jobs ----------------------------------------------------------------------------------

    def add_job(self, name: str, body: Json, cluster: Cluster) -> MlJob:
        job = self.jobs[name.lower()] = MlJob(name, body, self.clock.now(), cluster.name, "Queued")
        self.schedule(cluster)
        return job

    async def _live(self, job: MlJob, node: MlNode) -> None:
        """From its node to its end."""
        job.status = "Preparing"
        if not self.troubles.sticks(job):
            await self.take(self.timing.pull)
        await self._while_stuck(job)
        trouble = self._why_not_started(job) or await self.nodes.pull(self._image(job), self._login(job))
        code = self._not_started(job, trouble) if trouble else await self._run(job)
        job.status = "Finalizing"
        await self._while_stuck(job)
        await self.take(self.timing.end)
        self._end(job, job.ended_by or ("Failed" if code else "Completed"))

    async def _while_stuck(self, job: MlJob) -> None:
        while self.troubles.sticks(job):
            await self.clock.sleep(1.0)

    def _why_not_started(self, job: MlJob) -> str:
        if self.troubles.pull_error and self.troubles.only(job.name):
            return self.troubles.pull_error
        if trouble := self._registry_refusal(job):
            return trouble
        if not self.has_kvm and KVM in str((job.body.get("resources") or {}).get("dockerArgs")):
            return (
                "Error response from daemon: error gathering device information while adding custom device "
                f'"{KVM}": no such file or directory'
            )
        return ""

    def _registry_refusal(self, job: MlJob) -> str:
        """What the registry of its image says, if that is private, to the workspace's connections."""
        image = self._image(job)
        server = image.partition("/")[0]
        if server not in self.registries:
            return ""
        if login := self._login(job):
            if login == self.registries[server]:
                return ""
            told = "unauthorized: authentication required"
            return f"Error response from daemon: Get https://{server}/v2/: {told}"
        told = "repository does not exist or may require 'docker login'"
        return f"Error response from daemon: pull access denied for {image}, {told}"

    def _image(self, job: MlJob) -> str:
        name, version = str(job.body["environmentId"]).split("/")[-3::2]
        return str((self.environments[name, version].get("properties") or {}).get("image"))

    def _login(self, job: MlJob) -> Json:
        """What the workspace's connections say of the registry of a job's image; nothing if none does."""
        server = self._image(job).partition("/")[0]
        for each in self.connections.values():
            shown = each["properties"]
            if shown.get("category") == "ContainerRegistry" and server in str(shown.get("target")):
                found: Json = shown.get("credentials") or {}
                return found
        return {}

    def _not_started(self, job: MlJob, trouble: str) -> int:
        self._log(job, "system_logs/lifecycler/lifecycler.log", trouble.encode())
        return 1

    async def _run(self, job: MlJob) -> int:
        job.status, job.starts = "Running", job.starts + 1
        limit_s = _limit_s(job)
        if self.troubles.sticks(job):
            await self._until(job, limit_s)
            return 1
        own = {"AZUREML_RUN_ID": job.name, "AZUREML_ARM_WORKSPACE_NAME": "standin"}
        environ = {**self.node_environ, **own, **(job.body.get("environmentVariables") or {})}
        with self.clock.hold():
            docker_args = str((job.body.get("resources") or {}).get("dockerArgs") or "")
            command = self.prelude + job.body["command"]
            job.run = run = await self.nodes.run(job.name, command, environ, self._image(job), docker_args)
        limit = asyncio.ensure_future(self.clock.sleep(limit_s))
        waiting = asyncio.ensure_future(run.wait())
        try:
            await asyncio.wait((waiting, limit), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                job.ended_by = "Canceled"
                run.kill()
            code = await waiting
        finally:
            limit.cancel()
            waiting.cancel()
            run.kill()
        self._log(job, "user_logs/std_log.txt", run.log())
        return code

    async def _until(self, job: MlJob, limit_s: float) -> None:
        """Stuck until its own limit ends it."""
        begun = self.clock.now()
        while self.troubles.sticks(job) and self.clock.now() - begun < limit_s:
            await self.clock.sleep(1.0)
        job.ended_by = "Canceled"

    def _log(self, job: MlJob, name: str, text: bytes) -> None:
        container = self.storage.containers.setdefault("azureml", BlobContainer({}))
        container.blobs[f"ExperimentRun/dcid.{job.name}/{name}"] = text

    def _end(self, job: MlJob, status: str) -> None:
        job.status, job.life, job.run = status, None, None
        node, job.node = job.node, None
        if node is not None:
            node.job = None
            if node.state == "unusable":
                self._drop(node)
            elif node.cluster.nodes.get(node.id) is node:
                self._make_idle(node)

    def _stop(self, job: MlJob, status: str) -> None:
        """At once."""
        if job.life is not None:
            job.life.cancel()
        if job.run is not None:
            job.run.kill()
        self._end(job, status)

    async def cancel(self, job: MlJob) -> Json | None:
        if job.status in OVER:
            return None
        before, job.status = job.status, "CancelRequested"
        if self.troubles.sticks(job):
            await self._while_stuck(job)
        elif before == "Finalizing" and "Finalizing" in self.troubles.stuck and self.troubles.only(job.name):
            job.status = before  # nothing hears it any more
            return None
        await self.take(self.timing.end)
        if job.status == "CancelRequested":
            self._stop(job, "Canceled")
        return None

    async def delete_job(self, job: MlJob) -> Json | None:
        await self.take(self.timing.end)
        if self.jobs.get(job.name.lower()) is job:
            del self.jobs[job.name.lower()]
        return None

    # -- what befalls nodes --------------------------------------------------------------------

    def preempt(self, job: MlJob) -> None:
        """Take the node of a job back: Azure runs the job anew on another one."""
        node = job.node
        if node is None:
            return
        if job.life is not None:
            job.life.cancel()
        if job.run is not None:
            job.run.kill()
        job.node = job.life = job.run = None
        job.status = "Queued"
        self._drop(node)
        self.schedule(node.cluster)

    def spoil(self, job: MlJob) -> None:
        """The node of a job becomes unusable: its container is gone, and the job says that it runs."""
        if job.node is not None:
            job.node.state = "unusable"
            self.kill(job)

    def kill(self, job: MlJob) -> None:
        """Its container dies, and nobody notices: the job says that it runs, until its own limit ends it."""
        if job.life is not None:
            job.life.cancel()
        if job.run is not None:
            job.run.kill()
        job.run, job.life = None, self.cloud.operations.spawn(self._expire(job))

    async def _expire(self, job: MlJob) -> None:
        await self.clock.sleep(_limit_s(job))
        self._end(job, "Canceled")


def _limit_s(job: MlJob) -> float:
    return seconds((job.body.get("limits") or {}).get("timeout") or "P1000D", "timeout")


def cores_of(size: str) -> int:
    return CORES.get(size.lower(), UNKNOWN_CORES)
