"""Print what happened to a pool, or to one of its machines."""

from __future__ import annotations

import argparse

from .arguments import add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="its name or id (default: all)")


def main(args: argparse.Namespace) -> int:
    from evalfleet import keeping
    from evalfleet.views.lines import event_line

    pool = keeping.open_pool(args.name)
    about = pool.view().machine(args.machine).id if args.machine else None
    for record in pool.store.read(pool.name):
        if about is None or getattr(record.event, "machine", None) == about:
            print(event_line(record))
    return 0
