"""Save what the screens of a pool's machines show, one PNG a machine: MACHINE.png.

It comes from the guest's server, or, where that is silent, from the virtual machine around it.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import add_machines, add_name

if TYPE_CHECKING:
    from pathlib import Path

    from evalfleet.api.pool import Pool
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.state import MachineState

PATIENCE_S = 10.0
MOST_BYTES = 64 << 20
PNG = b"\x89PNG\r\n\x1a\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", default=".", help="where to (default: here)")


def main(args: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from evalfleet.api import pools

    from . import following

    pool = pools.open_pool(args.name)
    folder = Path(args.output)
    answers = pool.probe(pool.running(args.machines))
    folder.mkdir(parents=True, exist_ok=True)
    return following.told(asyncio.run(_save_all(pool, answers, folder)))


async def _save_all(pool: Pool, answers: list[ActionResult], folder: Path) -> list[ActionResult]:
    """Of those that answer; the others said why they do not."""
    import asyncio

    saving = [
        _save(pool, answer.machine, folder / f"{answer.machine.name}.png")
        for answer in answers
        if not answer.problem
    ]
    return [*(answer for answer in answers if answer.problem), *await asyncio.gather(*saving)]


async def _save(pool: Pool, machine: MachineState, file: Path) -> ActionResult:
    from evalfleet.api.pool_machine import ActionResult

    image, problem = await _from_guest(pool, machine)
    if not image:
        image, worse = await _from_outside(pool, machine)
        problem = worse or problem
    if not image:
        return ActionResult(machine, problem)
    file.write_bytes(image)
    print(file)
    return ActionResult(machine)


async def _from_guest(pool: Pool, machine: MachineState) -> tuple[bytes, str]:
    """The picture, or why there is none."""
    from evalfleet.api.tunnels import fetch, open_tunnels
    from evalfleet.benchmarks.waa.host_commands import GUEST_TUNNEL

    problems: list[str] = []
    async with open_tunnels(pool, [machine], [GUEST_TUNNEL], problems.append) as (tunnel,):
        try:
            image = await fetch(tunnel, "/screenshot", PATIENCE_S, MOST_BYTES)
        except OSError as err:
            return b"", problems[0] if problems else f"its guest sends no picture: {err}"
    if not image.startswith(PNG):
        return b"", "its guest sends something else than a PNG picture"
    return image, ""


async def _from_outside(pool: Pool, machine: MachineState) -> tuple[bytes, str]:
    """For a guest that hangs, which is when people want to see it; and why there is none at all."""
    from evalfleet.benchmarks.waa.host_commands import NO_WINDOWS

    from .visiting import no_windows, visit

    seen = await visit(pool, machine, "screenshot", 2 * PATIENCE_S)
    if seen.code == NO_WINDOWS:
        return b"", no_windows(pool.name)
    return (seen.said if seen.said.startswith(PNG) else b""), ""
