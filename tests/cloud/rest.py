"""A plain client of the stand-in, for what Microsoft's clients hide, and bodies for it."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from standins.azure import StandIn
from tests.waiting import PATIENCE_S, until

Json = dict[str, Any]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPLAINPLAINPLAINPLAINPLAINPLAINPLAINPLAIN0"
IMAGE = {
    "publisher": "Canonical",
    "offer": "0001-com-ubuntu-server-jammy",
    "sku": "22_04-lts-gen2",
    "version": "latest",
}


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


class Rest:
    """Paths are below the subscription, unless they are whole URLs."""

    def __init__(self, azure: StandIn) -> None:
        self.azure = azure
        azure.faults.vm_limits = None  # these tests look more often than Azure bears
        self.root = f"/subscriptions/{azure.subscription}"
        self.token = azure.token()
        self._tls = ssl.create_default_context(cafile=str(azure.ca))

    def ask(self, method: str, path: str, body: Json | None = None, **query: str) -> Reply:
        where = urlsplit(path if path.startswith("https:") else self.azure.endpoint + self.root + path)
        options = urlencode({"api-version": "2024-07-01", **query}) if not where.query else where.query
        connection = http.client.HTTPSConnection(where.netloc, context=self._tls, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            target = f"{where.path}?{options}"
            connection.request(method, target, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        is_json = "json" in answer.headers.get("Content-Type", "")
        return Reply(answer.status, json.loads(text) if is_json else text.decode(), dict(answer.headers))

    def get(self, path: str, **query: str) -> Reply:
        return self.ask("GET", path, None, **query)

    def outcome(self, reply: Reply) -> Json:
        """Of the long-running operation that a reply began."""
        assert reply.status in (200, 201, 202), reply
        where = reply.headers.get("Azure-AsyncOperation")
        if where is None:
            return {"status": "Succeeded"}

        def ended() -> Json | None:
            found: Json = self.get(where).body
            return found if found["status"] != "InProgress" else None

        return until(ended, "the end of the operation")

    def put(self, path: str, body: Json) -> Json:
        """All the way."""
        outcome = self.outcome(self.ask("PUT", path, body))
        assert outcome["status"] == "Succeeded", outcome
        return self.get(path).body  # type: ignore[no-any-return]

    def act(self, path: str) -> Json:
        return self.outcome(self.ask("POST", path))

    def delete(self, path: str) -> Json:
        return self.outcome(self.ask("DELETE", path))

    # -- a fleet's resources -------------------------------------------------------------------

    def furnish(self, location: str = "eastus") -> None:
        """The group `rg` with a network."""
        self.put("/resourceGroups/rg", {"location": location})
        self.put(network("virtualNetworks/net"), VNET | {"location": location})

    def new_interface(self, name: str, location: str = "eastus", method: str = "Static") -> str:
        sku = {"name": "Standard" if method == "Static" else "Basic"}
        address = {"location": location, "sku": sku, "properties": {"publicIPAllocationMethod": method}}
        self.put(network(f"publicIPAddresses/{name}-ip"), address)
        nic = {"location": location, "properties": {"ipConfigurations": [self._configuration(name)]}}
        self.put(network(f"networkInterfaces/{name}-nic"), nic)
        return self.root + network(f"networkInterfaces/{name}-nic")

    def _configuration(self, name: str) -> Json:
        address = self.root + network(f"publicIPAddresses/{name}-ip")
        properties = {
            "subnet": {"id": self.root + network("virtualNetworks/net/subnets/s")},
            "publicIPAddress": {"id": address, "properties": {"deleteOption": "Delete"}},
        }
        return {"name": "ip", "properties": properties}

    def new_vm(self, name: str, **more: Any) -> Json:
        """All the way; `more` as for `vm_body`."""
        nic = self.new_interface(name, more.get("location", "eastus"), more.pop("method", "Static"))
        return self.put(compute(name), vm_body(name, nic, **more))

    def power(self, name: str) -> str:
        codes: list[str] = [
            each["code"] for each in self.get(f"{compute(name)}/instanceView").body["statuses"]
        ]
        return codes[-1]


VNET: Json = {
    "properties": {
        "addressSpace": {"addressPrefixes": ["10.0.0.0/16"]},
        "subnets": [{"name": "s", "properties": {"addressPrefix": "10.0.0.0/24"}}],
    }
}


def network(rest: str) -> str:
    return f"/resourceGroups/rg/providers/Microsoft.Network/{rest}"


def compute(vm: str) -> str:
    return f"/resourceGroups/rg/providers/Microsoft.Compute/virtualMachines/{vm}"


def vm_body(
    name: str,
    nic: str,
    *,
    location: str = "eastus",
    size: str = "Standard_D4s_v5",
    key: str = KEY,
    custom_data: str = "",
    tags: dict[str, str] | None = None,
    zone: str = "",
    **properties: Any,
) -> Json:
    linux = {
        "disablePasswordAuthentication": True,
        "ssh": {"publicKeys": [{"path": "/home/azureuser/.ssh/authorized_keys", "keyData": key}]},
    }
    profile: Json = {"computerName": name, "adminUsername": "azureuser", "linuxConfiguration": linux}
    if custom_data:
        profile["customData"] = base64.b64encode(custom_data.encode()).decode()
    disk = {
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "diskSizeGB": 128,
        "managedDisk": {"storageAccountType": "StandardSSD_LRS"},
    }
    body: Json = {
        "location": location,
        "tags": tags or {},
        "properties": {
            "hardwareProfile": {"vmSize": size},
            "storageProfile": {"imageReference": dict(IMAGE), "osDisk": disk},
            "osProfile": profile,
            "networkProfile": {"networkInterfaces": [{"id": nic, "properties": {"deleteOption": "Delete"}}]},
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
            **properties,
        },
    }
    return {**body, "zones": [zone]} if zone else body


DEFINITION: Json = {
    "location": "eastus",
    "properties": {
        "osType": "Linux",
        "osState": "Generalized",
        "hyperVGeneration": "V2",
        "identifier": {"publisher": "p", "offer": "o", "sku": "s"},
    },
}


def version_of(rest: Rest, vm: str, *regions: str) -> Json:
    """An image of a machine of `rg`, in these regions."""
    properties = {
        "publishingProfile": {"targetRegions": [{"name": each} for each in regions]},
        "storageProfile": {"source": {"virtualMachineId": rest.root + compute(vm)}},
    }
    return {"location": "eastus", "properties": properties}
