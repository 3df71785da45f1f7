"""The runs of this home: ls, verify."""

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


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="this run or pool; default: all of this home")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def verify(args: argparse.Namespace) -> int:
    """Check that the journal is as it was written: every event of one run, or of all runs and pools.

    Exit code 0: all is well. 1: something was changed, removed or swapped; the line says which event.
    """
    import json
    import sys

    from evalfleet.api import runs

    checked = runs.verify(args.run)
    damaged = [each for each in checked if each["problem"]]
    if args.json:
        print(json.dumps(checked))
    else:
        for each in checked:
            print(f"{each['name']}: {_verdict(each)}")
        for each in damaged:
            print(f"evalfleet: {each['problem']}", file=sys.stderr)
    return 1 if damaged else 0


def _verdict(checked: dict[str, Any]) -> str:
    if checked["problem"]:
        return "DAMAGED"
    text = f"{checked['events']:,} events are as they were written"
    if checked["not_covered"]:
        text += f"; of these, {checked['not_covered']:,} are not covered: they are older than the checksums"
    return text
