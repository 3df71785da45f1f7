"""Take up a run where it stopped: unrun and unfinished tasks run, settled ones stay.

Attempts that still run on their machines are adopted, not started again.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument("--only", choices=("broken",), help="run the broken tasks again, and nothing else")
    parser.add_argument(
        "--take-over", action="store_true", help="take the run from a controller that still lives"
    )
    parser.add_argument("--budget", metavar="USD", help="a new budget for the whole run")
    parser.add_argument("--max-duration", metavar="2h", help="a new time limit, from now")
    parser.add_argument("--workers", metavar="N", help="another number of machines at once")
    parser.add_argument("--env-file", metavar="FILE", help="read secrets from here")
    parser.add_argument(
        "--detach", action="store_true", help="return at once; `evalfleet watch` follows the run"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the results last")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import runs

    from .follow import follow

    runs.tell_overdue()
    order = runs.resume_order(
        args.run,
        only_broken=args.only == "broken",
        take_over=args.take_over,
        limits=_limits(args),
        env_file=args.env_file,
    )
    if args.detach:
        from evalfleet.api.detach import detach

        return detach(order, as_json=args.json)
    return follow(runs.control(order), as_json=args.json)


def _limits(args: argparse.Namespace) -> dict[str, float]:
    from evalfleet.planning import values

    limits: dict[str, float] = {}
    if args.budget is not None:
        limits["budget_usd"] = values.parse_usd(args.budget, "--budget")
    if args.max_duration is not None:
        limits["max_duration_s"] = values.parse_duration(args.max_duration, "--max-duration")
    if args.workers is not None:
        limits["workers"] = values.parse_count(args.workers, "--workers", 1, 10_000)
    return limits
