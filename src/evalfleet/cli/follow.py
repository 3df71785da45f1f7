"""Following a run to its end, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from evalfleet.clock import WallClock
from evalfleet.views.lines import without_content
from evalfleet.views.notable import refusals_table
from evalfleet.views.summary import REFUSED
from evalfleet.views.terminal import summary, view_for

from .terminal import has_colours, reader_left

if TYPE_CHECKING:
    from evalfleet.api.run import Run
    from evalfleet.events import Record
    from evalfleet.state import RunState
    from evalfleet.views.documents import Results


def follow(run: Run, *, as_json: bool, quiet: bool = False) -> int:
    """Show this process's run until it ends; its exit code. `quiet`: nothing is said before its end.

    The first Ctrl-C stops handing out tasks and collects what runs; the second leaves at once.
    """
    with _signals(_Interrupts(run)), notes():
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
        run.wait()
    else:
        try:
            run.wait(observe=observe)
        finally:
            view.close(run.state(), clock.now())
    results = run.results()
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
