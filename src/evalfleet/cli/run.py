"""Starting runs, taking them up again, and ending them: run, resume, cancel, demo."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from evalfleet.planning.flags import Flag, flags, word_of

from .terminal import ask, has_colours, note, result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from evalfleet.api.run import Run
    from evalfleet.controller import Order
    from evalfleet.planning.plan import Resolved
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.workspace import Workspace


ASK_ABOVE_USD = 20.0


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", nargs="?", help="see above")
    groups: dict[str, Any] = {}
    for option, flag in flags().items():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        add_flag(groups[flag.group], option, flag)
    how = groups["how"]
    how.add_argument(
        "--detach", action="store_true", help="return at once; `evalfleet watch` follows the run"
    )
    how.add_argument("--dry-run", action="store_true", help="print the plan and its estimate, start nothing")
    how.add_argument("--yes", action="store_true", help="do not ask for confirmation, whatever it may cost")
    how.add_argument("--quiet", action="store_true", help="print nothing before the summary or the results")
    how.add_argument("--json", action="store_true", help="print one JSON object per line, the results last")


def add_flag(group: Any, option: str, flag: Flag) -> None:
    spelling = flag.short or f"--{word_of(option).replace('_', '-')}"
    if flag.kind == "switch":
        group.add_argument(spelling, action="store_true", default=None, dest=option, help=flag.help)
    else:
        action = "append" if flag.is_repeated else "store"
        group.add_argument(spelling, metavar=flag.metavar, action=action, dest=option, help=flag.help)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark: bring machines up, run every task, collect the results, clean up.

    BENCHMARK is a file (./mybench.toml), a name from evalfleet.toml, an installed benchmark, or a dotted
    path. Without BENCHMARK, --from RUN runs tasks of that run again, with its files, settings and limits.
    """
    from evalfleet.api import runs
    from evalfleet.planning.workspace import Workspace

    workspace = Workspace.here()
    if args.benchmark is None:
        return start_run(workspace, _resolve_again(workspace, args), args)
    resolved = runs.resolve_request(workspace, request_of(args), "dry run" if args.dry_run else "run")
    return start_run(workspace, resolved, args)


KEPT_AGAIN = ("from_run", "only", "task_ids", "workers", "budget", "max_duration", "name", "keep", "env_file")
"""The options that a run of an earlier run's plan may set anew."""


def _resolve_again(workspace: Workspace, args: argparse.Namespace) -> Resolved:
    """Plan tasks of an earlier run again, by that run's own plan. Raises RequestError."""
    from evalfleet.api.rerun import resolve_rerun
    from evalfleet.api.resumption import new_limits
    from evalfleet.errors import RequestError
    from evalfleet.planning.values import parse_names

    if args.from_run is None:
        raise RequestError("name the benchmark to run, or the run whose tasks to run again with --from RUN")
    for option, flag in flags().items():
        if getattr(args, option) is not None and option not in KEPT_AGAIN:
            spelling = flag.short or f"--{word_of(option).replace('_', '-')}"
            raise RequestError(f"{spelling} needs BENCHMARK: without it, run {args.from_run} decides")
    return resolve_rerun(
        workspace,
        args.from_run,
        args.task_ids or (),
        only=parse_names(args.only or (), "--only"),
        limits=new_limits(args.budget, args.max_duration, args.workers),
        new_name=args.name,
        keep=bool(args.keep),
        env_file=args.env_file,
    )


def words_of(args: argparse.Namespace) -> list[str]:
    """What was typed, for use elsewhere: no file of secrets, and no name, which serves only once."""
    words = [args.benchmark]
    for option, flag in flags().items():
        value = getattr(args, option)
        if value is None or option in ("env_file", "name"):
            continue
        spelling = flag.short or f"--{word_of(option).replace('_', '-')}"
        if flag.kind == "switch":
            words.append(spelling)
        else:
            words += [word for each in (value if flag.is_repeated else [value]) for word in (spelling, each)]
    return words


def start_run(workspace: Workspace, resolved: Resolved, args: argparse.Namespace) -> int:
    """Once all doubts were told, and nobody said no."""
    from evalfleet.api import runs

    if not result_of(_agreed_on(workspace, resolved, args)):
        return 2
    if args.dry_run:
        return 0
    if args.detach:
        return _detach(runs.order_of(runs.plan_run(resolved)), as_json=args.json)
    started = result_of(runs.start(workspace, resolved))
    code = _follow(started, as_json=args.json, quiet=args.quiet)
    if resolved.keep:
        pool = started.state().plan.pool
        print(
            f"evalfleet: the machines stay, as pool {pool}; `evalfleet pool delete {pool}` ends them",
            file=sys.stderr,
        )
    return code


async def _agreed_on(workspace: Workspace, resolved: Resolved, args: argparse.Namespace) -> bool:
    """Print all doubts, and ask if it may cost much. Return False if the answer is no."""
    from evalfleet.api import runs
    from evalfleet.api.survey import estimated, forewarned, late_line, short_budget, survey

    from .dry_run import describe

    warnings = [*resolved.warnings, *await runs.vet(resolved, dry=args.dry_run)]
    for warning in warnings:
        note(warning)
    seen = await survey(workspace, resolved)
    expected = estimated(resolved, seen)
    doubts = [*filter(None, (late_line(resolved, seen), short_budget(resolved, seen, expected)))]
    for doubt in doubts:
        note(doubt)
    if args.dry_run:
        print(describe(resolved, seen, expected, [*warnings, *doubts], as_json=args.json))
        return True
    for warning in await forewarned(workspace, resolved, expected):
        note(warning)
    return _agreed(expected.usd, resolved, args)


def _detach(order: Order, *, as_json: bool) -> int:
    import json

    from evalfleet.api.runs import detach

    pid = result_of(detach(order))
    if as_json:
        print(json.dumps({"run": order.run, "pid": pid, "home": str(order.home)}))
    else:
        print(f"run {order.run} goes on in the background (pid {pid})")
        print(f"follow it: evalfleet watch {order.run}    stop it: evalfleet cancel {order.run}")
    return 0


def _follow(run: Run, *, as_json: bool, quiet: bool = False, first: Callable[[], None] | None = None) -> int:
    from .watch import follow

    return follow(run, as_json=as_json, quiet=quiet, first=first)


def request_of(args: argparse.Namespace) -> RunRequest:
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
    return ask(f"{question}. Go on? [y/N] ").lower() in ("y", "yes")


def resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument(
        "--only",
        choices=("broken", "ungraded"),
        help="broken: run only broken tasks again; ungraded: only grade answers, and run no task",
    )
    parser.add_argument(
        "--regrade", action="store_true", help="grade tasks that have a score again, and keep both grades"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="take the run from a controller that still lives"
    )
    parser.add_argument(
        "--from",
        dest="from_url",
        metavar="URL",
        help="the store that `run --store` was given: takes the run over from whatever computer has it",
    )
    parser.add_argument("--budget", metavar="USD", help="a new budget for the whole run")
    parser.add_argument("--max-duration", metavar="2h", help="a new time limit, from now")
    parser.add_argument("--workers", metavar="N", help="a new number of machines at once")
    parser.add_argument(
        "--with-new-files",
        action="store_true",
        help="read the benchmark again, and run what is left with its files as they are now",
    )
    parser.add_argument("--env-file", metavar="FILE", help="read secrets from here")
    parser.add_argument(
        "--detach", action="store_true", help="return at once; `evalfleet watch` follows the run"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing before the summary")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, the results last"
    )


def resume(args: argparse.Namespace) -> int:
    """Continue a run where it stopped: unrun and unfinished tasks run, settled ones stay.

    Attempts that still run on their machines are adopted, not started again. Machines get the files that the
    run was planned with, whatever became of them since. With --with-new-files the journal records what has
    changed. Machines that are up are released first, and results of ended attempts are kept. A score never
    changes: --regrade keeps new grades beside the first, and `show RUN TASK` has all.
    """
    from evalfleet.api import resumption, runs
    from evalfleet.planning.workspace import Workspace

    workspace = Workspace.here()
    if args.regrade or args.only == "ungraded":
        _refuse_limits(args)
        order = resumption.grade_order(workspace, args.run, again=args.regrade, env_file=args.env_file)
        return _follow(result_of(runs.control(workspace, order)), as_json=args.json, quiet=args.quiet)
    run, order = result_of(
        resumption.ready_to_resume(
            workspace,
            args.run,
            tell=note,
            only_broken=args.only == "broken",
            take_over=args.take_over,
            limits=resumption.new_limits(args.budget, args.max_duration, args.workers),
            env_file=args.env_file,
            with_new_files=args.with_new_files,
            from_url=args.from_url,
        )
    )
    left = resumption.what_is_left(run, order)

    def tell() -> None:
        if not args.quiet:
            note(left)
        if not args.with_new_files:
            resumption.tell_of_changes(run, note)

    if not args.detach:
        run = result_of(runs.control(workspace, order, run))
        return _follow(run, as_json=args.json, quiet=args.quiet, first=tell)
    code = _detach(order, as_json=args.json)
    tell()
    return code


def _refuse_limits(args: argparse.Namespace) -> None:
    """Grading runs no task: flags about running are refused. Raises RequestError."""
    from evalfleet.errors import RequestError

    for option in ("take_over", "from_url", "budget", "max_duration", "workers", "with_new_files", "detach"):
        if getattr(args, option):
            flag = "--from" if option == "from_url" else f"--{option.replace('_', '-')}"
            raise RequestError(f"{flag} has no effect when resume only grades answers; leave it out")


def cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its name; `evalfleet ls` shows all")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="the reason, for the journal and the report"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def cancel(args: argparse.Namespace) -> int:
    """Stop a run: end what runs, delete its machines, keep its results. It can be resumed.

    Where no controller is at work on the run any more, this command cleans up itself.
    """
    import json

    from evalfleet.api import resumption, runs
    from evalfleet.planning.values import parse_line
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.terminal import summary

    workspace = Workspace.here()
    run, reason = runs.open_run(workspace, args.run), parse_line(args.reason, "--reason")
    if run.state().ended_at is None:
        run.cancel(reason)
        run.wait()  # returns at once where no controller is at work
    if run.state().ended_at is None:
        run = result_of(runs.control(workspace, resumption.cancelling_order(workspace, run, reason)))
        run.wait()
    result_of(runs.tell_overdue(workspace))
    results = run.results()
    print(json.dumps(results) if args.json else summary(results, colours=has_colours()))
    return 0


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", default="4", help="machines at once (default: 4)")
    parser.add_argument("--first", metavar="N", help="only the first N tasks")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, the results last"
    )


def demo(args: argparse.Namespace) -> int:
    """Run a real benchmark on this computer, on four local machines, and end with a report.

    The first time it fetches the benchmark's packages; a run takes about a minute.
    """
    from evalfleet.api import runs
    from evalfleet.demo.prepare import prepare
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.report import report
    from evalfleet.views.summary import called

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    workspace = Workspace.here()
    demo = prepare(workspace.home / ".demo", say)
    say(demo.why)
    request = RunRequest(str(demo.benchmark), workers=args.workers, first=args.first)
    run = result_of(runs.start(workspace, runs.resolve_request(workspace, request)))
    code = _follow(run, as_json=args.json)
    path = run.folder / "report.md"
    path.write_text(report(run.results(), "md"), encoding="utf-8")
    say(f"the report: {path}")
    worth = sorted(run.tasks(), key=lambda task: (task["success"] is True, task["score"] is not None))
    what = f"{run.name} {worth[0]['task_id']}"
    say(f"look closer: {called()} show {what}    or: {called()} logs {what}")
    return code
