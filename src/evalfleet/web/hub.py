"""Runs that are looked at: each is folded once, whoever looks, and what changes goes to all watchers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from evalfleet.api.home import list_runs
from evalfleet.api.pools import pools
from evalfleet.errors import FleetError, JournalError, JournalForeign, RequestError
from evalfleet.journal import StreamInfo
from evalfleet.model import Alerting
from evalfleet.planning.workspace import Workspace
from evalfleet.views.dashboard.board import Board
from evalfleet.views.dashboard.head import RUN_COLUMNS, instant, run_row
from evalfleet.views.format import iso
from evalfleet.views.results import RunSummary
from evalfleet.views.stats import eta_s, machine_usd

from .watched import CALM_S, WatchedRun

LOOK_S = 0.25
"""How often the journal of a run that somebody watches is looked at."""
PING_S = 10.0
"""A page that has heard nothing for longer is late."""
BEHIND = 200
"""A watcher who has not taken so many messages is cut off: it comes back, and is told what it has missed."""
MOST_TASKS = 250_000
"""So many tasks of runs that nobody watches are kept in memory, together."""

log = logging.getLogger(__name__)


PING = b"event: ping\ndata: {}\n\n"
"""A comment would not reach the page."""
GONE = b"event: gone\ndata: {}\n\n"


class Hub:
    """All runs of a home that are looked at, or were a moment ago."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._alerting = workspace.notify().alerting or Alerting()
        self._runs: dict[str, WatchedRun] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closing = asyncio.Event()

    async def open(self, run: str) -> WatchedRun:
        """The run, folded up to now. Raises RequestError: there is none; JournalError: it cannot be read."""
        async with self._opening.setdefault(run, asyncio.Lock()):
            known = self._runs.get(run)
            try:
                watched = await asyncio.to_thread(self._opened, run, known)
            except FleetError:
                if known is not None and not known.watchers:
                    self._runs.pop(run, None)
                raise
            self._runs[run] = watched
            watched.used_at = time.monotonic()
            self._forget_some()
            return watched

    def check(self, run: str) -> StreamInfo:
        """Raises RequestError if there is no such run. Call it in a thread."""
        info = self.workspace.records().stream(run)
        if info.kind == "pool":
            raise RequestError(f"{run!r} is a pool, not a run: `evalfleet pool status {run}` shows it")
        return info

    def _opened(self, run: str, known: WatchedRun | None) -> WatchedRun:
        store, info = self.workspace.records(), self.check(run)
        if known is None or known.created_at != info.created_at:
            board = Board(self.workspace.home, store, run)
            known = WatchedRun(self.workspace, board, info.created_at, self._alerting)
        known.board.advance()
        return known

    def _forget_some(self) -> None:
        """Runs that nobody watches, the one that was looked at longest ago first."""
        idle = sorted((run for run in self._runs.values() if not run.watchers), key=lambda run: run.used_at)
        room = sum(len(run.board.state.tasks) for run in idle)
        for run in idle[:-1]:
            if room <= MOST_TASKS and len(idle) <= 50:
                return
            room -= len(run.board.state.tasks)
            del self._runs[run.board.run]

    async def snapshot(self, run: str) -> bytes:
        """Return all of the run, compressed."""
        watched = await self.open(run)
        packed = await asyncio.to_thread(watched.snapshot)
        watched.used_at = time.monotonic()
        return packed

    def runs(self) -> dict[str, Any]:
        """The table of runs. Call it in a thread."""
        summaries = list_runs(self.workspace, self._summary)
        return {"runs": {"columns": RUN_COLUMNS, "rows": [self._run_row(each) for each in summaries]}}

    def _summary(self, run: str) -> RunSummary:
        known = self._runs.get(run)
        if known is None:
            known = self._runs.setdefault(run, self._opened(run, None))
        return known.summary()

    def _run_row(self, summary: RunSummary) -> list[Any]:
        known = self._runs.get(summary.run) if summary.status == "running" else None
        left_s = None if known is None else eta_s(known.board.state, self.workspace.now())
        return run_row(summary, left_s)

    def machines(self) -> list[dict[str, Any]]:
        """Machines of runs and pools that exist by their journals. Call it in a thread."""
        now = self.workspace.now()
        states = {("pool", view.name): view.state for view in pools(self.workspace)}
        for summary in list_runs(self.workspace, self._summary):
            if summary.machines_up:
                known = self._runs.get(summary.run) or self._opened(summary.run, None)
                state = known.board.state
                states |= {} if state.plan.pool else {("run", summary.run): state}
        return [
            {
                "place": machine.offer.place,
                "machine": machine.name,
                "id": machine.id,
                kind: name,
                "phase": machine.phase,
                "where": machine.offer.region or machine.node,
                "expires_at": iso(machine.expires_at),
                "usd": round(machine_usd(machine, now), 4),
            }
            for (kind, name), state in states.items()
            for machine in map(state.machines.__getitem__, state.undeleted)
        ]

    def money(self) -> dict[str, Any]:
        """Return what each run has cost. Call it in a thread."""
        summaries = list_runs(self.workspace, self._summary)
        columns = ("name", "place", "model", "started", "status")
        rows = [
            [
                *(each.run, ", ".join(each.places), each.model, instant(each.started_at)),
                *(each.status, each.machines_usd, each.models_usd, each.budget_usd),
            ]
            for each in summaries
        ]
        return {
            "runs": {"columns": (*columns, "machine_usd", "model_usd", "budget_usd"), "rows": rows},
        }

    # -- watchers --------------------------------------------------------------------------------

    async def events(self, run: str, after: int | None) -> AsyncGenerator[bytes]:
        """The stream of one watcher, from event number `after` on."""
        try:
            watched = await self.open(run)
        except RequestError:  # it was removed meanwhile
            yield GONE
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        watched.watchers.add(queue)
        if watched.follower is None or watched.follower.done():
            watched.follower = asyncio.create_task(self._follow(watched))
        try:
            yield b"retry: 1000\n\n"
            if after is not None:
                yield await asyncio.to_thread(watched.missed, after)
            while (message := await queue.get()) is not None:
                yield message
        finally:
            watched.watchers.discard(queue)
            watched.used_at = time.monotonic()

    async def _follow(self, watched: WatchedRun) -> None:
        """Tells all watchers of one run what is new, or that nothing is, until there are none."""
        told, spoken_at = "", time.monotonic()
        while watched.watchers:
            try:
                message = await asyncio.to_thread(watched.look)
            except RequestError:
                return self._end(watched, GONE)
            except JournalForeign as err:
                return self._tell_damage(watched, err)
            except (JournalError, OSError) as err:
                message = None
                if str(err) != told:
                    told = str(err)
                    log.warning("%s: %s", watched.board.run, err)
            if message is None and time.monotonic() >= spoken_at + PING_S:
                message = PING
            if message is not None:
                spoken_at = time.monotonic()
                for queue in list(watched.watchers):
                    _give(queue, message, watched)
            await asyncio.sleep(LOOK_S if watched.board.state.ended_at is None else CALM_S)

    def _tell_damage(self, watched: WatchedRun, err: JournalForeign) -> None:
        log.warning("%s: %s", watched.board.run, err)
        self._end(watched, b"event: damaged\ndata: %s\n\n" % msgspec.json.encode({"error": str(err)}))

    def _end(self, watched: WatchedRun, message: bytes) -> None:
        """Tell all watchers why nothing follows; who looks again finds the run opened anew."""
        for queue in list(watched.watchers):
            _give(queue, message, watched)
            _give(queue, None, watched)
        if self._runs.get(watched.board.run) is watched:
            del self._runs[watched.board.run]

    async def close(self) -> None:
        """End all streams."""
        self._closing.set()
        for watched in self._runs.values():
            for queue in list(watched.watchers):
                _give(queue, None, watched)
            if watched.follower is not None:
                watched.follower.cancel()


def _give(queue: asyncio.Queue[bytes | None], message: bytes | None, watched: WatchedRun) -> None:
    try:
        queue.put_nowait(message)
    except asyncio.QueueFull:
        watched.watchers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
