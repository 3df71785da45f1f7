"""Ways into machines: a shell, a command, a port."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evalfleet.cli.terminal import result_of

from . import add_benchmark, add_json, add_machines, add_name

if TYPE_CHECKING:
    from evalfleet.api.pools import Pool
    from evalfleet.api.tunnels import Tunnel
    from evalfleet.state import MachineState


def ssh_arguments(parser: argparse.ArgumentParser) -> None:
    # in one, and by hand: argparse would drop the `--` that tells a command from a machine
    parser.usage = "evalfleet pool ssh [-h] NAME [MACHINE] [[--] COMMAND ...]"
    parser.add_argument(
        "words",
        metavar="NAME [MACHINE] [[--] COMMAND ...]",
        nargs=argparse.REMAINDER,
        help="the pool; a machine's name or id, not needed in a pool of one machine; what to run there",
    )


def ssh(args: argparse.Namespace) -> int:
    """Open a shell on a machine of a pool, or run a command there. Its exit code is the command's."""
    from evalfleet.api import pools
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace

    if not args.words:
        raise RequestError("say which pool; `evalfleet pool ls` shows all")
    pool = pools.open_pool(Workspace.here(), args.words[0])
    names = [machine.name for machine in pool.view().machines]
    machine, command = _split(args.words[1:])
    if machine is None and len(names) != 1:
        raise RequestError(f"say which machine of pool {pool.name!r}: {', '.join(names) or 'it has none'}")
    argv = result_of(pool.shell(machine or names[0], command))
    os.execvp(argv[0], list(argv))


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """The machine, if one is named, and the command."""
    machine = words[0] if words and words[0] != "--" else None
    command = words if machine is None else words[1:]
    return machine, command[1:] if command[:1] == ["--"] else command


def tunnel_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument(
        "--port",
        metavar="[HERE:]THERE",
        action="append",
        default=[],
        help="a port of the machines, and the first one to try here; may be repeated",
    )
    add_benchmark(parser)
    add_json(parser)


async def tunnel(args: argparse.Namespace) -> int:
    """Reach ports of a pool's machines on this computer, until Ctrl-C.

    Everything goes through the SSH connection: nothing is opened on the machines, and nobody but this
    computer can connect. Without --port, the benchmark says which port it is.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    def show(tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels if not args.json else ():
            print(f"{tunnel.machine.name}: 127.0.0.1:{tunnel.here} is its port {tunnel.there}", flush=True)

    ports = [_pair(port) for port in args.port]
    pool = pools.open_pool(Workspace.here(), args.name)
    machines = pool.running(args.machines)
    ports = ports or [appliances.tunnel_of(pool, machines, args.benchmark)]
    return await carry(pool, machines, ports, show, as_json=args.json)


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


async def carry(
    pool: Pool,
    machines: Sequence[MachineState],
    ports: Sequence[tuple[int, int]],
    show: Callable[[Sequence[Tunnel]], None],
    *,
    as_json: bool,
) -> int:
    """Open tunnels, show them, and keep them open until Ctrl-C, which is the proper end."""
    import asyncio
    import json
    import signal
    import sys

    from evalfleet.api.tunnels import open_tunnels

    def complain(problem: str) -> None:
        print(f"evalfleet: {problem}", file=sys.stderr, flush=True)

    enough = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, enough.set)
    async with open_tunnels(pool, machines, ports, complain) as tunnels:
        if as_json:
            rows = [{"machine": t.machine.name, "here": t.here, "there": t.there} for t in tunnels]
            print(json.dumps(rows), flush=True)
        show(tunnels)
        print("Ctrl-C closes them", file=sys.stderr, flush=True)
        await enough.wait()
    return 0
