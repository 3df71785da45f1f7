"""What the benchmark that machines were set up for can do there: do, reset, clean, vnc, screenshot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import add_benchmark, add_json, add_machine, add_machines, add_name, add_yes

if TYPE_CHECKING:
    from pathlib import Path

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
    """Run a verb of the benchmark that a pool's machines were set up for.

    `pool reset` and `pool clean` are two such verbs. Nobody else can have the machines meanwhile.
    """
    return await _do(args, args.word, args.machines, sure=args.yes)


def reset_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machine(parser)
    add_benchmark(parser)
    add_json(parser)


async def reset(args: argparse.Namespace) -> int:
    """Bring what a benchmark runs on one machine of a pool back to its golden state.

    What is in it now is lost.
    """
    return await _do(args, "reset", [args.machine], sure=True)


def clean_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    add_benchmark(parser)
    add_yes(parser)
    add_json(parser)


async def clean(args: argparse.Namespace) -> int:
    """Remove what setting up a benchmark left on a pool's machines, which may be gigabytes.

    It is meant for lent hosts, which otherwise keep it. Machines of a cloud do not need it: `pool delete`
    deletes their disks.
    """
    return await _do(args, "clean", args.machines, sure=args.yes)


async def _do(args: argparse.Namespace, word: str, machines: Sequence[str], *, sure: bool) -> int:
    from evalfleet.api import appliances, pools
    from evalfleet.cli.terminal import agreed
    from evalfleet.planning.workspace import Workspace

    from .show import print_answers

    pool = pools.open_pool(Workspace.here(), args.name)
    running = pool.running(machines)
    owner, verb = appliances.verb_of(pool, running, word, args.benchmark)
    names = [machine.name for machine in running]
    if verb.asks and not sure and not agreed(f"{verb.asks} on {', '.join(names)}"):
        return 2
    answers = await appliances.do(pool, names, owner, verb)
    return print_answers(answers, as_json=args.json)


def vnc_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    add_benchmark(parser)
    add_json(parser)


async def vnc(args: argparse.Namespace) -> int:
    """Look at the screens of a pool's machines in a browser, until Ctrl-C: one link per machine.

    Everything goes through the SSH connection: the screens are open to nobody but this computer.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    from .shell import carry

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


def screenshot_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", default=".", help="where to (default: here)")
    add_benchmark(parser)
    add_json(parser)


async def screenshot(args: argparse.Namespace) -> int:
    """Save what the screens of a pool's machines show, one PNG per machine: MACHINE.png.

    It comes from the guest's server, or, where that is silent, from the virtual machine around it.
    """
    from pathlib import Path

    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    from .show import print_answers

    pool = pools.open_pool(Workspace.here(), args.name)
    machines = pool.running(args.machines)
    owner, _ = appliances.screen_of(pool, machines, args.benchmark)
    answers = await pool.probe(machines)
    folder = Path(args.output)
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
