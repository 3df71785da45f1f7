"""The tasks of a results document: chosen and sorted by how they went, their numbers taken together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evalfleet.errors import RequestError
from evalfleet.names import hint, safe_name

from .stats import mean_interval, pass_at, wilson

if TYPE_CHECKING:
    from .documents import Figures, PassAtK, RepeatedTask, Results, TaskFacts, TaskResult
    from .fleet_documents import Aggregated, WorkerResults, WorkerSummary

SLOW = 10
"""The slowest of so many scored tasks are slow, and what was ended by its time limit."""

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
    scored = sorted((task for task in tasks if task["success"] is not None), key=SORTS["duration"])
    slowest = {task["task_id"] for task in scored[: -(-len(scored) // SLOW)]}

    def is_slow(task: TaskResult) -> bool:
        return task["limit_seconds"] is not None or task["task_id"] in slowest

    tests = [is_slow if outcome == "slow" else _GOES[outcome] for outcome in only]
    return [task for task in tasks if not tests or any(test(task) for test in tests)]


_RANKS = {"fail": 0, "broken": 1, "running": 2, "waiting": 3, "unrun": 4, "answered": 5, "pass": 6}


def outcome_word(task: TaskFacts) -> str:
    """`pass`, `fail`, `broken`, or what else a task is while, or because, it has no outcome."""
    if task["success"] is not None:
        return "pass" if task["success"] else "fail"
    return task["status"]


def task_usd(task: TaskResult) -> float:
    """What machines and models cost for it, as far as that is known."""
    models = task["cost_usd"] if task["model_usd"] is None else task["model_usd"]
    return (models or 0.0) + (task["machine_usd"] or 0.0)


SORTS: dict[str, Callable[[TaskResult], Any]] = {
    "outcome": lambda task: _RANKS[outcome_word(task)],
    "task": lambda task: task["task_id"],
    "domain": lambda task: (task["domain"], _RANKS[outcome_word(task)]),
    "duration": lambda task: -(task["duration_seconds"] or 0.0),
    "score": lambda task: (task["score"] is None, task["score"]),
    "attempts": lambda task: -task["attempts"],
    "cost": lambda task: -task_usd(task),
}
"""How tasks can be sorted: failures first, by name, by domain, and the longest, worst, most tried or dearest
first. Those that are alike stay in file order."""


def in_order(tasks: Sequence[TaskResult], sort: str = "outcome") -> list[TaskResult]:
    return sorted(tasks, key=SORTS[sort])


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


# -- models and repeats --------------------------------------------------------------------------------

_KS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 500, 1000)
"""For which k pass@k is told, and for the number of repeats itself."""


def by_task(tasks: Sequence[TaskResult], strict: bool = False) -> list[RepeatedTask]:
    """Each task of the benchmark by each model, with its repeats taken together. `strict`: as in `Tally`."""
    groups: dict[tuple[str, str | None], list[TaskResult]] = {}
    for task in tasks:
        groups.setdefault((task["origin"], task["model"]), []).append(task)
    return [_repeated(task, model, repeats, strict) for (task, model), repeats in groups.items()]


def _repeated(id: str, model: str | None, repeats: Sequence[TaskResult], strict: bool) -> RepeatedTask:
    broken = sum(task["status"] == "broken" for task in repeats)
    scores = [task["score"] for task in repeats if task["score"] is not None]
    succeeded = sum(task["success"] is True for task in repeats)
    judged = len(scores) + (broken if strict else 0)
    ci = wilson(succeeded, judged)
    return {
        "task_id": id,
        "model": model,
        "domain": repeats[0]["domain"],
        "total": len(repeats),
        "scored": len(scores),
        "broken": broken,
        "succeeded": succeeded,
        "success_rate": round(succeeded / judged, 6) if judged else None,
        "success_rate_ci": [round(end, 6) for end in ci] if ci else None,
        "mean_score": round(sum(scores) / judged, 6) if judged else None,
        "pass_at_k": {
            str(k): round(pass_at(k, succeeded, judged), 6)
            for k in sorted({*_KS, len(repeats)})
            if k <= judged and len(repeats) > 1
        },
    }


def pass_at_k(tasks: Sequence[RepeatedTask], strict: bool = False) -> dict[str, PassAtK]:
    """k -> the mean over the tasks that have so many scored repeats. `strict`: as in `Tally`."""
    found: dict[str, PassAtK] = {}
    for k in sorted({k for task in tasks for k in task["pass_at_k"]}, key=int):
        its = [task for task in tasks if k in task["pass_at_k"]]
        values = [task["pass_at_k"][k] for task in its]
        ci = mean_interval(values, sum(task["scored"] + task["broken"] * strict for task in its))
        found[k] = {
            "mean": round(sum(values) / len(values), 6),
            "ci": [round(end, 6) for end in ci] if ci else None,
            "tasks": len(values),
        }
    return found


# -- for scripts that know other files -------------------------------------------------------------


def aggregated(document: Results) -> Aggregated:
    """`aggregated_results.json`, from results()."""
    return {
        "total_tasks": document["total_tasks"],
        "succeeded": document["succeeded"],
        "failed": document["failed"],
        "success_rate": document["success_rate"],
        "tasks": document["tasks"],
        "by_domain": document["by_domain"],
    }


def by_machine(document: Results) -> dict[str, WorkerResults]:
    """File name -> `<machine>_results.json`, from results(): each settled task where it was decided."""
    tasks: dict[str, list[TaskResult]] = {machine["name"]: [] for machine in document["machines"]}
    for task in document["tasks"]:
        if task["status"] in ("scored", "broken") and task["machine"] is not None:
            tasks[task["machine"]].append(task)
    ends = {machine["name"]: machine["ended_at"] for machine in document["machines"]}
    return {
        f"{safe_name(name)}_results.json": _worker(document["run"], name, ends[name], its)
        for name, its in tasks.items()
    }


def _worker(run: str, name: str, ended: str | None, tasks: list[TaskResult]) -> WorkerResults:
    scored = [task["success"] for task in tasks if task["success"] is not None]
    succeeded = sum(scored)
    summary: WorkerSummary = {
        "total": len(tasks),
        "succeeded": succeeded,
        "failed": len(scored) - succeeded,
        "success_rate": round(succeeded / len(scored), 6) if scored else None,
    }
    return {"worker_name": name, "run_id": run, "completed_at": ended, "tasks": tasks, "summary": summary}
