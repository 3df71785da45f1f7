"""A stand-in for Azure: ARM over https for what a fleet of virtual machines needs, on this computer.

    with StandIn() as azure:
        client = ComputeManagementClient(credential, azure.subscription, base_url=azure.endpoint, ...)

With `Records`, the default, machines are records only. With `StandIn(Hosts())`, as root, each is a host of
the lab with a real sshd: addresses are the hosts' (public and private are the same one), custom data and
security groups are honoured, a deallocated machine keeps its disk. A client reaches them from inside the
lab's network: run it behind `azure.hosts.lab.prefix` with `azure.endpoint_inside` and
`azure.environment_inside`, or in a thread within `azure.hosts.lab.inside()`. It is 198.18.0.1 to the
machines, which must be let in by a security group.

Afterwards `azure.resources()` and `azure.meters` say what is left and what was billed. What is to go wrong
is set before or meanwhile: `azure.faults`, `azure.cloud.quota.limits`, `azure.cloud.capacity.limits`,
`azure.cloud.catalog.restrictions`, `azure.cloud.store.lag_s`, `azure.evict(...)`,
`azure.make_unreachable(...)`. `azure.jump(seconds)` lets time pass.
"""

from __future__ import annotations

from standins.cloud.faults import Failed, Late, Lost, Stuck
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Records

from .cloud import Timing
from .faults import Bucket, Policy, Refused, SlowBoot, Throttled
from .standin import StandIn

__all__ = [
    "Bucket",
    "Failed",
    "Hosts",
    "Late",
    "Lost",
    "Policy",
    "Records",
    "Refused",
    "SlowBoot",
    "StandIn",
    "Stuck",
    "Throttled",
    "Timing",
]
