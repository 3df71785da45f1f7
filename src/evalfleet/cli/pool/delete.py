"""Delete a pool and all its machines, and what is on them."""

from __future__ import annotations

import argparse

from .arguments import add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.cli.confirm import agreed
    from evalfleet.views.format import plural

    from . import following

    pool = pools.open_pool(args.name)
    many = plural(len(pool.view().machines), "machine")
    if not args.yes and not agreed(f"delete pool {pool.name} and its {many}"):
        return 2
    pool.delete()
    following.follow(pool)
    print(f"pool {pool.name} is deleted: {many}")
    return 0
