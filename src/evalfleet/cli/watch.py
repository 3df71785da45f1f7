"""Follow a run live, from any terminal; with a task, follow its log.

Ctrl-C stops watching, not the run.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument("task", metavar="TASK", nargs="?", help="follow the log of this task")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import runs

    from .follow import watch

    run = runs.open(args.run)
    if args.task is not None:
        from evalfleet.cli.logs import print_task_log

        return print_task_log(run, args.task, follow=True)
    return watch(run, as_json=args.json)
