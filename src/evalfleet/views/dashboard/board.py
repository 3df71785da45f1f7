"""One run as browsers see it: a fold of its journal that is kept current, and the tables made of it.

A table's rows are lists of cells. What changes is sent as whole rows; what time alone changes (how long
something has taken) is left to the browser.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Self

import msgspec

from evalfleet import events as ev
from evalfleet.journal import Store
from evalfleet.model import SECOND, Answered, AttemptId, Broken, MachineId, Micros, Scored, Task, TaskId
from evalfleet.names import attempt_number, folder_of
from evalfleet.state import AttemptState, MachineState, RunState, TaskState, apply_all
from evalfleet.views.progress import Progress, read_progress
from evalfleet.views.results import attempt_model_usd, attempt_seconds, task_status
from evalfleet.views.stats import attempt_usd, machine_usd

from .phases import NOTED, Phases

Row = list[Any]
ShotStep = tuple[int, str]
"""The number of a step, and the name of its screenshot."""

TASK_COLUMNS = (
    *("id", "domain", "outcome", "score", "attempts", "seconds", "machine", "cause", "steps", "tokens"),
    *("usd", "model", "repeat", "attempt", "started", "ended"),
)
"""The last two are of its only attempt, if all that is to be told of that is in the task's row: most are."""
ATTEMPT_COLUMNS = (
    *("id", "task", "number", "machine", "outcome", "cause", "score", "started", "ended", "usd"),
)
MACHINE_COLUMNS = (
    *("id", "name", "place", "offer", "region", "phase", "phases", "usd", "attempt", "step", "idle_since"),
    *("screen", "why"),
)
PROGRESS_EVERY = SECOND
"""How far attempts have come is not read more often for one screenshot."""
USD_EVERY = 10 * SECOND
"""What a machine costs changes all the time: its row is not sent for that more often."""
MANY_EVENTS = 30_000
"""A run that has more may be shown first, and compared with its checksums afterwards."""
TASK_DICTIONARIES = ("domain", "outcome", "machine", "cause", "model")
_NOTHING: Mapping[str, Any] = {}
ATTEMPT_DICTIONARIES = ("task", "machine", "outcome", "cause")


class Touched:
    """The keys of rows that some events have changed."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, None] = {}
        self.attempts: dict[AttemptId, None] = {}
        self.machines: dict[MachineId, None] = {}
        self.unsettled = False
        """All tasks without an outcome: whether they still wait depends on whether the run goes on."""

    def __bool__(self) -> bool:
        return bool(self.tasks or self.attempts or self.machines or self.unsettled)

    def note(self, state: RunState, event: ev.Event) -> None:
        """What `event`, which is part of the state already, has changed."""
        match event:
            case ev.RunPlanned() | ev.RunResumed() | ev.RunEnded() | ev.TasksPlanned():
                self.unsettled = True
            case ev.TasksReopened(tasks):
                self.tasks |= dict.fromkeys(tasks)
            case _:
                attempt = getattr(event, "attempt", None)
                if attempt is not None and attempt in state.attempts:
                    known = state.attempts[attempt]
                    self.attempts[attempt] = None
                    self.tasks[known.task] = None
                    self.machines[known.machine] = None
                machine = getattr(event, "machine", None)
                if machine is not None and machine in state.machines:
                    self.machines[machine] = None


class Board:
    """A run's fold, shared by all who look at it. May be used from any thread."""

    def __init__(self, home: Path, store: Store, run: str, *, verify_first: bool = True) -> None:
        self.home, self.run = home, run
        self._verify_first = verify_first
        self.folder = folder_of(home, run)
        self.state = RunState(queues=False)
        self.seq = 0
        self.unverified = False
        """Its events were read, and are not compared with their checksums yet."""
        self.lock = threading.RLock()
        self._store = store
        self._phases = Phases()
        self._untold = Touched()
        self._progress: dict[AttemptId, Progress] = {}
        self._progress_at: Micros = 0
        self._machine_rows: dict[MachineId, Row] = {}
        self._domains: dict[str, str] = {}

    @classmethod
    def of(cls, home: Path, store: Store, state: RunState) -> Self:
        """The board of a run that somebody else has folded, up to its newest event."""
        board = cls(home, store, state.plan.run)
        board.state, board.seq = state, state.events
        for record in store.read_kinds(board.run, [kind.__name__ for kind in NOTED]):
            board._phases.note(record.at, record.event)
        return board

    def advance(self) -> None:
        """Take in what was recorded since. Raises RequestError: there is no such run; JournalError."""
        with self.lock:
            if self.seq:
                for page in self._store.read_pages(self.run, self.seq):
                    events = [record.event for record in page]
                    self._take([record.at for record in page], events)
                    for event in events:
                        self._untold.note(self.state, event)
                return
            large = self._store.length(self.run) > MANY_EVENTS
            self.unverified = large and not self._verify_first
            with _uncollected():
                for ats, events in self._pages():
                    self._take(ats, events)

    def _pages(self) -> Iterator[tuple[list[Micros], list[ev.Event]]]:
        if self.unverified:
            yield from self._store.read_unverified(self.run)
            return
        for page in self._store.read_pages(self.run):
            yield [record.at for record in page], [record.event for record in page]

    def _take(self, ats: Sequence[Micros], events: Sequence[ev.Event]) -> None:
        apply_all(self.state, ats, events)
        self.seq = self.state.events
        for at, event in zip(ats, events, strict=True):
            kind = type(event)
            if kind in NOTED:  # nearly all are of attempts, and none of these
                self._phases.note(at, event)
            elif isinstance(event, ev.TasksPlanned):
                self._share(event.tasks)

    def _share(self, tasks: Iterable[Task]) -> None:
        """Have tasks share what is equal in many of them: of a large run that is a sixth of its memory."""
        share = msgspec.structs.force_setattr
        domains = self._domains
        for task in tasks:
            share(task, "domain", domains.setdefault(task.domain, task.domain))
            if not task.params:
                share(task, "params", _NOTHING)
            if not task.metadata:
                share(task, "metadata", _NOTHING)
            if not task.own:
                share(task, "own", _NOTHING)

    def verify(self) -> None:
        """Compare what was read with its checksums, if that was not done yet. Raises JournalForeign."""
        with self.lock:  # who makes the first picture of it comes first
            if not self.unverified:
                return
        self._store.verify(self.run)
        self.unverified = False

    def news(self) -> Touched:
        """What has changed since this was last asked, by whom it is told to all watchers."""
        with self.lock:
            self.advance()
            touched, self._untold = self._untold, Touched()
            return touched

    def since(self, seq: int) -> Touched:
        """What has changed since event number `seq`, up to now."""
        touched = Touched()
        with self.lock:
            for record in self._store.read(self.run, seq):
                if record.seq > self.seq:
                    break
                touched.note(self.state, record.event)
        return touched

    def is_live(self, now: Micros) -> bool:
        """Is a controller at work on it, anywhere?"""
        return self._store.held(self._store.stream(self.run), now) is not None

    # -- rows ------------------------------------------------------------------------------------

    def look_at_progress(self, now: Micros) -> None:
        """Read anew how far the attempts that run have come."""
        with self.lock:
            self._progress = read_progress(self.home, self.state, now) if self.state.ready else {}
            self._progress_at = now

    def newest_shot(self, attempt: AttemptId, now: Micros) -> ShotStep | None:
        """The newest screenshot of an attempt that runs, as new as any row tells; None if nothing does."""
        with self.lock:
            if now >= self._progress_at + PROGRESS_EVERY:
                self.look_at_progress(now)
            progress = self._progress.get(attempt)
        step = None if progress is None else progress.step
        return None if step is None or not step.screenshot else (step.n, step.screenshot)

    def changed_machines(self, now: Micros) -> list[Row]:
        """Rows of machines that differ from when this was last asked: also by what is not in the journal."""
        with self.lock:
            rows = {machine: self.machine_row(machine, now) for machine in self.state.machines}
            changed = [row for machine, row in rows.items() if self._machine_rows.get(machine) != row]
            self._machine_rows = rows
            return changed

    def changes(self, touched: Touched, now: Micros) -> dict[str, list[Row]]:
        """The rows of what was touched, as a part of an event for browsers."""
        with self.lock:
            state = self.state
            tasks = dict(touched.tasks)
            if touched.unsettled:
                tasks |= {id: None for id, known in state.tasks.items() if known.outcome is None}
            parts = {
                "tasks": [task_row(state, state.tasks[task], now) for task in tasks],
                "attempts": [attempt_row(state, state.attempts[a], now) for a in touched.attempts],
                "machines": [self.machine_row(machine, now) for machine in touched.machines],
            }
            return {name: rows for name, rows in parts.items() if rows}

    def tables(self, now: Micros) -> dict[str, Any]:
        """All rows, as the snapshot has them: cells that repeat are numbers of a dictionary's entries.

        An attempt whose task's row tells all of it has none.
        """
        with self.lock, _uncollected():
            state = self.state
            others: dict[str, Iterable[str]] = {"task": state.tasks, "machine": state.machines}
            tasks = _task_rows(state, now)
            attempts = (attempt_row(state, attempt, now) for attempt in _untold(state))
            machines = (self.machine_row(machine, now) for machine in state.machines)
            return {
                "tasks": _table(TASK_COLUMNS, tasks, TASK_DICTIONARIES, others),
                "attempts": _table(ATTEMPT_COLUMNS, attempts, ATTEMPT_DICTIONARIES, others),
                "machines": _table(MACHINE_COLUMNS, machines, (), others),
            }

    def machine_row(self, id: MachineId, now: Micros) -> Row:
        machine = self.state.machines[id]
        attempt = next(iter(machine.open), None)
        progress = None if attempt is None else self._progress.get(attempt)
        step = None if progress is None else progress.count
        shown_at = idle_since = None
        if progress is not None and progress.step is not None and progress.step.screenshot:
            shown_at = (progress.stepped_at or 0) // 1000
        if progress is not None and progress.idle_s is not None:
            idle_since = 1000 * round(self._progress_at / 1_000_000 - progress.idle_s)
        offer = machine.offer
        return [
            *(id, machine.name, offer.place, offer.size, offer.region or None, machine.phase),
            self._phases.of(id),
            round(machine_usd(machine, max(now - now % USD_EVERY, machine.billed_at)), 4),
            attempt,
            step,
            idle_since,
            shown_at,
            _why(machine),
        ]


def _why(machine: MachineState) -> str | None:
    if machine.cause is None:
        return machine.detail[:300] or None
    return f"{machine.cause}: {machine.detail}"[:300]


def _untold(state: RunState) -> Iterator[AttemptState]:
    """Attempts of which tasks' rows do not tell all, in the order of tasks."""
    attempts = state.attempts
    for known in state.tasks.values():
        ids = known.attempts
        if len(ids) == 1:
            only = attempts[ids[0]]
            if only.outcome is not known.outcome or known.outcome is None:
                yield only
        elif ids:
            yield from [attempts[id] for id in ids]


def _task_rows(state: RunState, now: Micros) -> Iterator[Sequence[Any]]:
    """What `task_row` gives for each task, in less time for those that were scored at their first attempt."""
    attempts, slots = state.attempts, state.plan.slots
    prices = {id: machine.offer.usd_per_hour for id, machine in state.machines.items()}
    usual = state.plan.model or None
    for known in state.tasks.values():
        ids, outcome = known.attempts, known.outcome
        if type(outcome) is not Scored or len(ids) != 1:
            yield task_row(state, known, now)
            continue
        attempt, task = attempts[ids[0]], known.task
        started_at, ended_at = attempt.started_at, attempt.ended_at
        if attempt.outcome is not outcome or ended_at is None or attempt.metered is not None:
            yield task_row(state, known, now)
            continue
        took_s = (ended_at - started_at) / SECOND
        usd = took_s * prices[attempt.machine] / 3600 / slots + (attempt_model_usd(attempt) or 0.0)
        yield (
            task.id,
            task.domain,
            "pass" if outcome.success else "fail",
            outcome.score,
            1,
            round(attempt.seconds or took_s, 6),
            attempt.machine,
            None,
            outcome.num_steps,
            None if outcome.measured is None else _tokens(attempt),
            round(usd, 5) or None,
            task.model or usual,
            task.repeat or None,
            attempt_number(ids[0]),
            started_at // 1000,
            ended_at // 1000,
        )


def task_row(state: RunState, known: TaskState, now: Micros) -> Row:
    outcome, task, attempts = known.outcome, known.task, known.attempts
    model = task.model or state.plan.model or None
    if not attempts:
        status, repeat = task_status(state, known), task.repeat or None
        return [task.id, task.domain, status, *(None, 0, *(None,) * 6), model, repeat, *(None,) * 3]
    attempt = state.attempts[known.decided_by or attempts[-1]]
    score, cause, steps = None, None, None
    if isinstance(outcome, Scored):  # nearly all: there may be very many
        word: str = "pass" if outcome.success else "fail"
        score, steps = outcome.score, outcome.num_steps
    else:
        word = task_status(state, known)
        cause = outcome.cause.value if isinstance(outcome, Broken) else None
    if isinstance(attempt.outcome, Answered):
        steps = attempt.outcome.num_steps
    started_at = ended_at = None
    if len(attempts) == 1:
        usd = _usd(state, attempt, now)
        if attempt.outcome is outcome is not None and attempt.ended_at is not None:  # all of it is told here
            started_at, ended_at = attempt.started_at // 1000, attempt.ended_at // 1000
    else:
        usd = sum([_usd(state, state.attempts[a], now) for a in attempts])
    return [
        task.id,
        task.domain,
        word,
        score,
        len(attempts),
        attempt_seconds(attempt),
        attempt.machine,
        cause,
        steps,
        _tokens(attempt),
        round(usd, 5) or None,
        model,
        task.repeat or None,
        attempt_number(attempts[-1]),
        started_at,
        ended_at,
    ]


def attempt_row(state: RunState, attempt: AttemptState, now: Micros) -> Row:
    outcome, ended_at = attempt.outcome, attempt.ended_at
    word, cause, score = "running", None, None
    if isinstance(outcome, Scored):
        word, score = "pass" if outcome.success else "fail", outcome.score
    elif isinstance(outcome, Broken):
        word, cause = "broken", outcome.cause.value
    elif outcome is not None:
        word = "answered"
    number = attempt_number(attempt.id)
    return [
        None if attempt.id == f"{attempt.task}.{number}" else attempt.id,
        attempt.task,
        number,
        attempt.machine,
        word,
        cause,
        score,
        attempt.started_at // 1000,
        None if ended_at is None else ended_at // 1000,
        round(_usd(state, attempt, now), 5) or None,
    ]


def _tokens(attempt: AttemptState) -> int | None:
    """The tokens that the meter counted, or else those that the attempt told."""
    if attempt.metered is not None:
        tokens: Mapping[str, int] = attempt.metered.tokens
        return tokens.get("in", 0) + tokens.get("out", 0)
    measured = None if attempt.outcome is None else attempt.outcome.measured
    if measured is None or not measured.tokens:
        return None
    tokens = measured.tokens
    return tokens["total"] if "total" in tokens else tokens.get("in", 0) + tokens.get("out", 0)


def _usd(state: RunState, attempt: AttemptState, now: Micros) -> float:
    """What its machine and its models cost, as far as that is known."""
    return attempt_usd(state, attempt, now) + (attempt_model_usd(attempt) or 0.0)


class _Numbers(dict[str | None, int | None]):
    """The entries of a dictionary, each with its number: one that is looked up for the first time gets the
    next."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        super().__init__((entry, n) for n, entry in enumerate(entries))
        self[None] = None  # a cell without a value has no entry

    def __missing__(self, entry: str | None) -> int:
        self[entry] = number = len(self) - 1
        return number

    def entries(self) -> list[str]:
        return [entry for entry in self if entry is not None]


class _Column:
    """The cells of one column, encoded some at a time, so that there are never all of them: there may be very
    many. One that has the same value everywhere is that value alone."""

    def __init__(self, numbers: _Numbers | None) -> None:
        self.numbers = numbers
        self._count = 0
        self._only: Any = None
        self._encoded: bytearray | None = None

    def add(self, cells: Sequence[Any]) -> None:
        if self.numbers is not None:
            cells = list(map(self.numbers.__getitem__, cells))
        if self._encoded is None:
            first = cells[0] if self._count == 0 else self._only
            if cells.count(first) == len(cells):
                self._only = first
                self._count += len(cells)
                return
            self._encoded = bytearray(b"," + msgspec.json.encode(self._only)) * self._count
        self._encoded += b","
        self._encoded += msgspec.json.encode(cells)[1:-1]
        self._count += len(cells)

    def packed(self) -> Any:
        if self._encoded is None:
            return {"same": self._only}
        self._encoded[0:1] = b"["
        self._encoded += b"]"
        return msgspec.Raw(self._encoded)


def _table(
    columns: Sequence[str],
    rows: Iterator[Sequence[Any]],
    dictionaries: Sequence[str],
    others: Mapping[str, Iterable[str]],
) -> dict[str, Any]:
    """A table column by column, because a browser reads few long lists much sooner than many short ones.

    `others`: the columns whose entries are the keys of another table.
    """
    numbers = {column: _Numbers(others.get(column, ())) for column in dictionaries}
    made, count = [_Column(numbers.get(column)) for column in columns], 0
    while some := list(islice(rows, 2000)):
        count += len(some)
        for column, cells in zip(made, zip(*some, strict=True), strict=True):
            column.add(cells)
    return {
        "columns": columns,
        "count": count,
        "cells": [column.packed() for column in made],
        "dictionaries": {
            column: f"{column}s" if column in others else entries.entries()
            for column, entries in numbers.items()
        },
    }


@contextmanager
def _uncollected() -> Generator[None]:
    """Without the garbage collector, which would walk all that was read, again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
