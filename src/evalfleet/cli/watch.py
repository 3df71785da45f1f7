"""Looking at a run that goes on, or has ended: watch, logs; and following this process's own run."""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from evalfleet.clock import WallClock
from evalfleet.errors import FleetError
from evalfleet.model import AttemptId
from evalfleet.views.format import visible
from evalfleet.views.lines import without_content
from evalfleet.views.notable import refusals_table
from evalfleet.views.summary import REFUSED
from evalfleet.views.terminal import summary, view_for

from .terminal import has_colours, reader_left

if TYPE_CHECKING:
    from evalfleet.api.live_log import LiveLog
    from evalfleet.api.run import Run
    from evalfleet.events import Record
    from evalfleet.state import AttemptState, RunState
    from evalfleet.views.documents import Results


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

    from .watch import watch_run

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
                if attempt is not None and not as_json and (graded := run.graders_log(attempt)):
                    print(f"--- its grader ---\n{visible(graded)}", end="")
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


# -- following this process's own run -----------------------------------------------------------------------


def follow(run: Run, *, as_json: bool, quiet: bool = False, first: Callable[[], None] | None = None) -> int:
    """Show this process's run until it ends; its exit code. `quiet`: nothing is said before its end.

    The first Ctrl-C stops handing out tasks and collects what runs; the second leaves at once. So it is
    already while `first` is done.
    """
    with _signals(_Interrupts(run)), notes():
        if first is not None:
            first()
        _show(run, as_json=as_json, quiet=quiet)
    if run.exit_code == REFUSED:
        _tell_refusals(run.results())
    if run.left:
        print(f"evalfleet: left {run.name}: attempts go on; `evalfleet resume {run.name}`", file=sys.stderr)
    return run.exit_code


def _tell_refusals(results: Results) -> None:
    """Which offers said no, unless the summary has said all of it: one offer, and why."""
    refusals, stop = results["refusals"], results["stop"]
    said = stop is not None and len(refusals) == 1 and refusals[0]["answer"] in stop["detail"]
    if refusals and not said:
        print(f"\n{refusals_table(refusals)}", file=sys.stderr)


def watch_run(run: Run, *, as_json: bool, content: bool = False) -> int:
    """Show a run that may be another process's. Ctrl-C stops watching.

    `content`: JSON has what agents say.
    """
    _show(run, as_json=as_json, to_a_reader=True, content=content)
    if run.state().ended_at is None:
        print(
            f"evalfleet: no controller is at work on {run.name}; go on with `evalfleet resume {run.name}`",
            file=sys.stderr,
        )
    return run.exit_code


def _show(
    run: Run, *, as_json: bool, to_a_reader: bool = False, quiet: bool = False, content: bool = True
) -> None:
    """Until the run ends; `to_a_reader`: or until nobody reads it any more, which raises BrokenPipeError."""
    clock = WallClock()
    view = view_for(json=as_json, content=content, home=run.home)

    def observe(state: RunState, records: Sequence[Record]) -> None:
        view.update(state, clock.now(), records)
        if to_a_reader and reader_left(0):
            raise BrokenPipeError

    if quiet:
        results = run.wait()
    else:
        try:
            results = run.wait(observe=observe)
        finally:
            view.close(run.state(), clock.now())
    told = summary(results, run.folder, colours=has_colours())
    document = results if content else without_content(results)
    text = json.dumps(document) if as_json else f"{'' if quiet else chr(10)}{told}"
    sys.stdout.write(f"{text}\n")  # in one write, as every line of a run: notes may come meanwhile
    sys.stdout.flush()


class _Notes(logging.Handler):
    """What places and the engine warn of, as lines like our others; the display may be in between."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"evalfleet: note: {self.format(record)}\n")
        sys.stderr.flush()


@contextmanager
def notes() -> Generator[None]:
    logger, handler = logging.getLogger("evalfleet"), _Notes(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Interrupts:
    """What Ctrl-C does. Once: drain. Twice: leave. Thrice: nothing, since we are leaving already."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._count = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1 and signum != signal.SIGHUP:
            self._run.drain()
        else:
            self._run.leave()

    @property
    def leaving(self) -> bool:
        return self._run.left


@contextmanager
def _signals(handler: _Interrupts) -> Generator[None]:
    """Who presses Ctrl-C again while we leave must not turn the exit code into something else.

    What is ignored stays so: a closed terminal after `nohup`, and a Ctrl-C that is meant for others in the
    background of a script, is nothing to us.
    """
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [name for name in names if signal.getsignal(name) is not signal.SIG_IGN]
    before = {name: signal.signal(name, handler) for name in heeded}
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(name, signal.SIG_IGN if handler.leaving else old)
