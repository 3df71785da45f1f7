"""What earlier runs of a home tell beforehand: what tasks and calls took and cost, and machines' boots."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median

import msgspec

from evalfleet.model import decodable

LATEST = 5
LOOKED_AT = 100
FEW_ATTEMPTS = 5
FEW_CALLS = 20


class _Task(msgspec.Struct, frozen=True):
    task_id: str
    model_usd: float | None = None
    attempts: int = 1
    origin: str = ""
    score: float | None = None
    duration_seconds: float | None = None


class _Machine(msgspec.Struct, frozen=True):
    place: str = ""
    size: str = ""
    requested_at: datetime | None = None
    ready_at: datetime | None = None


class _Models(msgspec.Struct, frozen=True):
    usd: float = 0.0
    calls: int = 0
    unknown_calls: int = 0


class _Run(msgspec.Struct, frozen=True):
    """What is needed of a results.json."""

    benchmark: str
    tasks: tuple[_Task, ...]
    model: str | None = None
    machines: tuple[_Machine, ...] = ()
    models: _Models = _Models()


def known_durations(home: Path, benchmark: str) -> dict[str, float]:
    """What the latest runs of a benchmark in this home tell of its tasks' durations, newest first."""
    known: dict[str, float] = {}
    for run in _latest(home, benchmark):
        for task in run.tasks:
            if task.score is not None and task.duration_seconds is not None:
                known.setdefault(task.task_id, task.duration_seconds)
                known.setdefault(task.origin or task.task_id, task.duration_seconds)
    return known


def known_attempt_usd(home: Path, benchmark: str, model: str) -> float | None:
    """What 95 of 100 attempts of the latest runs with this model cost at most; None if few were metered."""
    found = sorted(
        task.model_usd / max(1, task.attempts)
        for run in _latest(home, benchmark)
        if (run.model or "") == model
        for task in run.tasks
        if task.model_usd is not None
    )
    return found[int(0.95 * (len(found) - 1))] if len(found) >= FEW_ATTEMPTS else None


def known_call_usd(home: Path, benchmark: str, model: str) -> float | None:
    """What a call of the latest runs with this model cost on average; None if few told what they used."""
    runs = [run.models for run in _latest(home, benchmark) if (run.model or "") == model]
    calls = sum(each.calls - each.unknown_calls for each in runs)
    return sum(each.usd for each in runs) / calls if calls >= FEW_CALLS else None


def known_machine_s(home: Path, benchmark: str, places: Collection[str], borrowed: str) -> float | None:
    """What machines took until they were ready for the benchmark; those of size `borrowed` tell nothing."""
    found = [
        (machine.ready_at - machine.requested_at).total_seconds()
        for run in _latest(home, benchmark)
        for machine in run.machines
        if machine.place in places and machine.size != borrowed
        if machine.ready_at is not None and machine.requested_at is not None
    ]
    return median(found) if found else None


def _latest(home: Path, benchmark: str) -> Iterator[_Run]:
    left = LATEST
    for path in sorted(home.glob("*/results.json"), key=_changed_at, reverse=True)[:LOOKED_AT]:
        if left == 0:
            return
        try:
            found = msgspec.json.decode(path.read_bytes(), type=decodable(_Run))
        except (OSError, msgspec.MsgspecError):
            continue  # anyone may have put a file there
        if found.benchmark == benchmark:
            left -= 1
            yield found


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
