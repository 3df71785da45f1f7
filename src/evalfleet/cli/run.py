"""Run a benchmark: bring machines up, run every task, collect the results, clean up.

BENCHMARK is a file (./mybench.toml), a name from evalfleet.toml, an installed benchmark, or a dotted path.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from evalfleet.planning.flags import Flag, flags, word_of

if TYPE_CHECKING:
    from evalfleet.planning.plan import Resolved
    from evalfleet.planning.request import RunRequest

ASK_ABOVE_USD = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", help="see above")
    groups: dict[str, Any] = {}
    for option, flag in flags().items():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], option, flag)
    how = groups["how"]
    how.add_argument(
        "--detach", action="store_true", help="return at once; `evalfleet watch` follows the run"
    )
    how.add_argument("--dry-run", action="store_true", help="print the plan and its estimate, start nothing")
    how.add_argument("--yes", action="store_true", help="do not ask, whatever it may cost")
    how.add_argument("--json", action="store_true", help="one JSON object a line, the results last")


def _add(group: Any, option: str, flag: Flag) -> None:
    spelling = flag.short or f"--{word_of(option).replace('_', '-')}"
    if flag.kind == "switch":
        group.add_argument(spelling, action="store_true", default=None, dest=option, help=flag.help)
    else:
        action = "append" if flag.is_repeated else "store"
        group.add_argument(spelling, metavar=flag.metavar, action=action, dest=option, help=flag.help)


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


def _request(args: argparse.Namespace) -> RunRequest:
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.values import parse_pairs

    given: dict[str, Any] = {name: getattr(args, name) for name in flags()}
    given["settings"] = parse_pairs(args.settings or (), "--set") or None
    given["agent"] = parse_pairs(args.agent or (), "-A") or None
    return RunRequest(args.benchmark, **given)


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
