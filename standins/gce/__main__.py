"""A Compute Engine on this computer, until Ctrl-C. Its instances are records, or hosts."""

from __future__ import annotations

import sys

from standins import by_hand

from . import Hosts, StandIn, Timing

SOON = Timing(
    insert=(0.0, 0.1),
    boot=(0.0, 0.1),
    delete=(0.0, 0.1),
    power=(0.0, 0.1),
    other=(0.0, 0.1),
    limit_late=(0.0, 0.1),
)


def main(argv: list[str]) -> int:
    hosts = by_hand.wants_hosts("gce", __doc__, argv, "instances are hosts of the lab with a real sshd")
    return by_hand.serve("gce", lambda: make(hosts), lambda google: guide(google, hosts))


def make(hosts: bool) -> StandIn:
    google = StandIn(Hosts() if hosts else None, timing=SOON)
    google.allows_violations = True  # a stranger's client is refused; that is no fault of the stand-in
    return google


def guide(google: StandIn, hosts: bool) -> by_hand.Guide:
    settings = {
        "kind": "gce",
        "project": google.project,
        "zones": ["us-central1-a"],
        "endpoint": google.endpoint_inside if hosts else google.endpoint,
        "ca": str(google.ca),
        "ssh_from": ["*"],
        "settle_s": 0.5,
    }
    hints = by_hand.run_hints(google.hosts.lab) if hosts else by_hand.NO_HOSTS
    exports = google.environment_inside if hosts else google.environment
    return by_hand.Guide(exports, by_hand.PLACE, settings, hints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
