"""End all that runs on one machine of a pool, and bring it up anew."""

from __future__ import annotations

import argparse

from .arguments import add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", help="its name or id")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools

    from . import following

    (answer,) = pools.open_pool(args.name).restart(args.machine)
    if not answer.problem:
        print(f"{answer.machine.name} was restarted and answers")
    return following.told([answer])
