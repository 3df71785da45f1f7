"""Stop a run: end what runs, delete its machines, keep its results. It can be resumed.

Where no controller is at work on the run any more, this command cleans up itself.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its name; `evalfleet ls` shows all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def main(args: argparse.Namespace) -> int:
    import json

    from evalfleet.api import runs
    from evalfleet.views.terminal import summary

    run = runs.open(args.run)
    if run.state().ended_at is None:
        run.cancel()
        run.wait()  # returns at once where no controller is at work
    if run.state().ended_at is None:
        run = runs.control(runs.cancelling_order(run))
        run.wait()
    runs.tell_overdue()
    results = run.results()
    print(json.dumps(results) if args.json else summary(results))
    return 0
