"""What earlier runs tell beforehand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from evalfleet.model import Offer, Plan, Task, TaskId
from evalfleet.planning.forecast import chances_of
from evalfleet.planning.past import past_of

VM = Offer("azure", "D4")


def leave(home: Path, run: str, age_s: int, ready: list[int | None], benchmark: str = "b", **of: Any) -> None:
    """The results of a run; machines by the minutes until they were ready."""
    machines = [
        {
            "place": "azure",
            "size": "D4",
            "requested_at": "2026-11-15T12:00:00.500Z",
            "ready_at": None if minutes is None else f"2026-11-15T12:{minutes:02d}:00.500Z",
            **of,
        }
        for minutes in ready
    ]
    tasks = [{"task_id": "t", "score": 1.0, "duration_seconds": float(age_s)}]
    path = home / run / "results.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"benchmark": benchmark, "tasks": tasks, "machines": machines}))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def known(home: Path) -> float | None:
    chances = chances_of(past_of(home, "b"), Plan("r", "b"), [Task(TaskId("t"))], [VM], {})
    seconds = [second for run in chances.machines[VM.key] for second in run]
    return median(seconds) if chances.known_machines else None


def test_the_middle_of_what_machines_took(tmp_path: Path) -> None:
    assert known(tmp_path) is None
    leave(tmp_path, "one", 1, [10, None, 50])
    leave(tmp_path, "two", 2, [12])
    assert known(tmp_path) == 12 * 60


def test_other_places_benchmarks_and_borrowed_machines_tell_nothing(tmp_path: Path) -> None:
    leave(tmp_path, "elsewhere", 1, [1], place="lab")
    leave(tmp_path, "other", 2, [2], benchmark="c")
    leave(tmp_path, "borrowed", 3, [3], size="pool")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/results.json").write_text("[]")
    assert known(tmp_path) is None


def test_only_the_latest_runs_count(tmp_path: Path) -> None:
    for age in range(1, 8):
        leave(tmp_path, f"r{age}", age, [20 if age <= 5 else 1])
    assert known(tmp_path) == 20 * 60
    assert past_of(tmp_path, "b").durations() == {"t": 1.0}
