"""Have more machines in a pool, or fewer: those that no run has go, the newest first."""

from __future__ import annotations

import argparse

from .arguments import add_json, add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("workers", metavar="N", help="how many machines")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.planning.values import parse_count

    from . import following

    pool = pools.open_pool(args.name)
    pool.resize(parse_count(args.workers, "N", 1, 10_000))
    following.follow(pool)
    following.show(pool.view(), as_json=args.json)
    return 0
