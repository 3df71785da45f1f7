"""What HAL's graders give, benchmark by benchmark, as a score from 0 to 1 for each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

BY_AGENT = ("taubench_", "appworld_")
"""Benchmarks whose scores the agent's own process has reported: HAL's grader only hands them on."""
BY_STEPS = ("scicode", "scicode_easy")
"""Benchmarks whose graders tell the steps of a task that are right."""


def score_of(
    benchmark: str,
    task: str,
    place: int,
    results: Any,
    metrics: Mapping[str, Any],
    submission: Mapping[str, Any],
    steps: Mapping[str, int] | None = None,
) -> float | None:
    """None if nothing tells. `place` is where the task's answer stood among those that were graded, and
    `steps` how many a task has, if that is known."""
    if benchmark in BY_STEPS and steps and task in steps:
        right = _rows(_table(_table(results).get("details")).get(task))
        return _share(len(right) / steps[task])
    for prefix, read in _FINER.items():
        if benchmark.startswith(prefix):
            score = _share(read(task, place, results, submission))
            if score is not None:
                return score
    if task in _ids(metrics.get("successful_tasks")):
        return 1.0
    if task in _ids(metrics.get("failed_tasks")):
        return 0.0
    return _share(_field(results, task, "score", "reward", "correct"))


def _table(value: object) -> dict[str, Any]:
    """Empty if it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _rows(value: object) -> list[Any]:
    """Empty if it is no list."""
    return list(cast("list[object]", value)) if isinstance(value, list) else []


def _ids(listed: object) -> set[str]:
    return set(map(str, _rows(listed)))


def _share(value: object) -> float | None:
    """A number from 0 to 1. HAL's benchmarks give no others; what is beyond is cut off."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return min(1.0, max(0.0, float(value)))
    return None


def _field(results: Any, task: str, *names: str) -> object:
    found: Any = _table(results).get(task)
    if not isinstance(found, dict):
        return found
    fields = cast("dict[str, Any]", found)
    return next((fields[name] for name in names if name in fields), None)


def _gaia(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return _field(results, task, "score")


def _taubench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    told: Any = _field(results, task, "answer", "reward")
    if isinstance(told, dict):
        told = cast("dict[str, Any]", told).get("reward")
    return 0.0 if isinstance(told, str) else told


def _appworld(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    """The agent returns its evaluation beside its answer."""
    if not isinstance(submission.get("evaluation"), dict):
        return 0.0
    told = _table(submission["evaluation"])
    own = _table(told["individual"]).get(task) if isinstance(told.get("individual"), dict) else told
    return _table(own).get("success")


def _usaco(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    tries = _rows(_table(_table(results).get("sdict")).get(task))
    return _table(_table(tries[0]).get("result")).get("fraction_passed") if tries else None


def _swebench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    told = _table(results)
    return task in _ids(told["resolved_ids"]) if "resolved_ids" in told else None


def _corebench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    if not isinstance(_table(results).get(task), dict):
        return None
    counts = {key: n for key, n in _table(_table(results)[task]).items() if _share(n) is not None}
    right = sum(n for key, n in counts.items() if key.startswith("correct_"))
    total = sum(n for key, n in counts.items() if key.startswith("total_"))
    return right / total if total else 0.0


def _scienceagentbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return _field(_table(results).get("eval_result"), task, "success_rate")


def _assistantbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return dict(enumerate(_rows(_table(results).get("scores")))).get(place)


def _colbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return dict(enumerate(_rows(results))).get(place)


def _replicatorbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return _field(results, task, "overall_score", "correct")


_Reader = Callable[[str, int, Any, Mapping[str, Any]], object]
_FINER: Mapping[str, _Reader] = {
    "gaia": _gaia,
    "taubench_": _taubench,
    "appworld_": _appworld,
    "usaco": _usaco,
    "swebench_": _swebench,
    "corebench_": _corebench,
    "scienceagentbench": _scienceagentbench,
    "assistantbench": _assistantbench,
    "colbench_": _colbench,
    "replicatorbench": _replicatorbench,
}
