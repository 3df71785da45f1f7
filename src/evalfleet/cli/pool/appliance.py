"""Verbs of the benchmark that machines were set up for, and their screens: do, vnc."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import add_benchmark, add_json, add_machines, add_name, add_yes

if TYPE_CHECKING:
    from evalfleet.api.appliances import BenchmarkAppliance
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.api.pools import Pool
    from evalfleet.api.tunnels import Tunnel
    from evalfleet.state import MachineState


def do_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "word", metavar="VERB", help="what to do; a wrong one is answered with a list of them"
    )
    add_machines(parser)
    add_benchmark(parser)
    add_yes(parser)
    add_json(parser)


async def do(args: argparse.Namespace) -> int:
    """Run a verb of the benchmark that a pool's machines were set up for. No run can take them meanwhile.

    `reset` returns the benchmark's software on a machine to its golden state. Its current state is lost.
    `clean` removes the files that the set-up left on lent hosts, which may be gigabytes.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.cli.terminal import agreed
    from evalfleet.planning.workspace import Workspace

    from .show import print_answers

    pool = pools.open_pool(Workspace.here(), args.name)
    running = pool.running(args.machines)
    owner, verb = appliances.verb_of(pool, running, args.word, args.benchmark)
    names = [machine.name for machine in running]
    if verb.asks and not args.yes and not agreed(f"{verb.asks} on {', '.join(names)}"):
        return 2
    answers = await appliances.do(pool, names, owner, verb)
    return print_answers(answers, as_json=args.json)


def vnc_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("--save", metavar="FOLDER", help="instead: save each screen there as MACHINE.png")
    add_benchmark(parser)
    add_json(parser)


async def vnc(args: argparse.Namespace) -> int:
    """Look at the screens of a pool's machines in a browser, until Ctrl-C: one link per machine.

    Everything goes through the SSH connection: the screens are open to nobody but this computer.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    from .shell import carry

    if args.save is not None:
        return await _screenshots(args, Path(args.save))
    pool = pools.open_pool(Workspace.here(), args.name)
    machines = pool.running(args.machines)
    owner, screen = appliances.screen_of(pool, machines, args.benchmark)

    def show(tunnels: Sequence[Tunnel]) -> None:
        links.keep(tunnels)
        for tunnel in tunnels if not args.json else ():
            print(f"{tunnel.machine.name}: {appliances.link_to(tunnel)}", flush=True)
        if bare := [tunnel.machine.name for tunnel in tunnels if not tunnel.machine.prepared]:
            hint = f"{owner.set_up(pool.name)} {owner.appliance.what} up"
            print(f"evalfleet: note: {', '.join(bare)}: nothing was prepared; {hint}", file=sys.stderr)

    with appliances.ScreenLinks(pool) as links:
        return await carry(pool, machines, [(screen.port, screen.port)], show, as_json=args.json)


async def _screenshots(args: argparse.Namespace, folder: Path) -> int:
    """Save what the machines' screens show, one PNG for each: MACHINE.png.

    It comes from the guest's server, or, where that is silent, from the virtual machine around it.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    from .show import print_answers

    pool = pools.open_pool(Workspace.here(), args.name)
    machines = pool.running(args.machines)
    owner, _ = appliances.screen_of(pool, machines, args.benchmark)
    answers = await pool.probe(machines)
    folder.mkdir(parents=True, exist_ok=True)
    return print_answers(await _save_all(pool, owner, answers, folder), as_json=args.json)


async def _save_all(
    pool: Pool, owner: BenchmarkAppliance, answers: list[ActionResult], folder: Path
) -> list[ActionResult]:
    """Save the pictures of those that answer; the others said why they do not."""
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
    return ActionResult(machine, problem, str(file) if image else "")
