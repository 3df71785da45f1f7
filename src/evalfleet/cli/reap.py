"""Delete what is ours and has expired, and what a run of this home that has ended left behind.

Never what evalfleet did not make, never another home's machines before they expire. Works from tags alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalfleet.api.places import FoundBelonging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument(
        "--all-owners", action="store_true", help="what others own and has expired, too; asks"
    )
    parser.add_argument(
        "--pools", action="store_true", help="expired pools, too, also those of your other homes"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--install",
        nargs="?",
        const="cron",
        choices=("cron", "github"),
        help="do it every hour: a line in your crontab (default), or print a workflow for GitHub",
    )
    parser.add_argument("--uninstall", action="store_true", help="take the line out of your crontab again")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    if args.install or args.uninstall:
        return _schedule(args)
    from evalfleet.api import places, runs
    from evalfleet.cli.machines import show

    now = round(time.time() * 1e6)
    if not args.dry_run:
        runs.tell_overdue()
    found = places.machines(now, all_owners=args.all_owners, pools=args.pools)
    going = [each for each in found if each.why]
    show(going, "nothing of ours has expired", as_json=args.json)
    if args.dry_run or not going:
        return 0
    others = sum(not each.is_own for each in going)
    if others and not args.yes and not _agreed(others):
        return 2
    answers = places.reap(going)
    for machine, problem in answers.items():
        if problem:
            print(f"evalfleet: {machine}: {problem}", file=sys.stderr)
    _tell(going, answers)
    left = sum(bool(problem) for problem in answers.values())
    if not args.json:
        print(f"deleted: {len(answers) - left}" + (f"; still there: {left}" if left else ""))
    return 1 if left else 0


def _schedule(args: argparse.Namespace) -> int:
    from evalfleet.cli import crontab

    if args.install == "github":
        print(crontab.workflow(), end="")
        return 0
    if args.uninstall:
        print(crontab.uninstall())
        return 0
    print(crontab.install(("--pools",) if args.pools else ()))
    if names := crontab.unseen():
        print(
            f"evalfleet: note: cron does not see {', '.join(names)}: put what `reap` logs in with into .env "
            "beside evalfleet.toml",
            file=sys.stderr,
        )
    return 0


def _tell(going: Sequence[FoundBelonging], answers: Mapping[str, str]) -> None:
    """Whom evalfleet.toml names under [notify]: something was left behind."""
    from evalfleet.api import runs
    from evalfleet.cli.machines import document

    problems = [f"{machine}: {problem}" for machine, problem in answers.items() if problem]
    runs.tell_reaped([document(each) for each in going], problems)


def _agreed(many: int) -> bool:
    """Only `yes` is yes. Where nobody can answer, nothing is deleted."""
    if not sys.stdin.isatty():
        print(f"evalfleet: {many} of these are not yours: say --yes", file=sys.stderr)
        return False
    return input(f"{many} of these are not yours. Type yes to delete them: ").strip() == "yes"
