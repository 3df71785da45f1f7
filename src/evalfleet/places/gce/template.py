"""What is sent to Google: an instance with all that belongs to it in one call, and firewall rules. Pure.

One insert carries labels, a disk that goes with the instance, our public key, and the time at which Google
itself ends it: no crash of ours falls between a machine and its dead-man switch. That time is absolute, so
that neither a slow start nor a reset moves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from evalfleet.places.vm.answers import Json

from .machine_types import HYPERDISK
from .names import DESCRIPTION, timestamp

LATE_S = 30.0
"""Google ends a machine up to so much later than it was told to."""
SHORTEST_S = 45.0
"""Google refuses an end that is less than 30 s away; the request takes some time to arrive."""
LEAST_LIFE_S = SHORTEST_S + LATE_S
LONGEST_LIFE_S = 119 * 86_400.0
"""Google allows 120 days."""
AGREES_S = 90.0
"""So far the end that Google plans may be from the one that it was told."""
HYPERDISK_IOPS, HYPERDISK_MB_S = 3000, 140
"""As much as the price of the capacity includes; by default Google provisions more, and bills it."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
ALLOW_PRIORITY, DENY_PRIORITY = 900, 1000
"""Below 65534, at which the default network lets everybody in; the lower number goes first."""
INSIDE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
"""Who may connect to machines without a public address, if the settings name nobody."""


class InstanceBuild(Struct, frozen=True):
    """One machine to be made."""

    project: str
    machine: str
    name: str
    zone: str
    type: str
    spot: bool
    nested: bool
    stops: bool
    """At the end of its time it is stopped, not deleted: it belongs to a pool."""
    image: str
    disk: str
    disk_gb: int
    user: str
    public_key: str
    network: str
    subnet: str
    """A link, or empty."""
    tag: str
    public_ip: bool
    service_account: str
    labels: Mapping[str, str]
    ends_at: float


def instance(build: InstanceBuild) -> Json:
    """The body of the insert."""
    body: Json = {
        "name": build.name,
        "description": f"{DESCRIPTION}{build.machine}",
        "machineType": f"zones/{build.zone}/machineTypes/{build.type}",
        "labels": dict(build.labels),
        "tags": {"items": [build.tag]},
        "disks": [_disk(build)],
        "networkInterfaces": [_interface(build)],
        "metadata": {"items": [{"key": key, "value": value} for key, value in _metadata(build).items()]},
        "scheduling": scheduling(build.ends_at, spot=build.spot, stops=build.stops),
    }
    if build.nested:
        body["advancedMachineFeatures"] = {"enableNestedVirtualization": True}
    if build.service_account:  # without one the metadata server has no token for whoever runs there
        body["serviceAccounts"] = [{"email": build.service_account, "scopes": [SCOPE]}]
    return body


def _disk(build: InstanceBuild) -> Json:
    made: Json = {
        "sourceImage": build.image,
        "diskSizeGb": str(build.disk_gb),
        "diskType": f"zones/{build.zone}/diskTypes/{build.disk}",
        "labels": dict(build.labels),
        "description": f"{DESCRIPTION}{build.machine}",
    }
    if build.disk == HYPERDISK:
        made["provisionedIops"], made["provisionedThroughput"] = str(HYPERDISK_IOPS), str(HYPERDISK_MB_S)
    return {"boot": True, "autoDelete": True, "initializeParams": made}


def _interface(build: InstanceBuild) -> Json:
    interface: Json = {"network": build.network}
    if build.subnet:
        interface["subnetwork"] = build.subnet
    if build.public_ip:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    return interface


def _metadata(build: InstanceBuild) -> dict[str, str]:
    """Every process of the machine can read it: no secret is in it."""
    return {
        "ssh-keys": login_line(build.user, build.public_key),
        "block-project-ssh-keys": "TRUE",
        "enable-oslogin": "FALSE",
        "enable-guest-attributes": "TRUE",
    }


def login_line(user: str, public_key: str) -> str:
    """A line of the metadata `ssh-keys`."""
    return f"{user}:{public_key} {user}"


def scheduling(ends_at: float, *, spot: bool, stops: bool) -> Json:
    """When Google ends it by itself. That can be changed while it is stopped, and not while it runs."""
    limit: Json = {
        "terminationTime": timestamp(ends_at),
        "instanceTerminationAction": "STOP" if stops else "DELETE",
        "automaticRestart": False,
    }
    if spot:
        return {**limit, "provisioningModel": "SPOT", "preemptible": True, "onHostMaintenance": "TERMINATE"}
    return {**limit, "provisioningModel": "STANDARD", "onHostMaintenance": "MIGRATE"}


def end_of(now: float, until: float) -> float:
    """What Google is told, so that a machine is gone by `until`, as far as that can be told."""
    return max(min(until - LATE_S, now + LONGEST_LIFE_S), now + SHORTEST_S)


def firewall_rules(
    names: tuple[str, str], network: str, tag: str, sources: Sequence[str], port: int, whose: str
) -> tuple[Json, Json]:
    """Two rules about machines with our tag: nobody may connect, but SSH from where the user says.

    Rules that allow add up: in a network that lets everybody in, only a denial keeps them out.
    """
    common: Json = {"network": network, "direction": "INGRESS", "targetTags": [tag], "disabled": False}
    deny = {
        "name": names[0],
        "description": f"evalfleet: nobody may connect to machines of {whose}",
        "priority": DENY_PRIORITY,
        "denied": [{"IPProtocol": "all"}],
        "sourceRanges": ["0.0.0.0/0"],
        **common,
    }
    allow = {
        "name": names[1],
        "description": f"evalfleet: SSH to machines of {whose}",
        "priority": ALLOW_PRIORITY,
        "allowed": [{"IPProtocol": "tcp", "ports": [str(port)]}],
        "sourceRanges": ["0.0.0.0/0" if source == "*" else source for source in sources],
        **common,
    }
    return deny, allow
