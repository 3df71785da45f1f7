"""What was counted, beside what was billed: cost."""

from __future__ import annotations

import argparse
import json


def cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("reconcile",), help="reconcile")
    parser.add_argument("run", metavar="RUN", nargs="?", help="one run or pool, instead of --month")
    parser.add_argument("--month", metavar="2026-11", help="all runs and pools of this month (UTC)")
    parser.add_argument(
        "--export", metavar="FILE", required=True, help="the bill: CSV or JSON of a cloud or a model's vendor"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def cost(args: argparse.Namespace) -> int:
    """Compare what was counted for machines and models with an exported bill, day by day.

    What a cloud billed is known by its tags; a model's vendor tells it by model. Each difference is
    explained, or called unexplained. Discounts, reservations and other currencies are set in [cost] of
    evalfleet.toml.
    """
    from evalfleet.api.reconcile import reconcile, reconcile_document, reconcile_table
    from evalfleet.planning.workspace import Workspace
    from evalfleet.toml_tables import expand

    workspace = Workspace.here()
    found = reconcile(workspace, workspace.cwd / expand(args.export), args.run, args.month)
    print(json.dumps(reconcile_document(found)) if args.json else reconcile_table(found))
    return 0
