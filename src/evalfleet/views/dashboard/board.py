"""One run as browsers see it: a fold of its journal that is kept current, and the tables made of it.

A table's rows are lists of cells. What changes is sent as whole rows; what time alone changes (how long
something has taken) is left to the browser.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evalfleet import events as ev
from evalfleet.events import Record
from evalfleet.journal import Store
from evalfleet.model import SECOND, Answered, AttemptId, Broken, MachineId, Micros, Scored, TaskId
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
    *("usd", "model", "repeat", "attempt"),
)
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

    def __init__(self, home: Path, store: Store, run: str) -> None:
        self.home, self.run = home, run
        self.folder = folder_of(home, run)
        self.state = RunState(queues=False)
        self.seq = 0
        self.lock = threading.RLock()
        self._store = store
        self._phases = Phases()
        self._untold = Touched()
        self._progress: dict[AttemptId, Progress] = {}
        self._progress_at: Micros = 0
        self._machine_rows: dict[MachineId, Row] = {}

    def advance(self) -> None:
        """Take in what was recorded since. Raises RequestError: there is no such run; JournalError."""
        with self.lock:
            is_new = self.seq == 0
            with _uncollected():
                for page in self._store.read_pages(self.run, self.seq):
                    self._take(page)
                    for record in page if not is_new else ():
                        self._untold.note(self.state, record.event)

    def _take(self, page: Sequence[Record]) -> None:
        apply_all(self.state, [record.at for record in page], [record.event for record in page])
        self.seq = self.state.events
        for record in page:
            if type(record.event) in NOTED:  # nearly all are of attempts, and none of these
                self._phases.note(record.at, record.event)

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
        """Return all rows, by table."""
        with self.lock, _uncollected():
            state = self.state
            return {
                "tasks": {
                    "columns": TASK_COLUMNS,
                    "rows": [task_row(state, task, now) for task in state.tasks.values()],
                },
                "attempts": {
                    "columns": ATTEMPT_COLUMNS,
                    "rows": [attempt_row(state, attempt, now) for attempt in state.attempts.values()],
                },
                "machines": {
                    "columns": MACHINE_COLUMNS,
                    "rows": [self.machine_row(machine, now) for machine in state.machines],
                },
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


def task_row(state: RunState, known: TaskState, now: Micros) -> Row:
    outcome, task, attempts = known.outcome, known.task, known.attempts
    model = task.model or state.plan.model or None
    if not attempts:
        status, repeat = task_status(state, known), task.repeat or None
        return [task.id, task.domain, status, *(None, 0, *(None,) * 6), model, repeat, None]
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
    return [
        attempt.id,
        attempt.task,
        attempt_number(attempt.id),
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
