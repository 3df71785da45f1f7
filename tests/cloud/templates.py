"""A template as a fleet would send it: a machine with all it needs, and its expiry."""

from __future__ import annotations

from typing import Any

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
