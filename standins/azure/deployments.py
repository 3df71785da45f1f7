"""Microsoft.Resources/deployments: several resources in one call, made although its client may be gone."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field

from standins.cloud.words import Answer, Call, Json

from .arm import Arm, page
from .cloud import Cloud
from .deploy_plan import Item, Plan
from .kind import canonical
from .operations import Operation
from .words import ArmError

ROOT = "/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Resources/deployments"
ONE = f"{ROOT}/{{name}}"
STRUCTURED = "2022-09-01"
"""From this version on, what went wrong below a deployment is told as JSON; before, as JSON in a text."""
STATUSES = {400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "Conflict"}


@dataclass(eq=False)
class Step:
    """One resource of a deployment."""

    item: Item
    state: str = "NotStarted"
    error: ArmError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Deployment:
    path: str
    group: str
    name: str
    mode: str
    started: float
    plan: Plan
    steps: dict[str, Step]
    tags: Json
    state: str = "Accepted"
    outputs: Json = field(default_factory=dict[str, object])
    operation: Operation | None = None


class Deployments:
    def __init__(self, cloud: Cloud, arm: Arm) -> None:
        self._cloud = cloud
        self._known: dict[tuple[str, str], Deployment] = {}
        cloud.on_group_gone.append(self._forget)
        arm.route("GET", ROOT, self._list)
        arm.route("PUT", ONE, self._put)
        arm.route("GET", ONE, self._get)
        arm.route("HEAD", ONE, self._head)
        arm.route("DELETE", ONE, self._delete)
        arm.route("POST", f"{ONE}/validate", self._validate)
        arm.route("POST", f"{ONE}/cancel", self._cancel)
        for one in (ONE, "/subscriptions/{subscription}/resourceGroups/{group}/deployments/{name}"):
            arm.route("GET", f"{one}/operations", self._operations)

    def _forget(self, group: str) -> None:
        self._known = {key: each for key, each in self._known.items() if key[0] != group.lower()}

    # -- verbs ---------------------------------------------------------------------------------

    async def _put(self, call: Call, found: re.Match[str]) -> Answer:
        key = (found["group"].lower(), found["name"].lower())
        old = self._known.get(key)
        if old is not None and old.operation is not None and not old.operation.done.is_set():
            raise ArmError(
                409,
                "DeploymentActive",
                f"Unable to edit or replace deployment '{old.name}': previous deployment from "
                f"'{self._cloud.clock.stamp(old.started)}' is still active. Please see "
                "https://aka.ms/arm-deploy for usage details.",
            )
        plan = self._plan(call, found)
        deployment = Deployment(
            call.path,
            found["group"],
            found["name"],
            call.body["properties"]["mode"].capitalize(),
            self._cloud.clock.now(),
            plan,
            {item.id.key: Step(item) for item in plan.items},
            call.body.get("tags") or {},
        )
        self._known[key] = deployment
        deployment.operation = self._cloud.operations.start(call.path, self._run(deployment))
        headers = self._cloud.operations.headers(call, deployment.operation, location=False)
        headers["Azure-AsyncOperation"] = headers["Azure-AsyncOperation"].replace(
            "/operations/", "/operationStatuses/"
        )
        return Answer(200 if old else 201, self._show(deployment, call), headers)

    def _plan(self, call: Call, found: re.Match[str]) -> Plan:
        """Refuses what Azure refuses before it begins."""
        self._cloud.need_group(found["group"])
        properties: Json = call.body.get("properties") or {}
        plan = Plan(self._cloud, found["subscription"], found["group"], found["name"], properties)
        problems = [problem for item in plan.items if (problem := self._preflight(plan, item))]
        if problems:
            raise ArmError(
                problems[0].status if len(problems) == 1 else 400,
                "InvalidTemplateDeployment",
                f"The template deployment '{found['name']}' is not valid according to the "
                "validation procedure. "
                "See inner errors for details.",
                details=[problem.error() for problem in problems],
            )
        return plan

    def _preflight(self, plan: Plan, item: Item) -> ArmError | None:
        try:
            body = plan.body(item)
        except ArmError as error:
            if error.code == "InvalidTemplate":
                raise
            return None  # it refers to what is still to be made
        try:
            self._cloud.kind(item.id).preflight(item.id, canonical(body))
            self._cloud.faults.check_policies(item.id.type, str(item.id), body)
        except ArmError as error:
            return error
        return None

    async def _validate(self, call: Call, found: re.Match[str]) -> Answer:
        plan = self._plan(call, found)
        resources = [{"id": str(item.id)} for item in plan.items]
        return Answer(
            200, {"properties": {"provisioningState": "Succeeded", "validatedResources": resources}}
        )

    async def _get(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, self._show(self._need(found), call))

    async def _head(self, call: Call, found: re.Match[str]) -> Answer:
        key = (found["group"].lower(), found["name"].lower())
        return Answer(204 if key in self._known else 404)

    async def _list(self, call: Call, found: re.Match[str]) -> Answer:
        self._cloud.need_group(found["group"])
        mine = [each for each in self._known.values() if each.group.lower() == found["group"].lower()]
        return page(call, [self._show(each, call) for each in mine], self._cloud.page_size)

    async def _delete(self, call: Call, found: re.Match[str]) -> Answer:
        """Of the record: what was deployed stays."""
        key = (found["group"].lower(), found["name"].lower())
        deployment = self._known.get(key)
        if deployment is None:
            return Answer(204)
        if deployment.operation is not None and not deployment.operation.done.is_set():
            raise ArmError(
                409,
                "DeploymentActive",
                f"The deployment '{deployment.name}' is running and cannot be deleted.",
            )
        del self._known[key]
        return Answer(204)

    async def _cancel(self, call: Call, found: re.Match[str]) -> Answer:
        """No further resource is begun; what is begun goes on."""
        deployment = self._need(found)
        if deployment.operation is None or deployment.operation.done.is_set():
            raise ArmError(
                409,
                "DeploymentCannotBeCancelled",
                f"The deployment '{deployment.name}' cannot be cancelled: its state is '{deployment.state}'.",
            )
        await self._cloud.operations.preempt(deployment.operation)
        deployment.state = "Canceled"
        return Answer(204)

    async def _operations(self, call: Call, found: re.Match[str]) -> Answer:
        deployment = self._need(found)
        begun = [step for step in deployment.steps.values() if step.state != "NotStarted"]
        return page(call, [self._show_step(deployment, step) for step in begun], self._cloud.page_size)

    def _need(self, found: re.Match[str]) -> Deployment:
        self._cloud.need_group(found["group"])
        deployment = self._known.get((found["group"].lower(), found["name"].lower()))
        if deployment is None:
            raise ArmError(404, "DeploymentNotFound", f"Deployment '{found['name']}' could not be found.")
        return deployment

    # -- doing it ------------------------------------------------------------------------------

    async def _run(self, deployment: Deployment) -> None:
        deployment.state = "Running"
        steps = deployment.steps.values()
        await asyncio.gather(*(self._step(deployment, step) for step in steps))
        if any(step.error is not None for step in steps):
            deployment.state = "Failed"
            raise _failed(deployment, "")
        deployment.outputs = deployment.plan.outputs()
        deployment.state = "Succeeded"

    async def _step(self, deployment: Deployment, step: Step) -> None:
        before = [deployment.steps[key] for key in step.item.after]
        for each in before:
            await each.done.wait()
        try:
            if all(each.state == "Succeeded" for each in before):
                await self._make(deployment, step)
        except ArmError as error:
            step.state, step.error = "Failed", error
        finally:
            step.done.set()

    async def _make(self, deployment: Deployment, step: Step) -> None:
        step.state = "Running"
        item = step.item
        hold_s = self._cloud.faults.hold_s("PUT", str(item.id))
        version = str(deployment.plan.expressions.value(item.raw["apiVersion"]))
        put = self._cloud.put(item.id, deployment.plan.body(item), version, hold_s)
        if put.operation is not None:
            try:
                await put.operation.outcome()
            except ArmError as error:
                raise _terminal(item, error) from error
        step.state = "Succeeded"

    # -- showing -------------------------------------------------------------------------------

    def _show(self, deployment: Deployment, call: Call) -> Json:
        made = [step.item.id for step in deployment.steps.values() if step.state == "Succeeded"]
        properties: Json = {
            "mode": deployment.mode,
            "provisioningState": deployment.state,
            "timestamp": self._cloud.clock.stamp(),
            "duration": f"PT{self._cloud.clock.now() - deployment.started:.3f}S",
            "correlationId": "00000000-0000-0000-0000-000000000000",
            "parameters": deployment.plan.shown_parameters(),
            "outputResources": [{"id": str(id)} for id in made],
            "outputs": deployment.outputs,
        }
        if deployment.state == "Failed":
            properties["error"] = _failed(deployment, call.asks("api-version")).error()
        shown: Json = {
            "id": deployment.path,
            "name": deployment.name,
            "type": "Microsoft.Resources/deployments",
            "properties": properties,
        }
        return {**shown, "tags": deployment.tags} if deployment.tags else shown

    def _show_step(self, deployment: Deployment, step: Step) -> Json:
        id = step.item.id
        properties: Json = {
            "provisioningOperation": "Create",
            "provisioningState": step.state,
            "timestamp": self._cloud.clock.stamp(),
            "targetResource": {"id": str(id), "resourceType": id.type, "resourceName": id.full_name},
        }
        if step.error is not None:
            properties["statusCode"] = "Conflict"
            properties["statusMessage"] = {"status": "Failed", "error": step.error.error()}
        name = f"{abs(hash(id.key)):016x}"
        return {"id": f"{deployment.path}/operations/{name}", "operationId": name, "properties": properties}


def _terminal(item: Item, error: ArmError) -> ArmError:
    return ArmError(
        409,
        "ResourceDeploymentFailure",
        "The resource write operation failed to complete successfully, because it reached "
        "terminal provisioning "
        "state 'Failed'.",
        target=str(item.id),
        details=[error.error()],
    )


def _failed(deployment: Deployment, version: str) -> ArmError:
    """The error of a deployment as this version of the API tells it."""
    failures = [(step, step.error) for step in deployment.steps.values() if step.error is not None]
    details = [
        {**error.error(), "target": str(step.item.id)} if version >= STRUCTURED else _as_text(error)
        for step, error in failures
    ]
    return ArmError(
        409,
        "DeploymentFailed",
        "At least one resource deployment operation failed. Please list deployment operations for "
        "details. Please see https://aka.ms/arm-deployment-operations for usage details.",
        target=deployment.path,
        details=details,
    )


def _as_text(error: ArmError) -> Json:
    text = json.dumps({"status": "Failed", "error": error.error()}, indent=2).replace("\n", "\r\n")
    return {"code": STATUSES.get(error.status, "Conflict"), "message": text}
