"""Look at the screens of a pool's machines in a browser, until Ctrl-C: a link a machine.

Everything goes through the SSH connection: the screens are open to nobody but this computer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import add_machines, add_name

if TYPE_CHECKING:
    from evalfleet.api.tunnels import Tunnel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.benchmarks.waa.host_commands import VNC_TUNNEL

    from .carrying import carry

    def show(tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels:
            print(f"{tunnel.machine.name}: http://127.0.0.1:{tunnel.here}/", flush=True)
        if bare := [tunnel.machine.name for tunnel in tunnels if not tunnel.machine.prepared]:
            hint = f"`evalfleet pool prepare {args.name} waa` sets Windows up"
            print(f"evalfleet: note: {', '.join(bare)}: nothing was prepared; {hint}", file=sys.stderr)

    return carry(args.name, args.machines, [VNC_TUNNEL], show)
