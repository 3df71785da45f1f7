"""Run a real benchmark on this computer, on four local machines, and end with a report.

The first time it fetches the benchmark's packages; a run takes about a minute.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", default="4", help="machines at once (default: 4)")
    parser.add_argument("--first", metavar="N", help="only the first N tasks")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the results last")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import runs
    from evalfleet.demo.prepare import prepare
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.report import report

    from .follow import follow

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    home = Workspace.here().home
    demo = prepare(home / ".demo", say)
    say(demo.why)
    request = RunRequest(str(demo.benchmark), workers=args.workers, first=args.first)
    run = runs.start(runs.resolve_request(request))
    code = follow(run, as_json=args.json)
    path = run.folder / "report.md"
    path.write_text(report(run.results(), "md"), encoding="utf-8")
    say(f"the report: {path}")
    say(f"look closer: `evalfleet show {run.name} TASK`, `evalfleet logs {run.name} TASK`")
    return code
