"""What a run would take and cost, before anything is spent: plan."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from evalfleet.errors import RequestError
from evalfleet.planning.flags import flags

from .run import add_flag, request_of, words_of

if TYPE_CHECKING:
    from evalfleet.planning.forecast import Forecast
    from evalfleet.planning.plan import Resolved
    from evalfleet.planning.workspace import Workspace

NOT_PLANNED = ("keep", "name", "max_duration")
"""Flags of `run` that change nothing that is planned."""


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", help="as for `evalfleet run`")
    promised = parser.add_argument_group("what is promised")
    promised.add_argument("--deadline", metavar="1h", help="choose the cheapest way that is done by then")
    promised.add_argument("--budget", metavar="USD", help="choose the quickest way that costs no more")
    groups: dict[str, Any] = {}
    for option, flag in flags().items():
        if option in NOT_PLANNED or option in ("budget", "deadline"):
            continue
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        if option == "workers":
            told = "numbers of machines at once to look at (default: 1,2,5,10,20,40)"
            groups["where"].add_argument("--workers", metavar="N[,N...]", help=told)
        else:
            add_flag(groups[flag.group], option, flag)
    how = groups["how"]
    how.add_argument("--draws", metavar="N", help="simulated runs for each way (default: 60)")
    how.add_argument("--json", action="store_true", help="print one JSON document")


async def plan(args: argparse.Namespace) -> int:
    """Show how long a run would take and what it would cost, by simulation, for each way to run it.

    BENCHMARK and the flags are those of `evalfleet run`. Each way (how many machines, which size, spot or
    regular, new ones or those of a stopped pool) is simulated many times, with this computer's offers and
    what earlier runs here took. Nine of ten simulated runs are within the ranges. With --deadline or --budget
    one of them is chosen, and the command that runs it is printed. Nothing is started.
    """
    from evalfleet.api import survey
    from evalfleet.planning.forecast import DRAWS, chosen
    from evalfleet.planning.values import parse_count, parse_duration, parse_usd
    from evalfleet.planning.workspace import Workspace

    from . import plan_table

    workspace = Workspace.here()
    deadline_s = None if args.deadline is None else parse_duration(args.deadline, "--deadline")
    budget_usd = None if args.budget is None else parse_usd(args.budget, "--budget")
    draws = DRAWS if args.draws is None else parse_count(args.draws, "--draws", 20, 10_000)
    counts = _counts(args.workers) or survey.WORKERS
    args.workers = None
    for option in NOT_PLANNED:
        setattr(args, option, None)
    resolved, others = _resolved(workspace, args)
    for warning in resolved.warnings:
        print(f"evalfleet: note: {warning}", file=sys.stderr)
    found = await survey.outlook(workspace, resolved, others, counts, draws)
    promised = deadline_s is not None or budget_usd is not None
    best = chosen(found.forecasts, deadline_s, budget_usd) if promised else None
    notes = [] if best is None else await survey.doubts(workspace, resolved, best.option.workers)
    command = None if best is None else _command(args, resolved, best)
    if args.json:
        print(json.dumps(plan_table.document(resolved, found, best, command, notes)))
    else:
        print(plan_table.described(resolved, found, draws))
        if best is not None:
            print(f"\nchosen: {plan_table.in_words(best)}\n{command}")
            for note in notes:
                print(f"evalfleet: note: {note}", file=sys.stderr)
        elif not promised:
            print("\n--deadline 1h or --budget 5 chooses one of them, and prints its command")
    if promised and best is None:
        print(f"evalfleet: {plan_table.out_of_reach(found, deadline_s, budget_usd)}", file=sys.stderr)
        return 2
    return 0


def _counts(text: str | None) -> Sequence[int]:
    from evalfleet.planning.values import parse_count, parse_names

    if text is None:
        return ()
    return [parse_count(each, "--workers", 1, 10_000) for each in parse_names(text, "--workers")]


def _resolved(workspace: Workspace, args: argparse.Namespace) -> tuple[Resolved, list[Resolved]]:
    """The request, and the same with spot machines, with those of the size that earlier runs needed, and with
    both, where there are such and nobody has chosen."""
    from evalfleet.api import runs

    budget, args.budget = args.budget, None  # it does not bound what is simulated
    try:
        request = request_of(args)
        resolve = functools.partial(runs.resolve_request, workspace, purpose="forecast")
        resolved = resolve(request)
        if args.pool:
            return resolved, []
        asked = [request]
        if not args.right_size and resolve(sized := request.but(right_size=True)).plan.needs is not None:
            asked.append(sized)
        others = [resolve(each) for each in asked[1:]]
        if not args.spot:
            with suppress(RequestError):  # none of its places has spot machines
                others += [resolve(each.but(spot=True)) for each in asked]
        return resolved, others
    finally:
        args.budget = budget


def _command(args: argparse.Namespace, resolved: Resolved, best: Forecast) -> str:
    """What to paste: the request as it was given, with what was chosen."""
    from evalfleet.api.survey import size_setting

    option = best.option
    given = argparse.Namespace(**vars(args))
    given.workers = str(option.workers)
    given.spot = True if option.offer.spot and not option.pool else None
    given.right_size = True if option.right_sized or args.right_size else None
    if option.pool:
        given.on, given.pool = None, option.pool_name
    elif not option.right_sized and (setting := size_setting(resolved.plan, option.offer)) is not None:
        given.settings = [*(args.settings or ()), setting]
    run = f"evalfleet run {shlex.join(words_of(given))}"
    return f"evalfleet pool start {option.pool_name} && {run}" if option.pool else run
