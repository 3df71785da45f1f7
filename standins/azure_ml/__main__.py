"""An Azure Machine Learning workspace on this computer, until Ctrl-C. Its jobs are processes, or its compute
instances are hosts."""

from __future__ import annotations

import sys

from standins import by_hand
from standins.cloud.hosts import Hosts

from . import Processes, StandIn, Timing

QUICK = (0.0, 0.1)
SOON = Timing(QUICK, QUICK, QUICK, QUICK, QUICK, QUICK)


def main(argv: list[str]) -> int:
    words = "machines are compute instances, which are hosts of the lab with a real sshd, in place of jobs"
    hosts = by_hand.wants_hosts("azure_ml", __doc__, argv, words)
    missing = None if hosts else Processes.missing()
    return by_hand.serve("azure_ml", lambda: make(hosts), lambda ml: guide(ml, hosts), missing)


def make(hosts: bool) -> StandIn:
    if hosts:
        return StandIn(machines=Hosts(), ml_timing=SOON)
    return StandIn(Processes(), ml_timing=SOON)


def guide(ml: StandIn, hosts: bool) -> by_hand.Guide:
    settings = {
        "kind": "azure_ml",
        "workspace": ml.workspace,
        "resource_group": ml.group,
        "endpoint": ml.endpoint_inside if hosts else ml.endpoint,
        "storage_endpoint": ml.storage_endpoint_inside if hosts else ml.storage_endpoint,
        "ca": str(ml.ca),
        "isolation": "none",
        "poll_s": 0.2,
        "settle_s": 0.5,
    }
    if hosts:
        settings["compute"] = "instances"
    exports = {**ml.service_principal(inside=hosts), "REQUESTS_CA_BUNDLE": str(ml.ca)}
    hints = by_hand.run_hints(ml.hosts.lab if hosts else None)
    return by_hand.Guide(exports, by_hand.PLACE, settings, hints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
