"""Templates and schedules: what Azure does by itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from standins.azure import Policy, StandIn, Stuck
from standins.azure.faults import VmLimits
from standins.azure.schedules import next_time
from standins.azure.server import lenient
from standins.azure.template import Expressions
from standins.azure.words import ArmError
from tests.cloud.rest import Json, Reply, Rest, compute, network, vm_body
from tests.cloud.templates import NIC, PIP, SCHEDULE, VM, resource, template
from tests.waiting import until

DEPLOYMENTS = "/resourceGroups/rg/providers/Microsoft.Resources/deployments"


def deploy(rest: Rest, name: str, made: Json | None = None, **parameters: str) -> Reply:
    given = {key: {"value": value} for key, value in {"name": name, **parameters}.items()}
    properties = {"mode": "Incremental", "template": made or template(), "parameters": given}
    return rest.ask("PUT", f"{DEPLOYMENTS}/{name}", {"properties": properties})


def test_a_deployment_makes_everything_in_order(azure: StandIn, rest: Rest) -> None:
    outcome = rest.outcome(deploy(rest, "vm"))
    assert outcome["status"] == "Succeeded"
    shown = rest.get(f"{DEPLOYMENTS}/vm").body["properties"]
    address = rest.get(network("publicIPAddresses/vm-ip")).body["properties"]["ipAddress"]
    assert shown["outputs"]["address"]["value"] == address
    assert len(shown["outputResources"]) == 4
    assert rest.power("vm") == "PowerState/running"
    assert len(rest.get(f"{DEPLOYMENTS}/vm/operations").body["value"]) == 4
    assert rest.outcome(deploy(rest, "vm"))["status"] == "Succeeded", "again changes nothing"
    assert len([span for span in azure.meters.spans if span.kind == "vm"]) == 1


def test_secure_parameters_are_shown_to_nobody(rest: Rest) -> None:
    made = template()
    made["parameters"]["secret"] = {"type": "secureString"}
    rest.outcome(deploy(rest, "vm", made, secret="hush"))
    reply = rest.get(f"{DEPLOYMENTS}/vm")
    assert "hush" not in json.dumps(reply.body)
    assert reply.body["properties"]["parameters"]["secret"] == {"type": "secureString"}


def test_the_case_of_azures_own_names_does_not_matter(azure: StandIn, rest: Rest) -> None:
    made = template()
    (address,) = [each for each in made["resources"] if each["type"] == PIP]
    address["sku"]["name"], address["properties"]["publicIPAllocationMethod"] = "standard", "STATIC"
    assert rest.outcome(deploy(rest, "vm", made))["status"] == "Succeeded"
    shown = rest.get(network("publicIPAddresses/vm-ip")).body
    assert (shown["sku"]["name"], shown["properties"]["publicIPAllocationMethod"]) == ("Standard", "Static")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{a: 1, "b": [1, 2,], /* c: 3 */ }', {"a": 1, "b": [1, 2]}),
        ('{ // no: "x"\n $schema: "https://x/y" }', {"$schema": "https://x/y"}),
        ('{"a": "// {b: 1,}"}', {"a": "// {b: 1,}"}),
    ],
)
def test_templates_are_read_as_leniently_as_azure_does(text: str, value: object) -> None:
    assert lenient(text) == value


def test_a_feature_lets_the_plain_security_type_be_named(rest: Rest) -> None:
    body = vm_body("vm", rest.new_interface("vm"))
    body["properties"]["securityProfile"] = {"securityType": "Standard"}
    assert rest.ask("PUT", compute("vm"), body).code == "InvalidParameter"
    feature = "/providers/Microsoft.Features/providers/Microsoft.Compute/features/UseStandardSecurityType"
    assert rest.get(feature).body["properties"]["state"] == "NotRegistered"
    rest.ask("POST", f"{feature}/register")
    assert rest.ask("PUT", compute("vm"), body).status == 201


def test_the_plain_security_type_can_be_named_from_the_version_on_that_has_it(rest: Rest) -> None:
    body = vm_body("vm", rest.new_interface("vm"))
    body["properties"]["securityProfile"] = {"securityType": "Standard"}
    assert rest.ask("PUT", compute("vm"), body, **{"api-version": "2025-11-01"}).status == 201


def test_what_is_asked_of_one_machine_is_limited(azure: StandIn, rest: Rest) -> None:
    rest.new_vm("vm")
    azure.faults.vm_limits = VmLimits()
    answers = [rest.get(compute("vm")) for _ in range(36)]
    assert {each.status for each in answers} == {200}
    refused = next(each for _ in range(1000) if (each := rest.get(compute("vm"))).status != 200)
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_deployment_goes_on_without_its_client(azure: StandIn, rest: Rest) -> None:
    deploy(rest, "vm")
    until(lambda: bool(azure.resources(SCHEDULE)))
    assert rest.power("vm") == "PowerState/running"


def test_a_failed_machine_fails_the_deployment_and_has_no_schedule(azure: StandIn, rest: Rest) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 0
    error = rest.outcome(deploy(rest, "vm"))["error"]
    assert error["code"] == "DeploymentFailed"
    (detail,) = error["details"]
    assert detail["code"] == "Conflict", "below 2022-09-01 the error is a text"
    inner = json.loads(detail["message"])["error"]
    assert inner["code"] == "ResourceDeploymentFailure"
    assert inner["details"][0]["code"] == "AllocationFailed"
    newer = rest.get(f"{DEPLOYMENTS}/vm").body["properties"]["error"]
    assert newer["details"][0]["code"] == "ResourceDeploymentFailure"
    assert azure.resources(SCHEDULE) == []
    assert rest.get(f"{DEPLOYMENTS}/vm").body["properties"]["provisioningState"] == "Failed"


def test_quota_and_policies_refuse_it_beforehand(azure: StandIn, rest: Rest) -> None:
    azure.cloud.quota.limits["eastus", "cores"] = 2
    reply = deploy(rest, "vm")
    assert reply.code == "InvalidTemplateDeployment"
    assert reply.body["error"]["details"][0]["code"] == "OperationNotAllowed"
    azure.cloud.quota.limits.clear()
    azure.faults.policies.append(Policy("no-public-addresses", PIP))
    details = deploy(rest, "vm").body["error"]["details"]
    assert (details[0]["code"], "no-public-addresses" in details[0]["message"]) == (
        "RequestDisallowedByPolicy",
        True,
    )
    assert [each for each in azure.resources() if each.id.type in (PIP, NIC, VM)] == []


def test_a_machine_stuck_in_a_deployment(azure: StandIn, rest: Rest) -> None:
    azure.faults.add(Stuck(), path="virtualMachines/vm$", times=1)
    deploy(rest, "vm")
    until(lambda: rest.get(compute("vm")).status == 200)
    assert deploy(rest, "vm").code == "DeploymentActive"
    assert rest.ask("POST", f"{DEPLOYMENTS}/vm/cancel").status == 204
    rest.delete(compute("vm"))
    assert azure.meters.running() == []


BAD_TEMPLATES: list[tuple[str, Any]] = [
    ("contentVersion", "one"),
    ("parameters", {}),
    ("variables", {}),
    ("colour", "red"),
    ("resources", [{"type": "Microsoft.Compute/disks", "name": "d"}]),
    ("resources", [resource("Microsoft.Compute/disks", "d", ["nothing"])]),
    ("resources", [resource("Microsoft.Compute/disks", "[concat('a']", [])]),
    ("resources", [resource("Microsoft.Compute/disks", "[launch('a')]", [])]),
]


@pytest.mark.parametrize(("key", "value"), BAD_TEMPLATES)
def test_a_bad_template_is_refused(rest: Rest, key: str, value: Any) -> None:
    assert deploy(rest, "vm", {**template(), key: value}).code == "InvalidTemplate"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("[[escaped]", "[escaped]"),
        ("[concat('it''s ', string(3))]", "it's 3"),
        ("[if(equals(1, 2), 'a', createArray('b', 'c')[1])]", "c"),
        ("[union(createObject('a', 1), createObject('b', 2)).b]", 2),
        ("[toLower(substring('ABCDEF', 1, 2))]", "bc"),
    ],
)
def test_expressions(text: str, value: object) -> None:
    assert Expressions({}).value(text) == value


def test_an_expression_that_cannot_be_evaluated() -> None:
    with pytest.raises(ArmError, match="Unable to evaluate"):
        Expressions({}).value("[first(1)]")


# -- schedules -------------------------------------------------------------------------------------


def at(hour: int, minute: int) -> float:
    return datetime(2026, 11, 15, hour, minute, tzinfo=UTC).timestamp()


def test_the_next_time_of_day() -> None:
    assert next_time((12, 30), at(12, 29)) == at(12, 30)
    assert next_time((12, 30), at(12, 30)) == at(12, 30)
    assert next_time((12, 30), at(12, 31)) == at(12, 30) + 86400


def test_a_schedule_deallocates_at_its_time_each_day(azure: StandIn, rest: Rest) -> None:
    soon = datetime.fromtimestamp(azure.clock.now() + 3 * 3600, UTC)
    rest.outcome(deploy(rest, "vm", time=soon.strftime("%H%M")))
    due = soon.replace(second=0, microsecond=0).timestamp()
    azure.jump(due - azure.clock.now() - 60.0)
    assert rest.power("vm") == "PowerState/running"
    azure.jump(20 * 3600.0)
    assert rest.power("vm") == "PowerState/deallocated"
    [span] = azure.meters.of("vm")
    assert span.end == pytest.approx(due, abs=5.0), "at its own moment, although time jumped"
    rest.act(f"{compute('vm')}/start")
    azure.jump(24 * 3600.0)
    assert rest.power("vm") == "PowerState/deallocated"


def test_a_schedule_can_be_moved_on_and_outlives_its_machine(azure: StandIn, rest: Rest) -> None:
    soon = datetime.fromtimestamp(azure.clock.now() + 3 * 3600, UTC)
    rest.outcome(deploy(rest, "vm", time=soon.strftime("%H%M")))
    path = f"/resourceGroups/rg/providers/{SCHEDULE}/shutdown-computevm-vm"
    body = rest.get(path).body
    later = datetime.fromtimestamp(azure.clock.now() + 6 * 3600, UTC).strftime("%H%M")
    body["properties"]["dailyRecurrence"]["time"] = later
    assert rest.put(path, body)["properties"]["dailyRecurrence"]["time"] == later
    azure.jump(4 * 3600.0)
    assert rest.power("vm") == "PowerState/running"
    rest.delete(compute("vm"))
    azure.jump(4 * 3600.0)
    assert rest.get(path).status == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dailyRecurrence", {"time": "2460"}),
        ("timeZoneId", "Mars"),
        ("taskType", "Sleep"),
        ("status", "Maybe"),
    ],
)
def test_a_bad_schedule_is_refused(rest: Rest, field: str, value: object) -> None:
    rest.outcome(deploy(rest, "vm"))
    path = f"/resourceGroups/rg/providers/{SCHEDULE}/shutdown-computevm-vm"
    body = rest.get(path).body
    body["properties"][field] = value
    assert rest.ask("PUT", path, body).code == "InvalidScheduleProperties"
