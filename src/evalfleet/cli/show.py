"""Show how a run went: outcome, attempts, causes, machines, cost; or one task with all its attempts."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument("task", metavar="TASK", nargs="?", help="this task, with all its attempts")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    import json

    from evalfleet.api import runs
    from evalfleet.views.show import show_run, show_task

    run = runs.open(args.run)
    if args.task is not None:
        detail = run.task(args.task)
        print(json.dumps(detail) if args.json else show_task(detail))
    else:
        results = run.results()
        print(json.dumps(results) if args.json else show_run(results))
    return 0
