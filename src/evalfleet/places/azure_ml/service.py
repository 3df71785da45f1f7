"""The workspace as one look shows it: jobs, clusters and mailboxes of ours, and what their states mean."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from evalfleet.channels.mail.boxes import Mailboxes, PilotMarks
from evalfleet.channels.supervisor.pilot import NO_KVM
from evalfleet.errors import FleetError
from evalfleet.model import Machine, MachineId
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient
from evalfleet.places.azure.blobs import BlobAccount, BlobStorage
from evalfleet.places.azure.names import HOME, MACHINE
from evalfleet.places.azure.services import (
    NO_PYTHON,
    NO_PYTHON_WORDS,
    OLD_PYTHON,
    OLD_PYTHON_WORDS,
    REFUSALS,
)
from evalfleet.places.vm.answers import Json, rows, table

from .settings import MlAccount
from .template import ENVIRONMENT, seconds_of

VERSION = "2025-09-01"
SCHEDULES_VERSION = "2021-07-01"
"""`updateSchedules` is not in the descriptions of later versions of the API."""
DATASTORE = "workspaceblobstore"
ARTIFACTS = "azureml"
"""The container of the workspace's storage account that the logs of jobs are in."""
LOG_BYTES = 64 << 10
RECHECK_S = 15.0
"""So often the marks of a machine that is up are read: Azure may have run its job anew between two looks."""
Stage = Literal["waits", "prepares", "runs", "ends", "over"]
STAGES: Mapping[str, Stage] = {
    "notstarted": "waits",
    "scheduled": "waits",
    "queued": "waits",
    "provisioning": "waits",
    "paused": "waits",
    "unknown": "waits",
    "preparing": "prepares",
    "starting": "prepares",
    "running": "runs",
    "notresponding": "runs",
    "finalizing": "ends",
    "cancelrequested": "ends",
    "completed": "over",
    "failed": "over",
    "canceled": "over",
}
"""What each status of a job means for its machine. One that Azure adds later counts as `unknown` does: it
tells nothing of a job whose pilot has begun, which is heard by itself.

`waits`: it has no node yet, and costs nothing. `prepares`: a node of its own pulls the image. `runs`: its
container should run, and our own pilot tells whether it does. `ends`: nothing of ours runs there any more.
"""
ON_A_NODE = frozenset(
    ("preparing", "starting", "running", "notresponding", "finalizing", "completed", "failed")
)
"""Statuses that a job does not reach without a node, which is billed."""
BEFORE_A_START = frozenset(status for status, stage in STAGES.items() if stage in ("waits", "prepares")) - {
    "unknown"
}
"""Statuses that a job whose pilot has begun before has only if Azure runs it anew."""
RUNNING: frozenset[Stage] = frozenset(("waits", "prepares", "runs"))
KVM = "/dev/kvm"
UNUSABLE = "unusable"
IMAGE_REMEDY = "name an `image`"
"""All machines are made of the same image: with these words the place is given up."""
_PERMANENT = re.compile(
    r"manifest.*(unknown|not found)|no such image|pull access denied|unauthorized|authentication required"
    r"|repository does not exist|invalid reference format|not found: manifest",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"unauthorized|authentication required|pull access denied", re.IGNORECASE)
LOGIN_REMEDY = "`az ml connection create` with type container_registry, or AcrPull for its identity"
_TROUBLE = re.compile(r"error|fail|denied|unauthorized|toomanyrequests|manifest", re.IGNORECASE)
QUOTA_REMEDY = "ask for more cores for Azure Machine Learning (studio: Quota)"
REMEDIES = {
    "clustercorequotareached": QUOTA_REMEDY,
    "clusterminnodesexceedcorequota": QUOTA_REMEDY,
    "subscriptioncorequotareached": QUOTA_REMEDY,
    "quotaexceeded": QUOTA_REMEDY,
    "allocationfailed": "the region has no room for that size now: other `sizes` are tried",
    "allocationtimedout": "the region has no room for that size now: other `sizes` are tried",
}


class MlJob(Struct, frozen=True):
    """A job as the workspace lists it."""

    name: str
    status: str
    """In small letters."""
    cluster: str
    tags: Mapping[str, str]

    @property
    def stage(self) -> Stage:
        return STAGES.get(self.status, "waits")


def job_of(shown: Json) -> MlJob:
    properties = table(shown.get("properties"))
    tags = {str(name): str(value) for name, value in table(properties.get("tags")).items()}
    cluster = str(properties.get("computeId") or "").rpartition("/")[2]
    return MlJob(str(shown.get("name")), str(properties.get("status") or "").lower(), cluster, tags)


class MlNode(Struct, frozen=True):
    """A node that has a job."""

    id: str = ""
    state: str = ""
    """In small letters: running, preparing, unusable, leaving, preempted."""


NO_NODE = MlNode()


class MlSighting(Struct, frozen=True):
    """One machine of ours: its job and its mailbox, one of which may be gone."""

    machine: MachineId
    job: MlJob | None = None
    has_box: bool = False
    marks: PilotMarks = PilotMarks()
    node: MlNode = NO_NODE
    """The node that it has, as its cluster shows it."""
    cluster: Json = {}
    """What the workspace shows of its cluster, if it must be known."""
    since: float = 0.0
    """When its status was first seen, by Azure's clock."""
    ended_at: float | None = None
    """When it was first seen to be over."""
    words: str = ""
    """The end of its log, if it failed before its pilot began."""
    has_just_begun: bool = False
    """Its pilot's mark was first seen after its job's status was asked for."""


def is_cluster(compute: Json) -> bool:
    return str(table(compute.get("properties")).get("computeType")).lower() == "amlcompute"


class MlClient:
    """The calls of one workspace that we need. All raise ArmFault."""

    def __init__(self, arm: ArmClient, account: MlAccount) -> None:
        self.arm, self._account = arm, account
        self.root = account.path

    async def workspace(self) -> Json | None:
        return await self.arm.find(self.root, VERSION)

    async def registry_logins(self) -> list[str]:
        """The registries that the workspace logs in to: the targets of its connections of that kind."""
        shown = [
            table(each.get("properties")) for each in await self.arm.all(f"{self.root}/connections", VERSION)
        ]
        kept = [each for each in shown if str(each.get("category")).lower() == "containerregistry"]
        return [str(each.get("target")).removeprefix("https://").rstrip("/").lower() for each in kept]

    async def storage(self, endpoint: str) -> BlobAccount:
        """The storage account that the workspace has its files in. `endpoint`: if it is not Azure's own.

        Its key is known where the workspace's own access to it is by that key.
        """
        path = f"{self.root}/datastores/{DATASTORE}"
        store = await self.arm.get(path, VERSION)
        properties = table(store.get("properties"))
        name = str(properties.get("accountName") or "")
        secrets = await self.arm.send("POST", f"{path}/listSecrets", VERSION)
        key = str(secrets.get("key") or "")
        where = f"https://{name}.blob.{properties.get('endpoint') or 'core.windows.net'}"
        return BlobAccount(name, endpoint or where, key)

    async def datastore(self) -> str:
        """The container that people's files of the workspace are in, in the same storage account."""
        store = await self.arm.get(f"{self.root}/datastores/{DATASTORE}", VERSION)
        return str(table(store.get("properties")).get("containerName") or "")

    async def jobs(self) -> list[MlJob]:
        """The jobs that evalfleet has made, whichever home did."""
        query = {"tag": MACHINE, "listViewType": "All"}
        return [job_of(shown) for shown in await self.arm.all(f"{self.root}/jobs", VERSION, **query)]

    async def job(self, name: str) -> MlJob | None:
        shown = await self.arm.find(f"{self.root}/jobs/{name}", VERSION)
        return None if shown is None else job_of(shown)

    async def add_job(self, name: str, body: Json) -> None:
        await self.arm.send("PUT", f"{self.root}/jobs/{name}", VERSION, body)

    async def cancel_job(self, name: str) -> None:
        try:
            await self.arm.send("POST", f"{self.root}/jobs/{name}/cancel", VERSION)
        except ArmFault as fault:
            if fault.status not in (400, 404, 409):  # it is over, or gone
                raise

    async def delete_job(self, name: str) -> None:
        """Its record: it must be over."""
        await self._delete(f"{self.root}/jobs/{name}")

    async def _delete(self, path: str, **query: str) -> None:
        try:
            await self.arm.send("DELETE", path, VERSION, query=query)
        except ArmFault as fault:
            if fault.status != 404:
                raise

    async def cluster(self, name: str) -> Json | None:
        return await self.arm.find(f"{self.root}/computes/{name}", VERSION)

    async def idle_time(self, cluster: str) -> float | None:
        """How many seconds a cluster keeps a node without a job; None if it does not tell."""
        properties = table(table((await self.cluster(cluster) or {}).get("properties")).get("properties"))
        return seconds_of(table(properties.get("scaleSettings")).get("nodeIdleTimeBeforeScaleDown"))

    async def clusters(self) -> list[Json]:
        return await self.arm.all(f"{self.root}/computes", VERSION)

    async def add_cluster(self, name: str, body: Json) -> None:
        await self.arm.send("PUT", f"{self.root}/computes/{name}", VERSION, body)

    async def nodes(self, cluster: str) -> Mapping[str, MlNode]:
        """The nodes of a cluster that have a job, by its name."""
        try:
            told = await self.arm.send("POST", f"{self.root}/computes/{cluster}/listNodes", VERSION)
        except ArmFault as fault:
            if fault.status == 404:
                return {}
            raise
        return {
            str(node.get("runId")): MlNode(str(node.get("nodeId")), str(node.get("nodeState") or "").lower())
            for node in rows(told.get("nodes"))
        }

    async def delete_cluster(self, name: str) -> None:
        try:
            await self._delete(f"{self.root}/computes/{name}", underlyingResourceAction="Delete")
        except ArmFault as fault:
            if fault.status != 409:  # it is being deleted
                raise

    async def add_instance(self, name: str, body: Json) -> None:
        """Azure ML does not change a compute instance by a second PUT."""
        await self.arm.send("PUT", f"{self.root}/computes/{name}", VERSION, body)

    async def update_schedules(self, instance: str, schedules: Json) -> None:
        path = f"{self.root}/computes/{instance}/updateSchedules"
        await self.arm.send("POST", path, SCHEDULES_VERSION, schedules)

    async def act(self, compute: str, action: str) -> None:
        """Start, stop or restart a compute instance, and wait for that as long as Azure tells how it goes."""
        try:
            operation = await self.arm.begin(f"{self.root}/computes/{compute}/{action}", VERSION)
        except ArmFault as fault:
            if fault.status != 409:  # something is being done to it: the next look tells what
                raise
        else:
            await self.arm.finish(operation)

    async def add_environment(self, version: str, body: Json) -> str:
        """Returns its id."""
        path = f"{self.root}/environments/{ENVIRONMENT}/versions/{version}"
        if await self.arm.find(path, VERSION) is None:
            await self.arm.send("PUT", path, VERSION, body)
        return path


class WorkspaceInventory:
    """What exists of one home in a workspace. Two lists show it; more is asked of machines that change."""

    def __init__(
        self,
        client: MlClient,
        opened: Callable[[], Awaitable[BlobStorage]],
        boxes: Mailboxes,
        home: str,
    ) -> None:
        """`opened` tells the workspace's storage, in which the logs of jobs are."""
        self._client, self._opened, self._boxes, self._home = client, opened, boxes, home
        self._marks: dict[MachineId, PilotMarks] = {}
        self._since: dict[MachineId, tuple[str, float]] = {}
        """Of its job: the status, and when that was first seen."""
        self._read_at: dict[MachineId, float] = {}
        """When the marks in its mailbox were read."""
        self._ended: dict[MachineId, float] = {}
        self._words: dict[MachineId, str] = {}
        self._nodes: dict[MachineId, MlNode] = {}
        self._nodes_at: dict[str, float] = {}
        """By cluster: when its nodes were asked for."""

    async def look(self) -> Mapping[MachineId, MlSighting]:
        jobs, boxes = await asyncio.gather(self._client.jobs(), self._boxes.seen())
        found: dict[MachineId, MlSighting] = {}
        for box in boxes:
            found[box.machine] = MlSighting(box.machine, has_box=True)
        for job in jobs:
            if job.tags.get(HOME) == self._home and MACHINE in job.tags:
                machine = MachineId(job.tags[MACHINE])
                found[machine] = structs.replace(found.get(machine) or MlSighting(machine), job=job)
        for kept in (self._marks, self._since, self._read_at, self._ended, self._words, self._nodes):
            for machine in kept.keys() - found.keys():
                kept.pop(machine)
        clusters = await self._asked_clusters(list(found.values()))
        # a job without its mailbox, which goes last, is a record and no more, unless it may run somewhere
        there = [
            seen
            for seen in found.values()
            if seen.has_box
            or (seen.job is not None and seen.job.stage != "over" and clusters.get(seen.job.cluster))
        ]
        await self._find_nodes(there)
        closer = await asyncio.gather(*(self._closer(seen, clusters) for seen in there))
        return {seen.machine: seen for seen in closer}

    async def _find_nodes(self, found: Sequence[MlSighting]) -> None:
        """Ask for the nodes of jobs that have got one since the last look, and now and then for all: a node
        may become unusable while its job is said to run."""
        jobs = {
            seen.machine: seen.job
            for seen in found
            if seen.job is not None and seen.job.stage in ("prepares", "runs")
        }
        now = self._client.arm.now()
        asked = {
            job.cluster
            for machine, job in jobs.items()
            if machine not in self._nodes or not 0 <= now - self._nodes_at.get(job.cluster, 0.0) < RECHECK_S
        }
        clusters = sorted(asked - {""})
        self._nodes_at.update(dict.fromkeys(clusters, now))
        for nodes in await asyncio.gather(*(self._client.nodes(name) for name in clusters)):
            self._nodes.update(
                {machine: nodes[job.name] for machine, job in jobs.items() if job.name in nodes}
            )

    async def _asked_clusters(self, found: Sequence[MlSighting]) -> Mapping[str, Json]:
        """Those that machines wait for: why, only the cluster tells; and those of jobs without a mailbox."""
        names = {
            seen.job.cluster
            for seen in found
            if seen.job is not None and (seen.job.stage == "waits" or not seen.has_box)
        }
        asked = sorted(names - {""})
        shown = await asyncio.gather(*(self._client.cluster(name) for name in asked))
        return {name: cluster or {} for name, cluster in zip(asked, shown, strict=True)}

    async def _closer(self, seen: MlSighting, clusters: Mapping[str, Json]) -> MlSighting:
        now, job, machine = self._client.arm.now(), seen.job, seen.machine
        status = job.status if job is not None else ""
        if machine not in self._since or self._since[machine][0] != status:
            self._since[machine] = (status, now)
        marks = known = self._marks.get(machine, PilotMarks())
        read_s = now - self._read_at.get(machine, 0.0)
        settled = status == "running" and marks.start is not None and 0 <= read_s < RECHECK_S
        if seen.has_box and not settled:
            marks = self._marks[machine] = await self._boxes.marks(machine, marks)
            self._read_at[machine] = now
        has_node = job is not None and (job.status in ON_A_NODE or marks.start is not None)
        if seen.has_box and has_node and marks.allocated is None:
            allocated = await self._boxes.mark_allocated(machine, now)
            marks = self._marks[machine] = marks._replace(allocated=allocated)
        ended_at = None
        if job is not None and job.stage in ("ends", "over"):
            ended_at = self._ended.setdefault(machine, now)
            if marks.start is None and marks.end is None and machine not in self._words:
                self._words[machine] = await self._last_words(job.name)
        return structs.replace(
            seen,
            marks=marks,
            has_just_begun=known.start is None and marks.start is not None,
            node=self._nodes.get(machine, NO_NODE),
            cluster=clusters.get(job.cluster, {}) if job is not None else {},
            since=self._since[machine][1],
            ended_at=ended_at,
            words=self._words.get(machine, ""),
        )

    async def _last_words(self, job: str) -> str:
        """The last line of trouble in the logs of a job that never began."""
        folder = f"ExperimentRun/dcid.{job}/"
        try:
            logs = (await self._opened()).bucket(ARTIFACTS)
            names = await logs.names(folder)
            chosen = sorted(names, key=lambda name: ("std_log" not in name, name))
            for name in chosen:
                text = (await logs.read(name, LOG_BYTES) or b"").decode("utf-8", "replace")
                lines = [line.strip() for line in text.splitlines() if _TROUBLE.search(line)]
                if "std_log" in name and not lines:
                    lines = [line.strip() for line in text.splitlines() if line.strip()]
                if lines:
                    return lines[-1][:300]
        except (ArmFault, FleetError):
            return ""
        return ""


# -- what it means -------------------------------------------------------------------------------------


class StagePatience(Struct, frozen=True):
    """The times for which a job may be in each stage before its machine is given up."""

    prepare_s: float
    start_s: float


def machine_of(seen: MlSighting, now: float, patience: StagePatience) -> Machine:
    """The machine as `list` shows it. `now` is by Azure's clock."""
    job, marks = seen.job, seen.marks
    if job is None:
        detail = "being deleted" if marks.stop else "being submitted"
        return Machine(seen.machine, "gone" if marks.stop else "queued", ran_s=0.0, detail=detail)
    node = seen.node.id or ("" if marks.start is None else marks.start.node)
    shown = Machine(seen.machine, "pending", job.name if marks.start else "", node, detail=_told(job))
    if marks.allocated is not None:
        shown = structs.replace(
            shown, start=f"{job.name}.1", ran_s=max(0.0, (seen.ended_at or now) - marks.allocated)
        )
    begun_before = marks.start is not None and not seen.has_just_begun
    if marks.restarted or (begun_before and job.status in BEFORE_A_START):
        why = f"{_told(job)}: its node was taken back, and Azure runs the job anew"
        return structs.replace(shown, phase="evicted", detail=why)
    if marks.end is not None or job.stage in ("ends", "over"):
        return _ended(seen, job, shown)
    if seen.node.state == UNUSABLE:
        return structs.replace(shown, phase="gone", detail=f"{_told(job)}, but its node {node} is unusable")
    if marks.start is not None:
        return structs.replace(shown, phase="gone" if marks.stop else "up")
    if job.stage == "waits":
        return _waiting(seen, job)
    limit_s = patience.prepare_s if job.stage == "prepares" else patience.start_s
    if now - seen.since > limit_s:
        what = "its image is not there" if job.stage == "prepares" else "its container has not started"
        detail = f"{_told(job)} for {(now - seen.since) / 60:.0f} min, but {what}"
        return structs.replace(shown, phase="gone", detail=detail)
    return structs.replace(shown, step="pull" if job.stage == "prepares" else "")


def _told(job: MlJob) -> str:
    return f"Azure ML: {job.status}"


def _waiting(seen: MlSighting, job: MlJob) -> Machine:
    properties = table(table(seen.cluster.get("properties")).get("properties"))
    errors = [table(each.get("error")) or each for each in rows(properties.get("errors"))]
    steady = str(properties.get("allocationState")).lower() == "steady"
    if errors and steady and not int(properties.get("currentNodeCount") or 0):
        code = str(errors[0].get("code") or "")
        remedy = REMEDIES.get(code.lower(), "other `sizes` are tried")
        message = str(errors[0].get("message") or "").rstrip(".")
        return Machine(seen.machine, "gone", ran_s=0.0, detail=f"Azure ML: {message} ({code}); {remedy}")
    counts = table(properties.get("nodeStateCounts"))
    broken = int(counts.get("unusableNodeCount") or 0)
    if steady and broken and broken == int(properties.get("currentNodeCount") or 0):
        words = f"all nodes of its cluster ({broken}) are unusable; other `sizes` are tried"
        return Machine(seen.machine, "gone", ran_s=0.0, detail=f"{_told(job)}, and {words}")
    told = str(properties.get("allocationState") or "").lower()
    return Machine(
        seen.machine, "queued", ran_s=0.0, detail=_told(job) + (f", its cluster is {told}" if told else "")
    )


def _ended(seen: MlSighting, job: MlJob, shown: Machine) -> Machine:
    """A machine whose job is over, or about to be."""
    end = seen.marks.end
    if end is not None and end.code in REFUSALS:
        return structs.replace(shown, phase="gone", address="", start="", detail=REFUSALS[end.code])
    if seen.marks.start is None and KVM in seen.words:  # no container can be started with the device
        told = f"Azure ML: {seen.words}; {REFUSALS[NO_KVM]}"
        return structs.replace(shown, phase="gone", start="", detail=told)
    ran_s = shown.ran_s
    if end is not None and seen.marks.allocated is not None:
        ran_s = max(0.0, end.at - seen.marks.allocated)
    if seen.marks.start is not None:
        why = "" if end is None else end.why
        phase: Literal["evicted", "gone"] = "evicted" if why == "evicted" else "gone"
        return structs.replace(
            shown, phase=phase, ran_s=ran_s, detail=_told(job) + (f", {why}" if why else "")
        )
    for words, code in ((NO_PYTHON_WORDS, NO_PYTHON), (OLD_PYTHON_WORDS, OLD_PYTHON)):
        if words in seen.words:
            return structs.replace(shown, phase="gone", start="", detail=REFUSALS[code])
    if _PERMANENT.search(seen.words):
        told = f"Azure ML: {seen.words}; {IMAGE_REMEDY} that is there (`evalfleet doctor` looks)"
        if _LOGIN.search(seen.words):
            told += f", or let the workspace log in to its registry: {LOGIN_REMEDY}"
        return structs.replace(shown, phase="gone", start="", detail=told)
    told = f"{_told(job)} before its container began" + (f": {seen.words}" if seen.words else "")
    return structs.replace(shown, phase="gone", detail=told)
