"""Looking at a run that goes on, or has ended: watch, logs."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.errors import FleetError
from evalfleet.model import AttemptId
from evalfleet.views.format import visible

from .terminal import reader_left

if TYPE_CHECKING:
    from evalfleet.api.live_log import LiveLog
    from evalfleet.api.run import Run
    from evalfleet.state import AttemptState


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument("task", metavar="TASK", nargs="?", help="follow the log of this task")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument(
        "--content", action="store_true", help="with --json: also what agents say, as in errors and metadata"
    )


def watch(args: argparse.Namespace) -> int:
    """Follow a run live, from any terminal; with a task, follow its log.

    Ctrl-C stops watching, not the run.
    """
    from evalfleet.api import runs
    from evalfleet.planning.workspace import Workspace

    from .follow import watch_run

    run, task = runs.open_run_or_task(Workspace.here(), args.run, args.task)
    if task is not None:
        return print_task_log(run, task, follow=True, as_json=args.json)
    return watch_run(run, as_json=args.json, content=args.content)


LOOK_S = 0.3
FIRST_S = 60.0
"""How long a machine may take to tell what a log holds now: a connection may have to be made."""


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument(
        "about",
        metavar="TASK|MACHINE",
        nargs="?",
        help="a task: its output; a machine: what happened to it (default: what happened to the run)",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until it ends")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per line: an event, or a piece of a task's output",
    )


def logs(args: argparse.Namespace) -> int:
    """Print the log of a run (its events), of a task (its last attempt's output), or of a machine.

    A task is named by its id, one of its attempts by `<task>.<n>`, a machine by its name or id.
    """
    from evalfleet.api import runs
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace

    run, about = runs.open_run_or_task(Workspace.here(), args.run, args.about)
    state = run.state()
    if about is None:
        return _print_events(run, None, args.follow, as_json=args.json)
    names = {machine.name: machine.id for machine in state.machines.values()}
    if about in state.tasks or about in state.attempts:
        return print_task_log(run, about, follow=args.follow, as_json=args.json)
    if about in names or about in state.machines:
        return _print_events(run, names.get(about, about), args.follow, as_json=args.json)
    raise RequestError(f"run {run.name!r} has neither a task nor a machine {about!r}")


def _print_events(run: Run, machine: str | None, follow: bool, *, as_json: bool) -> int:
    from evalfleet.views.lines import MOST, MOST_OF_ONE, event_line, json_line

    seen = 0
    while True:
        over = run.state().ended_at is not None or not run.is_live()
        for record in run.records(after=seen):
            seen = record.seq
            if machine is None or _concerns(run, record.event, machine):
                most = MOST if machine is None else MOST_OF_ONE
                print(json_line(record) if as_json else event_line(record, most), flush=follow)
        if over or not follow or reader_left(LOOK_S):
            return 0


def _concerns(run: Run, event: object, machine: str) -> bool:
    if getattr(event, "machine", None) == machine:
        return True
    attempt = run.state().attempts.get(getattr(event, "attempt", AttemptId("")))
    return attempt is not None and attempt.machine == machine


def print_task_log(run: Run, name: str, *, follow: bool, as_json: bool) -> int:
    """The newest attempt's output, from its machine while it runs, from the run's folder afterwards.

    `as_json`: in pieces, one object a line.
    """
    tail: _Tail | None = None
    try:
        while True:
            live = run.is_live()
            attempt, path = run.log_of(name)
            if attempt is None and not follow:
                print(f"{name} has not been started yet", file=sys.stderr)
                return 0
            if attempt is not None:
                if tail is None or tail.attempt.id != attempt.id:
                    if tail is not None:
                        tail.close()
                    tail = _Tail(run, attempt, as_json)
                tail.show(path, attempt.outcome is None, follow)
            over = attempt is not None and attempt.outcome is not None and attempt.collected is not None
            if over and path is None:
                raise FleetError(run.why_no_log(name))
            if not follow or over or not live or reader_left(LOOK_S):
                return 0
    finally:
        if tail is not None:
            tail.close()


class _Tail:
    """A printer of what is new in an attempt's log: from its machine while it runs, then as it came home."""

    def __init__(self, run: Run, attempt: AttemptState, as_json: bool) -> None:
        self.attempt = attempt
        self._as_json = as_json
        self._run = run
        self._live: LiveLog | None = None
        self._shown = 0
        # a character may lie across two pieces
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self, path: Path | None, running: bool, follow: bool) -> None:
        if path is not None:
            self._write(_read_from(path, self._shown))
            return
        if self._live is None and running:
            self._live = self._run.live_log(self.attempt)
        if self._live is None or self._live.over:
            return
        self._write(self._live.read(LOOK_S if follow else FIRST_S))
        if self._live.problem:
            why = self._live.problem
            print(f"evalfleet: the log is shown once the attempt has ended: {why}", file=sys.stderr)

    def _write(self, data: bytes) -> None:
        self._shown += len(data)
        text = self._text.decode(data)
        if not self._as_json:
            sys.stdout.write(visible(text))
        elif text:
            sys.stdout.write(json.dumps({"attempt": self.attempt.id, "text": text}) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.close()


def _read_from(path: Path, position: int) -> bytes:
    from evalfleet.channels.artefacts import plain_opener

    try:
        with open(path, "rb", opener=plain_opener) as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""  # moved home at this moment: the next look finds it there
