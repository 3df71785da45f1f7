"""Changing a run while it goes on: set, end, drain."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalfleet.api.run import Run
    from evalfleet.events import SteeringVerb


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its name; `evalfleet ls` shows all")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="the reason, for the journal and the report"
    )
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")


def set_limits_arguments(parser: argparse.ArgumentParser) -> None:
    _common_arguments(parser)
    parser.add_argument("--workers", metavar="N", help="a new number of machines at once; 0 pauses the run")
    parser.add_argument("--release", action="store_true", help="with --workers 0: delete the machines, too")
    parser.add_argument("--budget", metavar="USD", help="a new budget for the whole run")
    parser.add_argument("--attempts", metavar="N", help="a new number of attempts per task")


def set_limits(args: argparse.Namespace) -> int:
    """Change how many machines a live run has at once, what it may cost, or how often a task is tried.

    With fewer workers the newest machines are deleted when their attempts have ended. `--workers 0` pauses
    the run: no attempt starts, and the machines stay up and cost money. With `--release` they are deleted
    when their attempts have ended. `--workers N` continues the run. The budget cannot be less than what is
    spent or reserved. More attempts do not reopen a task that is broken for good.
    """
    from evalfleet.errors import RequestError
    from evalfleet.planning import values

    changes: dict[str, Any] = {}
    if args.workers is not None:
        changes["workers"] = values.parse_count(args.workers, "--workers", 0, 10_000)
    if args.budget is not None:
        changes["budget_usd"] = values.parse_usd(args.budget, "--budget")
    if args.attempts is not None:
        changes["attempts"] = values.parse_count(args.attempts, "--attempts", 1, 10)
    if not changes:
        raise RequestError("nothing to set: say --workers, --budget or --attempts")
    if args.release:
        if changes.get("workers") != 0:
            raise RequestError("--release needs --workers 0")
        changes["release"] = True
    return _steer(args, _run(args), "set", **changes)


def end_arguments(parser: argparse.ArgumentParser) -> None:
    _common_arguments(parser)
    parser.add_argument("about", metavar="TASK|ATTEMPT", help="a task that runs, or one of its attempts")


def end(args: argparse.Namespace) -> int:
    """End one attempt now. It is broken (cancelled), uses up one of its task's attempts, and is retried.

    A score that it has written by then counts.
    """
    from evalfleet.api.run_changes import attempt_of

    run = _run(args)
    return _steer(args, run, "end", attempt=attempt_of(run.state(), args.about))


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    _common_arguments(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="default: the whole run")
    parser.add_argument("--undo", action="store_true", help="let the run use a drained machine again")


def drain(args: argparse.Namespace) -> int:
    """Give a machine no more tasks, and let it go when what runs on it has ended.

    If work is left for it, another one takes its place. A host of a place `ssh` or a pool's machine stays
    out of the run until `evalfleet drain RUN MACHINE --undo`. Without a machine, the whole run is drained,
    as after the first Ctrl-C. Running attempts end by themselves, the other tasks stay unrun, and the run can
    be resumed.
    """
    from evalfleet.api.run_changes import machine_of
    from evalfleet.errors import RequestError

    run = _run(args)
    if args.machine is not None:
        verb: SteeringVerb = "undrain" if args.undo else "drain"
        machine = machine_of(run.state(), args.machine)
        _steer(args, run, verb, machine=machine)
        known = run.state().machines[machine]
        if not args.json and (known.offer.place, known.name) in run.state().kept_out:
            print(f"`evalfleet drain {run.name} {known.name} --undo` lets the run use it again")
        return 0
    if args.undo:
        raise RequestError("--undo needs a MACHINE; to continue a drained run, use `evalfleet resume`")
    return _drain_run(args, run)


def _run(args: argparse.Namespace) -> Run:
    from evalfleet.api import runs
    from evalfleet.planning.workspace import Workspace

    return runs.open_run(Workspace.here(), args.run)


def _steer(args: argparse.Namespace, run: Run, verb: SteeringVerb, **what: Any) -> int:
    from evalfleet.api.run import whoami
    from evalfleet.api.run_changes import steer
    from evalfleet.events import RunSteered
    from evalfleet.planning.values import parse_line

    steer(run, RunSteered(verb, whoami(), parse_line(args.reason, "--reason"), **what))
    return _tell(args, run)


def _drain_run(args: argparse.Namespace, run: Run) -> int:
    from evalfleet.api.run import whoami
    from evalfleet.api.run_changes import steer
    from evalfleet.events import StopRequested
    from evalfleet.planning.values import parse_line

    reason = parse_line(args.reason, "--reason")
    steer(run, StopRequested("user", "drained", drain=True, by=whoami(), why=reason))
    return _tell(args, run)


def _tell(args: argparse.Namespace, run: Run) -> int:
    import json

    from evalfleet.views.notable import steering

    last = steering(run.state())[-1]
    print(json.dumps(last) if args.json else f"{run.name}: {last['what']}")
    return 0
