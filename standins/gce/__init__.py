"""A stand-in for Compute Engine: its API for what a fleet of instances needs, on this computer.

    with StandIn() as google:
        compute = googleapiclient.discovery.build("compute", "v1", credentials=AnonymousCredentials(),
            client_options={"api_endpoint": google.anonymous_endpoint}, static_discovery=True)

With `Records`, the default, instances are records only. With `StandIn(Hosts())`, as root, each is a host of
the lab with a real sshd: addresses are the hosts' (public and private are the same one), keys in metadata and
firewall rules are honoured, the host tells its key to the metadata server, a stopped instance keeps its disk.
A client reaches them from inside the lab's network, as with the stand-in for Azure.

Where `GOOGLE_CONTRACTS` names the folder of Google's discovery documents, every call and every answer is
checked against them, and the stand-in fails at its end if one did not agree.

Afterwards `google.left()` and `google.meters` say what is left and what was billed. What is to go wrong is
set before or meanwhile: `google.faults`, `google.cloud.catalog` (quota, capacity), `google.preempt(...)`,
`google.make_unreachable(...)`. `google.jump(seconds)` lets time pass.
"""

from __future__ import annotations

from standins.cloud.faults import Failed, Late, Lost, Stuck
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Records

from .cloud import Timing
from .faults import FailsLate, MinuteBucket, Refused, Throttled
from .standin import StandIn

__all__ = [
    "Failed",
    "FailsLate",
    "Hosts",
    "Late",
    "Lost",
    "MinuteBucket",
    "Records",
    "Refused",
    "StandIn",
    "Stuck",
    "Throttled",
    "Timing",
]
