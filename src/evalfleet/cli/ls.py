"""List the runs of this home, newest first."""

from __future__ import annotations

import argparse
from typing import Any


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def ls(args: argparse.Namespace) -> int:
    """List the runs of this home, newest first."""
    import json

    from evalfleet.api import runs
    from evalfleet.views.format import table

    rows = runs.list_runs()
    if args.json:
        print(json.dumps(rows))
    elif not rows:
        print("no runs yet: start one with `evalfleet run BENCHMARK`, or try `evalfleet demo`")
    else:
        header = ("run", "benchmark", "status", "tasks", "scored", "broken", "unrun", "success", "started")
        print(table(header, [_cells(row) for row in rows]))
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["success_rate"]
    success = "-" if rate is None else f"{rate:.1%}"
    counts = (str(row[key]) for key in ("total_tasks", "scored", "broken", "unrun"))
    return (row["run"], row["benchmark"], row["status"], *counts, success, row["started_at"][:19])
