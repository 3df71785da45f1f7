"""What the screens of machines show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arguments import add_benchmark, add_machines, add_name

if TYPE_CHECKING:
    from pathlib import Path

    from evalfleet.api.appliances import BenchmarkAppliance
    from evalfleet.api.pool import Pool
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.api.tunnels import Tunnel
    from evalfleet.state import MachineState


def vnc_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    add_benchmark(parser)


def vnc(args: argparse.Namespace) -> int:
    """Look at the screens of a pool's machines in a browser, until Ctrl-C: a link a machine.

    Everything goes through the SSH connection: the screens are open to nobody but this computer.
    """
    from evalfleet.api import appliances, pools

    from .shell import carry

    pool = pools.open_pool(args.name)
    machines = pool.running(args.machines)
    owner, screen = appliances.screen_of(pool, machines, args.benchmark)

    def show(tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels:
            print(f"{tunnel.machine.name}: http://127.0.0.1:{tunnel.here}/", flush=True)
        if bare := [tunnel.machine.name for tunnel in tunnels if not tunnel.machine.prepared]:
            hint = f"{owner.set_up(pool.name)} {owner.appliance.what} up"
            print(f"evalfleet: note: {', '.join(bare)}: nothing was prepared; {hint}", file=sys.stderr)

    return carry(pool, machines, [(screen.port, screen.port)], show)


def screenshot_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", default=".", help="where to (default: here)")
    add_benchmark(parser)


def screenshot(args: argparse.Namespace) -> int:
    """Save what the screens of a pool's machines show, one PNG a machine: MACHINE.png.

    It comes from the guest's server, or, where that is silent, from the virtual machine around it.
    """
    import asyncio
    from pathlib import Path

    from evalfleet.api import appliances, pools

    from .show import print_problems

    pool = pools.open_pool(args.name)
    machines = pool.running(args.machines)
    owner, _ = appliances.screen_of(pool, machines, args.benchmark)
    answers = pool.probe(machines)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    return print_problems(asyncio.run(_save_all(pool, owner, answers, folder)))


async def _save_all(
    pool: Pool, owner: BenchmarkAppliance, answers: list[ActionResult], folder: Path
) -> list[ActionResult]:
    """Of those that answer; the others said why they do not."""
    import asyncio

    saving = [
        _save(pool, owner, answer.machine, folder / f"{answer.machine.name}.png")
        for answer in answers
        if not answer.problem
    ]
    return [*(answer for answer in answers if answer.problem), *await asyncio.gather(*saving)]


async def _save(pool: Pool, owner: BenchmarkAppliance, machine: MachineState, file: Path) -> ActionResult:
    from evalfleet.api.appliances import picture
    from evalfleet.api.pool_machine import ActionResult

    image, problem = await picture(pool, machine, owner)
    if image:
        file.write_bytes(image)
        print(file)
    return ActionResult(machine, problem)
