"""An Azure Batch account on this computer, until Ctrl-C. Its tasks are processes, or its nodes are hosts."""

from __future__ import annotations

import sys

from standins import by_hand
from standins.azure_ml import Processes

from . import Hosts, ProcessNodes, StandIn, Timing

SOON = Timing((0.0, 0.1), (0.0, 0.1), (0.0, 0.1))


def main(argv: list[str]) -> int:
    hosts = by_hand.wants_hosts("azure_batch", __doc__, argv, "nodes are hosts of the lab with a real sshd")
    missing = None if hosts else Processes.missing()
    return by_hand.serve("azure_batch", lambda: make(hosts), lambda batch: guide(batch, hosts), missing)


def make(hosts: bool) -> StandIn:
    if hosts:
        return StandIn(Hosts(), timing=SOON)
    return StandIn(nodes=ProcessNodes(), timing=SOON)


def guide(batch: StandIn, hosts: bool) -> by_hand.Guide:
    endpoint = batch.endpoint_inside if hosts else batch.endpoint
    reach = {"ssh_from": ["*"]} if hosts else {"reach": "mailbox"}
    settings = {
        "kind": "azure_batch",
        "account": f"{batch.account}.{batch.region}",
        "endpoint": endpoint,
        "management": endpoint,
        "storage_endpoint": batch.storage_endpoint_inside if hosts else batch.storage_endpoint,
        "ca": str(batch.ca),
        **reach,
        "poll_s": 0.2,
        "settle_s": 0.5,
    }
    exports = {**batch.service_principal(inside=hosts), "REQUESTS_CA_BUNDLE": str(batch.ca)}
    hints = by_hand.run_hints(batch.hosts.lab if hosts else None)
    return by_hand.Guide(exports, by_hand.PLACE, settings, hints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
