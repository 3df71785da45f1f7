"""A stand-in for Azure: ARM over https for what a fleet of virtual machines needs, on this computer.

    with StandIn() as azure:
        client = ComputeManagementClient(credential, azure.subscription, base_url=azure.endpoint, ...)

With `Records`, the default, machines are records only; with `Hosts` each is a host of the lab, with a real
sshd.
"""

from __future__ import annotations

from .cloud import Timing
from .faults import Failed, Late, Lost, Policy, Refused, SlowBoot, Stuck, Throttled
from .hosts import Hosts
from .machines import Records
from .standin import StandIn

__all__ = [
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
