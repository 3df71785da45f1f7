"""What is printed when a run is over: short, aligned, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalfleet.model import IMPORTED

from .format import clean, counted, duration, interval, models_usd, percent, plural, usd
from .results import Document
from .text_table import pairs


def summary(results: Document, run_dir: Path | None = None) -> str:
    """Eight to twelve lines about a results document. `run_dir`: where its files are."""
    run = results["run"]
    rows: list[tuple[str, object]] = [
        ("tasks", _tasks(results)),
        ("success", _success(results)),
        ("mean score", "-" if results["mean_score"] is None else f"{results['mean_score']:.3f}"),
    ]
    if results["broken"]:
        rows.append(("broken", counted(results["broken_causes"])))
    if results["refusals"]:
        rows.append(("machines", _machines(results)))
    rows += [("attempts", _attempts(results)), ("cost", _cost(results["cost"]))]
    if run_dir is not None:
        rows.append(("results", str(run_dir / "results.json")))
    rows.append(("report", f"evalfleet report {run}"))
    rows += zip(("next", ""), next_steps(results), strict=False)
    return f"{_headline(results)}\n{pairs(rows, indent='  ')}"


def _headline(results: Document) -> str:
    said = {"done": "done", "stopped": "stopped", "failed": "failed", "running": "not finished"}
    head = f"{results['run']}: {said[results['status']]} after {duration(results['duration_seconds'])}"
    stop = results["stop"]
    if stop is not None and results["status"] != "done":
        head += f" ({clean(stop['detail']) or stop['reason']})"
    return head


def _tasks(results: Document) -> str:
    parts = [f"{results['scored']:,} scored", f"{results['broken']:,} broken"]
    if results["unrun"]:
        parts.append(f"{results['unrun']:,} unrun")
    return f"{results['total_tasks']:,}: {', '.join(parts)}"


def _success(results: Document) -> str:
    if results["success_rate"] is None:
        return "nothing was scored"
    share = f"{percent(results['success_rate'])} ({results['succeeded']:,} of {results['scored']:,})"
    return f"{share}, 95% interval {interval(results['success_rate_ci'])}"


def _attempts(results: Document) -> str:
    used = sum(1 for machine in results["machines"] if machine["attempts"])
    causes = f" ({counted(results['causes'])})" if results["causes"] else ""
    retries = plural(results["retries"], "retry")
    return f"{results['attempts']:,} on {plural(used, 'machine')}, {retries}{causes}"


def _machines(results: Document) -> str:
    """Said where fewer were had than were asked for, or not at the first offer."""
    got = sum(machine["ready_at"] is not None for machine in results["machines"])
    workers, offers = plural(results["workers"], "worker"), plural(len(results["refusals"]), "offer")
    return f"{got:,} for {workers}; {offers} refused some: `evalfleet show {results['run']}`"


def _cost(cost: dict[str, Any]) -> str:
    parts = [f"{usd(cost['machines_usd'])} for machines"]
    if cost["models_usd"] is not None and "models_usd_range" not in cost:
        parts.append(f"{usd(cost['models_usd'])} for models")
    if cost["per_task_usd"]:
        parts.append(f"{usd(cost['per_task_usd'])} a scored task")
    of_when = f" (prices of {cost['prices_as_of']})" if cost.get("prices_as_of") else ""
    told = ", ".join(parts) + of_when
    return f"{told}; models {models_usd(cost)}" if "models_usd_range" in cost else told


def next_steps(results: Document) -> list[str]:
    """Commands that help, if anything is left to be done."""
    run = results["run"]
    steps: list[str] = []
    if results["status"] == "running":
        return [f"evalfleet watch {run}", f"evalfleet resume {run}, if nothing works on it any more"]
    if results["places"] == [IMPORTED]:
        return []
    if results["unrun"]:
        steps.append(f"evalfleet resume {run}")
    if results["broken"]:
        steps.append(f"evalfleet resume {run} --only broken")
    return steps
