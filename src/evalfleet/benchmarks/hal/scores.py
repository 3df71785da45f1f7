"""What HAL's graders give, benchmark by benchmark, as a score from 0 to 1 for each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

BY_AGENT = ("taubench_", "appworld_")
"""Benchmarks whose scores the agent's own process has reported: HAL's grader only hands them on."""


def score_of(
    benchmark: str,
    task: str,
    place: int,
    results: Any,
    metrics: Mapping[str, Any],
    submission: Mapping[str, Any],
) -> float | None:
    """None if nothing tells. `place` is where the task's answer stood among those that were graded."""
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


def _ids(listed: object) -> set[str]:
    return {str(each) for each in listed} if isinstance(listed, list) else set()


def _share(value: object) -> float | None:
    """A number from 0 to 1. HAL's benchmarks give no others; what is beyond is cut off."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return min(1.0, max(0.0, float(value)))
    return None


def _field(results: Any, task: str, *names: str) -> object:
    found = cast("dict[str, Any]", results).get(task) if isinstance(results, dict) else None
    if isinstance(found, dict):
        return next((found[name] for name in names if name in found), None)
    return found


def _gaia(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return _field(results, task, "score")


def _taubench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    told = _field(results, task, "answer", "reward")
    if isinstance(told, dict):
        told = told.get("reward")
    return 0.0 if isinstance(told, str) else told


def _appworld(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    """The agent returns its evaluation beside its answer."""
    told = submission.get("evaluation")
    if not isinstance(told, dict):
        return 0.0
    individual = told.get("individual")
    own = individual.get(task) if isinstance(individual, dict) else told
    return own.get("success") if isinstance(own, dict) else None


def _usaco(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    tries = results.get("sdict", {}).get(task) if isinstance(results, dict) else None
    if isinstance(tries, list) and tries and isinstance(tries[0], dict):
        result = tries[0].get("result")
        return result.get("fraction_passed") if isinstance(result, dict) else None
    return None


def _swebench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    if not isinstance(results, dict) or "resolved_ids" not in results:
        return None
    return task in _ids(results["resolved_ids"])


def _corebench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    told = results.get(task) if isinstance(results, dict) else None
    if not isinstance(told, dict):
        return None
    right = sum(
        value for key, value in told.items() if key.startswith("correct_") and _share(value) is not None
    )
    total = sum(
        value for key, value in told.items() if key.startswith("total_") and _share(value) is not None
    )
    return right / total if total else 0.0


def _scienceagentbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    told = results.get("eval_result") if isinstance(results, dict) else None
    return _field(told, task, "success_rate")


def _assistantbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    scores = results.get("scores") if isinstance(results, dict) else None
    return scores[place] if isinstance(scores, list) and place < len(scores) else None


def _colbench(task: str, place: int, results: Any, submission: Mapping[str, Any]) -> object:
    return results[place] if isinstance(results, list) and place < len(results) else None


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
