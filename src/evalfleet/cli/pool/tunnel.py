"""Reach ports of a pool's machines on this computer, until Ctrl-C.

Everything goes through the SSH connection: nothing is opened on the machines, and nobody but this computer
can connect. Without --port it is the guest's API, at 127.0.0.1:5001 or the next port that is free.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import add_machines, add_name

if TYPE_CHECKING:
    from evalfleet.api.tunnels import Tunnel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument(
        "--port",
        metavar="[HERE:]THERE",
        action="append",
        default=[],
        help="a port of the machines, and the first one to try here; may be repeated",
    )


def main(args: argparse.Namespace) -> int:
    from evalfleet.benchmarks.waa.host_commands import GUEST_TUNNEL

    from .carrying import carry

    def show(tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels:
            print(f"{tunnel.machine.name}: 127.0.0.1:{tunnel.here} is its port {tunnel.there}", flush=True)

    return carry(args.name, args.machines, [_pair(port) for port in args.port] or [GUEST_TUNNEL], show)


def _pair(given: str) -> tuple[int, int]:
    from evalfleet.errors import RequestError

    here, _, there = given.rpartition(":")
    try:
        pair = (int(here or there), int(there))
    except ValueError:
        pair = (0, 0)
    if not all(0 < port < 65536 for port in pair):
        raise RequestError(f"--port {given}: give a port, or two as 8080:80 (here:there)")
    return pair
