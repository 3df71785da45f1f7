"""Pools looked at: which there are, how one stands, what happened to it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import add_json, add_name

if TYPE_CHECKING:
    from evalfleet.views.fleet_documents import PoolDocument

LOOK_S = 0.3

ls_arguments = add_json


def ls(args: argparse.Namespace) -> int:
    """List the pools of this home, newest first."""
    import json

    from evalfleet.api import pools
    from evalfleet.api.documents import pool_document
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import table

    workspace = Workspace.here()
    shown = [pool_document(view, workspace.now()) for view in pools.pools(workspace)]
    if args.json:
        print(json.dumps(shown))
    elif not shown:
        print("no pools: make one with `evalfleet pool create NAME --on PLACE --workers N`")
    else:
        head = ("pool", "place", "machines", "held", "created", "expires")
        print(table(head, [_cells(pool) for pool in shown]))
        for warning in filter(None, (pool["warning"] for pool in shown)):
            print(f"evalfleet: note: {warning}", file=sys.stderr)
    return 0


def _cells(pool: PoolDocument) -> tuple[object, ...]:
    from evalfleet.views.format import local_time

    machines = pool["machines"]
    held = sum(machine["run"] is not None for machine in machines)
    created, expires = local_time(pool["created_at"]), local_time(pool["expires_at"])
    return pool["pool"], pool["place"], len(machines), held, created, expires


def status_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "--probe",
        action="store_true",
        help="ask every machine, and what a benchmark runs on it, whether it answers",
    )
    add_json(parser)


async def status(args: argparse.Namespace) -> int:
    """Show a pool's machines: where they are, how they are, and which run uses them.

    Where they have screens, also the links to those that `pool vnc` keeps open.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.planning.workspace import Workspace

    from .show import show

    pool = pools.open_pool(Workspace.here(), args.name)
    answers = await appliances.probe(pool) if args.probe else None
    view = pool.view()
    screens = appliances.open_links(pool)
    has_screens = bool(screens) or appliances.has_screens(pool, view.machines)
    show(view, as_json=args.json, answers=answers, screens=screens if has_screens else None)
    return 1 if answers is not None and any(answer.problem for answer in answers) else 0


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="its name or id (default: all)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until it is deleted, or Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def logs(args: argparse.Namespace) -> int:
    """Print what happened to a pool, or to one of its machines."""
    from evalfleet.api import pools
    from evalfleet.cli.terminal import reader_left
    from evalfleet.events import RunEnded
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.lines import event_line, json_line

    pool = pools.open_pool(Workspace.here(), args.name)
    about = pool.view().machine(args.machine).id if args.machine else None
    seen, deleted = 0, False
    while True:
        for record in pool.store.read(pool.name, after=seen):
            seen, deleted = record.seq, isinstance(record.event, RunEnded)
            if about is None or getattr(record.event, "machine", None) == about:
                print(json_line(record) if args.json else event_line(record), flush=args.follow)
        if deleted or not args.follow or reader_left(LOOK_S):
            return 0
