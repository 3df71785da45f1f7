"""Following a run: on a terminal a picture that stays in place, elsewhere plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from evalfleet.events import Record
from evalfleet.model import Micros
from evalfleet.state import RunState

from .frame import STYLES, FrameSize, Row, as_text, frame
from .lines import JsonLines, PlainLines, json_lines
from .notable import Notice, notices
from .progress import ProgressReader
from .summary import summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ["Display", "JsonLines", "PlainLines", "TerminalView", "json_lines", "summary", "view_for"]


class TerminalView(Protocol):
    """Shows a run that goes on. The caller decides how often, and polls."""

    def update(self, state: RunState, now: Micros, records: Sequence[Record] = ()) -> None:
        """Show the state at `now`; `records` became part of it since the last update."""
        ...

    def close(self, state: RunState | None = None, now: Micros = 0) -> None:
        """Show the last of it (if given a state) and leave the terminal as it was. May be repeated."""
        ...


def view_for(
    out: TextIO | None = None, *, json: bool = False, content: bool = True, home: Path | None = None
) -> TerminalView:
    """What suits `out` (default: standard output). `content`: JSON has what agents say. `home`: where the
    picture finds how far attempts have come.
    """
    stream = sys.stdout if out is None else out
    write = _Writer(stream)
    if json:
        return JsonLines(write, content)
    if out is None and in_notebook():
        return NotebookDisplay()
    return Display(stream, home) if is_screen(stream) else PlainLines(write)


class _Writer:
    """Writes lines until nobody reads them: `evalfleet run ... | head` must not end the run."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._open = True

    def __call__(self, line: str) -> None:
        if not self._open:
            return
        # Another encoding than UTF-8 gets question marks rather than a traceback.
        encoding = self._out.encoding or "utf-8"
        try:
            # with its end in one write, so that no line of another stream gets in between
            self._out.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._out.flush()
        except OSError:  # a closed pipe, or a terminal that is gone
            self._open = False


def is_screen(out: TextIO) -> bool:
    """Can a picture be kept in place there? Not in a pipe, a dumb terminal, or a notebook."""
    terminal = os.environ.get("TERM", "")
    return out.isatty() and terminal not in ("", "dumb", "unknown") and not in_notebook()


def in_notebook() -> bool:
    """Are we called from a cell of Jupyter's?"""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    kinds = () if get is None else type(get()).__mro__
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in kinds)


SELDOM_S = 0.5
"""A picture that takes long to draw is drawn so often."""


class Display:
    """The live picture, with rich. Draws only what changed since, and starts anew when resized.

    What others print meanwhile through `print` or logging appears above it.
    """

    def __init__(self, out: TextIO | None = None, home: Path | None = None) -> None:
        from rich.console import Console

        self._console: Console = Console(file=out, highlight=False, soft_wrap=False)
        self._ascii = not (self._console.encoding or "").lower().startswith("utf")
        self._events: deque[Notice] = deque(maxlen=5)
        self._live: Live | None = None
        self._size = FrameSize(0, 0)
        self._drawn: list[Row] = []
        self._closed = False
        self._next = 0.0
        self._progress = ProgressReader(home) if home is not None else None

    def update(self, state: RunState, now: Micros, records: Sequence[Record] = ()) -> None:
        told = [record for record in records if not _routine(record)]
        self._events.extend(line for line in notices(state, told) if line.kind in ("trouble", "news"))
        if not self._closed and state.events and time.monotonic() >= self._next:
            begun = time.monotonic()
            self._try(lambda: self._draw(state, now))
            took = time.monotonic() - begun
            self._next = begun + took + min(50 * took, SELDOM_S)  # about a fiftieth of a core

    def close(self, state: RunState | None = None, now: Micros = 0) -> None:
        if self._closed:
            return
        if state is not None and state.events:
            self._try(lambda: self._draw(state, now or state.last_at))
        self._closed = True
        if self._live is not None:
            # A finished run's picture makes room for the summary; any other one is the last word.
            self._live.transient = state is not None and state.ended_at is not None
            self._try(self._live.stop)

    def _try(self, work: Callable[[], None]) -> None:
        """A terminal that is gone ends the display, not the run."""
        try:
            work()
        except OSError:
            self._closed = True

    def _draw(self, state: RunState, now: Micros) -> None:
        width, height = self._console.size
        size = FrameSize(width, height)
        progress = self._progress(state) if self._progress is not None else None
        rows = frame(state, now, size, list(self._events), self._ascii, progress)
        if rows == self._drawn and size == self._size:
            return
        narrower = self._live is not None and size.width != self._size.width
        self._size, self._drawn = size, rows
        if narrower:
            self._restart()
        if self._live is None:
            self._live = self._start()
        self._live.update(_rendered(rows), refresh=True)

    def _start(self) -> Live:
        from rich.live import Live

        live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        live.start()
        return live

    def _restart(self) -> None:
        """The terminal has wrapped our old lines anew: where they are now, nobody knows."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.clear()


def _routine(record: Record) -> bool:
    """Every machine is requested, and becomes ready: its own line shows that."""
    return type(record.event).__name__ in ("MachineRequested", "MachineReady")


def _rendered(rows: Sequence[Row]) -> Text:
    from rich.text import Text

    whole = Text(no_wrap=True, overflow="crop", end="")
    for number, row in enumerate(rows):
        if number:
            whole.append("\n")
        for text, style in row:
            whole.append(text, STYLES[style])
    return whole


class NotebookDisplay:
    """The live picture in the output of a notebook's cell. Has the methods of a Display."""

    def __init__(self) -> None:
        self._cell: Any = None
        self._shown = ""

    def update(self, state: RunState, now: Micros, records: Sequence[Record] = ()) -> None:
        if not state.events or (html := notebook_picture(state, now)) == self._shown:
            return
        import IPython.display

        self._shown = html
        bundle = {"text/html": html, "text/plain": picture(state, now, NOTEBOOK_SIZE)}
        if self._cell is None:
            show: Any = vars(IPython.display)["display"]  # which has no types
            self._cell = show(bundle, raw=True, display_id=True)
        else:
            self._cell.update(bundle, raw=True)

    def close(self, state: RunState | None = None, now: Micros = 0) -> None:
        if state is not None:
            self.update(state, now or state.last_at)


NOTEBOOK_SIZE = FrameSize(100, 20)
_COLOURS = {"good": "#1a7f37", "bad": "#cf222e", "busy": "#0969da", "warn": "#9a6700", "dim": "#8c959f"}


def notebook_picture(state: RunState, now: Micros) -> str:
    """The display as HTML. Names of tasks and what machines said are anybody's: they are escaped."""
    from html import escape

    lines: list[str] = []
    for row in frame(state, now, NOTEBOOK_SIZE):
        pieces = (
            f'<span style="{_css(style)}">{escape(text)}</span>' if style else escape(text)
            for text, style in row
        )
        lines.append("".join(pieces))
    return f'<pre style="line-height: 1.3">{chr(10).join(lines)}</pre>'


def _css(style: str) -> str:
    return "font-weight: bold" if style == "title" else f"color: {_COLOURS[style]}"


def picture(state: RunState, now: Micros, size: FrameSize, events: Sequence[Notice] = ()) -> str:
    """The display as plain text."""
    return as_text(frame(state, now, size, events))
