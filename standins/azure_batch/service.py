"""The state of the stand-in for Azure Batch: pools with nodes, jobs with tasks, and how they live."""

from __future__ import annotations

import asyncio
import itertools
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from standins.cloud.background import Background
from standins.cloud.clock import Clock
from standins.cloud.machines import MachineTrouble
from standins.cloud.meters import Meters
from standins.cloud.words import Json

from .formula import evaluated
from .nodes import ROOT, Nodes, TaskRun
from .words import REGION, Faults, seconds

Span = tuple[float, float]
CORES = {
    "standard_d2s_v3": 2,
    "standard_d4s_v3": 4,
    "standard_d4s_v5": 4,
    "standard_d4ds_v5": 4,
    "standard_d8s_v5": 8,
}
UNKNOWN_CORES = 4
NOT_STARTED = -1
RESIZE_S = 900.0
"""Batch gives a resize up after so long, unless the pool says otherwise."""
TIMED_OUT: Json = {
    "code": "AllocationTimedout",
    "message": "Desired number of nodes could not be allocated as the resize timeout was reached",
}


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds, from and to."""

    allocate: Span = (20.0, 60.0)
    """From a resize to a node."""
    start: Span = (20.0, 60.0)
    """From a node to its start task."""
    end: Span = (1.0, 5.0)
    """Until what is deleted is gone."""


@dataclass(eq=False)
class Task:
    """A task. `body`: what the client sent."""

    id: str
    body: Json
    created: float
    is_manager: bool = False
    state: str = "active"
    changed: float = 0.0
    info: Json = field(default_factory=lambda: {"retryCount": 0, "requeueCount": 0})
    node: Node | None = None
    life: asyncio.Task[None] | None = None
    run: TaskRun | None = None
    ended_by: str = ""
    """Why Batch ends it, in its words."""
    refused: str = ""
    """Why it could not be started, in those of a registry."""


@dataclass(eq=False)
class Job:
    """A job. `pool`: the id of the pool that its tasks run in."""

    id: str
    body: Json
    created: float
    pool: str
    state: str = "active"
    changed: float = 0.0
    ended: float | None = None
    reason: str = ""
    etag: int = 1
    limit: asyncio.Task[None] | None = None
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])


@dataclass(eq=False)
class Node:
    """A compute node."""

    id: str
    pool: Pool
    spot: bool
    allocated: float
    state: str = "creating"
    changed: float = 0.0
    booted: float = 0.0
    address: str = ""
    public: str = ""
    port: int = 0
    start_info: Json | None = None
    errors: list[Json] = field(default_factory=list[Json])
    task: Task | None = None


@dataclass(eq=False)
class Pool:
    """A pool. `auto`: of a job's life."""

    id: str
    body: Json
    created: float
    auto: bool = False
    state: str = "active"
    resizing: bool = False
    targets: dict[bool, int] = field(default_factory=dict[bool, int])
    """Nodes that are wanted: dedicated by False, spot by True."""
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    errors: list[Json] = field(default_factory=list[Json])
    formula: str = ""
    scaled: float = 0.0
    changed: float = 0.0
    scaling: asyncio.Task[None] | None = None
    evaluating: asyncio.Task[None] | None = None
    """Where it scales by a formula."""

    @property
    def cores(self) -> int:
        return CORES.get(str(self.body["vmSize"]).lower(), UNKNOWN_CORES)

    def of(self, spot: bool) -> list[Node]:
        return [node for node in self.nodes.values() if node.spot == spot and node.state != "leavingpool"]


class Service(Background):
    """Everything there is, and what Batch does by itself. Belongs to the server's thread."""

    def __init__(self, clock: Clock, nodes: Nodes, timing: Timing, seed: int) -> None:
        super().__init__()
        self.clock, self.nodes, self.timing = clock, nodes, timing
        self.random = random.Random(seed)
        self.faults = Faults(seed)
        self.meters = Meters()
        self.pools: dict[str, Pool] = {}
        self.jobs: dict[str, Job] = {}
        self.quota = {"dedicated": 100, "spot": 100, "pools": 100, "jobs": 300}
        """Cores, pools, and jobs that are active."""
        self.room = {False: 10_000, True: 10_000}
        """How many nodes the region has left, dedicated by False, spot by True."""
        self.registries: dict[str, Json] = {}
        """Private ones, by address: the login that each takes, as `username` and `password`, or
        `identityReference`. All others let everybody in."""
        self.scaled_s = 30.0
        """No two requests to scale a pool by a formula may be closer."""
        self.has_storage = True
        """Has the account a storage account of its own?"""
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        await super().close()
        await self.nodes.close()

    async def _take(self, span: Span) -> None:
        await self.clock.sleep(self.random.uniform(*span))

    # -- pools ---------------------------------------------------------------------------------

    def add_pool(self, id: str, body: Json, *, auto: bool = False) -> Pool:
        now = self.clock.now()
        pool = self.pools[id.lower()] = Pool(id, body, now, auto, changed=now)
        pool.formula = str(body.get("autoScaleFormula") or "")
        self.resize(
            pool, int(body.get("targetDedicatedNodes") or 0), int(body.get("targetLowPriorityNodes") or 0)
        )
        return pool

    def resize(self, pool: Pool, dedicated: int, spot: int) -> None:
        pool.targets = {False: dedicated, True: spot}
        pool.errors, pool.resizing, pool.changed = [], True, self.clock.now()
        if pool.scaling is not None:
            pool.scaling.cancel()
        pool.scaling = self.spawn(self._scale(pool))

    def enable_scaling(self, pool: Pool, formula: str, every_s: float) -> None:
        self.disable_scaling(pool)
        pool.formula, pool.scaled = formula, self.clock.now()
        pool.evaluating = self.spawn(self._evaluate(pool, every_s))

    def disable_scaling(self, pool: Pool) -> None:
        """Its targets stay as they are."""
        pool.formula = ""
        if pool.evaluating is not None:
            pool.evaluating.cancel()

    async def _evaluate(self, pool: Pool, every_s: float) -> None:
        while pool.state == "active":
            targets = evaluated(pool.formula, self.clock.now(), self._pending(pool))
            if targets != pool.targets:
                self.resize(pool, targets[False], targets[True])
            await self.clock.sleep(every_s)

    def _pending(self, pool: Pool) -> int:
        jobs = [job for job in self.jobs.values() if job.state == "active" and job.pool == pool.id]
        return sum(task.state != "completed" for job in jobs for task in job.tasks.values())

    async def _scale(self, pool: Pool) -> None:
        """Bring the pool to its targets, as far as quota and the region allow."""
        patience, needed = seconds(pool.body.get("resizeTimeout")), self.random.uniform(*self.timing.allocate)
        most = RESIZE_S if patience is None else patience
        await self.clock.sleep(min(needed, most))
        if needed > most and any(target > len(pool.of(spot)) for spot, target in pool.targets.items()):
            pool.errors.append(TIMED_OUT)
            pool.resizing, pool.changed = False, self.clock.now()
            return
        for spot, target in pool.targets.items():
            idle_first = sorted(pool.of(spot), key=lambda node: node.state == "running")
            for node in idle_first[: max(0, len(idle_first) - target)]:
                if node.task is None or not pool.formula:  # which says `taskcompletion`
                    self.spawn(self.release(node))
            for _ in range(target - len(pool.of(spot))):
                if (error := self._refused(pool, spot)) is not None:
                    pool.errors.append(error)
                    break
                self._add_node(pool, spot)
        pool.resizing, pool.changed = False, self.clock.now()

    def _refused(self, pool: Pool, spot: bool) -> Json | None:
        used = sum(
            each.cores for each in self.pools.values() for node in each.nodes.values() if node.spot == spot
        )
        kind = "spot" if spot else "dedicated"
        if used + pool.cores > self.quota[kind]:
            code = "AccountLowPriorityCoreQuotaReached" if spot else "AccountCoreQuotaReached"
            words = "The specified account has reached core quota"
            return {"code": code, "message": f"{words}{' for low priority nodes' if spot else ''}"}
        if self.room[spot] <= 0:
            return TIMED_OUT
        self.room[spot] -= 1
        return None

    def _add_node(self, pool: Pool, spot: bool) -> None:
        now = self.clock.now()
        id = f"tvmps_{self.random.getrandbits(256):064x}_{'p' if spot else 'd'}"
        node = pool.nodes[id] = Node(id, pool, spot, now, changed=now)
        self.meters.start("vm", id, str(pool.body["vmSize"]), REGION, now, spot=spot)
        self.spawn(self._boot(node))

    def _become(self, node: Node, state: str) -> None:
        if node.state != "leavingpool":
            node.state, node.changed = state, self.clock.now()

    async def _boot(self, node: Node) -> None:
        self._become(node, "creating")
        await self._take(self.timing.start)
        if not self._is_there(node):
            return
        try:
            node.address = await self.nodes.create(node.id)
        except MachineTrouble:
            if self._is_there(node):
                raise
            return
        if not self._is_there(node):
            await self.nodes.destroy(node.id)
            return
        node.booted = self.clock.now()
        await self._map_ports(node)
        if self.faults.nodes_unusable:
            node.errors = [{"code": "NodePreparationError", "message": self.faults.node_error}]
            self._become(node, "unusable")
            return
        if trouble := await self._unpullable(node.pool):
            node.errors = [{"code": "ContainerPoolPreparationError", "message": trouble}]
            self._become(node, "unusable")
            return
        await self._run_start_task(node)
        self.schedule()

    async def _unpullable(self, pool: Pool) -> str:
        """Why the images of a pool with containers cannot be had, in a registry's words."""
        contained = (pool.body.get("virtualMachineConfiguration") or {}).get("containerConfiguration") or {}
        logins = contained.get("containerRegistries") or []
        for name in contained.get("containerImageNames") or []:
            if trouble := await self._pull(name, logins):
                return trouble
        return ""

    async def _pull(self, image: str, logins: Sequence[Json]) -> str:
        """What the registry of an image says to these logins; nothing if it gives the image."""
        host, slash, _ = image.partition("/")
        server = host if slash and ("." in host or ":" in host) else "docker.io"
        given = next((each for each in logins if each.get("registryServer", "docker.io") == server), None)
        taken = self.registries.get(server)
        if taken is None:
            return await self.nodes.pull(image, given or {})
        if given is None:
            told = "repository does not exist or may require 'docker login'"
            return f"Error response from daemon: pull access denied for {image}, {told}"
        if all(given.get(key) == value for key, value in taken.items()):
            return ""
        return f"Error response from daemon: Get https://{server}/v2/: unauthorized: authentication required"

    async def _map_ports(self, node: Node) -> None:
        network = node.pool.body.get("networkConfiguration") or {}
        for nat in (network.get("endpointConfiguration") or {}).get("inboundNATPools") or []:
            taken = {each.port for pool in self.pools.values() for each in pool.nodes.values()}
            # each pool has an address of its own; here all share one, so no two nodes may have one port
            node.port = next(
                p for p in range(nat["frontendPortRangeStart"], nat["frontendPortRangeEnd"]) if p not in taken
            )
            rules = nat.get("networkSecurityGroupRules") or []
            node.public = await self.nodes.open_port(node.port, node.id, nat["backendPort"], rules)

    async def _run_start_task(self, node: Node) -> None:
        start = node.pool.body.get("startTask")
        if not start:
            self._become(node, "idle")
            return
        self._become(node, "waitingforstarttask")
        node.start_info = info = {"state": "running", "startTime": self.clock.stamp(), "retryCount": 0}
        if self.faults.start_tasks_fail:
            code = self.faults.start_task_code
        elif self.faults.start_tasks_hang:
            return
        else:
            run = await self._start(node, f"{ROOT}/startup", start, {})
            code = await run.wait()
        info.update(
            state="completed",
            endTime=self.clock.stamp(),
            exitCode=code,
            result="failure" if code else "success",
        )
        if code:
            info["failureInfo"] = failure(
                "FailureExitCode", "The task exited with an exit code representing a failure"
            )
        self._become(node, "starttaskfailed" if code and start.get("waitForSuccess", True) else "idle")

    def _is_there(self, node: Node) -> bool:
        return node.pool.nodes.get(node.id) is node and node.state != "leavingpool"

    async def release(self, node: Node, *, state: str = "leavingpool") -> None:
        """Give a node back. What runs there is put back into its queue."""
        if node.pool.nodes.get(node.id) is not node or node.state in ("leavingpool", "preempted"):
            return
        node.state, node.changed = state, self.clock.now()
        self.meters.stop("vm", node.id, self.clock.now())
        self.nodes.close_port(node.port)
        task = node.task
        if task is not None and task.life is not None:
            self._requeue(task)
        if node.booted:
            await self.nodes.destroy(node.id)
        await self._take(self.timing.end)
        node.pool.nodes.pop(node.id, None)

    def _requeue(self, task: Task) -> None:
        """Batch runs it anew, whatever its retry count: that its node was lost is not its fault."""
        assert task.life is not None
        task.life.cancel()
        if task.node is not None:
            task.node.task = None
        task.life = task.node = task.run = None
        task.state, task.changed = "active", self.clock.now()
        task.info["requeueCount"] += 1
        task.info["lastRequeueTime"] = self.clock.stamp()
        task.info.pop("startTime", None)

    async def preempt(self, node: Node) -> None:
        """Take a spot node back; the pool asks for another one."""
        await self.release(node, state="preempted")
        if node.pool.state == "active":
            self.resize(node.pool, node.pool.targets[False], node.pool.targets[True])

    async def reboot(self, node: Node) -> None:
        """A node restarts, and its task is run anew there."""
        if node.task is not None:
            self._requeue(node.task)
        self._become(node, "rebooting")
        await self.nodes.reboot(node.id)
        await self._run_start_task(node)
        self.schedule()

    async def delete_pool(self, pool: Pool) -> None:
        pool.state, pool.changed = "deleting", self.clock.now()
        if pool.scaling is not None:
            pool.scaling.cancel()
        self.disable_scaling(pool)
        pool.targets = {False: 0, True: 0}
        await asyncio.gather(*(self.release(node) for node in list(pool.nodes.values())))
        await self._take(self.timing.end)
        self.pools.pop(pool.id.lower(), None)

    # -- jobs ----------------------------------------------------------------------------------

    def add_job(self, id: str, body: Json) -> Job:
        info, now = body["poolInfo"], self.clock.now()
        if auto := info.get("autoPoolSpecification"):
            pool = f"{auto.get('autoPoolIdPrefix') or ''}_{self.random.getrandbits(128):032X}"
            self.add_pool(pool, dict(auto["pool"]), auto=True)
        else:
            pool = info["poolId"]
        job = self.jobs[id.lower()] = Job(id, body, now, pool, changed=now)
        if manager := body.get("jobManagerTask"):
            self.add_task(job, str(manager["id"]), manager, is_manager=True)
        job.limit = self.spawn(self._limit_job(job))
        return job

    async def _limit_job(self, job: Job) -> None:
        limit = seconds((job.body.get("constraints") or {}).get("maxWallClockTime"))
        if limit is not None:
            await self.clock.sleep_until(job.created + limit)
            await self.end_job(job, "MaxWallClockTimeExpiry")

    def update_job(self, job: Job, body: Json) -> None:
        """Another limit counts from when the job was made, too."""
        job.body |= body
        job.etag += 1
        if "constraints" in body and job.limit is not None:
            job.limit.cancel()
            job.limit = self.spawn(self._limit_job(job))

    async def end_job(self, job: Job, reason: str) -> None:
        """Tasks end, and so does the pool that was made for the job."""
        if job.state not in ("active", "disabled"):
            return
        job.state, job.reason, job.changed = "terminating", reason, self.clock.now()
        await asyncio.gather(*(self.end_task(job, task, "TaskEnded") for task in job.tasks.values()))
        job.ended = self.clock.now()
        if job.state == "terminating":
            job.state, job.changed = "completed", self.clock.now()
        self._drop_auto_pool(job)

    async def delete_job(self, job: Job) -> None:
        await self.end_job(job, "UserTerminate")
        job.state, job.changed = "deleting", self.clock.now()
        self._drop_auto_pool(job)
        await self._take(self.timing.end)
        if self.jobs.get(job.id.lower()) is job:
            del self.jobs[job.id.lower()]

    def _drop_auto_pool(self, job: Job) -> None:
        pool = self.pools.get(job.pool.lower())
        auto = job.body["poolInfo"].get("autoPoolSpecification") or {}
        if pool is not None and pool.auto and pool.state == "active" and not auto.get("keepAlive"):
            self.spawn(self.delete_pool(pool))

    # -- tasks ---------------------------------------------------------------------------------

    def add_task(self, job: Job, id: str, body: Json, *, is_manager: bool = False) -> Task:
        now = self.clock.now()
        task = job.tasks[id.lower()] = Task(id, body, now, is_manager, changed=now)
        self.schedule()
        return task

    def schedule(self) -> None:
        """Give each task that waits a node of its pool that is idle: one task a node."""
        for job in self.jobs.values():
            pool = self.pools.get(job.pool.lower())
            if job.state != "active" or pool is None or pool.state != "active":
                continue
            for task in job.tasks.values():
                node = next(
                    (
                        each
                        for each in pool.nodes.values()
                        if each.state == "idle" and self._takes(each, task)
                    ),
                    None,
                )
                if task.state == "active" and task.life is None and node is not None:
                    task.node, node.task = node, task
                    self._become(node, "running")
                    task.state, task.changed = "running", self.clock.now()
                    task.info["startTime"] = self.clock.stamp()
                    task.life = self.spawn(self._live(job, task, node))

    def _takes(self, node: Node, task: Task) -> bool:
        return not (task.is_manager and node.spot and not task.body.get("allowLowPriorityNode", True))

    async def _live(self, job: Job, task: Task, node: Node) -> None:
        code = await self._run_task(job, task, node)
        task.info.update(endTime=self.clock.stamp(), result="failure" if code else "success")
        if code != NOT_STARTED:
            task.info["exitCode"] = code
        if task.ended_by:
            words = task.refused or "The task was ended: by a request, or by its wall-clock limit"
            task.info["failureInfo"] = failure(task.ended_by, words)
        elif code:
            task.info["failureInfo"] = failure(
                "FailureExitCode", "The task exited with an exit code representing a failure"
            )
        task.state, task.changed, task.life = "completed", self.clock.now(), None
        node.task = None
        self._become(node, "idle")
        if node.pool.formula and len(node.pool.of(node.spot)) > node.pool.targets[node.spot]:
            self.spawn(self.release(node))
        self.spawn(self._after(job, task))

    async def _without_image(self, pool: Pool, task: Json) -> str:
        """Why a container that its pool has not pulled beforehand cannot be had."""
        wanted = task.get("containerSettings") or {}
        contained = (pool.body.get("virtualMachineConfiguration") or {}).get("containerConfiguration") or {}
        if not wanted or wanted["imageName"] in (contained.get("containerImageNames") or []):
            return ""
        own = [wanted["registry"]] if wanted.get("registry") else contained.get("containerRegistries") or []
        return await self._pull(wanted["imageName"], own)

    async def _run_task(self, job: Job, task: Task, node: Node) -> int:
        limit = seconds((task.body.get("constraints") or {}).get("maxWallClockTime"))
        env = {
            "AZ_BATCH_JOB_ID": job.id,
            "AZ_BATCH_TASK_ID": task.id,
            "AZ_BATCH_POOL_ID": node.pool.id,
            "AZ_BATCH_NODE_IS_DEDICATED": str(not node.spot).lower(),
        }
        if trouble := await self._without_image(node.pool, task.body):
            task.ended_by, task.refused = "ContainerImageNotPulled", trouble
            return NOT_STARTED
        if self.faults.mute and job.id.endswith(self.faults.mute):
            await self.clock.sleep(1e9 if limit is None else limit)
            task.ended_by = "TaskEnded"
            return 137
        task.run = run = await self._start(node, folder_of(job, task), task.body, env)
        waiting = asyncio.ensure_future(run.wait())
        clock = asyncio.ensure_future(self.clock.sleep(1e9 if limit is None else limit))
        try:
            await asyncio.wait((waiting, clock), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                task.ended_by = "TaskEnded"
                await run.kill()
            return await waiting
        finally:
            clock.cancel()
            waiting.cancel()

    async def _start(self, node: Node, folder: str, body: Json, env: dict[str, str]) -> TaskRun:
        given = {each["name"]: str(each.get("value", "")) for each in body.get("environmentSettings") or []}
        here = {
            "AZ_BATCH_NODE_ID": node.id,
            "AZ_BATCH_NODE_ROOT_DIR": str(ROOT.parent),
            "AZ_BATCH_TASK_DIR": folder,
            "AZ_BATCH_TASK_WORKING_DIR": f"{folder}/wd",
        }
        who = ((body.get("userIdentity") or {}).get("autoUser") or {}).get("elevationLevel")
        return await self.nodes.run(
            node.id,
            folder,
            shlex.split(body["commandLine"]),
            {**env, **here, **given},
            who == "admin",
            body.get("containerSettings") or {},
        )

    async def end_task(self, job: Job, task: Task, why: str) -> None:
        if task.state == "active":
            task.state, task.changed = "completed", self.clock.now()
            task.info.update(
                endTime=self.clock.stamp(),
                result="failure",
                failureInfo=failure(why, "Task Was Ended by User Request"),
            )
        elif task.state == "running" and task.life is not None:
            task.ended_by, life = why, task.life
            if task.run is not None:
                await task.run.kill()
            else:
                life.cancel()
            await asyncio.wait((life,))

    async def _after(self, job: Job, task: Task) -> None:
        self.schedule()
        if task.is_manager and task.body.get("killJobOnCompletion", True):
            await self.end_job(job, "JMComplete")
        elif job.body.get("onAllTasksComplete") == "terminatejob" and all(
            each.state == "completed" for each in job.tasks.values()
        ):
            await self.end_job(job, "AllTasksComplete")


def folder_of(job: Job, task: Task) -> str:
    return f"{ROOT}/workitems/{job.id}/job-1/{task.id}"


def failure(code: str, message: str) -> Json:
    return {"category": "usererror", "code": code, "message": message, "details": []}
