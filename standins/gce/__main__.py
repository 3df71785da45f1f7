"""A Compute Engine on this computer, until Ctrl-C. Its instances are records, or hosts with a bucket."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lab.network import GATEWAY
from standins import by_hand
from standins.cloud.standin import bound
from standins.gcs import BUCKET, CloudStorage

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
    return by_hand.serve("gce", lambda: make(hosts), lambda made: guide(*made))


@contextmanager
def make(hosts: bool) -> Iterator[tuple[StandIn, CloudStorage | None]]:
    with StandIn(Hosts() if hosts else None, timing=SOON) as google:
        google.allows_violations = True  # a stranger's client is refused; that is no fault of the stand-in
        if not hosts:
            yield google, None
            return
        sock = bound(google.hosts.lab.socket(), GATEWAY, 0)
        with CloudStorage(BUCKET, identity=google.identity, sock=sock) as storage:
            yield google, storage


def guide(google: StandIn, storage: CloudStorage | None) -> by_hand.Guide:
    hosts = storage is not None
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
    if storage is not None:
        exports = {**exports, "STORAGE_EMULATOR_HOST": storage.url}
        hints = [*hints, f"--store gs://{BUCKET}/runs keeps a copy of the run in its bucket."]
    return by_hand.Guide(exports, by_hand.PLACE, settings, hints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
