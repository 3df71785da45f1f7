"""Firewall rules, and what they mean for a host of the lab: rules for `iptables-restore`.

Only who opens a TCP connection is looked at, since flows that are there go on. The lab's gateway, where
clients are, counts as the internet (unless `clients_are_inside`); the other hosts are the network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from lab.network import GATEWAY
from standins.cloud.words import Json

from .cloud import Cloud, Instance
from .words import PROJECT

OPENING = "-p tcp --syn"
INSIDE = ipaddress.ip_network("10.128.0.0/9")
"""Addresses of the network `default`."""
LAB = ipaddress.IPv4Network("198.18.0.0/15")
"""Addresses of the hosts that machines are."""


def defaults() -> list[Json]:
    """The rules that every network `default` has: among them, SSH from everywhere."""
    network = f"projects/{PROJECT}/global/networks/default"
    common: Json = {"network": network, "direction": "INGRESS", "priority": 65534, "disabled": False}
    return [
        {"name": "default-allow-ssh", "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], **common}
        | {"sourceRanges": ["0.0.0.0/0"]},
        {"name": "default-allow-internal", "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}], **common}
        | {"sourceRanges": [str(INSIDE)]},
    ]


def rules(cloud: Cloud, instance: Instance) -> str:
    """Of all rules that are about it, the one of the lowest number counts, and of two alike the denial."""
    lines: list[str] = []
    if not instance.is_public and not cloud.clients_are_inside:
        lines.append(f"-A RULES {OPENING} -s {GATEWAY}/32 -j DROP")
    for rule in sorted(
        cloud.firewalls.values(), key=lambda each: (each.get("priority", 1000), "allowed" in each)
    ):
        if _is_about(rule, instance):
            lines += _lines(rule, cloud.clients_are_inside)
    lines.append(f"-A RULES {OPENING} -j DROP")
    text = "".join(f"{line}\n" for line in lines)
    head = "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n:RULES -\n-A INPUT -i eth0 -j RULES\n"
    return f"{head}{text}COMMIT\n"


def _is_about(rule: Json, instance: Instance) -> bool:
    interface = instance.body["networkInterfaces"][0]
    network = str(interface.get("network") or "default").rsplit("/", 1)[-1]
    targets = rule.get("targetTags")
    return (
        not rule.get("disabled")
        and rule.get("direction", "INGRESS") == "INGRESS"
        and str(rule["network"]).rsplit("/", 1)[-1] == network
        and (not targets or bool(set(targets) & set(instance.tags)))
    )


def _lines(rule: Json, clients_are_inside: bool) -> Iterator[str]:
    verdict = "ACCEPT" if "allowed" in rule else "DROP"
    for source in _sources(rule.get("sourceRanges") or ["0.0.0.0/0"], clients_are_inside):
        for each in rule.get("allowed") or rule.get("denied") or ():
            if each["IPProtocol"] not in ("tcp", "all", "6"):
                continue
            for ports in each.get("ports") or [""]:
                where = f" --dport {ports.replace('-', ':')}" if ports else ""
                yield f"-A RULES {OPENING}{source}{where} -j {verdict}"


def _sources(ranges: list[str], clients_are_inside: bool) -> Iterator[str]:
    """Which of the lab's addresses they mean, as iptables has it."""
    for text in ranges:
        network = ipaddress.ip_network(text, strict=False)
        if network.prefixlen == 0:
            yield ""
            continue
        inside = network.version == 4 and network.overlaps(INSIDE)
        has_gateway = ipaddress.ip_address(GATEWAY) in network
        if has_gateway or (inside and clients_are_inside):
            yield f" -s {GATEWAY}/32"
        if inside:
            yield f" ! -s {GATEWAY}/32"
        elif isinstance(network, ipaddress.IPv4Network) and network.subnet_of(LAB) and not has_gateway:
            yield f" -s {network}"  # a host has one address, which is its public one, too


async def apply(cloud: Cloud) -> None:
    """After a change: to all that run."""
    for instance in list(cloud.instances.values()):
        if instance.status == "RUNNING":
            await cloud.machines.protect(instance.path, rules(cloud, instance))
