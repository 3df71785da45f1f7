"""An Azure on this computer, until Ctrl-C. Its virtual machines are records, or hosts."""

from __future__ import annotations

import sys

from standins import by_hand

from . import Hosts, StandIn, Timing

SOON = Timing((0.0, 0.1), (0.0, 0.1), (1.0, 3.0), (0.0, 0.1), (0.0, 0.1))


def main(argv: list[str]) -> int:
    hosts = by_hand.wants_hosts("azure", __doc__, argv, "machines are hosts of the lab with a real sshd")
    return by_hand.serve(
        "azure", lambda: StandIn(Hosts() if hosts else None, timing=SOON), lambda azure: guide(azure, hosts)
    )


def guide(azure: StandIn, hosts: bool) -> by_hand.Guide:
    settings = {
        "kind": "azure_vm",
        "subscription": azure.subscription,
        "resource_group": "rg",
        "endpoint": azure.endpoint_inside if hosts else azure.endpoint,
        "ca": str(azure.ca),
        "ssh_from": ["*"],
        "settle_s": 0.5,
    }
    exports = {**azure.service_principal(inside=hosts), "REQUESTS_CA_BUNDLE": str(azure.ca)}
    hints = by_hand.run_hints(azure.hosts.lab) if hosts else by_hand.NO_HOSTS
    return by_hand.Guide(exports, by_hand.PLACE, settings, hints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
