"""Show a pool's machines: where they are, how they are, and which run has them."""

from __future__ import annotations

import argparse

from .arguments import add_json, add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "--probe", action="store_true", help="ask every machine, and the Windows on it, whether it answers"
    )
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools

    from . import following
    from .visiting import with_windows

    pool = pools.open_pool(args.name)
    answers = with_windows(pool, pool.probe()) if args.probe else None
    following.show(pool.view(), as_json=args.json, answers=answers)
    return 1 if answers is not None and any(answer.problem for answer in answers) else 0
