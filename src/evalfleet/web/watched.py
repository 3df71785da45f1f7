"""One run that somebody looks at: what has changed, all of it at once, and its parts."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from evalfleet.api.run import Run
from evalfleet.api.run_changes import machine_of
from evalfleet.channels.samples import Sample, read_series
from evalfleet.errors import RequestError
from evalfleet.model import Alerting
from evalfleet.planning.workspace import Workspace
from evalfleet.state import RunState
from evalfleet.views.alert_watch import situation_of
from evalfleet.views.alerts import Alert, holding
from evalfleet.views.dashboard.board import ATTEMPT_COLUMNS, MACHINE_COLUMNS, Board, Touched, attempt_row
from evalfleet.views.dashboard.head import head
from evalfleet.views.follow import Follower
from evalfleet.views.results import RunSummary, machine_entry, summarised

from .screens import has_screen

if TYPE_CHECKING:
    from evalfleet.views.documents import Results

CALM_S = 2.0
"""How often machines' loads and controllers are looked at, and runs that have ended: they may be taken up
again, or deleted."""
HEAD_S = 5.0
"""Figures that time alone changes are sent as often."""
SHARE = 0.05
"""Of the time: at most so much goes into figures that cost more the more tasks a run has."""


class _Paced:
    """Something that is made anew at most for a small share of the time."""

    def __init__(self, least_s: float) -> None:
        self._least_s, self._next = least_s, 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def took(self, since: float) -> None:
        end = time.monotonic()
        self._next = end + max(self._least_s, (end - since) / SHARE)


class _FoldedRun(Follower):
    """A follower whose state is a board's."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.run, self.seq = board.run, board.seq

    @property
    def state(self) -> RunState:  # type: ignore[override]
        return self._board.state

    def poll(self) -> list[Any]:
        return []


class WatchedRun:
    """A run with its watchers. Methods with `look` or `snapshot` in their names are for threads."""

    def __init__(self, workspace: Workspace, board: Board, created_at: int, alerting: Alerting) -> None:
        self.board = board
        self.created_at = created_at
        self.used_at = time.monotonic()
        self.watchers: set[asyncio.Queue[bytes | None]] = set()
        self.follower: asyncio.Task[None] | None = None
        self._workspace = workspace
        self._alerting = alerting
        self._snapshot: tuple[int, bytes] | None = None
        self._snapshot_pace, self._head_pace = _Paced(1.0), _Paced(1.0)
        self._summary: RunSummary | None = None
        self._summary_pace = _Paced(1.0)
        self._calm_at = self._head_at = 0.0
        self._head: dict[str, Any] | None = None
        self._head_is_old = True
        self._live = False

    def run(self) -> Run:
        """The same run, for what `api` does with one."""
        return Run(self.board.home, self.board.run, follower=_FoldedRun(self.board))

    # -- for threads -----------------------------------------------------------------------------

    def look(self) -> bytes | None:
        """What is new, as an event for browsers. Raises RequestError: the run is gone; JournalError."""
        now = self._workspace.now()
        touched = self.board.news()
        parts: dict[str, Any] = self.board.changes(touched, now)
        calm = time.monotonic() >= self._calm_at
        if calm:
            self._calm_at = time.monotonic() + CALM_S
            live = self._look_at_controller()
            self._head_is_old |= live != self._live
            self._live = live
            self.board.look_at_progress(now)
        if calm or "machines" in parts:
            self._add_machines(parts, now)
        self._head_is_old |= bool(touched)
        aged = self._live and time.monotonic() >= self._head_at + HEAD_S
        if (self._head_is_old or aged) and self._head_pace.due:
            parts["run"] = self.head()
            self._head_is_old = False
        return _event(self.board.seq, now, parts) if parts else None

    def _look_at_controller(self) -> bool:
        store = self._workspace.records()
        info = store.stream(self.board.run)
        if info.created_at != self.created_at:
            raise RequestError(f"run {self.board.run!r} was deleted, and another one has its name")
        return store.held(info, self._workspace.now()) is not None

    def _add_machines(self, parts: dict[str, Any], now: int) -> None:
        """Also those whose step, load or cost has changed, which no event tells."""
        rows = {row[0]: row for row in (*parts.get("machines", ()), *self.board.changed_machines(now))}
        if rows:
            parts["machines"] = list(rows.values())

    def head(self) -> dict[str, Any]:
        begun, now = time.monotonic(), self._workspace.now()
        with self.board.lock:
            state = self.board.state
            alerts = self._alerts(now) if self._live else []
            found = head(state, now, self._live, alerts)
        self._head, self._head_at = found, time.monotonic()
        self._head_pace.took(begun)
        return found

    def _alerts(self, now: int) -> list[Alert]:
        return holding(situation_of(self.board.home, self.board.state, now), self._alerting)

    def snapshot(self) -> bytes:
        """All of the run, compressed. It may be as of a moment ago: the events that follow tell the rest."""
        if self._snapshot is not None and (
            self._snapshot[0] == self.board.seq or not self._snapshot_pace.due
        ):
            return self._snapshot[1]
        begun, now = time.monotonic(), self._workspace.now()
        self._live = self._look_at_controller()
        with self.board.lock:
            self.board.look_at_progress(now)
            seq = self.board.seq
            document = {"seq": seq, "now": now // 1000, "run": self.head(), **self.board.tables(now)}
        packed = gzip.compress(msgspec.json.encode(document), compresslevel=1)
        self._snapshot = (seq, packed)
        self._snapshot_pace.took(begun)
        return packed

    def summary(self) -> RunSummary:
        """The run's row as `ls` has it."""
        known = self._summary
        if known is None or (
            (known.events != self.board.seq or known.machines_up) and self._summary_pace.due
        ):
            begun = time.monotonic()
            with self.board.lock:
                self.board.advance()
                known = self._summary = summarised(self.board.state, self._workspace.now())
            self._summary_pace.took(begun)
        return known

    def results(self) -> Results:
        """What `show --json` prints."""
        with self.board.lock:
            return self.run().results()

    def machine(self, name: str) -> dict[str, Any]:
        """One machine: its load over time, and what ran on it. Raises RequestError."""
        with self.board.lock:
            state, now = self.board.state, self._workspace.now()
            id = machine_of(state, name)
            machine = state.machines[id]
            self.board.look_at_progress(now)
            row = self.board.machine_row(id, now)
            attempts = [each for each in state.attempts.values() if each.machine == id]
            entry = machine_entry(machine, max(now, state.last_at) if state.undeleted else state.last_at)
            rows = [attempt_row(state, each, now) for each in attempts]
        samples = thinned(read_series(self.board.home, id))
        return {
            "machine": {**entry, **dict(zip(MACHINE_COLUMNS, row, strict=True))},
            "phases": row[MACHINE_COLUMNS.index("phases")],
            "has_screen": has_screen(state),
            "series": {
                "columns": ["at", "cpu", "memory", "disk"],
                "rows": [[each.at // 1000, each.cpu, each.memory, each.disk] for each in samples],
            },
            "attempts": {"columns": ATTEMPT_COLUMNS, "rows": rows},
        }

    def wall(self) -> dict[str, Any]:
        """The newest screenshot of every machine that is there."""
        with self.board.lock:
            state, now = self.board.state, self._workspace.now()
            self.board.look_at_progress(now)
            rows = [
                dict(zip(MACHINE_COLUMNS, self.board.machine_row(m, now), strict=True)) for m in state.ready
            ]
        base = f"/api/runs/{quote(self.board.run, safe='')}/machines"
        return {
            "screens": [
                [
                    *(row["id"], row["attempt"], row["screen"], row["idle_since"]),
                    f"{base}/{quote(row['id'], safe='')}/screen",
                ]
                for row in rows
            ]
        }

    def missed(self, seq: int) -> bytes:
        """What has changed since event number `seq`, for a watcher who was there then.

        All machines that are there are told again, because no event tells their steps and loads. Many may
        come back at once: the head may be the last that was made, for which another follows soon.
        """
        now = self._workspace.now()
        with self.board.lock:
            touched = self.board.since(seq) if seq < self.board.seq else Touched()
            touched.machines |= dict.fromkeys(self.board.state.undeleted)
            parts: dict[str, Any] = self.board.changes(touched, now)
            due = self._head is None or self._head_pace.due
            parts["run"] = self.head() if due else self._head
            return _event(self.board.seq, now, parts)


def _event(seq: int, now: int, parts: dict[str, Any]) -> bytes:
    data = msgspec.json.encode({"seq": seq, "now": now // 1000, **parts})
    return b"id: %d\ndata: %s\n\n" % (seq, data)


MOST_SAMPLES = 2000


def thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """No more than a page can draw."""
    return samples[:: -(-len(samples) // MOST_SAMPLES)] if samples else samples
