"""Keeping tunnels open until the user has seen enough."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from evalfleet.api import pool, pools
from evalfleet.api.tunnels import Tunnel, open_tunnels
from evalfleet.state import MachineState


def carry(
    name: str,
    machines: Sequence[str],
    ports: Sequence[tuple[int, int]],
    show: Callable[[Sequence[Tunnel]], None],
) -> int:
    """Open them, show them, and wait for Ctrl-C, which is the proper end."""
    pool = pools.open_pool(name)
    asyncio.run(_carry(pool, pool.running(machines), ports, show))
    return 0


async def _carry(
    pool: pool.Pool,
    machines: Sequence[MachineState],
    ports: Sequence[tuple[int, int]],
    show: Callable[[Sequence[Tunnel]], None],
) -> None:
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, enough.set)
    async with open_tunnels(pool, machines, ports, _complain) as tunnels:
        show(tunnels)
        print("Ctrl-C closes them", file=sys.stderr, flush=True)
        await enough.wait()


def _complain(problem: str) -> None:
    print(f"evalfleet: {problem}", file=sys.stderr, flush=True)
