"""Let a pool live longer: its machines end by themselves at their expiry."""

from __future__ import annotations

import argparse

from .arguments import add_json, add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--expires", metavar="14d", default="14d", help="counted from now (default: 14d)")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.planning.values import parse_duration

    from . import following

    pool = pools.open_pool(args.name)
    answers = pool.extend(parse_duration(args.expires, "--expires"))
    following.show(pool.view(), as_json=args.json)
    return following.told(answers)
