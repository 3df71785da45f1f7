"""Compare the counted cost with a bill: cost."""

from __future__ import annotations

import argparse
import json


def cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("reconcile",), help="reconcile")
    parser.add_argument("run", metavar="RUN", nargs="?", help="one run or pool, instead of --month")
    parser.add_argument("--month", metavar="2026-11", help="all runs and pools of this month (UTC)")
    parser.add_argument(
        "--export", metavar="FILE", required=True, help="the bill in the FOCUS format: CSV or JSON"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def cost(args: argparse.Namespace) -> int:
    """Compare the counted cost of machines with a cloud's bill, day by day.

    The bill is a FOCUS export of Azure Cost Management or Google Cloud billing. Tags tie its rows to runs.
    Each difference gets a reason or is called unexplained. Set discounts, reservations and other currencies
    in [cost] of evalfleet.toml.
    """
    from evalfleet.api.reconcile import reconcile, reconcile_document, reconcile_table
    from evalfleet.planning.workspace import Workspace
    from evalfleet.toml_tables import expand

    workspace = Workspace.here()
    reconciled = reconcile(workspace, workspace.cwd / expand(args.export), args.run, args.month)
    print(json.dumps(reconcile_document(reconciled)) if args.json else reconcile_table(reconciled))
    return 0
