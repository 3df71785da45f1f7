"""How a run went: its exit code, and what is printed when it is over."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.model import IMPORTED, Verdict
from evalfleet.state import RunState

from .format import (
    clean,
    counted,
    duration,
    interval,
    local_time,
    models_usd,
    named_numbers,
    painted,
    pairs,
    percent,
    plural,
    usd,
)
from .notable import WHOLE
from .stats import judged

if TYPE_CHECKING:
    from .documents import Cost, PlaceUse, Results

DONE = 0
NOT_AS_ASKED = 1
LIMIT_REACHED = 3
REFUSED = 4
INTERRUPTED = 130

METRICS_SHOWN = MODELS_SHOWN = FAILED_SHOWN = 8


def exit_code(state: RunState) -> int:
    """See the command line's contract: 0 as asked, 1 not so, 3 limits, 4 refused, 130 interrupted."""
    if state.ended_at is None:
        return INTERRUPTED
    if state.stop is None or state.status == "done":
        return DONE if as_asked(state, state.plan.verdict) else NOT_AS_ASKED
    if state.status == "failed":
        return REFUSED
    by_limit = state.stop.reason in ("budget", "time", "store")
    return LIMIT_REACHED if by_limit else INTERRUPTED


def as_asked(state: RunState, verdict: Verdict) -> bool:
    """All answers are graded, few enough broken, and enough of the scored ones solved."""
    return not shortfall(state, verdict)


def shortfall(state: RunState, verdict: Verdict) -> str:
    """Why a run that is over did not do as it was asked to; empty if it did.

    Strictly, a broken task is not solved.
    """
    allowed = verdict.allow_broken * state.total if verdict.allow_broken_is_share else verdict.allow_broken
    if state.answered:
        return f"{plural(state.answered, 'answer')} not graded"
    if state.grading_problem:
        return "nothing was graded again"
    if state.broken > allowed and not verdict.strict:
        limit = f", more than the {allowed:g} of --allow-broken" if allowed else ""
        return f"{plural(state.broken, 'task')} broken{limit}"
    if verdict.fail_under is None:
        return ""
    of, asked = judged(state), f"--fail-under {verdict.fail_under:g}"
    if not of:
        return f"nothing was scored, and {asked} was asked for"
    rate = state.succeeded / of
    return "" if rate >= verdict.fail_under else f"a pass rate of {rate:.4g} is below {asked}"


def summary(
    results: Results, run_dir: Path | None = None, *, colours: bool = False, steps: bool = True
) -> str:
    """Eight to twelve lines about a results document. `run_dir`: where its files are."""
    run = results["run"]
    rows: list[tuple[str, object]] = [
        ("tasks", _tasks(results)),
        ("pass rate", _pass_rate(results)),
        ("mean score", "-" if results["mean_score"] is None else f"{results['mean_score']:.3f}"),
    ]
    if (again := results["graded_again"]) is not None:
        many = f"{plural(again['otherwise'], 'task')} of {again['tasks']:,} with another score"
        rows.append(("graded again", f"{many}, pass rate {percent(again['success_rate'])}; the first counts"))
    for model, part in list(results["by_model"].items())[:MODELS_SHOWN]:
        share = f"{percent(part['success_rate'])} ({part['succeeded']:,} of {part['scored']:,})"
        rows.append((clean(model, 40), f"{share}, 95% interval {interval(part['success_rate_ci'])}"))
    if results["pass_at_k"]:
        ks = list(results["pass_at_k"])
        told = ks if len(ks) <= 6 else [*ks[:3], *ks[-3:]]
        rows.append(
            ("repeats", ", ".join(f"pass@{k} {percent(results['pass_at_k'][k]['mean'])}" for k in told))
        )
    if results["metrics"]:
        means = {name: found["mean"] for name, found in list(results["metrics"].items())[:METRICS_SHOWN]}
        more = len(results["metrics"]) - len(means)
        rows.append(("means", named_numbers(means) + (f" and {more} more" if more else "")))
    if results["tokens"]:
        kinds = list(results["tokens"].items())[:METRICS_SHOWN]
        rows.append(
            ("tokens", "; ".join(f"{kind} {it['total']:,.0f}, mean {it['mean']:,.0f}" for kind, it in kinds))
        )
    if results["shortfall"]:
        rows.append(("exit code 1", results["shortfall"]))
    if results["broken"]:
        rows.append(("broken", counted(results["broken_causes"])))
    if results["refusals"]:
        rows.append(("machines", _machines(results)))
    rows += zip(("places", *[""] * len(results["by_place"])), _places(results), strict=False)
    rows += [("attempts", _attempts(results)), ("cost", _cost(results["cost"])), *_models(results)]
    if run_dir is not None:
        rows.append(("results", str(run_dir / "results.json")))
    rows += _failed(results)
    if results["rerun_of"]:
        rows.append(("rerun of", results["rerun_of"]))
    rows.append(("report", f"{called()} report {run}"))
    commands = [step.replace("evalfleet", called(), 1) for step in next_steps(results) * steps]
    rows += zip(("next", ""), commands, strict=False)
    text = pairs(rows, indent="  ")
    if colours and results["shortfall"]:
        line = next(line for line in text.split("\n") if line.startswith("  exit code 1"))
        text = text.replace(line, painted(line, "bad"), 1)
    return f"{_headline(results)}\n{text}"


def _models(results: Results) -> list[tuple[str, object]]:
    """What is known of metered calls: how many there were, what retries cost, and what nobody knows."""
    models = results["models"]
    if not models["metered"]:
        return []
    parts = [plural(models["calls"], "call")]
    if models["retries_usd"]:
        parts.append(f"{usd(models['retries_usd'])} for attempts that did not decide their task")
    if models["unknown_calls"]:
        parts.append(f"{models['unknown_calls']:,} of unknown cost, up to {usd(models['unknown_usd'])} more")
    if models["untold"]:
        parts.append(f"{plural(len(models['untold']), 'attempt')} on lost machines told nothing")
    if models["unseen"]:
        parts.append(f"{plural(len(models['unseen']), 'attempt')} went round the meter")
    return [("models", ", ".join(parts))]


def _headline(results: Results) -> str:
    said = {"done": "done", "stopped": "stopped", "failed": "failed", "running": "not finished"}
    head = f"{results['run']}: {said[results['status']]} after {duration(results['duration_seconds'])}"
    stop = results["stop"]
    if results["grading_problem"]:
        head += f" (its answers could not be graded: {clean(results['grading_problem'])})"
    elif stop is not None and results["status"] != "done":
        head += f" ({clean(stop['detail'], WHOLE) or stop['reason']})"
    return head


def _tasks(results: Results) -> str:
    parts = [f"{results['scored']:,} scored", f"{results['broken']:,} broken"]
    if results["answered"]:
        parts.append(f"{results['answered']:,} answered and not graded yet")
    if unrun := results["unrun"] - results["answered"]:
        parts.append(f"{unrun:,} unrun")
    return f"{results['total_tasks']:,}: {', '.join(parts)}"


def _pass_rate(results: Results) -> str:
    if results["success_rate"] is None:
        return "nothing was scored"
    of = results["scored"] + results["broken"] if results.get("strict") else results["scored"]
    share = f"{percent(results['success_rate'])} ({results['succeeded']:,} of {of:,})"
    if results.get("strict") and results["broken"]:
        share += ", broken counted as failed"
    return f"{share}, 95% interval {interval(results['success_rate_ci'])}"


def _attempts(results: Results) -> str:
    used = sum(1 for machine in results["machines"] if machine["attempts"])
    causes = f" ({counted(results['causes'])})" if results["causes"] else ""
    retries = plural(results["retries"], "retry")
    return f"{results['attempts']:,} on {plural(used, 'machine')}, {retries}{causes}"


def _failed(results: Results) -> list[tuple[str, object]]:
    failed = [task["task_id"] for task in results["tasks"] if task["success"] is False]
    more = f" and {len(failed) - FAILED_SHOWN:,} more" if len(failed) > FAILED_SHOWN else ""
    return [("failed", f"{', '.join(failed[:FAILED_SHOWN])}{more}")] if failed else []


def _machines(results: Results) -> str:
    """Said where fewer were had than were asked for, or not at the first offer."""
    got = sum(machine["ready_at"] is not None for machine in results["machines"])
    workers, offers = plural(results["workers"], "worker"), plural(len(results["refusals"]), "offer")
    return f"{got:,} for {workers}; {offers} refused some: `evalfleet show {results['run']}`"


def _places(results: Results) -> list[str]:
    """What ran where, if there were several places, and why one was left."""
    uses = results["by_place"]
    if len(uses) < 2:
        return []
    return [
        f"{use['place']}: {use['scored']:,} of {use['attempts']:,} attempts scored{_left(use)}"
        for use in uses
    ]


def _left(use: PlaceUse) -> str:
    opened = [change for change in use["changes"] if change["phase"] == "open"]
    if not opened:
        return ""
    back = "; it came back" if use["circuit"] == "closed" else ""
    return f"; left at {local_time(opened[0]['at'])}, because {opened[0]['why']}{back}"


def _cost(cost: Cost) -> str:
    parts = [f"{usd(cost['machines_usd'])} for machines"]
    if cost["models_usd"] is not None and "models_usd_range" not in cost:
        parts.append(f"{usd(cost['models_usd'])} for models")
    if cost["per_task_usd"]:
        parts.append(f"{usd(cost['per_task_usd'])} a scored task")
    of_when = f" (prices of {cost['prices_as_of']})" if cost.get("prices_as_of") else ""
    told = ", ".join(parts) + of_when
    return f"{told}; models {models_usd(cost)}" if "models_usd_range" in cost else told


def next_steps(results: Results) -> list[str]:
    """Commands that help, if anything is left to be done."""
    run = results["run"]
    steps: list[str] = []
    if results["status"] == "running":
        return [f"evalfleet watch {run}", f"evalfleet resume {run} # if nothing works on it any more"]
    if results["places"] == [IMPORTED]:
        return []
    # with the same budget it would stop at once
    stop = results["stop"]
    more = " --budget MORE" if stop is not None and stop["reason"] == "budget" else ""
    if results["unrun"] > results["answered"]:
        steps.append(f"evalfleet resume {run}{more}")
        if results["status"] == "failed" and any(m["cause"] == "setup" for m in results["machines"]):
            steps = [f"evalfleet resume {run} --with-new-files # once the set-up is mended"]
    elif results["answered"]:
        steps.append(f"evalfleet resume {run} --only ungraded")
    if results["broken"]:
        steps.append(f"evalfleet resume {run} --only broken{more}")
    return steps


def called() -> str:
    """How to call evalfleet from here, so that a command which is suggested can be pasted."""
    if shutil.which("evalfleet"):
        return "evalfleet"
    program = sys.argv[0]
    if os.path.basename(program) == "evalfleet" and os.access(program, os.X_OK):
        return shlex.quote(program)
    return f"{shlex.quote(sys.executable)} -m evalfleet"
