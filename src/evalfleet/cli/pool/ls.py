"""List the pools of this home, newest first."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .arguments import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    import json

    from evalfleet.api import pools
    from evalfleet.views.text_table import table

    from . import following

    shown = [following.document(view) for view in pools.pools()]
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


def _cells(pool: dict[str, Any]) -> tuple[object, ...]:
    machines: list[dict[str, Any]] = pool["machines"]
    held = sum(machine["run"] is not None for machine in machines)
    created, expires = str(pool["created_at"])[:16], str(pool["expires_at"] or "-")[:16]
    return pool["pool"], pool["place"], len(machines), held, created, expires
