"""The stand-in's answers against Microsoft's own description of the resources.

The descriptions are Bicep's type index (github.com/Azure/bicep-types-az), which is not ours to copy: put the
`types.json` of each provider's version into folders called `compute-2024-07-01` and `network-2024-07-01`, and
say where these are in AZURE_CONTRACTS. `make test` finds those of ../shared/contracts by itself.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import structs

from evalfleet.places.azure import AzureSettings
from evalfleet.places.azure.template import (
    ADDRESS,
    NIC,
    NSG,
    VM,
    VNET,
    deployment,
    let_in,
    network,
    security_group,
)
from standins.azure import StandIn
from tests.cloud.rest import Json, Rest, compute, vm_body
from tests.cloud.templates import build

FOLDER = os.environ.get("AZURE_CONTRACTS", "")
VERSION = "2024-07-01"
GROWING = (".vmSize",)
"""The one list that is out of date by design."""
READ_ONLY, REQUIRED, WRITE_ONLY = 2, 1, 4

pytestmark = pytest.mark.skipif(not FOLDER, reason="NO CHECK AGAINST AZURE'S CONTRACTS: set AZURE_CONTRACTS")


class Contract:
    """Of one resource provider. `complaints` says what a value has that it may not have, and the reverse."""

    def __init__(self, path: Path) -> None:
        self._types: list[Json] = json.loads(path.read_text())

    def resource(self, type: str, version: str = VERSION) -> Json:
        name = f"{type}@{version}".lower()
        found = next(each for each in self._types if each.get("name", "").lower() == name)
        return self._at(found["body"])

    def action(self, type: str, name: str) -> tuple[Json, Json]:
        """What an action of a resource takes, and what it answers."""
        (found,) = [
            each
            for each in self._types
            if (each.get("resourceType", "").lower(), each.get("name")) == (type.lower(), name)
        ]
        return self._at(found["input"]), self._at(found["output"])

    def literals(self, type: str, field: str) -> set[str]:
        """What a field of a kind of objects may say, in small letters."""
        found = next(each for each in self._types if each.get("name") == type)
        fields = found.get("baseProperties") or found["properties"]
        options = self._at(fields[field]["type"])["elements"]
        return {str(self._at(each).get("value", "")).lower() for each in options} - {""}

    def _at(self, reference: Json) -> Json:
        return self._types[int(reference["$ref"].rsplit("/", 1)[-1])]

    def complaints(self, type: Json, value: Any, where: str, *, sent: bool) -> list[str]:
        match type["$type"]:
            case "ObjectType":
                return self._object(type, value, where, sent)
            case "DiscriminatedObjectType" if isinstance(value, dict):
                return self._object(self._chosen(type, value), value, where, sent)
            case "ArrayType" if isinstance(value, list):
                item = self._at(type["itemType"])
                return [
                    bad
                    for n, each in enumerate(value)
                    for bad in self.complaints(item, each, f"{where}.{n}", sent=sent)
                ]
            case "UnionType":
                options = [self._at(each) for each in type["elements"]]
                named = [each for each in options if each["$type"] == "StringLiteralType"]
                if named and not where.endswith(GROWING):
                    options = named  # some lists of names are open: what is not on them, Azure refuses
                found = [self.complaints(option, value, where, sent=sent) for option in options]
                return [] if [] in found else [f"{where}: {value!r} is none of what it may be"]
            case "StringLiteralType":
                same = isinstance(value, str) and value.lower() == type["value"].lower()
                return [] if same else [f"{where}: {value!r} is not {type['value']!r}"]
            case "StringType" if not isinstance(value, str):
                return [f"{where}: {value!r} is no text"]
            case "IntegerType" if not isinstance(value, int):
                return [f"{where}: {value!r} is no number"]
            case "BooleanType" if not isinstance(value, bool):
                return [f"{where}: {value!r} is neither true nor false"]
            case _:
                return []

    def _chosen(self, type: Json, value: Json) -> Json:
        """The one of several kinds that the value says it is."""
        kinds = {name.lower(): each for name, each in type["elements"].items()}
        kind = self._at(kinds[str(value.get(type["discriminator"])).lower()])
        return {**kind, "properties": {**type["baseProperties"], **kind["properties"]}}

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
def contract(provider: str, version: str = VERSION) -> Contract:
    return Contract(Path(FOLDER) / f"{provider}-{version}" / "types.json")


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


MARKET, OWN = "Canonical:ubuntu-24_04-lts:server:latest", "/subscriptions/s/resourceGroups/g/providers/x/i"
COMBINATIONS = [
    *itertools.product(
        get_args(get_type_hints(AzureSettings)["security_type"]),
        (False, True),
        ("", "1"),
        (False, True),
        ("", "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/x/i"),
        (MARKET, OWN),
        get_args(get_type_hints(AzureSettings)["disk"]),
    )
]


def test_what_we_deploy_is_what_azure_takes_whatever_the_settings_say() -> None:
    assert len(COMBINATIONS) == 2**6 * 3
    for security_type, spot, zone, public_ip, identity, image, disk in COMBINATIONS:
        wanted = structs.replace(
            build(security_type, spot),
            **{"zone": zone, "public_ip": public_ip, "identity": identity, "image": image, "disk": disk},
        )
        resources: list[Json] = deployment(wanted)["properties"]["template"]["resources"]
        described = [each for each in resources if each["type"] in (VM, NIC, ADDRESS)]
        assert len(described) == 2 + public_ip
        for each in described:
            sent = {
                key: value for key, value in each.items() if key not in ("type", "apiVersion", "dependsOn")
            }
            assert each["apiVersion"] == VERSION
            assert check(sent, each["type"], sent=True) == [], wanted


@pytest.mark.parametrize("sources", [(), ("*",), ("192.0.2.7/32",), ("192.0.2.7/32", "198.51.100.0/24")])
def test_the_network_that_we_make_is_what_azure_takes(sources: tuple[str, ...]) -> None:
    bodies = {
        NSG: security_group("eastus", {"a": "b"}, sources, 22),
        VNET: network("eastus", {"a": "b"}),
    }
    for type, body in bodies.items():
        assert check({"name": "n", **body}, type, sent=True) == []


def test_a_command_for_a_machine_is_what_azure_takes_and_so_is_what_comes_of_it(rest: Rest) -> None:
    rest.new_vm("vm")
    rules, command = contract("compute"), let_in("azureuser", "ssh-ed25519 AAAA")
    takes, answers = rules.action(VM, "runCommand")
    assert rules.complaints(takes, command, "sent", sent=True) == []
    assert rules.complaints(takes, {"script": "true"}, "sent", sent=True), "the check itself finds mistakes"
    shown = rest.outcome(rest.ask("POST", f"{compute('vm')}/runCommand", command))
    assert rules.complaints(answers, shown["properties"]["output"], "answered", sent=False) == []


def test_a_name_that_is_on_no_list_of_azures_is_found() -> None:
    wrong = structs.replace(build("Standard"), disk="Premium_XYZ")
    resources: list[Json] = deployment(wrong)["properties"]["template"]["resources"]
    (vm,) = [each for each in resources if each["type"] == VM]
    sent = {key: value for key, value in vm.items() if key not in ("type", "apiVersion", "dependsOn")}
    (complaint,) = check(sent, VM, sent=True)
    assert "storageAccountType: 'Premium_XYZ'" in complaint


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
