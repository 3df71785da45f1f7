"""What security groups mean for a host of the lab: rules for `iptables-restore`.

Only who opens a TCP connection is looked at, since flows that are there go on in Azure, too. The lab's
gateway, where clients are, counts as the internet (unless `clients_are_inside`); the other hosts are the
virtual network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.network import GATEWAY
from standins.cloud.words import Json

from .addresses import public_addresses
from .kind import reference
from .network import RULE
from .store import Resource
from .words import parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

OPENING = "-p tcp --syn"
OUTSIDE = f"-s {GATEWAY}/32"
INSIDE = f"! -s {GATEWAY}/32"


def rules(cloud: Cloud, nic: Resource) -> str:
    """Both the subnet's and the interface's group must let a connection through."""
    groups = [group for group in (_subnet_group(cloud, nic), _group(cloud, nic)) if group is not None]
    chains = [_chain(cloud, f"GROUP{n}", group) for n, group in enumerate(groups)]
    if not cloud.clients_are_inside and not _is_open(cloud, nic, has_group=bool(groups)):
        chains.append([f"-A GROUP{len(chains)} {OPENING} {OUTSIDE} -j DROP"])
    names = "".join(f":GROUP{n} -\n" for n in range(len(chains)))
    jumps = "".join(f"-A INPUT -i eth0 -j GROUP{n}\n" for n in range(len(chains)))
    lines = "".join(f"{line}\n" for chain in chains for line in chain)
    return f"*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n{names}{jumps}{lines}COMMIT\n"


def _is_open(cloud: Cloud, nic: Resource, *, has_group: bool) -> bool:
    """To the internet: never without a public address, and a standard one needs a group that opens it."""
    found = [cloud.store.get(parse_id(id)) for id in public_addresses(nic) if id]
    return any(each is not None and (has_group or each.extra["sku"]["name"] == "Basic") for each in found)


def _group(cloud: Cloud, holder: Resource) -> Resource | None:
    id = reference(holder.properties.get("networkSecurityGroup"))
    return cloud.store.get(parse_id(id)) if id else None


def _subnet_group(cloud: Cloud, nic: Resource) -> Resource | None:
    subnet = cloud.store.get(
        parse_id(reference(nic.properties["ipConfigurations"][0]["properties"]["subnet"]))
    )
    return _group(cloud, subnet) if subnet is not None else None


def _chain(cloud: Cloud, name: str, group: Resource) -> list[str]:
    all_rules = [each.properties for each in cloud.store.children(group.id, RULE.rsplit("/", 1)[-1])]
    inbound = [
        rule
        for rule in all_rules
        if rule["direction"] == "Inbound" and rule["protocol"].lower() in ("tcp", "*")
    ]
    lines: list[str] = []
    for rule in sorted(inbound, key=lambda rule: int(rule["priority"])):
        verdict = "RETURN" if rule["access"] == "Allow" else "DROP"
        lines += [
            f"-A {name} {OPENING} {source} {port} -j {verdict}"
            for source in _sources(rule)
            for port in _ports(rule)
        ]
    inside = "" if cloud.clients_are_inside else INSIDE
    return [*lines, f"-A {name} {inside} -j RETURN", f"-A {name} {OPENING} -j DROP"]


def _sources(rule: Json) -> list[str]:
    given = [*([rule["sourceAddressPrefix"]] if rule.get("sourceAddressPrefix") else [])]
    given += rule.get("sourceAddressPrefixes") or []
    tags = {"*": "", "Internet": OUTSIDE, "VirtualNetwork": INSIDE}
    return [tags.get(each, f"-s {each}") for each in given if each != "AzureLoadBalancer"]


def _ports(rule: Json) -> list[str]:
    given = [*([rule["destinationPortRange"]] if rule.get("destinationPortRange") else [])]
    given += rule.get("destinationPortRanges") or []
    return ["" if each == "*" else f"--dport {each.replace('-', ':')}" for each in given]
