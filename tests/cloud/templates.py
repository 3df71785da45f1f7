"""A template as a fleet would send it: a machine with all it needs, and its expiry."""

from __future__ import annotations

from typing import Any

from evalfleet.model import MachineId
from evalfleet.places.azure.names import names_of
from evalfleet.places.azure.template import VmBuild
from tests.cloud.rest import Json, vm_body

SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#"
PIP = "Microsoft.Network/publicIPAddresses"
NIC = "Microsoft.Network/networkInterfaces"
VM = "Microsoft.Compute/virtualMachines"
SCHEDULE = "Microsoft.DevTestLab/schedules"


def resource(type: str, name: str, after: list[str], **more: Any) -> Json:
    here = {"location": "[resourceGroup().location]", "apiVersion": "2024-07-01"}
    return {"type": type, "name": name, "dependsOn": after, **here, **more}


def template() -> Json:
    """A machine with all it needs, and its expiry."""
    subnet = "[resourceId('Microsoft.Network/virtualNetworks/subnets', 'net', 's')]"
    public = {"id": f"[resourceId('{PIP}', variables('ip'))]", "properties": {"deleteOption": "Delete"}}
    configuration = {"subnet": {"id": subnet}, "publicIPAddress": public}
    machine = vm_body("x", "[resourceId('Microsoft.Network/networkInterfaces', variables('nic'))]")[
        "properties"
    ]
    machine["osProfile"]["computerName"] = "[parameters('name')]"
    shutdown = {
        "status": "Enabled",
        "taskType": "ComputeVmShutdownTask",
        "timeZoneId": "UTC",
        "dailyRecurrence": {"time": "[parameters('time')]"},
        "targetResourceId": f"[resourceId('{VM}', parameters('name'))]",
    }
    return {
        "$schema": SCHEMA,
        "contentVersion": "1.0.0.0",
        "parameters": {"name": {"type": "string"}, "time": {"type": "string", "defaultValue": "0300"}},
        "variables": {
            "ip": "[concat(parameters('name'), '-ip')]",
            "nic": "[format('{0}-nic', parameters('name'))]",
        },
        "resources": [
            resource(
                SCHEDULE,
                "[concat('shutdown-computevm-', parameters('name'))]",
                [f"[resourceId('{VM}', parameters('name'))]"],
                properties=shutdown,
            ),
            resource(VM, "[parameters('name')]", ["[variables('nic')]"], properties=machine),
            resource(
                NIC,
                "[variables('nic')]",
                [f"[resourceId('{PIP}', variables('ip'))]"],
                properties={"ipConfigurations": [{"name": "ip", "properties": configuration}]},
            ),
            resource(
                PIP,
                "[variables('ip')]",
                [],
                sku={"name": "Standard"},
                properties={"publicIPAllocationMethod": "Static"},
            ),
        ],
        "outputs": {
            "address": {
                "type": "string",
                "value": f"[reference(resourceId('{PIP}', variables('ip'))).ipAddress]",
            }
        },
    }


def build(security_type: str, spot: bool = False) -> VmBuild:
    """What the place `azure` would make."""
    return VmBuild(
        root="/subscriptions/s/resourceGroups/rg",
        names=names_of(MachineId("pool-abc123-1")),
        region="eastus",
        zone="1",
        size="Standard_D4s_v5",
        spot=spot,
        image="Canonical:ubuntu-24_04-lts:server:latest",
        security_type=security_type,
        disk="StandardSSD_LRS",
        disk_gb=128,
        user="azureuser",
        public_key="ssh-ed25519 AAAA",
        custom_data="#cloud-config",
        subnet="/subnet",
        nsg="/nsg",
        public_ip=True,
        identity="/identity",
        tags={"a": "b"},
        shutdown_at=0.0,
    )
