"""The stand-in's answers against Microsoft's own description of the resources.

The descriptions are Bicep's type index (github.com/Azure/bicep-types-az), which is not ours to copy: put the
`types.json` of each provider's version into folders called `compute-2024-07-01` and `network-2024-07-01`, and
say where these are in AZURE_CONTRACTS. `make test` finds those of ../shared/contracts by itself.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from evalfleet.places.azure.template import ADDRESS, NIC, VM, deployment
from standins.azure import StandIn
from tests.cloud.rest import Json, Rest, vm_body
from tests.cloud.templates import build

FOLDER = os.environ.get("AZURE_CONTRACTS", "")
VERSION = "2024-07-01"
READ_ONLY, REQUIRED, WRITE_ONLY = 2, 1, 4

pytestmark = pytest.mark.skipif(not FOLDER, reason="NO CHECK AGAINST AZURE'S CONTRACTS: set AZURE_CONTRACTS")


class Contract:
    """Of one resource provider. `complaints` says what a value has that it may not have, and the reverse."""

    def __init__(self, path: Path) -> None:
        self._types: list[Json] = json.loads(path.read_text())

    def resource(self, type: str) -> Json:
        name = f"{type}@{VERSION}".lower()
        found = next(each for each in self._types if each.get("name", "").lower() == name)
        return self._at(found["body"])

    def _at(self, reference: Json) -> Json:
        return self._types[int(reference["$ref"].rsplit("/", 1)[-1])]

    def complaints(self, type: Json, value: Any, where: str, *, sent: bool) -> list[str]:
        match type["$type"]:
            case "ObjectType":
                return self._object(type, value, where, sent)
            case "ArrayType" if isinstance(value, list):
                item = self._at(type["itemType"])
                return [
                    bad
                    for n, each in enumerate(value)
                    for bad in self.complaints(item, each, f"{where}.{n}", sent=sent)
                ]
            case "UnionType":
                options = [self._at(each) for each in type["elements"]]
                found = [self.complaints(option, value, where, sent=sent) for option in options]
                return [] if [] in found else [f"{where}: {value!r} is none of what it may be"]
            case "StringLiteralType":
                return [] if value == type["value"] else [f"{where}: {value!r} is not {type['value']!r}"]
            case "StringType" if not isinstance(value, str):
                return [f"{where}: {value!r} is no text"]
            case "IntegerType" if not isinstance(value, int):
                return [f"{where}: {value!r} is no number"]
            case "BooleanType" if not isinstance(value, bool):
                return [f"{where}: {value!r} is neither true nor false"]
            case _:
                return []

    def _object(self, type: Json, value: Any, where: str, sent: bool) -> list[str]:
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        known: Json = type.get("properties") or {}
        hidden = READ_ONLY if sent else WRITE_ONLY
        found: list[str] = []
        for key, below in value.items():
            if key in known:
                if known[key]["flags"] & hidden and (sent or below is not None):
                    found.append(f"{where}.{key} is {'read' if sent else 'write'}-only")
                found += self.complaints(self._at(known[key]["type"]), below, f"{where}.{key}", sent=sent)
            elif "additionalProperties" not in type and key != "etag":
                found.append(f"{where}.{key} is unknown")
        for key, about in known.items():
            needed = about["flags"] & REQUIRED and not about["flags"] & hidden and not about["flags"] & 8
            if needed and key not in value:
                found.append(f"{where}.{key} is missing")
        return found


@cache
def contract(provider: str) -> Contract:
    return Contract(Path(FOLDER) / f"{provider}-{VERSION}" / "types.json")


def check(body: Json, type: str, *, sent: bool) -> list[str]:
    provider = type.split("/")[0].removeprefix("Microsoft.").lower()
    rules = contract(provider)
    return rules.complaints(rules.resource(type), body, type, sent=sent)


def test_what_it_shows_is_what_azure_shows(azure: StandIn, rest: Rest) -> None:
    group: Json = {
        "location": "eastus",
        "properties": {"securityRules": [{"name": "ssh", "properties": dict(RULE)}]},
    }
    rest.put("/resourceGroups/rg/providers/Microsoft.Network/networkSecurityGroups/nsg", group)
    rest.new_vm("vm", tags={"a": "b"}, zone="1", priority="Spot", evictionPolicy="Delete")
    # disks have versions of their own; children are looked at in their parents
    apart = ("subnets", "securityRules", "disks")
    shown = [each for each in azure.shown() if not each["type"].endswith(apart)]
    assert len(shown) == 5
    assert [bad for each in shown for bad in check(each, each["type"], sent=False)] == []


def test_what_tests_send_is_what_azure_takes() -> None:
    body = vm_body(
        "vm", "/subscriptions/x", custom_data="x", zone="1", priority="Spot", evictionPolicy="Delete"
    )
    assert check(body, "Microsoft.Compute/virtualMachines", sent=True) == []
    body["properties"]["hardwareProfile"]["colour"] = "red"
    body["properties"]["vmId"] = "mine"
    complaints = check(body, "Microsoft.Compute/virtualMachines", sent=True)
    assert len(complaints) == 2, "the check itself finds mistakes"


@pytest.mark.parametrize("security_type", ["Standard", "TrustedLaunch"])
@pytest.mark.parametrize("spot", [False, True])
def test_what_we_deploy_is_what_azure_takes(security_type: str, spot: bool) -> None:
    resources: list[Json] = deployment(build(security_type, spot))["properties"]["template"]["resources"]
    described = [each for each in resources if each["type"] in (VM, NIC, ADDRESS)]
    assert len(described) == 3
    for each in described:
        sent = {key: value for key, value in each.items() if key not in ("type", "apiVersion", "dependsOn")}
        assert each["apiVersion"] == VERSION
        assert check(sent, each["type"], sent=True) == []


RULE = {
    "protocol": "Tcp",
    "access": "Allow",
    "direction": "Inbound",
    "priority": 100,
    "sourceAddressPrefix": "198.18.0.1/32",
    "sourcePortRange": "*",
    "destinationAddressPrefix": "*",
    "destinationPortRange": "22",
}
