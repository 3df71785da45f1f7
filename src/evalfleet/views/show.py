"""`show` in words: a run with its tasks and machines, or one task with every attempt at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .format import (
    clean,
    counted,
    duration,
    local_time,
    named_numbers,
    outcome_style,
    painted,
    pairs,
    plural,
    table,
    usd,
)
from .notable import refusals_table
from .progress import progress_words
from .summary import summary
from .tasks import in_order, outcome_word, task_usd

if TYPE_CHECKING:
    from .documents import Attempt, MachineResult, OutcomeDetails, Results, TaskDetail, TaskFacts, TaskResult
    from .fleet_documents import PoolMachineRow

SHORT_S = 0.95
"""Steps that took less are of no interest."""

TASKS_SHOWN = 200


def show_run(results: Results, *, colours: bool = False, steps: bool = True) -> str:
    """The summary, then tasks that need a look first, then machines, then offers that refused some.

    `steps`: with what to do next.
    """
    refused = refusals_table(results["refusals"])
    left = undeleted_lines(results["machines"])
    tasks = _tasks(results["tasks"], colours)
    parts = [
        summary(results, colours=colours, steps=steps),
        tasks,
        _machines(results["machines"]),
        left,
        refused,
    ]
    return "\n\n".join(part for part in parts if part)


def show_tasks(
    results: Results, tasks: Sequence[TaskResult], *, sort: str | None = None, colours: bool = False
) -> str:
    """Some tasks of the run, all of them and in the order that they have: by `sort`."""
    head = f"{results['run']}: {len(tasks):,} of {plural(results['total_tasks'], 'task')}"
    return f"{head}\n\n{_task_table(tasks, colours, sort)}" if tasks else head


def _tasks(tasks: list[TaskResult], colours: bool) -> str:
    shown = in_order(tasks)[:TASKS_SHOWN]
    left = len(tasks) - len(shown)
    return _task_table(shown, colours) + (
        f"\n... and {left} more: `evalfleet show --json`, `evalfleet report --format csv`" if left else ""
    )


def _task_table(tasks: Sequence[TaskResult], colours: bool, sort: str | None = None) -> str:
    """What they are sorted by is a column, if it is none anyway."""
    asked = _SORTED_BY.get(sort or "")
    rows = [
        (
            task["task_id"],
            _verdict(task),
            *([] if asked is None else [asked(task)]),
            duration(task["duration_seconds"]) if task["duration_seconds"] is not None else None,
            task["attempts"],
            task["machine"],
            clean(task["error"] or "", 100) or None,
        )
        for task in tasks
    ]
    extra = () if asked is None else (sort or "",)
    head = ("task", "outcome", *extra, "took", "attempts", "machine", "error")
    style = _task_style if colours else None
    return table(head, rows, right=(*extra, "took", "attempts"), width=160, style=style)


_SORTED_BY: dict[str, Callable[[TaskResult], object]] = {
    "score": lambda task: task["score"],
    "cost": lambda task: usd(task_usd(task)),
}


def _task_style(column: str, text: str) -> str:
    return outcome_style(text) if column == "outcome" else ""


def _verdict(task: TaskFacts) -> str:
    word = outcome_word(task)
    if task["status"] == "broken":
        return f"{word}: {task['cause']}"
    if task["score"] is None:
        return word
    scored = _outcome(task)
    broken = counted(task["broken_attempts"])
    return f"{scored} after {broken}" if broken else scored


def _machines(machines: list[MachineResult]) -> str:
    if not machines:
        return ""
    rows = [
        (
            machine["name"],
            machine["phase"],
            machine["place"],
            machine["attempts"],
            machine["scored"],
            duration(machine["uptime_seconds"]),
            usd(machine["cost_usd"]),
            _steps(machine["timings"]),
            machine["detail"],
        )
        for machine in machines
    ]
    head = ("machine", "phase", "place", "attempts", "scored", "up", "cost", "came up in", "ended because")
    optional = ("came up in", "place")
    return table(head, rows, right=("attempts", "scored", "up", "cost"), width=180, optional=optional)


def undeleted_lines(machines: Sequence[MachineResult | PoolMachineRow]) -> str:
    """A line for each machine that its place does not delete, with why and what to do: all waits for it."""
    lines = [
        f"{machine['name']} ({machine['id']}) cannot be deleted, and costs on until it is: "
        f"{clean(machine['delete_refused'])}"
        for machine in machines
        if machine["delete_refused"]
    ]
    return "\n".join(lines)


def _steps(timings: Mapping[str, float]) -> str | None:
    long = [f"{step.replace('_', '-')} {duration(s)}" for step, s in timings.items() if s >= SHORT_S]
    return ", ".join(long) or None


def show_task(detail: TaskDetail, *, colours: bool = False) -> str:
    """One task: what it is, how it ended, and each attempt."""
    verdict = _verdict(detail)
    rows: list[tuple[str, object]] = [
        ("task", detail["task_id"]),
        ("domain", detail["domain"]),
        ("outcome", verdict),
        ("steps", detail["num_steps"]),
        ("time limit", duration(detail["timeout_seconds"])),
        ("params", json.dumps(detail["params"], ensure_ascii=False) if detail["params"] else None),
    ]
    if detail["tags"]:
        rows.append(("tags", ", ".join(detail["tags"])))
    if detail["task_metadata"]:
        rows.append(("metadata", json.dumps(detail["task_metadata"], ensure_ascii=False)))
    head = pairs(rows)
    if colours:
        head = head.replace(f"  {verdict}\n", f"  {painted(verdict, outcome_style(verdict))}\n", 1)
    return "\n\n".join((head, *(_attempt(attempt) for attempt in detail["attempts"])))


def _attempt(attempt: Attempt) -> str:
    outcome = _outcome(attempt) if attempt["outcome"] in ("scored", "broken") else attempt["outcome"]
    rows = [
        ("attempt", attempt["attempt"]),
        ("outcome", outcome),
        ("machine", f"{attempt['machine']} on {attempt['node'] or '?'}"),
        ("started", local_time(attempt["started_at"])),
        ("took", duration(attempt["duration_seconds"]) if attempt["duration_seconds"] is not None else None),
        ("progress", progress_words(attempt["progress"]) if attempt["progress"] is not None else None),
        ("machine cost", usd(attempt["machine_usd"]) if attempt["machine_usd"] else None),
        ("model cost", _model_cost(attempt)),
        ("tokens", named_numbers(attempt["tokens"]) or None),
        ("metrics", named_numbers(attempt["metrics"]) or None),
        ("metadata", json.dumps(attempt["metadata"], ensure_ascii=False) if attempt["metadata"] else None),
        ("artefacts", attempt["artifacts"]),
        ("error", attempt["error"]),
        ("problem", attempt["problem"]),
        ("grader", clean(attempt["grader"] or "", 1000) or None),
        *((f"grade {n}", _grade(grade)) for n, grade in enumerate(attempt["grades"], start=1)),
    ]
    return pairs([row for row in rows if row[1] is not None], indent="  ")


def _model_cost(attempt: Attempt) -> str | None:
    """What its calls cost as they were metered; where they were not, as its result tells."""
    metered = attempt["metered"]
    if metered is None:
        return None if attempt["cost_usd"] is None else usd(attempt["cost_usd"])
    said = f"{usd(metered['usd'])}, {plural(metered['calls'], 'call')}"
    if not metered["unknown_calls"]:
        return said
    return f"{said}, {metered['unknown_calls']:,} of unknown cost, up to {usd(metered['unknown_usd'])} more"


def _grade(grade: OutcomeDetails) -> str:
    return f"{_outcome(grade)} ({clean(grade['error'], 100)})" if grade["error"] else _outcome(grade)


def _outcome(verdict: OutcomeDetails) -> str:
    """`pass`, `fail`, `fail (0.5)` or `broken: model`."""
    if verdict["cause"] or verdict["score"] is None:
        return f"broken: {verdict['cause']}"
    word = "pass" if verdict["success"] else "fail"
    return word if verdict["score"] == verdict["success"] else f"{word} ({verdict['score']:g})"
