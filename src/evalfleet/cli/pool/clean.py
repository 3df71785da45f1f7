"""Undo what setting up WAA left on a pool's machines: its container, image and Windows, some 60 GB.

For hosts that were lent, which otherwise keep it. Those of a cloud need it not: `pool delete` deletes their
disks. Docker stays, and golden storage that was there before.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import add_machines, add_name

if TYPE_CHECKING:
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.model import Ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.benchmarks.waa import host_commands
    from evalfleet.cli.confirm import agreed

    from . import following

    pool = pools.open_pool(args.name)
    names = [machine.name for machine in pool.running(args.machines)]
    if not args.yes and not agreed(f"delete Windows and all else of WAA on {', '.join(names)}"):
        return 2
    done = pool.execute(names, host_commands.verb("clean"), host_commands.CLEAN_S, host_commands.NO_WINDOWS)
    return following.told([_answer(answer, ended) for answer, ended in done])


def _answer(answer: ActionResult, ended: Ended | None) -> ActionResult:
    from evalfleet.api import pool_machine
    from evalfleet.benchmarks.waa.host_commands import NO_WINDOWS

    if ended is None or answer.problem:
        return answer
    if ended.reason == "exited" and ended.exit_code in (0, NO_WINDOWS):
        what = "is clean" if ended.exit_code == 0 else "had nothing of WAA on it"
        print(f"{answer.machine.name} {what}")
        return answer
    return pool_machine.ActionResult(
        answer.machine, f"{ended.reason.replace('_', ' ')}: {ended.detail.strip()}"
    )
