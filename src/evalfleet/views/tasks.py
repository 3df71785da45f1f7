"""The tasks of a results document: chosen by how they went, and their numbers taken together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from evalfleet.errors import RequestError
from evalfleet.names import hint

from .stats import percentile

if TYPE_CHECKING:
    from .documents import Figures, TaskResult

SLOW = 0.9
"""A task is slow if it took longer than this share of the scored ones, or was ended by its time limit."""

_GOES: dict[str, Callable[[TaskResult], bool]] = {
    "failed": lambda task: task["success"] is False,
    "broken": lambda task: task["status"] == "broken",
    "unrun": lambda task: task["status"] not in ("scored", "broken"),
    "passed": lambda task: task["success"] is True,
}
OUTCOMES = (*_GOES, "slow")


def by_outcome(tasks: Sequence[TaskResult], only: Sequence[str]) -> list[TaskResult]:
    """The tasks that went in one of these ways, in order; all, if none is named. Raises RequestError."""
    for outcome in only:
        if outcome not in OUTCOMES:
            raise RequestError(f"--only {outcome!r} is no outcome; {hint(outcome, OUTCOMES)}")
    seconds = [task["duration_seconds"] or 0.0 for task in tasks if task["success"] is not None]
    bound = percentile(seconds, SLOW) or 0.0

    def is_slow(task: TaskResult) -> bool:
        scored = task["success"] is not None
        return scored and (task["limit_seconds"] is not None or (task["duration_seconds"] or 0.0) > bound)

    tests = [is_slow if outcome == "slow" else _GOES[outcome] for outcome in only]
    return [task for task in tasks if not tests or any(test(task) for test in tests)]


def figures(tables: Iterable[Mapping[str, float]]) -> dict[str, Figures]:
    """The numbers of each name, names in alphabetical order."""
    numbers: dict[str, list[float]] = {}
    for table in tables:
        for name, number in table.items():
            numbers.setdefault(name, []).append(number)
    return {
        name: {
            "count": len(found),
            "mean": round(sum(found) / len(found), 6),
            "min": min(found),
            "max": max(found),
            "total": round(sum(found), 6),
        }
        for name, found in sorted(numbers.items())
    }


def metrics_by_domain(tasks: Sequence[TaskResult]) -> dict[str, dict[str, Figures]]:
    """Domain -> the metrics of its scored tasks."""
    domains: dict[str, list[Mapping[str, float]]] = {}
    for task in tasks:
        if task["success"] is not None:
            domains.setdefault(task["domain"], []).append(task["metrics"])
    return {domain: figures(tables) for domain, tables in domains.items()}
