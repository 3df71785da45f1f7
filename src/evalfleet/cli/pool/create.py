"""Make a pool and its machines. They stay, and may cost money, until they are deleted or expire."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what to call it")
    parser.add_argument(
        "--on", metavar="PLACE", default="local", help="where they come from (default: local)"
    )
    parser.add_argument("--workers", metavar="N", default="1", help="how many machines (default: 1)")
    parser.add_argument("--expires", metavar="14d", default="14d", help="when they end by themselves")
    parser.add_argument("--prefix", metavar="P", default=None, help="machines are called P-1, P-2, ...")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", dest="settings", help="a setting")
    parser.add_argument("--config", metavar="FILE", help="this file instead of the nearest evalfleet.toml")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.errors import PlaceError
    from evalfleet.planning.plan import PREFIX, PoolRequest
    from evalfleet.planning.values import parse_count, parse_duration, parse_pairs
    from evalfleet.views.refusals import refusals, refusals_table

    from . import following

    request = PoolRequest(
        name=args.name,
        on=args.on,
        workers=parse_count(args.workers, "--workers", 1, 10_000),
        expires_s=parse_duration(args.expires, "--expires"),
        prefix=args.prefix or PREFIX,
        settings=parse_pairs(args.settings or (), "--set"),
        config=args.config,
    )
    pool = pools.create(request)
    state = following.follow(pool)
    view = pool.view()
    if not view.machines:
        why = "; ".join(sorted({block.detail for block in state.blocks.values()})) or state.last_failure
        pool.delete()
        pool.wait()
        why = why or "no place offers any"
        if told := refusals_table(refusals(state)):
            print(told, file=sys.stderr)
        raise PlaceError(f"pool {pool.name!r} got no machine: {why}", transient=False)
    following.show(view, as_json=args.json)
    return 0
