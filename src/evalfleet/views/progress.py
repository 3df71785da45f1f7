"""How far attempts that run have come: their newest step, and for how long nothing was heard of them.

Read from files that the run's controller keeps beside the journal, so that every process sees the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from evalfleet.channels.samples import Newest, read_newest
from evalfleet.model import SECOND, AttemptId, MachineId, Micros, NewestStep, Step, decodable, seconds_between
from evalfleet.names import STEPS, safe_name
from evalfleet.state import RunState

from .format import clean, duration, iso, table

if TYPE_CHECKING:
    from .documents import AttemptProgress, StepRow


class Progress(Struct, frozen=True):
    """How far one attempt that runs has come. None: nothing tells."""

    count: int | None = None
    """How many steps it has made."""
    step: Step | None = None
    """The newest."""
    idle_s: float | None = None
    """How long ago it last made a step, wrote a line, or began or ended a metered model call."""
    problem: str = ""
    """Why its trajectory cannot be read."""
    stepped_at: Micros | None = None
    """When its newest step was made, as the step tells it, or seen."""


def read_progress(home: Path, state: RunState, now: Micros) -> dict[AttemptId, Progress]:
    """How far all attempts that run have come. `now` is the wall clock's."""
    folder = home / safe_name(state.plan.run) / STEPS
    loads: dict[MachineId, Newest | None] = {}
    found: dict[AttemptId, Progress] = {}
    stepped = folder.is_dir()
    for machine in state.ready:
        for attempt in state.machines[machine].open:
            if machine not in loads:
                loads[machine] = read_newest(home, machine)
            step = _newest(folder / f"{safe_name(attempt)}.json") if stepped else None
            found[attempt] = _progress(step, loads[machine], attempt, now)
    return found


def _newest(path: Path) -> NewestStep | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=decodable(NewestStep))
    except (OSError, msgspec.MsgspecError):
        return None


def _progress(step: NewestStep | None, load: Newest | None, attempt: AttemptId, now: Micros) -> Progress:
    output = load.jobs.get(attempt) if load is not None else None
    heard = [at for at in (step.seen_at if step else 0, output.grew_at if output else 0) if at]
    # a clock that was set back must not show an idle time below nothing
    idle_s = max(0.0, seconds_between(max(heard), now)) if heard else None
    if step is None:
        return Progress(idle_s=idle_s)
    made_at = step.step.at if step.step is not None else None
    stepped_at = step.seen_at if made_at is None else round(made_at * SECOND)
    return Progress(step.count, step.step, idle_s, step.problem, stepped_at or None)


class ProgressReader:
    """Reads progress for a view that is drawn many times a second: the files, once a second."""

    def __init__(self, home: Path, every_s: float = 1.0) -> None:
        self._home = home
        self._every_s = every_s
        self._next = 0.0
        self._last: Mapping[AttemptId, Progress] = {}

    def __call__(self, state: RunState) -> Mapping[AttemptId, Progress]:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self._last = read_progress(self._home, state, time.time_ns() // 1000)
        return self._last


def step_row(step: Step) -> StepRow:
    return {
        "n": step.n,
        "at": None if step.at is None else iso(round(step.at * SECOND)),
        "action": step.action or None,
        "ok": step.ok,
        "screenshot": step.screenshot or None,
        "x": step.x,
        "y": step.y,
        "tokens": step.tokens,
        "error": step.error or None,
    }


def progress_entry(progress: Progress) -> AttemptProgress:
    return {
        "steps": progress.count,
        "step": None if progress.step is None else step_row(progress.step),
        "idle_seconds": None if progress.idle_s is None else round(progress.idle_s, 1),
        "problem": progress.problem or None,
    }


def progress_words(progress: AttemptProgress) -> str:
    """For people: the newest step, and for how long nothing came."""
    parts: list[str] = []
    if progress["steps"] is not None:
        step = progress["step"]
        action = f": {clean(step['action'], 60)}" if step is not None and step["action"] else ""
        parts.append(f"step {progress['steps']}{action}")
    if progress["idle_seconds"] is not None:
        parts.append(f"idle {duration(progress['idle_seconds'])}")
    if progress["problem"]:
        parts.append(clean(progress["problem"]))
    return ", ".join(parts)


def steps_table(rows: Sequence[StepRow]) -> str:
    """A line a step, for people."""
    head = ("step", "at", "action", "tokens", "error")
    lines = [(row["n"], row["at"], row["action"], row["tokens"], row["error"]) for row in rows]
    return table(head, lines, right=("step", "tokens"), longest=100)
