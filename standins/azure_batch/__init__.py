"""A stand-in for Azure Batch: its data plane over https, API 2025-06-01, as far as pilots need it.

    with StandIn() as batch:
        client = BatchClient(batch.endpoint, credential, connection_verify=str(batch.ca))

With `Paper`, the default, nodes are records: what a task would write is what a test puts into
`batch.paper.contents`. With `StandIn(Hosts())`, as root, each node is a host of the lab: start tasks and
tasks are real processes there, their files are read while they run, and an inbound NAT pool is a listener at
the lab's gateway that leads to the node's port. A client reaches it from inside the lab's network, as with
the stand-in for Azure's VMs. With `StandIn(nodes=ProcessNodes())` tasks are processes of this computer, each
in a namespace of its own: pilots that are reached by mailboxes in `batch.storage` are real.

Afterwards `batch.left()` and `batch.meters` say what is left and what was billed. What is to go wrong is set
before or meanwhile: `batch.faults`, `batch.service.quota`, `batch.preempt(...)`, `batch.reboot(...)`.
"""

from __future__ import annotations

from standins.cloud.faults import Failed, Late, Lost
from standins.cloud.hosts import Hosts

from .nodes import Paper, ProcessNodes
from .service import Timing
from .standin import StandIn
from .words import Refused, Throttled

__all__ = [
    "Failed",
    "Hosts",
    "Late",
    "Lost",
    "Paper",
    "ProcessNodes",
    "Refused",
    "StandIn",
    "Throttled",
    "Timing",
]
