"""Bring Windows on one machine of a pool back to its golden state. What is in it now is lost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import add_name

if TYPE_CHECKING:
    from evalfleet.model import Ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", help="its name or id")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pool_machine, pools
    from evalfleet.benchmarks.waa import host_commands

    from . import following

    pool = pools.open_pool(args.name)
    ((answer, ended),) = pool.execute([args.machine], host_commands.verb("reset"), host_commands.RESET_S)
    if ended is not None and (problem := _problem(args.name, ended)):
        answer = pool_machine.ActionResult(answer.machine, problem)
    if not answer.problem:
        print(f"{answer.machine.name}: Windows is as it was installed, and answers")
    return following.told([answer])


def _problem(pool: str, ended: Ended) -> str:
    from evalfleet.benchmarks.waa.host_commands import NO_WINDOWS

    from .visiting import no_windows

    if ended.reason == "exited" and ended.exit_code == 0:
        return ""
    if ended.exit_code == NO_WINDOWS:
        return no_windows(pool)
    return f"{ended.reason.replace('_', ' ')}: {ended.detail.strip()}"
