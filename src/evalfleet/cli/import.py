"""Make a run of results that another program made, so that show, report and the others understand them.

RESULTS_DIR is a folder in which a benchmark's own program left its results, of any number of workers. A task
without a result becomes broken, with its cause, and not a zero. The files are copied; nothing is changed
there.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        metavar="BENCHMARK",
        help="whose results they are; a wrong one is answered with those there are",
    )
    parser.add_argument(
        "results", metavar="RESULTS_DIR", nargs="+", type=Path, help="where its results are; may be several"
    )
    parser.add_argument("--name", metavar="RUN", help="what to call the run (default: made from the time)")
    parser.add_argument("--trial", metavar="T", help="this trial only, where there are several")
    parser.add_argument(
        "--keep", choices=("first", "newest"), help="which score counts when a task has more than one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, as of show")


def main(args: argparse.Namespace) -> int:
    import json

    from evalfleet.api.imports import import_results
    from evalfleet.views.show import show_run

    run = import_results(args.benchmark, args.results, name=args.name, trial=args.trial, keep=args.keep)
    results = run.results()
    print(json.dumps(results) if args.json else show_run(results))
    return 0
