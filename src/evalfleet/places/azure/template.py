"""What is deployed for one machine, in one call, and for a region's network. Pure.

The machine's deployment is carried out by Azure itself: address, interface, machine, and the schedule that
stops it. No crash of ours falls between the machine and its dead-man switch.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec import Struct

from evalfleet.places.vm.answers import Json

from .names import Names

COMPUTE, GALLERIES, DISKS, NETWORK, SCHEDULES, RESOURCES = (
    "2024-07-01",
    "2023-07-03",
    "2024-03-02",
    "2024-07-01",
    "2018-09-15",
    "2021-04-01",
)
STANDARD = "Standard"
"""The security type that is never named: before 2025-11-01 Azure refuses the name, and gives it to who names
none. From then on it is the other way round, so COMPUTE must stay below until that is changed, too."""
SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#"
VM = "Microsoft.Compute/virtualMachines"
DISK = "Microsoft.Compute/disks"
NIC = "Microsoft.Network/networkInterfaces"
ADDRESS = "Microsoft.Network/publicIPAddresses"
NSG = "Microsoft.Network/networkSecurityGroups"
VNET = "Microsoft.Network/virtualNetworks"
SCHEDULE = "Microsoft.DevTestLab/schedules"
DEPLOYMENT = "Microsoft.Resources/deployments"
API: Mapping[str, str] = {
    DEPLOYMENT: RESOURCES,
    VM: COMPUTE,
    DISK: DISKS,
    NIC: NETWORK,
    ADDRESS: NETWORK,
    NSG: NETWORK,
    VNET: NETWORK,
    SCHEDULE: SCHEDULES,
}
"""The version by which each kind is spoken to."""


class VmBuild(Struct, frozen=True):
    """One machine to be made. `root`: the id of its resource group."""

    root: str
    names: Names
    region: str
    zone: str
    size: str
    spot: bool
    image: str
    security_type: str
    disk: str
    disk_gb: int
    user: str
    public_key: str
    custom_data: str
    subnet: str
    nsg: str
    public_ip: bool
    identity: str
    tags: Mapping[str, str]
    shutdown_at: float


def names_standard(version: str) -> bool:
    """Must a plain machine say so? Before this version of the API Azure refuses that, then it insists."""
    return version >= "2025-11-01"


def deployment(build: VmBuild) -> Json:
    """The body of the call. The host's private key is a secure parameter: Azure shows it to nobody."""
    resources = [_nic(build), _vm(build), _schedule(build)]
    if build.public_ip:
        resources.insert(0, _address(build))
    template = {
        "$schema": SCHEMA,
        "contentVersion": "1.0.0.0",
        "parameters": {"customData": {"type": "secureString"}},
        "resources": resources,
    }
    properties = {
        "mode": "Incremental",
        "template": template,
        "parameters": {"customData": {"value": base64.b64encode(build.custom_data.encode()).decode()}},
    }
    return {"tags": dict(build.tags), "properties": properties}


def _resource(build: VmBuild, type: str, name: str, properties: Json, after: tuple[str, ...] = ()) -> Json:
    resource: Json = {
        "type": type,
        "apiVersion": API[type],
        "name": name,
        "location": build.region,
        "tags": {key: literal(value) for key, value in build.tags.items()},
        "properties": properties,
    }
    return {**resource, "dependsOn": list(after)} if after else resource


def literal(text: str) -> str:
    """Text that ARM does not take for an expression."""
    return f"[{text}" if text.startswith("[") else text


def _address(build: VmBuild) -> Json:
    properties = {"publicIPAllocationMethod": "Static", "deleteOption": "Delete"}
    address = _resource(build, ADDRESS, build.names.address, properties)
    zones = {"zones": [build.zone]} if build.zone else {}
    return {**address, "sku": {"name": "Standard"}, **zones}


def _nic(build: VmBuild) -> Json:
    configuration: Json = {"subnet": {"id": build.subnet}}
    after: tuple[str, ...] = ()
    if build.public_ip:
        address = id_of(build.root, ADDRESS, build.names.address)
        configuration["publicIPAddress"] = {"id": address, "properties": {"deleteOption": "Delete"}}
        after = (address,)
    properties = {
        "ipConfigurations": [{"name": "main", "properties": configuration}],
        "networkSecurityGroup": {"id": build.nsg},
    }
    return _resource(build, NIC, build.names.nic, properties, after)


def _vm(build: VmBuild) -> Json:
    nic = id_of(build.root, NIC, build.names.nic)
    properties: Json = {
        "hardwareProfile": {"vmSize": build.size},
        "storageProfile": {"imageReference": image_of(build.image), "osDisk": _disk(build)},
        "osProfile": _os(build),
        "networkProfile": {"networkInterfaces": [{"id": nic, "properties": {"deleteOption": "Delete"}}]},
        "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
    }
    if build.security_type != STANDARD or names_standard(COMPUTE):
        properties["securityProfile"] = {"securityType": build.security_type}
    if build.spot:
        # deallocated, not deleted: so we see that it was evicted, and delete it ourselves
        properties |= {"priority": "Spot", "evictionPolicy": "Deallocate", "billingProfile": {"maxPrice": -1}}
    vm = _resource(build, VM, build.names.vm, properties, (nic,))
    if build.zone:
        vm["zones"] = [build.zone]
    if build.identity:
        vm["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {build.identity: {}}}
    return vm


def _disk(build: VmBuild) -> Json:
    return {
        "name": build.names.disk,
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "diskSizeGB": build.disk_gb,
        "managedDisk": {"storageAccountType": build.disk},
    }


def _os(build: VmBuild) -> Json:
    keys = [{"path": f"/home/{build.user}/.ssh/authorized_keys", "keyData": build.public_key}]
    return {
        "computerName": build.names.vm,
        "adminUsername": build.user,
        "customData": "[parameters('customData')]",
        "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": keys}},
    }


def image_of(text: str) -> Json:
    if text.startswith("/"):
        return {"id": text}
    publisher, offer, sku, version = text.split(":")
    return {"publisher": publisher, "offer": offer, "sku": sku, "version": version}


def _schedule(build: VmBuild) -> Json:
    vm = id_of(build.root, VM, build.names.vm)
    return _resource(build, SCHEDULE, build.names.schedule, schedule(vm, build.shutdown_at), (vm,))


def schedule(vm: str, at: float) -> Json:
    return {
        "status": "Enabled",
        "taskType": "ComputeVmShutdownTask",
        "dailyRecurrence": {"time": daily(at)},
        "timeZoneId": "UTC",
        "targetResourceId": vm,
        "notificationSettings": {"status": "Disabled"},
    }


def id_of(root: str, type: str, name: str) -> str:
    return f"{root}/providers/{type}/{name}"


def cloud_config(private_key: str, public_key: str) -> str:
    """For cloud-init: the host key, which only root on the machine can read, and no other."""
    indented = "".join(f"    {line}\n" for line in private_key.strip().splitlines())
    return (
        "#cloud-config\n"
        "ssh_deletekeys: true\n"
        "ssh_genkeytypes: [ed25519]\n"
        "ssh_keys:\n"
        f"  ed25519_private: |\n{indented}"
        f"  ed25519_public: {public_key.strip()}\n"
    )


def let_in(user: str, public_key: str) -> Json:
    """The command for Azure's agent by which the key lets the user in, beside what does already.

    It runs as root, and the user writes: what the file's name leads to, the user could write anyway.
    """
    line = shlex.quote(public_key.strip())
    add = f"grep -qxF {line} authorized_keys 2>/dev/null || printf '\\n%s\\n' {line} >>authorized_keys"
    write = f"umask 077; mkdir -p .ssh && cd .ssh && {{ {add}; }}"
    script = f"cd ~{user} && runuser -u {user} -- sh -c {shlex.quote(write)}"
    return {"commandId": "RunShellScript", "script": [script]}


# -- a region's network ---------------------------------------------------------------------------

RANGE = "10.42.0.0/16"
SUBNET = "machines"


def security_group(region: str, tags: Mapping[str, str], sources: tuple[str, ...], port: int) -> Json:
    """SSH from where the user says, and nothing else: Azure's own rules deny the rest."""
    rules = [_rule(sources, port)] if sources else []
    return {"location": region, "tags": dict(tags), "properties": {"securityRules": rules}}


def _rule(sources: tuple[str, ...], port: int) -> Json:
    source: Json = (
        {"sourceAddressPrefix": sources[0]} if len(sources) == 1 else {"sourceAddressPrefixes": list(sources)}
    )
    properties = {
        "protocol": "Tcp",
        "direction": "Inbound",
        "access": "Allow",
        "priority": 1000,
        "sourcePortRange": "*",
        "destinationPortRange": str(port),
        "destinationAddressPrefix": "*",
        **source,
    }
    return {"name": "ssh", "properties": properties}


def network(region: str, tags: Mapping[str, str]) -> Json:
    subnets = [{"name": SUBNET, "properties": {"addressPrefix": RANGE}}]
    properties = {"addressSpace": {"addressPrefixes": [RANGE]}, "subnets": subnets}
    return {"location": region, "tags": dict(tags), "properties": properties}


# -- the dead-man switch: a daily time, in UTC, at which Azure deallocates a machine -----------------

LEAD_S = 31 * 60.0
"""A schedule that is set less than half an hour ahead first acts on the next day."""
FARTHEST_S = 23.5 * 3600.0
"""A time further ahead than a day would come a day early. It is moved on while the machine is in use."""
STOPPING_S = 120.0
"""How long Azure may take to stop it, during which it is billed."""
SHORTEST_S = LEAD_S + 60.0 + STOPPING_S
"""With less time left, a switch that is set now acts too late."""
LEAST_LIFE_S = 40 * 60.0
"""The least that a new machine is given: SHORTEST_S, and some minutes until its deployment has begun."""


def shutdown_at(now: float, expires_s: float) -> float:
    """When a machine with so long to live is stopped: at its expiry, as far as a daily time can say."""
    at = min(now + expires_s, now + FARTHEST_S)
    if at < now + LEAD_S:
        return _minute(now + LEAD_S + 59.0)
    return _minute(at)


def _minute(at: float) -> float:
    return at - at % 60.0


def daily(at: float) -> str:
    """The time of day as the schedule has it: `1930`."""
    return datetime.fromtimestamp(at, UTC).strftime("%H%M")
