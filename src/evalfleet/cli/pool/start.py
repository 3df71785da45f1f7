"""Start what was stopped in a pool, and make machines that are missing."""

from __future__ import annotations

import argparse

from .arguments import add_json, add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools

    from . import following

    pool = pools.open_pool(args.name)
    pool.start()
    following.follow(pool)
    following.show(pool.view(), as_json=args.json)
    return 0
