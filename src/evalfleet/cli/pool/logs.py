"""Print what happened to a pool, or to one of its machines."""

from __future__ import annotations

import argparse

from .arguments import add_name

LOOK_S = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="its name or id (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until it is deleted, or Ctrl-C")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.cli.wait import reader_left
    from evalfleet.events import RunEnded
    from evalfleet.views.lines import event_line

    pool = pools.open_pool(args.name)
    about = pool.view().machine(args.machine).id if args.machine else None
    seen, deleted = 0, False
    while True:
        for record in pool.store.read(pool.name, after=seen):
            seen, deleted = record.seq, isinstance(record.event, RunEnded)
            if about is None or getattr(record.event, "machine", None) == about:
                print(event_line(record), flush=args.follow)
        if deleted or not args.follow or reader_left(LOOK_S):
            return 0
