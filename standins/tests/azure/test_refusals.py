"""What the stand-in refuses, in ARM's words."""

from __future__ import annotations

from typing import Any

import pytest

from standins.azure import Policy, StandIn
from standins.azure.catalog import Restriction
from tests.cloud.rest import Json, Rest, compute, network, vm_body
from tests.waiting import until


def changed(body: Json, path: str, value: Any) -> Json:
    """`path` with dots; numbers are places in lists. Changes the body itself."""
    *before, last = path.split(".")
    place: Any = body
    for word in before:
        place = place[int(word)] if isinstance(place, list) else place.setdefault(word, {})
    place[last] = value
    return body


BAD_MACHINES = [
    ("location", "", "LocationRequired"),
    ("location", "moon", "LocationNotAvailableForResourceType"),
    ("zones", ["7"], "InvalidAvailabilityZone"),
    ("properties.hardwareProfile.vmSize", "Standard_Huge", "InvalidParameter"),
    ("properties.colour", "red", "InvalidRequestContent"),
    ("properties.osProfile.adminUsername", "admin", "InvalidParameter"),
    ("properties.osProfile.computerName", "under_score", "InvalidParameter"),
    ("properties.osProfile.customData", "not base64!", "InvalidParameter"),
    ("properties.osProfile.linuxConfiguration.ssh.publicKeys.0.path", "/root/keys", "InvalidParameter"),
    ("properties.storageProfile.imageReference.sku", "no-such", "PlatformImageNotFound"),
    ("properties.storageProfile.imageReference.sku", "22_04-lts-arm64", "BadRequest"),
    ("properties.storageProfile.osDisk.diskSizeGB", 10, "InvalidParameter"),
    ("properties.storageProfile.osDisk.managedDisk.storageAccountType", "Gold_LRS", "InvalidParameter"),
    ("properties.evictionPolicy", "Delete", "InvalidParameter"),
    ("properties.securityProfile.securityType", "Standard", "InvalidParameter"),
    ("properties.securityProfile.securityType", "standard", "InvalidParameter"),
    ("properties.networkProfile.networkInterfaces", [], "InvalidParameter"),
]


@pytest.mark.parametrize(("path", "value", "code"), BAD_MACHINES)
def test_a_bad_machine_is_refused_and_nothing_is_made(
    azure: StandIn, rest: Rest, path: str, value: Any, code: str
) -> None:
    body = vm_body("vm", rest.new_interface("vm"))
    reply = rest.ask("PUT", compute("vm"), changed(body, path, value))
    assert reply.code == code
    assert rest.get(compute("vm")).status == 404
    assert [span.kind for span in azure.meters.running()] == ["address"]


def test_references_must_lead_somewhere(rest: Rest) -> None:
    nic = rest.new_interface("a")
    assert rest.ask("PUT", compute("b"), vm_body("b", f"{nic}x")).code == "InvalidResourceReference"
    rest.put(compute("a"), vm_body("a", nic))
    assert rest.ask("PUT", compute("b"), vm_body("b", nic)).code == "NicInUse"


def test_what_is_in_use_cannot_be_deleted(rest: Rest) -> None:
    rest.new_vm("vm")
    group = {"location": "eastus", "properties": {"securityRules": []}}
    rest.put(network("networkSecurityGroups/nsg"), group)
    nic = rest.get(network("networkInterfaces/vm-nic")).body
    nic["properties"]["networkSecurityGroup"] = {"id": rest.root + network("networkSecurityGroups/nsg")}
    rest.put(network("networkInterfaces/vm-nic"), nic)
    disk = rest.get(compute("vm")).body["properties"]["storageProfile"]["osDisk"]["managedDisk"]["id"]
    for path, code in (
        (network("networkInterfaces/vm-nic"), "NicInUse"),
        (network("publicIPAddresses/vm-ip"), "PublicIPAddressCannotBeDeleted"),
        (network("virtualNetworks/net/subnets/s"), "InUseSubnetCannotBeDeleted"),
        (network("virtualNetworks/net"), "InUseSubnetCannotBeDeleted"),
        (network("networkSecurityGroups/nsg"), "InUseNetworkSecurityGroupCannotBeDeleted"),
        (disk.removeprefix(rest.root), "OperationNotAllowed"),
    ):
        assert rest.ask("DELETE", path).code == code
    rest.delete(compute("vm"))
    assert rest.delete(network("virtualNetworks/net"))["status"] == "Succeeded"


def test_a_machine_is_what_it_was_made_as(rest: Rest) -> None:
    nic = rest.new_interface("vm")
    body = vm_body("vm", nic, custom_data="#cloud-config\n{}")
    rest.put(compute("vm"), body)
    rest.put(compute("vm"), body)
    for path, value in (
        ("properties.osProfile.customData", "bmV3"),
        ("properties.priority", "Spot"),
        ("properties.storageProfile.imageReference.sku", "22_04-lts"),
        ("zones", ["1"]),
    ):
        other = changed(vm_body("vm", nic), path, value)
        assert rest.ask("PUT", compute("vm"), other).code == "PropertyChangeNotAllowed"
    moved = {**body, "location": "westus2"}
    assert rest.ask("PUT", compute("vm"), moved).code == "InvalidResourceLocation"


@pytest.mark.parametrize(
    ("name", "limit", "spot", "code"),
    [
        ("cores", 6, False, "OperationNotAllowed"),
        ("standardDSv5Family", 6, False, "OperationNotAllowed"),
        ("lowPriorityCores", 6, True, "QuotaExceeded"),
    ],
)
def test_quota_counts_machines_also_when_they_are_deallocated(
    azure: StandIn, rest: Rest, name: str, limit: int, spot: bool, code: str
) -> None:
    more: Json = {"priority": "Spot"} if spot else {}
    azure.cloud.quota.limits["eastus", name] = limit
    rest.new_vm("a", **more)
    rest.act(f"{compute('a')}/deallocate")
    reply = rest.ask("PUT", compute("b"), vm_body("b", rest.new_interface("b"), **more))
    assert (reply.status, reply.code) == (409, code)
    assert "Current Usage: 4, Additional Required: 4" in reply.body["error"]["message"]
    usages = rest.get("/providers/Microsoft.Compute/locations/eastus/usages").body["value"]
    assert [(each["currentValue"], each["limit"]) for each in usages if each["name"]["value"] == name] == [
        (4, limit)
    ]
    rest.delete(compute("a"))
    assert rest.ask("PUT", compute("b"), vm_body("b", rest.new_interface("c"), **more)).status == 201


def test_addresses_have_a_quota(azure: StandIn, rest: Rest) -> None:
    azure.cloud.quota.limits["eastus", "PublicIPAddresses"] = 1
    rest.new_interface("a")
    body = {
        "location": "eastus",
        "sku": {"name": "Standard"},
        "properties": {"publicIPAllocationMethod": "Static"},
    }
    assert rest.ask("PUT", network("publicIPAddresses/b"), body).code == "PublicIPCountLimitReached"
    assert rest.get(network("publicIPAddresses/b")).status == 404


@pytest.mark.parametrize(
    ("scope", "more", "code"),
    [
        (("eastus", "", ""), {}, "AllocationFailed"),
        (("eastus", "2", ""), {"zone": "2"}, "ZonalAllocationFailed"),
        (("eastus", "", "standard_d4s_v5"), {"priority": "Spot"}, "OverconstrainedAllocationRequest"),
    ],
)
def test_a_region_without_room_fails_late_and_bills_nothing(
    azure: StandIn, rest: Rest, scope: tuple[str, str, str], more: Json, code: str
) -> None:
    azure.cloud.capacity.limits[scope] = 0
    reply = rest.ask("PUT", compute("vm"), vm_body("vm", rest.new_interface("vm"), **more))
    assert reply.status == 201, "Azure says so only later"
    outcome = rest.outcome(reply)
    assert (outcome["status"], outcome["error"]["code"]) == ("Failed", code)
    assert rest.get(compute("vm")).body["properties"]["provisioningState"] == "Failed"
    assert [span.kind for span in azure.meters.running()] == ["address"]
    azure.cloud.capacity.limits.clear()
    again = vm_body("vm", rest.root + network("networkInterfaces/vm-nic"), **more)
    rest.put(compute("vm"), again)
    assert rest.power("vm") == "PowerState/running", "the same call tries again"
    rest.delete(compute("vm"))
    assert azure.meters.running() == []


def test_a_disk_that_stayed_is_in_the_way(azure: StandIn, rest: Rest) -> None:
    body = vm_body("vm", rest.new_interface("vm"))
    body["properties"]["storageProfile"]["osDisk"] |= {"name": "vm-disk", "deleteOption": "Detach"}
    rest.put(compute("vm"), body)
    rest.delete(compute("vm"))
    assert [span.kind for span in azure.meters.running()] == ["disk"], "and is billed"
    body["properties"]["networkProfile"]["networkInterfaces"][0]["id"] = rest.new_interface("vm")
    assert rest.ask("PUT", compute("vm"), body).code == "ConflictingUserInput"
    rest.delete("/resourceGroups/rg/providers/Microsoft.Compute/disks/vm-disk")
    assert rest.ask("PUT", compute("vm"), body).status == 201


def test_a_group_that_others_use_stays(rest: Rest) -> None:
    nic = rest.new_interface("vm")
    rest.put("/resourceGroups/other", {"location": "eastus"})
    machine = compute("vm").replace("/rg/", "/other/")
    rest.put(machine, vm_body("vm", nic))
    reply = rest.ask("DELETE", "/resourceGroups/rg")
    where = reply.headers["Location"]
    until(lambda: rest.get(where).status != 202)
    assert rest.get(where).code == "ResourceGroupDeletionBlocked"
    assert rest.get("/resourceGroups/rg").body["properties"]["provisioningState"] == "Succeeded"
    rest.delete(machine)
    rest.ask("DELETE", "/resourceGroups/rg")
    until(lambda: rest.get("/resourceGroups/rg").status == 404)


def test_a_stopped_machine_may_find_its_place_taken(azure: StandIn, rest: Rest) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 1
    rest.new_vm("a")
    rest.act(f"{compute('a')}/deallocate")
    rest.new_vm("b")
    outcome = rest.act(f"{compute('a')}/start")
    assert outcome["error"]["code"] == "AllocationFailed"
    assert rest.power("a") == "PowerState/deallocated"
    rest.delete(compute("b"))
    assert rest.act(f"{compute('a')}/start")["status"] == "Succeeded"


def test_restricted_sizes_are_listed_so_and_refused(azure: StandIn, rest: Rest) -> None:
    azure.cloud.catalog.restrictions.append(Restriction("Standard_D4s_v5", "eastus", ("1",)))
    listed = rest.get("/providers/Microsoft.Compute/skus", **{"$filter": "location eq 'eastus'"}).body[
        "value"
    ]
    sku = next(each for each in listed if each["name"] == "Standard_D4s_v5")
    assert sku["restrictions"][0]["restrictionInfo"] == {"locations": ["eastus"], "zones": ["1"]}
    nic = rest.new_interface("vm")
    assert rest.ask("PUT", compute("vm"), vm_body("vm", nic, zone="1")).code == "SkuNotAvailable"
    assert rest.ask("PUT", compute("vm"), vm_body("vm", nic, zone="2")).status == 201


def test_policies_rights_and_registration(azure: StandIn, rest: Rest) -> None:
    group = {"location": "eastus", "properties": {}}
    path = network("networkSecurityGroups/nsg")
    azure.faults.policies.append(
        Policy("need-cost-centre", "Microsoft.Network/networkSecurityGroups", required_tag="costCentre")
    )
    reply = rest.ask("PUT", path, group)
    assert (reply.status, reply.code) == (403, "RequestDisallowedByPolicy")
    assert "need-cost-centre" in reply.body["error"]["message"]
    group["tags"] = {"costcentre": "42"}
    assert rest.outcome(rest.ask("PUT", path, group))["status"] == "Succeeded"

    azure.faults.denied_actions.append("Microsoft.Compute/virtualMachines/write")
    reply = rest.ask("PUT", compute("vm"), {})
    assert (reply.status, reply.code) == (403, "AuthorizationFailed")
    shown = rest.get("/providers/Microsoft.Authorization/permissions").body["value"]
    assert shown[0]["notActions"] == ["Microsoft.Compute/virtualMachines/write"]

    azure.cloud.registered.discard("microsoft.network")
    assert rest.get("/providers/Microsoft.Network").body["registrationState"] == "NotRegistered"
    assert rest.ask("PUT", path, group).code == "MissingSubscriptionRegistration"
    rest.ask("POST", "/providers/Microsoft.Network/register")
    assert rest.ask("PUT", path, group).status == 200


def test_names_groups_and_tokens(rest: Rest) -> None:
    here = {"location": "eastus", "properties": {}}
    assert rest.ask("PUT", network("networkSecurityGroups/microsoft-x"), here).code == "ReservedResourceName"
    assert rest.ask("PUT", network("networkSecurityGroups/a b").replace(" ", "%20"), here).code == (
        "InvalidResourceName"
    )
    other = network("networkSecurityGroups/x").replace("/rg/", "/nowhere/")
    assert rest.ask("PUT", other, here).code == "ResourceGroupNotFound"
    assert rest.get(network("networkSecurityGroups/x")).code == "ResourceNotFound"
    assert rest.ask("DELETE", network("networkSecurityGroups/x")).status == 204
    assert (
        rest.ask("PUT", "/resourceGroups/rg", {"location": "westus2"}).code == "InvalidResourceGroupLocation"
    )
    rest.token = "stolen"
    assert rest.get("/resourceGroups/rg").status == 401


def test_an_expired_token_is_refused(azure: StandIn, rest: Rest) -> None:
    azure.identity.lifetime_s = -1.0
    rest.token = azure.token()
    assert rest.get("/resourceGroups/rg").code == "ExpiredAuthenticationToken"


def test_networks_must_make_sense(rest: Rest) -> None:
    net = rest.get(network("virtualNetworks/net")).body
    subnet = network("virtualNetworks/net/subnets/t")
    assert rest.ask("PUT", subnet, {"properties": {"addressPrefix": "10.0.9.0/24"}}).status == 201
    far = {"properties": {"addressPrefix": "192.168.0.0/24"}}
    assert rest.ask("PUT", network("virtualNetworks/net/subnets/u"), far).code == "NetcfgInvalidSubnet"
    near = {"properties": {"addressPrefix": "10.0.0.128/25"}}
    assert rest.ask("PUT", network("virtualNetworks/net/subnets/u"), near).code == "NetcfgSubnetRangesOverlap"
    assert len(net["properties"]["subnets"]) == 1


def test_security_rules_must_make_sense(rest: Rest) -> None:
    rule = {
        "protocol": "Tcp",
        "access": "Allow",
        "direction": "Inbound",
        "priority": 100,
        "sourceAddressPrefix": "198.18.0.1/32",
        "sourcePortRange": "*",
        "destinationAddressPrefix": "*",
        "destinationPortRange": "22",
    }
    path = network("networkSecurityGroups/nsg")

    def group(*rules: Json) -> Json:
        named = [{"name": f"r{n}", "properties": each} for n, each in enumerate(rules)]
        return {"location": "eastus", "properties": {"securityRules": named}}

    assert rest.ask("PUT", path, group(rule, rule)).code == "SecurityRuleConflict"
    assert rest.ask("PUT", path, group({**rule, "priority": 1})).code == "SecurityRuleInvalidPriority"
    source = {**rule, "sourceAddressPrefix": "300.1.1.1"}
    assert rest.ask("PUT", path, group(source)).code == "SecurityRuleInvalidAddressPrefix"
    shown = rest.put(path, group(rule))
    assert shown["properties"]["securityRules"][0]["properties"]["destinationPortRange"] == "22"
