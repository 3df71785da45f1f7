"""Run a benchmark: bring machines up, run every task, collect the results, clean up.

BENCHMARK is a file (./mybench.toml), a name from evalfleet.toml, an installed benchmark, or a dotted path.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalfleet.planning.plan import Resolved

ASK_ABOVE_USD = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", help="see above")
    where = parser.add_argument_group("where")
    where.add_argument("--on", metavar="PLACE[,PLACE...]", help="where machines come from (default: local)")
    where.add_argument("--pool", metavar="NAME", help="borrow the machines of this pool instead")
    where.add_argument("--workers", metavar="N", help="how many machines at once (default: 1, or the pool)")
    where.add_argument(
        "--spot", action="store_true", default=None, help="prefer cheaper machines that may be taken back"
    )
    where.add_argument(
        "--keep", action="store_true", default=None, help="leave the machines behind, as pool RUN-pool"
    )
    where.add_argument("--canary", metavar="N", help="attempts that must end before more machines are made")
    which = parser.add_argument_group("which tasks")
    which.add_argument("--tasks", metavar="N", help="a seeded sample of N tasks, spread over the domains")
    which.add_argument("--seed", metavar="S", help="another sample (default: 0)")
    which.add_argument("--first", metavar="N", help="the first N tasks of the file")
    which.add_argument(
        "--task", metavar="ID", action="append", dest="task_ids", help="this task; may be repeated"
    )
    which.add_argument("--domain", metavar="D", action="append", dest="domains", help="tasks of this domain")
    which.add_argument("--repeat", metavar="K", help="run every task K times, as K tasks")
    which.add_argument("--schedule", metavar="POLICY", help="dynamic (default), round-robin or slices")
    what = parser.add_argument_group("what runs")
    what.add_argument("--model", metavar="M", help="the model under test, told to the benchmark")
    what.add_argument("--set", metavar="KEY=VALUE", action="append", dest="settings", help="a setting")
    what.add_argument(
        "-A", metavar="KEY=VALUE", action="append", dest="agent", help="an argument of the agent"
    )
    what.add_argument(
        "--env-file", metavar="FILE", help="read secrets and settings from here; never uploaded"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--budget", metavar="USD", help="the most that machines may cost")
    limits.add_argument("--max-duration", metavar="2h", help="the longest that the run may take")
    limits.add_argument("--task-timeout", metavar="S", help="the longest that a task may take")
    limits.add_argument("--attempts", metavar="N", help="tries a task (default: 3)")
    limits.add_argument("--allow-broken", metavar="N|P%", help="exit 0 with so many broken tasks")
    limits.add_argument("--fail-under", metavar="RATE", help="exit 1 below this success rate")
    how = parser.add_argument_group("how")
    how.add_argument("--name", metavar="RUN", help="the run's name (default: made from benchmark and time)")
    how.add_argument("--config", metavar="FILE", help="this file instead of the nearest evalfleet.toml")
    how.add_argument("--profile", metavar="NAME", help="defaults from [profiles.NAME]")
    how.add_argument(
        "--detach", action="store_true", help="return at once; `evalfleet watch` follows the run"
    )
    how.add_argument("--dry-run", action="store_true", help="print the plan and its estimate, start nothing")
    how.add_argument("--yes", action="store_true", help="do not ask, whatever it may cost")
    how.add_argument("--json", action="store_true", help="one JSON object a line, the results last")


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import runs
    from evalfleet.api.estimate import describe, estimate, forewarned

    from .follow import follow

    resolved = runs.vet(runs.resolve_request(_request(args), dry=args.dry_run))
    for warning in resolved.warnings:
        print(f"evalfleet: note: {warning}", file=sys.stderr)
    expected = estimate(resolved)
    if args.dry_run:
        print(describe(resolved, expected, as_json=args.json))
        return 0
    for warning in forewarned(resolved, expected):
        print(f"evalfleet: note: {warning}", file=sys.stderr)
    if not _agreed(expected.usd, resolved, args):
        return 2
    if args.detach:
        from evalfleet.api.detach import detach

        return detach(runs.order_of(runs.plan_run(resolved)), as_json=args.json)
    run = runs.start(resolved)
    code = follow(run, as_json=args.json)
    if resolved.keep:
        pool = runs.kept_pool(run.name)
        print(
            f"evalfleet: the machines stay, as pool {pool}; `evalfleet pool delete {pool}` ends them",
            file=sys.stderr,
        )
    return code


def _request(args: argparse.Namespace) -> Any:
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.values import parse_pairs

    given = {name: getattr(args, name) for name in RunRequest.__struct_fields__ if hasattr(args, name)}
    given["settings"] = parse_pairs(args.settings or (), "--set") or None
    given["agent"] = parse_pairs(args.agent or (), "-A") or None
    return RunRequest(**given)


def _agreed(usd: float | None, resolved: Resolved, args: argparse.Namespace) -> bool:
    """Ask before spending much. Where nobody can answer, spend nothing."""
    budget = resolved.plan.limits.budget_usd
    most = usd if budget is None else min(usd or 0.0, budget)
    if most is None or most <= ASK_ABOVE_USD or args.yes:
        return True
    question = f"this may cost about ${most:.2f}"
    if not sys.stdin.isatty():
        print(
            f"evalfleet: {question}: say --yes, or set a --budget of at most ${ASK_ABOVE_USD:g}",
            file=sys.stderr,
        )
        return False
    return input(f"{question}. Go on? [y/N] ").strip().lower() in ("y", "yes")
