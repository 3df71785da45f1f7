"""The calls of Microsoft.MachineLearningServices that the stand-in knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from standins.azure.arm import Arm, page
from standins.azure.blobs import ACCOUNT, KEY
from standins.azure.cloud import Cloud
from standins.azure.words import SUBSCRIPTION, ArmError
from standins.cloud.words import Answer, Call, Json

from .instances import Instance
from .service import OVER, REGION, Cluster, MlJob, Service, cores_of, seconds

GROUP, WORKSPACE = "evals", "standin"
PROVIDER = "Microsoft.MachineLearningServices"
ROOT = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{PROVIDER}/workspaces/{WORKSPACE}"
VERSIONS = re.compile(r"20(21-07|22-(10|12)|23|24|25|26)-.*")
_LOCATION = f"/subscriptions/{SUBSCRIPTION}/providers/{PROVIDER}/locations/{REGION}"
JOB_OPERATIONS, COMPUTE_OPERATIONS = (
    f"{_LOCATION}/mfeOperationsStatus",
    f"{_LOCATION}/computeOperationsStatus",
)
DATASTORE, CONTAINER = "workspaceblobstore", "azureml-blobstore-00000000"
_JOB_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9\-_]{0,254}")
COMPUTE_NAME = re.compile(r"(?!.*-[0-9]*$)[a-zA-Z][a-zA-Z0-9-]{1,30}[a-zA-Z0-9]")
_STATES = ("idle", "running", "preparing", "unusable", "leaving", "preempted")


class MachineLearning:
    """What each call does. Its routes come before those of plain resources."""

    def __init__(self, cloud: Cloud, arm: Arm, service: Service) -> None:
        self._cloud, self._service = cloud, service
        root = f"/subscriptions/{{subscription}}/resourceGroups/{{group}}/providers/{PROVIDER}"
        one = f"{root}/workspaces/{{workspace}}"
        usages = f"/subscriptions/{{subscription}}/providers/{PROVIDER}/locations/{{location}}/usages"
        store, computes, jobs = f"{one}/datastores", f"{one}/computes", f"{one}/jobs"
        connections = f"{one}/connections"
        environment = f"{one}/environments/{{name}}/versions/{{version}}"
        for method, path, handler in (
            ("GET", one, self._workspace),
            ("GET", usages, self._usages),
            ("GET", store, self._datastores),
            ("GET", f"{store}/{{name}}", self._datastore),
            ("POST", f"{store}/{{name}}/listSecrets", self._secrets),
            ("GET", environment, self._environment),
            ("PUT", environment, self._put_environment),
            ("GET", connections, self._connections),
            ("GET", f"{connections}/{{name}}", self._connection),
            ("PUT", f"{connections}/{{name}}", self._put_connection),
            ("GET", computes, self._computes),
            ("GET", f"{computes}/{{name}}", self._compute),
            ("PUT", f"{computes}/{{name}}", self._put_compute),
            ("DELETE", f"{computes}/{{name}}", self._delete_compute),
            ("POST", f"{computes}/{{name}}/listNodes", self._nodes),
            ("POST", f"{computes}/{{name}}/start", self._start),
            ("POST", f"{computes}/{{name}}/stop", self._stop),
            ("POST", f"{computes}/{{name}}/restart", self._restart),
            ("POST", f"{computes}/{{name}}/updateSchedules", self._update_schedules),
            ("GET", jobs, self._jobs),
            ("GET", f"{jobs}/{{name}}", self._job),
            ("PUT", f"{jobs}/{{name}}", self._put_job),
            ("DELETE", f"{jobs}/{{name}}", self._delete_job),
            ("POST", f"{jobs}/{{name}}/cancel", self._cancel_job),
        ):
            arm.route(method, path, handler)

    def _root(self, found: re.Match[str], call: Call) -> str:
        """The id of the workspace. Raises ArmError if it is another one."""
        if not VERSIONS.fullmatch(call.asks("api-version")):
            raise ArmError(400, "InvalidResourceType", f"No api-version {call.asks('api-version')}.")
        self._cloud.need_group(found["group"])
        if found["workspace"].lower() != WORKSPACE:
            raise ArmError(
                404,
                "ResourceNotFound",
                f"The Resource '{PROVIDER}/workspaces/{found['workspace']}' under resource group "
                f"'{found['group']}' was not found.",
            )
        return ROOT

    async def _workspace(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        group = root.rpartition("/providers/")[0]
        return Answer(
            200,
            {
                "id": root,
                "name": WORKSPACE,
                "type": f"{PROVIDER}/workspaces",
                "location": REGION,
                "properties": {
                    "provisioningState": "Succeeded",
                    "workspaceId": "00000000-aaaa-bbbb-cccc-000000000000",
                    "storageAccount": f"{group}/providers/Microsoft.Storage/storageAccounts/{ACCOUNT}",
                    "containerRegistry": f"{group}/providers/Microsoft.ContainerRegistry/registries/standin",
                    "publicNetworkAccess": "Enabled",
                    "managedNetwork": {"isolationMode": "Disabled"},
                    "discoveryUrl": f"{call.base}/discovery",
                },
            },
        )

    async def _usages(self, call: Call, found: re.Match[str]) -> Answer:
        service, above = self._service, f"/subscriptions/{SUBSCRIPTION}"
        family, spot_family = (
            f"Standard DSv5 Family Cluster {kind} vCPUs" for kind in ("Dedicated", "LowPriority")
        )
        other = f"{above}/resourceGroups/others/providers/{PROVIDER}/workspaces/other"

        def usage(whose: str, kind: str, name: str, used: int, limit: int) -> Json:
            return {
                "id": f"{whose}/usages" + (f"/{name.replace(' ', '_')}" if "Family" in name else ""),
                "type": f"{PROVIDER}/{kind}/usages",
                "currentValue": used,
                "limit": limit,
                "name": {"value": name, "localizedValue": name},
                "unit": "Count",
            }

        dedicated, spot = service.used_cores(False), service.used_cores(True)
        shown = [
            usage(above, "totalCores", "Clusters", len(service.clusters), 100),
            usage(
                above,
                "dedicatedCores",
                "Total Cluster Dedicated Regional vCPUs",
                dedicated,
                service.quota[False],
            ),
            usage(above, "vmFamily", family, dedicated, service.family_quota),
            # the same name again, for workspaces and for computes
            usage(ROOT, "workspaces", family, dedicated, service.family_quota),
            usage(other, "workspaces", family, 0, service.family_quota),
            usage(f"{other}/computes/one", "workspaces/computes", family, 0, service.family_quota),
            usage(
                above,
                "lowPriorityCores",
                "Total Cluster LowPriority Regional vCPUs",
                spot,
                service.quota[True],
            ),
            usage(above, "vmFamily", spot_family, spot, -1),
            usage(other, "workspaces", spot_family, 0, -1),
        ]
        return Answer(200, {"value": shown})

    # -- datastores ----------------------------------------------------------------------------

    def _show_datastore(self, root: str) -> Json:
        return {
            "id": f"{root}/datastores/{DATASTORE}",
            "name": DATASTORE,
            "type": f"{PROVIDER}/workspaces/datastores",
            "properties": {
                "datastoreType": "AzureBlob",
                "accountName": ACCOUNT,
                "containerName": CONTAINER,
                "endpoint": "core.windows.net",
                "protocol": "https",
                "isDefault": True,
                "serviceDataAccessAuthIdentity": "None",
                "credentials": {"credentialsType": "AccountKey" if self._service.has_key else "None"},
            },
        }

    async def _datastores(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, {"value": [self._show_datastore(self._root(found, call))]})

    async def _datastore(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        if found["name"] != DATASTORE:
            raise ArmError(404, "UserError", f"Could not find datastore: {found['name']}")
        return Answer(200, self._show_datastore(root))

    async def _secrets(self, call: Call, found: re.Match[str]) -> Answer:
        await self._datastore(call, found)
        if not self._service.has_key:
            return Answer(200, {"secretsType": "None"})
        return Answer(200, {"secretsType": "AccountKey", "key": KEY})

    # -- connections ---------------------------------------------------------------------------

    def _show_connection(self, root: str, name: str) -> Json:
        """Credentials are not shown again."""
        sent = self._service.connections[name]["properties"]
        return {
            "id": f"{root}/connections/{name}",
            "name": name,
            "type": f"{PROVIDER}/workspaces/connections",
            "properties": {key: value for key, value in sent.items() if key != "credentials"},
        }

    async def _connections(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        return Answer(
            200, {"value": [self._show_connection(root, name) for name in self._service.connections]}
        )

    async def _connection(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        if found["name"] not in self._service.connections:
            raise ArmError(404, "ResourceNotFound", f"Connection {found['name']} was not found.")
        return Answer(200, self._show_connection(root, found["name"]))

    async def _put_connection(self, call: Call, found: re.Match[str]) -> Answer:
        root, sent = self._root(found, call), call.body.get("properties") or {}
        if not sent.get("authType") or not sent.get("category") or not sent.get("target"):
            raise ArmError(400, "UserError", "A connection needs authType, category and target.")
        self._service.connections[found["name"]] = call.body
        return Answer(200, self._show_connection(root, found["name"]))

    # -- environments --------------------------------------------------------------------------

    async def _environment(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        body = self._service.environments.get((found["name"], found["version"]))
        if body is None:
            raise ArmError(404, "UserError", f"Environment {found['name']}:{found['version']} not found.")
        return Answer(200, self._show_environment(root, found["name"], found["version"], body))

    def _show_environment(self, root: str, name: str, version: str, body: Json) -> Json:
        return {
            "id": f"{root}/environments/{name}/versions/{version}",
            "name": version,
            "type": f"{PROVIDER}/workspaces/environments/versions",
            "properties": {**body["properties"], "environmentType": "UserCreated"},
        }

    async def _put_environment(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        properties = call.body.get("properties") or {}
        if not properties.get("image") and not properties.get("build"):
            raise ArmError(400, "UserError", "An environment needs an image or a build context.")
        self._service.environments[found["name"], found["version"]] = call.body
        return Answer(201, self._show_environment(root, found["name"], found["version"], call.body))

    # -- computes ------------------------------------------------------------------------------

    def _need_cluster(self, name: str) -> Cluster:
        cluster = self._service.clusters.get(name.lower())
        if cluster is None:
            raise ArmError(404, "ResourceNotFound", f"Compute with name {name} was not found.")
        return cluster

    async def _computes(self, call: Call, found: re.Match[str]) -> Answer:
        root = self._root(found, call)
        shown = [self._show_cluster(root, each) for each in self._service.clusters.values()]
        instances = self._service.instances
        shown += [instances.show(root, PROVIDER, each) for each in instances.all.values()]
        return page(call, shown, self._cloud.page_size)

    async def _compute(self, call: Call, found: re.Match[str]) -> Answer:
        root, instance = self._root(found, call), self._instance(found)
        if instance is not None:
            return Answer(200, self._service.instances.show(root, PROVIDER, instance))
        return Answer(200, self._show_cluster(root, self._need_cluster(found["name"])))

    def _instance(self, found: re.Match[str]) -> Instance | None:
        return self._service.instances.all.get(found["name"].lower())

    def _need_instance(self, found: re.Match[str], *states: str) -> Instance:
        instance = self._instance(found)
        if instance is None:
            raise ArmError(404, "ResourceNotFound", f"Compute with name {found['name']} was not found.")
        if instance.state not in states:
            raise ArmError(409, "Conflict", f"Compute {instance.name} is {instance.state}.")
        return instance

    async def _start(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        instance = self._need_instance(found, "Stopped")
        answer = self._begun(call, self._service.instances.start(instance), COMPUTE_OPERATIONS)
        return answer if self._service.instances.tells_starts else Answer(202)

    async def _stop(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        instance = self._need_instance(found, "Running", "JobRunning")
        return self._begun(call, self._service.instances.stop(instance), COMPUTE_OPERATIONS)

    async def _restart(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        instance = self._need_instance(found, "Running", "JobRunning", "Unusable")
        return self._begun(call, self._service.instances.restart(instance), COMPUTE_OPERATIONS)

    async def _update_schedules(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        instance = self._need_instance(found, "Running", "JobRunning", "Stopping", "Stopped")
        self._service.instances.schedule(instance, call.body)
        return Answer(200)

    def _put_instance(self, call: Call, root: str, name: str) -> Answer:
        instances = self._service.instances
        old = instances.all.get(name.lower())
        if name.lower() in self._service.clusters:
            raise ArmError(409, "Conflict", f"Compute {name} is of another kind.")
        if old is not None and old.state == "Deleting":
            raise ArmError(409, "ComputeBeingDeleted", f"Compute {name} is being deleted.")
        if str(call.body.get("location") or "").lower() != REGION:
            raise ArmError(400, "BadArgument", f"Compute must be in the region of its workspace, {REGION}.")
        if old is not None:
            words = f"Compute instance {name} is there already: this call cannot change it."
            raise ArmError(400, "BadArgument", words)
        size = str((call.body["properties"].get("properties") or {}).get("vmSize"))
        if self._service.used_cores(False) + cores_of(size) > self._service.quota[False]:
            words = f"Operation results in exceeding quota limits of Core. Size: {size}."
            raise ArmError(400, "ClusterCoreQuotaReached", words)
        instance = instances.add(name, call.body)
        operation = self._cloud.operations.start(COMPUTE_OPERATIONS, instances.bring(instance))
        headers = self._cloud.operations.headers(call, operation, location=False)
        return Answer(201, instances.show(root, PROVIDER, instance), headers)

    async def _put_compute(self, call: Call, found: re.Match[str]) -> Answer:
        root, name = self._root(found, call), found["name"]
        if str((call.body.get("properties") or {}).get("computeType")) == "ComputeInstance":
            return self._put_instance(call, root, name)
        old = self._service.clusters.get(name.lower())
        if old is not None and old.state == "Deleting":
            raise ArmError(409, "ComputeBeingDeleted", f"Compute {name} is being deleted.")
        _check_cluster(name, call.body)
        if old is not None:
            old.body = call.body
            self._service.schedule(old)
            return Answer(200, self._show_cluster(root, old))
        cluster = self._service.add_cluster(name, call.body)
        operation = self._cloud.operations.start(COMPUTE_OPERATIONS, self._service.make_cluster(cluster))
        headers = self._cloud.operations.headers(call, operation, location=False)
        return Answer(201, self._show_cluster(root, cluster), headers)

    async def _delete_compute(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        if not call.asks("underlyingResourceAction"):
            raise ArmError(400, "BadArgument", "underlyingResourceAction must be Delete or Detach.")
        instance = self._instance(found)
        if instance is not None:
            if instance.state == "Deleting":
                raise ArmError(409, "ComputeBeingDeleted", f"Compute {instance.name} is being deleted.")
            return self._begun(call, self._service.instances.delete(instance), COMPUTE_OPERATIONS)
        cluster = self._service.clusters.get(found["name"].lower())
        if cluster is None:
            return Answer(204)
        if cluster.state == "Deleting":
            raise ArmError(409, "ComputeBeingDeleted", f"Compute {cluster.name} is being deleted.")
        operation = self._cloud.operations.start(COMPUTE_OPERATIONS, self._service.delete_cluster(cluster))
        return Answer(202, None, self._cloud.operations.headers(call, operation, location=True))

    async def _nodes(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        nodes = [
            {
                "nodeId": node.id,
                "nodeState": node.state,
                "privateIpAddress": "10.0.0.4",
                "port": 50000,
                **({"runId": node.job.name} if node.job is not None else {}),
            }
            for node in self._need_cluster(found["name"]).nodes.values()
        ]
        return Answer(200, {"nodes": nodes})

    def _show_cluster(self, root: str, cluster: Cluster) -> Json:
        stamp = self._service.clock.stamp
        states = [node.state for node in cluster.nodes.values()]
        had = [node for node in cluster.nodes.values() if node.state != "preparing"]
        return {
            "id": f"{root}/computes/{cluster.name}",
            "name": cluster.name,
            "type": f"{PROVIDER}/workspaces/computes",
            "location": REGION,
            "tags": cluster.body.get("tags") or {},
            "properties": {
                "computeType": "AmlCompute",
                "computeLocation": cluster.body["location"],
                "createdOn": stamp(cluster.created),
                "modifiedOn": stamp(cluster.changed),
                "provisioningState": cluster.state,
                "isAttachedCompute": False,
                "disableLocalAuth": bool(cluster.body["properties"].get("disableLocalAuth")),
                "properties": {
                    **cluster.settings,
                    "allocationState": "Resizing" if cluster.resizing else "Steady",
                    "allocationStateTransitionTime": stamp(cluster.changed),
                    "currentNodeCount": len(had),
                    "targetNodeCount": len(cluster.nodes),
                    "nodeStateCounts": {f"{state}NodeCount": states.count(state) for state in _STATES},
                    **({"errors": cluster.errors} if cluster.errors else {}),
                },
            },
        }

    # -- jobs ----------------------------------------------------------------------------------

    def _need_job(self, name: str) -> MlJob:
        job = self._service.jobs.get(name.lower())
        if job is None:
            raise ArmError(404, "UserError", f"Job {name} was not found.")
        return job

    async def _jobs(self, call: Call, found: re.Match[str]) -> Answer:
        root, tag = self._root(found, call), call.asks("tag")
        jobs = [
            self._show_job(root, job)
            for job in self._service.jobs.values()
            if not tag or tag in (job.body.get("tags") or {})
        ]
        return page(call, jobs, self._cloud.page_size)

    async def _job(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, self._show_job(self._root(found, call), self._need_job(found["name"])))

    async def _put_job(self, call: Call, found: re.Match[str]) -> Answer:
        root, name = self._root(found, call), found["name"]
        properties = call.body.get("properties") or {}
        if name.lower() in self._service.jobs:
            old = self._service.jobs[name.lower()]
            if old.body.get("command") != properties.get("command"):
                raise ArmError(400, "UserError", f"A job with this name {name} already exists.")
            old.body["tags"] = properties.get("tags") or {}
            return Answer(200, self._show_job(root, old))
        cluster = self._check_job(name, properties)
        return Answer(201, self._show_job(root, self._service.add_job(name, properties, cluster)))

    def _check_job(self, name: str, properties: Json) -> Cluster:
        for wrong in _job_problems(name, properties):
            raise ArmError(400, "UserError", wrong)
        environment = str(properties["environmentId"]).split("/")
        if (environment[-3], environment[-1]) not in self._service.environments:
            raise ArmError(400, "UserError", f"Environment {properties['environmentId']} was not found.")
        cluster = self._service.clusters.get(str(properties["computeId"]).rpartition("/")[2].lower())
        if cluster is None:
            raise ArmError(400, "UserError", f"Unknown compute target {properties['computeId']}.")
        if cluster.state != "Succeeded":
            raise ArmError(400, "UserError", f"Compute {cluster.name} is in state {cluster.state}.")
        return cluster

    async def _delete_job(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        job = self._service.jobs.get(found["name"].lower())
        if job is None:
            return Answer(204)
        if job.status not in OVER:
            raise ArmError(409, "UserError", f"Job {job.name} is {job.status}: only what is over is deleted.")
        return self._begun(call, self._service.delete_job(job))

    async def _cancel_job(self, call: Call, found: re.Match[str]) -> Answer:
        self._root(found, call)
        job = self._need_job(found["name"])
        if job.status in OVER:
            raise ArmError(400, "UserError", f"Job {job.name} is in the terminal state {job.status}.")
        if job.status == "CancelRequested":
            return Answer(200)
        return self._begun(call, self._service.cancel(job))

    def _begun(self, call: Call, work: object, where: str = JOB_OPERATIONS) -> Answer:
        operation = self._cloud.operations.start(where, work)  # type: ignore[arg-type]
        return Answer(202, None, self._cloud.operations.headers(call, operation, location=True))

    def _show_job(self, root: str, job: MlJob) -> Json:
        return {
            "id": f"{root}/jobs/{job.name}",
            "name": job.name,
            "type": f"{PROVIDER}/workspaces/jobs",
            "properties": {**job.body, "status": job.status, "isArchived": False},
            "systemData": {"createdAt": self._service.clock.stamp(job.created)},
        }


def _check_cluster(name: str, body: Json) -> None:
    """Raises ArmError."""
    properties = body.get("properties") or {}
    inner = properties.get("properties") or {}
    if not COMPUTE_NAME.fullmatch(name):
        raise ArmError(400, "InvalidResourceName", f"Invalid compute name {name}.")
    if str(properties.get("computeType")) != "AmlCompute":
        raise ArmError(
            400, "BadArgument", "The stand-in has computes of the kinds AmlCompute and ComputeInstance."
        )
    if not body.get("location"):  # a cluster may be in another region than its workspace
        raise ArmError(400, "BadArgument", "location must be given.")
    scale = inner.get("scaleSettings") or {}
    if not inner.get("vmSize") or "maxNodeCount" not in scale:
        raise ArmError(400, "BadArgument", "vmSize and scaleSettings.maxNodeCount must be given.")
    if "nodeIdleTimeBeforeScaleDown" in scale:
        seconds(scale["nodeIdleTimeBeforeScaleDown"], "nodeIdleTimeBeforeScaleDown")
    if inner.get("vmPriority", "Dedicated") not in ("Dedicated", "LowPriority"):
        raise ArmError(400, "BadArgument", f"vmPriority {inner['vmPriority']} is not known.")
    cores_of(str(inner["vmSize"]))


def _job_problems(name: str, properties: Json) -> Iterator[str]:
    if not _JOB_NAME.fullmatch(name):
        yield f"Invalid job name {name}."
    if properties.get("jobType") != "Command":
        yield "The stand-in has jobs of the kind Command only."
    for needed in ("command", "environmentId", "computeId"):
        if not properties.get(needed):
            yield f"{needed} must be given."
    limits = properties.get("limits") or {}
    if "timeout" in limits:
        seconds(limits["timeout"], "limits.timeout")
    if limits and limits.get("jobLimitsType") != "Command":
        yield "limits.jobLimitsType must be Command."
