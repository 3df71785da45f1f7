"""The calls of Batch's data plane that the stand-in knows, and the one of Azure that tells quotas."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import quote

from standins.azure.blobs import ACCOUNT as STORAGE
from standins.azure.words import SUBSCRIPTION
from standins.cloud.words import Answer, Call, Json

from .formula import evaluated
from .nodes import ROOT
from .service import Job, Node, Pool, Service, Task, folder_of
from .words import ACCOUNT, REGION, VERSION, BatchError, checked_id, invalid, missing, need, seconds

PAGE = 1000
EVALUATED_S = 900.0
"""Formulas are evaluated so often, unless the client says otherwise."""
RESERVED = range(50_000, 55_001)
IMAGES = (
    ("canonical", "ubuntu-24_04-lts", "server", "batch.node.ubuntu 24.04", ()),
    ("canonical", "0001-com-ubuntu-server-jammy", "22_04-lts", "batch.node.ubuntu 22.04", ()),
    ("microsoft-dsvm", "ubuntu-hpc", "2404", "batch.node.ubuntu 24.04", ("DockerCompatible",)),
)
COUNTS = [
    "creating",
    "idle",
    "offline",
    "preempted",
    "rebooting",
    "reimaging",
    "running",
    "starting",
    "startTaskFailed",
    "leavingPool",
    "unknown",
    "unusable",
    "waitingForStartTask",
    "deallocated",
    "deallocating",
    "upgradingOS",
]
Handler = Callable[..., Awaitable[Answer]]
_STARTS = re.compile(r"startswith\(\s*id\s*,\s*'([^']*)'\s*\)")
_EQUAL = re.compile(r"(\w+)\s+eq\s+'([^']*)'")


class Api:
    """What each call does."""

    def __init__(self, service: Service) -> None:
        self._service = service
        item = r"([^/()]+)"
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/supportedimages", self._images),
            ("GET", "/nodecounts", self._counts),
            ("POST", "/pools", self._add_pool),
            ("GET", "/pools", self._pools),
            ("GET", f"/pools/{item}", self._pool),
            ("DELETE", f"/pools/{item}", self._delete_pool),
            ("POST", f"/pools/{item}/resize", self._resize),
            ("POST", f"/pools/{item}/enableautoscale", self._scale),
            ("POST", f"/pools/{item}/disableautoscale", self._stop_scaling),
            ("POST", f"/pools/{item}/removenodes", self._remove_nodes),
            ("GET", f"/pools/{item}/nodes", self._nodes),
            ("GET", f"/pools/{item}/nodes/{item}", self._node),
            ("GET", f"/pools/{item}/nodes/{item}/files/(.+)", self._node_file),
            ("POST", "/jobs", self._add_job),
            ("GET", "/jobs", self._jobs),
            ("GET", f"/jobs/{item}", self._job),
            ("PATCH", f"/jobs/{item}", self._patch_job),
            ("DELETE", f"/jobs/{item}", self._delete_job),
            ("POST", f"/jobs/{item}/terminate", self._end_job),
            ("POST", f"/jobs/{item}/tasks", self._add_task),
            ("GET", f"/jobs/{item}/tasks", self._tasks),
            ("GET", f"/jobs/{item}/taskcounts", self._task_counts),
            ("GET", f"/jobs/{item}/tasks/{item}", self._task),
            ("POST", f"/jobs/{item}/tasks/{item}/terminate", self._end_task),
            ("GET", f"/jobs/{item}/tasks/{item}/files", self._files),
            ("GET", f"/jobs/{item}/tasks/{item}/files/(.+)", self._file),
        ]
        self._routes = [(method, re.compile(path), handler) for method, path, handler in routes]

    async def answer(self, call: Call) -> Answer:
        """Raises BatchError."""
        if call.path.lower().startswith("/subscriptions/"):
            return self._managed(call)
        version = call.asks("api-version")
        if not version:
            raise BatchError(
                400,
                "MissingRequiredQueryParameter",
                "A query parameter that's mandatory for this request is not specified.",
                QueryParameterName="api-version",
            )
        if version != VERSION:
            raise BatchError(
                400, "UnsupportedRequestVersion", f"The api-version {version} is not one of {VERSION}."
            )
        for method, path, handler in self._routes:
            found = path.fullmatch(call.path)
            if found is not None and method == call.method:
                return await handler(call, *found.groups())
        raise BatchError(405, "UnsupportedHttpVerb", f"The stand-in does not know {call.method} {call.path}")

    def _managed(self, call: Call) -> Answer:
        """The account, as the Resource Manager shows it."""
        quota, kind = self._service.quota, "Microsoft.Batch/batchAccounts"
        if not call.path.startswith(f"/subscriptions/{SUBSCRIPTION}/"):
            raise BatchError(404, "SubscriptionNotFound", "The subscription could not be found.")
        group = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/evals"
        account = {
            "id": f"{group}/providers/{kind}/{ACCOUNT}",
            "name": ACCOUNT,
            "type": kind,
            "location": REGION,
            "properties": {
                "accountEndpoint": f"{ACCOUNT}.{REGION}.batch.azure.com",
                "provisioningState": "Succeeded",
                "poolAllocationMode": "BatchService",
                "dedicatedCoreQuota": quota["dedicated"],
                "dedicatedCoreQuotaPerVMFamilyEnforced": False,
                "dedicatedCoreQuotaPerVMFamily": [],
                "lowPriorityCoreQuota": quota["spot"],
                "poolQuota": quota["pools"],
                "activeJobAndJobScheduleQuota": quota["jobs"],
                "publicNetworkAccess": "Enabled",
                "autoStorage": {
                    "storageAccountId": f"{group}/providers/Microsoft.Storage/storageAccounts/{STORAGE}"
                }
                if self._service.has_storage
                else None,
            },
        }
        if call.method == "GET" and call.path.lower().endswith(f"/providers/{kind.lower()}"):
            return Answer(200, {"value": [account]})
        raise BatchError(404, "ResourceNotFound", f"The stand-in does not know {call.path}")

    # -- lists -----------------------------------------------------------------------------------

    def _page(self, call: Call, shown: list[Json]) -> Answer:
        chosen = [each for each in shown if _fits(call.asks("$filter"), each)]
        size = min(PAGE, int(call.asks("maxresults") or PAGE))
        begin = int(call.asks("$skiptoken") or 0)
        body: Json = {"odata.metadata": f"{call.base}/$metadata", "value": chosen[begin : begin + size]}
        if begin + size < len(chosen):
            more = {**call.query, "$skiptoken": str(begin + size)}
            body["odata.nextLink"] = f"{call.base}{call.path}?" + "&".join(
                f"{k}={quote(v)}" for k, v in more.items()
            )
        return Answer(200, body)

    async def _images(self, call: Call) -> Answer:
        return self._page(
            call,
            [
                {
                    "nodeAgentSKUId": agent,
                    "imageReference": {
                        "publisher": publisher,
                        "offer": offer,
                        "sku": sku,
                        "version": "latest",
                    },
                    "osType": "linux",
                    "capabilities": list(capabilities),
                    "verificationType": "verified",
                }
                for publisher, offer, sku, agent, capabilities in IMAGES
            ],
        )

    async def _counts(self, call: Call) -> Answer:
        pools = self._service.pools.values()
        return self._page(
            call,
            [
                {
                    "poolId": pool.id,
                    "dedicated": _count(pool, False),
                    "lowPriority": _count(pool, True),
                }
                for pool in pools
            ],
        )

    # -- pools -----------------------------------------------------------------------------------

    def _find_pool(self, id: str) -> Pool:
        pool = self._service.pools.get(id.lower())
        if pool is None:
            raise BatchError(404, "PoolNotFound", "The specified pool does not exist.")
        return pool

    async def _add_pool(self, call: Call) -> Answer:
        id = checked_id(call.body)
        if id.lower() in self._service.pools:
            raise BatchError(409, "PoolExists", "The specified pool already exists.")
        check_pool(call.body)
        self._check_quota("pools", len(self._service.pools))
        self._service.add_pool(id, call.body)
        return Answer(201)

    def _check_quota(self, what: str, used: int) -> None:
        if used >= self._service.quota[what]:
            code = "PoolQuotaReached" if what == "pools" else "ActiveJobAndScheduleQuotaReached"
            raise BatchError(
                409, code, f"The account has reached its quota of {self._service.quota[what]} {what}."
            )

    async def _pools(self, call: Call) -> Answer:
        return self._page(call, [self._show_pool(pool) for pool in self._service.pools.values()])

    async def _pool(self, call: Call, id: str) -> Answer:
        return Answer(200, self._show_pool(self._find_pool(id)))

    async def _delete_pool(self, call: Call, id: str) -> Answer:
        pool = self._find_pool(id)
        if pool.state == "deleting":
            raise BatchError(409, "PoolBeingDeleted", "The specified pool is being deleted.")
        self._service.spawn(self._service.delete_pool(pool))
        return Answer(202)

    async def _resize(self, call: Call, id: str) -> Answer:
        pool = self._find_pool(id)
        if pool.formula:
            raise BatchError(
                409, "OperationInvalidForCurrentState", "Automatic scaling is enabled on the pool."
            )
        if pool.resizing:
            raise BatchError(
                409,
                "PoolResizing" if pool.state == "active" else "PoolBeingDeleted",
                "The specified pool is being resized.",
            )
        targets = (call.body.get("targetDedicatedNodes"), call.body.get("targetLowPriorityNodes"))
        if targets == (None, None):
            raise missing("targetDedicatedNodes")
        self._service.resize(pool, *(int(each or 0) for each in targets))
        return Answer(202)

    async def _scale(self, call: Call, id: str) -> Answer:
        pool, service = self._find_pool(id), self._service
        formula, every = need(call.body, "autoScaleFormula"), call.body.get("autoScaleEvaluationInterval")
        if (seconds(every) or EVALUATED_S) < 300:
            raise invalid("autoScaleEvaluationInterval", every, "from 5 minutes to 168 hours")
        if pool.resizing:
            raise BatchError(409, "PoolResizing", "The specified pool is being resized.")
        if service.clock.now() - pool.scaled < service.scaled_s:
            raise BatchError(
                409,
                "AutoScaleTooManyRequestsToEnable",
                "Another request to enable autoscale on the pool was within 30 seconds.",
            )
        try:
            evaluated(formula, service.clock.now(), 0)
        except SyntaxError as error:
            raise BatchError(
                400, "AutoScalingFormulaSyntaxError", f"The formula has a syntax error: {error.msg}"
            ) from None
        service.enable_scaling(pool, formula, seconds(every) or EVALUATED_S)
        return Answer(200)

    async def _stop_scaling(self, call: Call, id: str) -> Answer:
        self._service.disable_scaling(self._find_pool(id))
        return Answer(200)

    async def _remove_nodes(self, call: Call, id: str) -> Answer:
        pool = self._find_pool(id)
        for each in need(call.body, "nodeList"):
            if (node := pool.nodes.get(each)) is not None:
                pool.targets[node.spot] = max(0, pool.targets[node.spot] - 1)
                self._service.spawn(self._service.release(node))
        return Answer(202)

    def _show_pool(self, pool: Pool) -> Json:
        stamp = self._service.clock.stamp
        kept = (
            "vmSize",
            "virtualMachineConfiguration",
            "networkConfiguration",
            "startTask",
            "metadata",
            "taskSlotsPerNode",
            "displayName",
        )
        return {
            "id": pool.id,
            **{key: without_passwords(pool.body[key]) for key in kept if key in pool.body},
            "state": pool.state,
            "allocationState": "resizing" if pool.resizing else "steady",
            "creationTime": stamp(pool.created),
            "stateTransitionTime": stamp(pool.changed),
            "targetDedicatedNodes": pool.targets.get(False, 0),
            "targetLowPriorityNodes": pool.targets.get(True, 0),
            "currentDedicatedNodes": len(pool.of(False)),
            "currentLowPriorityNodes": len(pool.of(True)),
            "enableAutoScale": bool(pool.formula),
            **({"autoScaleFormula": pool.formula} if pool.formula else {}),
            **({"resizeErrors": pool.errors} if pool.errors else {}),
        }

    async def _nodes(self, call: Call, id: str) -> Answer:
        return self._page(call, [self._show_node(node) for node in self._find_pool(id).nodes.values()])

    async def _node(self, call: Call, id: str, node: str) -> Answer:
        found = self._find_pool(id).nodes.get(node)
        if found is None:
            raise BatchError(404, "NodeNotFound", "The specified node does not exist.")
        return Answer(200, self._show_node(found))

    def _show_node(self, node: Node) -> Json:
        stamp = self._service.clock.stamp
        ends = [
            {
                "name": "ssh.0",
                "protocol": "tcp",
                "publicIPAddress": node.public,
                "publicFQDN": "dns.eastus.cloudapp.azure.com",
                "frontendPort": node.port,
                "backendPort": 22,
            }
        ]
        return {
            "id": node.id,
            "state": node.state,
            "schedulingState": "enabled",
            "stateTransitionTime": stamp(node.changed),
            "allocationTime": stamp(node.allocated),
            **({"lastBootTime": stamp(node.booted)} if node.booted else {}),
            "ipAddress": node.address or "10.0.0.4",
            "vmSize": node.pool.body["vmSize"],
            "isDedicated": not node.spot,
            "runningTasksCount": int(node.task is not None),
            **({"startTaskInfo": node.start_info} if node.start_info else {}),
            **({"errors": node.errors} if node.errors else {}),
            **({"endpointConfiguration": {"inboundEndpoints": ends}} if node.port else {}),
        }

    # -- jobs ------------------------------------------------------------------------------------

    def _find_job(self, id: str) -> Job:
        job = self._service.jobs.get(id.lower())
        if job is None:
            raise BatchError(404, "JobNotFound", "The specified job does not exist.")
        return job

    async def _add_job(self, call: Call) -> Answer:
        body, service = call.body, self._service
        id = checked_id(body)
        if id.lower() in service.jobs:
            deleting = service.jobs[id.lower()].state == "deleting"
            code = "JobBeingDeleted" if deleting else "JobExists"
            raise BatchError(
                409,
                code,
                "The specified job already exists."
                if not deleting
                else "The specified job is being deleted.",
            )
        where = need(body, "poolInfo")
        auto = where.get("autoPoolSpecification")
        if bool(auto) == bool(where.get("poolId")):
            raise invalid("poolInfo", where, "either poolId or autoPoolSpecification must be specified")
        if auto:
            need(auto, "poolLifetimeOption")
            if len(str(auto.get("autoPoolIdPrefix") or "")) > 20:
                raise invalid("autoPoolIdPrefix", auto["autoPoolIdPrefix"], "up to 20 characters")
            check_pool(need(auto, "pool"))
            self._check_quota("pools", len(service.pools))
        if manager := body.get("jobManagerTask"):
            self._check_task(manager, need(auto, "pool") if auto else self._pool_body(where))
        self._check_quota("jobs", sum(job.state == "active" for job in service.jobs.values()))
        seconds((body.get("constraints") or {}).get("maxWallClockTime"))
        service.add_job(id, body)
        return Answer(201)

    def _pool_body(self, where: Json) -> Json:
        pool = self._service.pools.get(str(where["poolId"]).lower())
        return pool.body if pool is not None else {}

    def _check_task(self, task: Json, pool: Json) -> None:
        checked_id(task)
        need(task, "commandLine")
        seconds((task.get("constraints") or {}).get("maxWallClockTime"))
        contained = (pool.get("virtualMachineConfiguration") or {}).get("containerConfiguration")
        if login := (task.get("containerSettings") or {}).get("registry"):
            check_registry(login)
        if contained and not task.get("containerSettings"):
            raise BatchError(
                400,
                "InvalidPropertyValue",
                "A pool with containerConfiguration takes container tasks only.",
                PropertyName="containerSettings",
            )
        if task.get("containerSettings") and not contained:
            raise BatchError(
                400,
                "InvalidPropertyValue",
                "The pool has no containerConfiguration.",
                PropertyName="containerSettings",
            )

    async def _jobs(self, call: Call) -> Answer:
        return self._page(call, [self._show_job(job) for job in self._service.jobs.values()])

    async def _job(self, call: Call, id: str) -> Answer:
        return Answer(200, self._show_job(self._find_job(id)))

    async def _patch_job(self, call: Call, id: str) -> Answer:
        job = self._find_job(id)
        if job.state not in ("active", "disabled"):
            raise BatchError(409, "JobCompleted", "The specified job is already in a completed state.")
        given = ("constraints", "metadata", "priority", "onAllTasksComplete")
        self._service.update_job(job, {key: call.body[key] for key in given if key in call.body})
        return Answer(200)

    async def _delete_job(self, call: Call, id: str) -> Answer:
        job = self._find_job(id)
        if job.state == "deleting":
            raise BatchError(409, "JobBeingDeleted", "The specified job is being deleted.")
        self._service.spawn(self._service.delete_job(job))
        return Answer(202)

    async def _end_job(self, call: Call, id: str) -> Answer:
        job = self._find_job(id)
        if job.state != "active":
            raise BatchError(409, "JobCompleted", "The specified job is already in a completed state.")
        self._service.spawn(
            self._service.end_job(job, str(call.body.get("terminateReason") or "UserTerminate"))
        )
        return Answer(202)

    def _show_job(self, job: Job) -> Json:
        stamp = self._service.clock.stamp
        kept = ("constraints", "metadata", "jobManagerTask", "onAllTasksComplete", "displayName")
        info: Json = {"startTime": stamp(job.created), "poolId": job.pool}
        if job.ended is not None:
            info |= {"endTime": stamp(job.ended), "terminateReason": job.reason}
        return {
            "id": job.id,
            **{key: without_passwords(job.body[key]) for key in kept if key in job.body},
            "eTag": f"0x{job.etag:X}",
            "creationTime": stamp(job.created),
            "lastModified": stamp(job.changed),
            "state": job.state,
            "stateTransitionTime": stamp(job.changed),
            "priority": 0,
            "poolInfo": without_passwords(job.body["poolInfo"]),
            "executionInfo": info,
        }

    # -- tasks -----------------------------------------------------------------------------------

    def _find_task(self, job: str, id: str) -> tuple[Job, Task]:
        found = self._find_job(job)
        task = found.tasks.get(id.lower())
        if task is None:
            raise BatchError(404, "TaskNotFound", "The specified task does not exist.")
        return found, task

    async def _add_task(self, call: Call, job: str) -> Answer:
        found, id = self._find_job(job), checked_id(call.body)
        if found.state != "active":
            raise BatchError(409, "JobCompleted", "The specified job is already in a completed state.")
        if id.lower() in found.tasks:
            raise BatchError(409, "TaskExists", "The specified task already exists.")
        pool = self._service.pools.get(found.pool.lower())
        self._check_task(call.body, pool.body if pool is not None else {})
        self._service.add_task(found, id, call.body)
        return Answer(201)

    async def _tasks(self, call: Call, job: str) -> Answer:
        found = self._find_job(job)
        return self._page(call, [self._show_task(found, task) for task in found.tasks.values()])

    async def _task_counts(self, call: Call, job: str) -> Answer:
        tasks = list(self._find_job(job).tasks.values())
        ends = [str(task.info.get("result")) for task in tasks if task.state == "completed"]
        runs = sum(task.state == "running" for task in tasks)
        counts = {"active": len(tasks) - runs - len(ends), "running": runs, "completed": len(ends)}
        counts |= {"succeeded": ends.count("success"), "failed": ends.count("failure")}
        return Answer(200, {"taskCounts": counts, "taskSlotCounts": counts})  # each task takes one slot

    async def _task(self, call: Call, job: str, id: str) -> Answer:
        return Answer(200, self._show_task(*self._find_task(job, id)))

    async def _end_task(self, call: Call, job: str, id: str) -> Answer:
        found, task = self._find_task(job, id)
        if task.state == "completed":
            raise BatchError(409, "TaskCompleted", "The specified task is already in a completed state.")
        self._service.spawn(self._service.end_task(found, task, "TaskEnded"))
        return Answer(204)

    def _show_task(self, job: Job, task: Task) -> Json:
        stamp, node = self._service.clock.stamp, task.node
        where: Json = {}
        if node is not None:
            where = {
                "nodeInfo": {
                    "poolId": node.pool.id,
                    "nodeId": node.id,
                    "taskRootDirectory": folder_of(job, task),
                }
            }
        kept = ("commandLine", "constraints", "environmentSettings", "userIdentity", "displayName")
        return {
            "id": task.id,
            **{key: task.body[key] for key in kept if key in task.body},
            "creationTime": stamp(task.created),
            "state": task.state,
            "stateTransitionTime": stamp(task.changed),
            "executionInfo": task.info,
            **where,
        }

    # -- files -----------------------------------------------------------------------------------

    def _node_of(self, task: Task) -> Node:
        if task.node is None or task.node.pool.nodes.get(task.node.id) is not task.node:
            raise BatchError(409, "OperationInvalidForCurrentState", "The task has no node now.")
        return task.node

    async def _files(self, call: Call, job: str, id: str) -> Answer:
        found, task = self._find_task(job, id)
        names = await self._service.nodes.files(self._node_of(task).id, folder_of(found, task))
        return self._page(
            call,
            [{"name": name, "isDirectory": False, "url": f"{call.base}{call.path}/{name}"} for name in names],
        )

    async def _file(self, call: Call, job: str, id: str, path: str) -> Answer:
        found, task = self._find_task(job, id)
        return _contents(await self._service.nodes.read(self._node_of(task).id, folder_of(found, task), path))

    async def _node_file(self, call: Call, id: str, node: str, path: str) -> Answer:
        """A file below the folder that the node has for all tasks, its start task among them."""
        found = self._find_pool(id).nodes.get(node)
        if found is None:
            raise BatchError(404, "NodeNotFound", "The specified node does not exist.")
        folder, _, name = path.partition("/")
        if folder == "startup" and name == "stderr.txt" and self._service.faults.start_tasks_fail:
            return _contents(self._service.faults.start_task_words.encode())
        return _contents(await self._service.nodes.read(found.id, f"{ROOT}/{folder}", name))


def _contents(data: bytes | None) -> Answer:
    """A file, as both calls give it."""
    if data is None:
        raise BatchError(404, "FileNotFound", "The specified file does not exist.")
    headers = {
        "ocp-creation-time": "Tue, 17 Nov 2026 00:00:00 GMT",
        "ocp-batch-file-isdirectory": "False",
    }
    return Answer(200, data, headers)


def check_pool(body: Json) -> None:
    """Raises BatchError for what Batch would refuse at once."""
    need(body, "vmSize")
    machine = need(body, "virtualMachineConfiguration")
    image, agent = need(machine, "imageReference"), need(machine, "nodeAgentSKUId")
    agents = {f"{p}:{o}:{s}": a for p, o, s, a, _ in IMAGES}
    if not image.get("virtualMachineImageId"):
        key = ":".join(str(image.get(part, "")).lower() for part in ("publisher", "offer", "sku"))
        if agents.get(key) != agent:
            raise invalid(
                "imageReference",
                key,
                "The specified imageReference with the nodeAgentSKUId is not supported.",
            )
    patience = seconds(body.get("resizeTimeout"))
    if patience is not None and not 300 <= patience <= 7 * 86_400:
        raise invalid("resizeTimeout", body["resizeTimeout"], "from 5 minutes to 168 hours")
    contained = machine.get("containerConfiguration")
    if contained and need(contained, "type") not in ("dockerCompatible", "criCompatible"):
        raise invalid("type", contained["type"], "dockerCompatible or criCompatible")
    for each in (contained or {}).get("containerRegistries") or []:
        check_registry(each)
        if each.get("identityReference"):  # which pools that are made by this API have not
            raise invalid("identityReference", each["identityReference"], "the pool has no such identity")
    if "targetNodeCommunicationMode" in body or "certificateReferences" in body:
        raise BatchError(400, "InvalidRequestBody", "The property is not of this version of the API.")
    nats = ((body.get("networkConfiguration") or {}).get("endpointConfiguration") or {}).get(
        "inboundNATPools"
    ) or []
    for nat in nats:
        first, last = need(nat, "frontendPortRangeStart"), need(nat, "frontendPortRangeEnd")
        if last - first + 1 < 40 or not 1 <= first <= last <= 65_534 or first in RESERVED or last in RESERVED:
            raise invalid(
                "frontendPortRangeStart", f"{first}-{last}", "at least 40 ports, none of 50000 to 55000"
            )
        if need(nat, "backendPort") in (29_876, 29_877):
            raise invalid("backendPort", nat["backendPort"], "reserved")
        rules = nat.get("networkSecurityGroupRules") or []
        if len(rules) > 25 or any(not 150 <= rule["priority"] <= 4096 for rule in rules):
            raise invalid("networkSecurityGroupRules", rules, "up to 25, with priorities from 150 to 4096")


def check_registry(login: Json) -> None:
    by_password = bool(login.get("username")) and bool(login.get("password"))
    if by_password == bool(login.get("identityReference")):
        raise invalid(
            "containerRegistries", login.get("registryServer"), "a user name and a password, or an identity"
        )


def without_passwords(shown: Any) -> Any:
    """As Batch shows what it was sent: what is a secret is not said again."""
    if isinstance(shown, dict):
        return {key: without_passwords(value) for key, value in shown.items() if key != "password"}
    return [without_passwords(each) for each in shown] if isinstance(shown, list) else shown


def _count(pool: Pool, spot: bool) -> Json:
    states = [node.state for node in pool.nodes.values() if node.spot == spot]
    counts: Json = {name: states.count(name.lower()) for name in COUNTS}
    return {**counts, "total": len(states)}


def _fits(filter: str, shown: Json) -> bool:
    """Does something fit a filter? Only what the stand-in knows may be asked for."""
    if not filter:
        return True
    terms: Iterable[str] = filter.split(" and ")
    return all(_fits_one(term.strip(), shown) for term in terms)


def _fits_one(term: str, shown: dict[str, Any]) -> bool:
    if found := _STARTS.fullmatch(term):
        return str(shown["id"]).lower().startswith(found[1].lower())
    if found := _EQUAL.fullmatch(term):
        return str(shown.get(found[1])) == found[2]
    raise BatchError(
        400,
        "InvalidQueryParameterValue",
        "The value specified for a query parameter is invalid.",
        QueryParameterName="$filter",
        QueryParameterValue=term,
    )
