"""Print the log of a run (its events), of a task (its last attempt's output), or of a machine.

A task is named by its id, one of its attempts by `<task>.<n>`, a machine by its name or id.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.model import AttemptId

if TYPE_CHECKING:
    from evalfleet.api import Run

LOOK_S = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument("about", metavar="TASK|MACHINE", nargs="?")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until it ends")


def main(args: argparse.Namespace) -> int:
    from evalfleet import api
    from evalfleet.errors import RequestError

    run = api.open(args.run)
    state = run.state()
    if args.about is None:
        return _print_events(run, None, args.follow)
    names = {machine.name: machine.id for machine in state.machines.values()}
    if args.about in state.tasks or args.about in state.attempts:
        return print_task_log(run, args.about, follow=args.follow)
    if args.about in names or args.about in state.machines:
        return _print_events(run, names.get(args.about, args.about), args.follow)
    raise RequestError(f"run {run.name!r} has neither a task nor a machine {args.about!r}")


def _print_events(run: Run, machine: str | None, follow: bool) -> int:
    from evalfleet.views.lines import event_line

    seen = 0
    while True:
        over = run.state().ended_at is not None or not run.is_live()
        for record in run.records(after=seen):
            seen = record.seq
            line = event_line(record)
            if machine is None or _concerns(run, record.event, machine):
                print(line, flush=follow)
        if over or not follow:
            return 0
        time.sleep(LOOK_S)


def _concerns(run: Run, event: object, machine: str) -> bool:
    if getattr(event, "machine", None) == machine:
        return True
    attempt = run.state().attempts.get(getattr(event, "attempt", AttemptId("")))
    return attempt is not None and attempt.machine == machine


def print_task_log(run: Run, name: str, *, follow: bool) -> int:
    """The newest attempt's output, from its machine while it runs, from the run's folder afterwards."""
    position, current = 0, ""
    while True:
        attempt, path = run.log_of(name)
        if attempt is None and not follow:
            print(f"{name} has not been started yet", file=sys.stderr)
            return 0
        if attempt is not None and attempt.id != current:
            position, current = 0, attempt.id
        over = attempt is not None and attempt.outcome is not None and attempt.collected is not None
        position = _print_from(path, position)
        if not follow or over or (attempt is None and not run.is_live()):
            return 0
        time.sleep(LOOK_S)


def _print_from(path: Path | None, position: int) -> int:
    if path is None:
        return position
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return position  # moved home at this moment: the next look finds it there
    sys.stdout.write(data.decode("utf-8", "replace"))
    sys.stdout.flush()
    return position + len(data)
