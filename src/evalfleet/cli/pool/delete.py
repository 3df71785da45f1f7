"""Delete a pool and all its machines, and what is on them."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def main(args: argparse.Namespace) -> int:
    from evalfleet import keeping
    from evalfleet.views.words import plural

    from . import following

    pool = keeping.open_pool(args.name)
    many = plural(len(pool.view().machines), "machine")
    if not args.yes and not _agreed(f"delete pool {pool.name} and its {many}"):
        return 2
    pool.delete()
    following.follow(pool)
    print(f"pool {pool.name} is deleted: {many}")
    return 0


def _agreed(what: str) -> bool:
    """Only `yes` is yes. Where nobody can answer, nothing is deleted."""
    if not sys.stdin.isatty():
        print(f"evalfleet: this would {what}: say --yes", file=sys.stderr)
        return False
    try:
        agreed = input(f"This will {what}. Type yes to go on: ").strip() == "yes"
    except EOFError:
        agreed = False
    if not agreed:
        print("evalfleet: nothing was deleted", file=sys.stderr)
    return agreed
