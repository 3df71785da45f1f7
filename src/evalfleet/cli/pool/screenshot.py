"""Save what the screens of a pool's machines show, one PNG a machine: MACHINE.png."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import add_machines, add_name

if TYPE_CHECKING:
    from pathlib import Path

    from evalfleet.keeping import Answer, Pool
    from evalfleet.state import MachineState

GUEST_API = (5001, 5000)
PATIENCE_S = 30.0
MOST_BYTES = 64 << 20
PNG = b"\x89PNG\r\n\x1a\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", default=".", help="where to (default: here)")


def main(args: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from evalfleet import keeping

    from . import following

    pool = keeping.open_pool(args.name)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    return following.told(asyncio.run(_save_all(pool, pool.running(args.machines), folder)))


async def _save_all(pool: Pool, machines: list[MachineState], folder: Path) -> list[Answer]:
    import asyncio

    return await asyncio.gather(
        *(_save(pool, machine, folder / f"{machine.name}.png") for machine in machines)
    )


async def _save(pool: Pool, machine: MachineState, file: Path) -> Answer:
    from evalfleet.keeping import Answer
    from evalfleet.tunnels import fetch, open_tunnels

    problems: list[str] = []
    async with open_tunnels(pool, [machine], [GUEST_API], problems.append) as (tunnel,):
        try:
            image = await fetch(tunnel, "/screenshot", PATIENCE_S, MOST_BYTES)
        except OSError as err:
            return Answer(machine, problems[0] if problems else f"its guest sends no picture: {err}")
    if not image.startswith(PNG):
        return Answer(machine, "its guest sends something else than a PNG picture")
    file.write_bytes(image)
    print(file)
    return Answer(machine)
