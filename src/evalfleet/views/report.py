"""A run as a document to keep or send on: Markdown, JSON, CSV, and what CI reads."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from evalfleet.errors import RequestError
from evalfleet.files import to_json
from evalfleet.names import hint

from .ci import github_annotations, junit
from .format import clean, counted, duration, interval, local_time, models_usd, number, percent, usd, user_of
from .summary import next_steps
from .tasks import in_order, outcome_word

if TYPE_CHECKING:
    from .documents import Figures, MachineResult, Results, Shares, TaskResult

SLOWEST = 10
ATTEMPTS_NAMED = 5
MOST = 50
"""Longer lists of broken tasks and machines are cut: results.json has all."""
TASKS_MOST = 5000
METRICS_ACROSS = 6
"""So many metrics have a column in the table of domains."""


def report(results: Results, format: str) -> str:
    """The report in `format`, one of `FORMATS`. Raises RequestError for another."""
    make = FORMATS.get(format)
    if make is None:
        raise RequestError(f"report format {format!r} is unknown; {hint(format, FORMATS)}")
    return make(results if format == "json" else _without_hosts(results))


def _without_hosts(results: Results) -> Results:
    """Return the results with the users that changed the run named without their computers."""
    text = json.dumps(results)
    for by in {entry["by"] for entry in results.get("steering") or [] if entry["by"]}:
        text = text.replace(json.dumps(by)[1:-1], json.dumps(user_of(by))[1:-1])
    return cast("Results", json.loads(text))


def _json(results: Results) -> str:
    return to_json(results).decode()


# -- Markdown --------------------------------------------------------------------------------------


def _markdown(results: Results) -> str:
    sections = [
        _headline(results),
        _domains(results),
        _models(results),
        _repeats(results),
        _metrics(results),
        _tasks(results),
        _attempts(results),
        _cost(results),
        _slowest(results),
        _broken(results),
        _retried(results),
        _unrun(results),
        _places(results),
        _machines(results),
        _steering(results),
        _provenance(results),
        _next(results),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _headline(results: Results) -> str:
    rate = percent(results["success_rate"])
    of = f"{results['scored']:,} scored tasks"
    if results.get("strict"):
        of = f"{results['scored'] + results['broken']:,} tasks, broken ones counted as failed"
    rows = [
        ("Pass rate", f"**{rate}** ({results['succeeded']:,} of {of})"),
        ("95% interval", interval(results["success_rate_ci"])),
        ("Mean score", _number(results["mean_score"])),
        ("Tasks", _task_counts(results)),
        ("Benchmark", results["benchmark"]),
        ("Model", results["model"] or "-"),
        ("Places", ", ".join(results["places"])),
        ("Isolation", _isolation(results)),
        ("Status", _status(results)),
        ("Started", local_time(results["started_at"])),
        ("Ended", local_time(results["ended_at"]) or "-"),
        ("Duration", duration(results["duration_seconds"])),
        ("Cost of machines", usd(results["cost"]["machines_usd"])),
    ]
    return f"# {_cell(results['run'])}\n\n" + _table(["", ""], rows)


ISOLATION = {
    "user": "each attempt was a user of its own",
    "none": "none: attempts on one machine could reach each other",
    "container": "each attempt was in a container of its own",
    "own": "the benchmark's own",
}


def _isolation(results: Results) -> str:
    return "; ".join(ISOLATION.get(kind, kind) for kind in results["isolation"]) or "-"


def _task_counts(results: Results) -> str:
    numbers = {"scored": results["scored"], "broken": results["broken"], "unrun": results["unrun"]}
    counts = ", ".join(f"{n:,} {name}" for name, n in numbers.items())
    answered = f" (of these, {results['answered']:,} answered and not graded yet)"
    return f"{results['total_tasks']:,}: {counts}{answered if results['answered'] else ''}"


def _status(results: Results) -> str:
    stop = results["stop"]
    if results["grading_problem"]:
        return f"{results['status']} (its answers could not be graded: {results['grading_problem']})"
    return f"{results['status']} ({stop['detail'] or stop['reason']})" if stop else results["status"]


def _domains(results: Results) -> str:
    return _parts("domain", {name or "(none)": part for name, part in results["by_domain"].items()})


def _models(results: Results) -> str:
    return _parts("model", results["by_model"])


def _parts(kind: str, parts: Mapping[str, Shares]) -> str:
    """The table of a run's parts, by what they are parted by."""
    head = [kind.capitalize(), "Tasks", "Scored", "Passed", "Pass rate", "95% interval", "Mean score"]
    rows = [
        (
            name,
            part["total"],
            part["scored"],
            part["succeeded"],
            percent(part["success_rate"]),
            interval(part["success_rate_ci"]),
            _number(part["mean_score"]),
        )
        for name, part in parts.items()
    ]
    return f"## By {kind}\n\n" + _table(head, rows, right=(1, 2, 3, 4, 6)) if rows else ""


def _repeats(results: Results) -> str:
    """Each task with its repeats taken together, and how likely one of k tries succeeds."""
    if not results["pass_at_k"]:
        return ""
    whole = [(model, part["pass_at_k"]) for model, part in results["by_model"].items()]
    whole = whole or [(results["model"] or "all", results["pass_at_k"])]
    rows = [
        (model, f"pass@{k}", percent(found["mean"]), interval(found["ci"]), found["tasks"])
        for model, at_k in whole
        for k, found in at_k.items()
    ]
    text = "## Repeats\n\n" + _table(["Model", "", "Mean", "95% interval", "Tasks"], rows, right=(2, 4))
    ks = list(results["pass_at_k"])
    head = ["Task", "Model", "Scored", "Succeeded", "Mean score", *(f"pass@{k}" for k in ks)]
    each = [
        (
            task["task_id"],
            task["model"] or "-",
            f"{task['scored']} of {task['total']}",
            task["succeeded"],
            _number(task["mean_score"]),
            *(percent(task["pass_at_k"].get(k)) for k in ks),
        )
        for task in results["by_task"][:TASKS_MOST]
    ]
    return f"{text}\n\n{_table(head, each, right=range(2, len(head)))}"


def _metrics(results: Results) -> str:
    """The benchmark's own numbers, with the means of each domain where there are several; and tokens."""
    rows = [
        (name, figures["count"], number(figures["mean"]), number(figures["min"]), number(figures["max"]))
        for name, figures in results["metrics"].items()
    ]
    text = ""
    if rows:
        head = ["Metric", "Scored tasks", "Mean", "Least", "Most"]
        text = "## Metrics\n\n" + _table(head, rows[:MOST], right=(1, 2, 3, 4)) + _rest(len(rows), "metrics")
    domains, names = results["by_domain"], list(results["metrics"])[:METRICS_ACROSS]
    if rows and len(domains) > 1:
        means = [
            (domain or "(none)", *(_mean(part["metrics"], name) for name in names))
            for domain, part in domains.items()
        ]
        text += "\n\n" + _table(["Mean by domain", *map(_cell, names)], means, right=range(1, len(names) + 1))
    tokens = [
        (kind, number(figures["total"]), number(figures["mean"]), figures["count"])
        for kind, figures in results["tokens"].items()
    ]
    if tokens:
        title = "\n\n## Tokens\n\n" if text else "## Tokens\n\n"
        text += title + _table(
            ["Kind", "Total", "Mean", "Attempts that told"], tokens[:MOST], right=(1, 2, 3)
        )
    return text


def _mean(metrics: Mapping[str, Figures], name: str) -> str:
    return number(metrics[name]["mean"]) if name in metrics else "-"


def _tasks(results: Results) -> str:
    """Every task with its outcome, domain by domain, failures first."""
    domains: dict[str, list[TaskResult]] = {}
    for task in results["tasks"][:TASKS_MOST]:
        domains.setdefault(task["domain"], []).append(task)
    parts = ["## Tasks"]
    for domain, tasks in sorted(domains.items()):
        counts = Counter(outcome_word(task) for task in tasks)
        title = f"### {_cell(domain) or '(none)'}: " if len(domains) > 1 else ""
        parts.append(title + ", ".join(f"{n:,} {word}" for word, n in counts.most_common()))
        rows = [
            (
                task["task_id"],
                f"broken: {task['cause']}" if task["status"] == "broken" else outcome_word(task),
                _number(task["score"]),
                "-" if task["num_steps"] is None else task["num_steps"],
                duration(task["duration_seconds"]),
                task["attempts"],
                task["error"] or "",
            )
            for task in in_order(tasks)
        ]
        head = ["Task", "Outcome", "Score", "Steps", "Duration", "Attempts", "Why"]
        parts.append(_table(head, rows, right=(2, 3, 4, 5)))
    left = len(results["tasks"]) - TASKS_MOST
    parts += [f"... and {left:,} more tasks; results.json has them all."] if left > 0 else []
    return "\n\n".join(parts)


def _provenance(results: Results) -> str:
    """What it takes to run the same again."""
    made = results["provenance"]
    tables = {"Settings": made["settings"], "Agent": made["agent"], "Tasks chosen by": made["selection"]}
    rows: list[tuple[str, object]] = [
        (name, ", ".join(f"{key} = {_said(value)}" for key, value in table.items()))
        for name, table in tables.items()
        if table
    ]
    set_limits = ("attempts", "budget_usd", "max_duration_s", "canary", "workers")
    limits = {name: made["limits"].get(name) for name in set_limits}
    rows.append(("Limits", ", ".join(f"{name} {value}" for name, value in limits.items() if value)))
    commit = f"{made['commit']}{', with uncommitted changes' if made['uncommitted'] else ''}"
    rows += [("Commit", commit)] if made["commit"] else []
    rows += [(f"Digest of {name.replace('_', ' ')}", digest) for name, digest in made["digests"].items()]
    rows += [("Versions", ", ".join(f"{name} {version}" for name, version in made["versions"].items()))]
    return "## Made of\n\n" + _table(["", ""], [row for row in rows if row[1]])


def _said(value: object) -> str:
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def _attempts(results: Results) -> str:
    total, retries = results["attempts"], results["retries"]
    text = f"## Attempts\n\n{total:,} attempts, of which {retries:,} were retries."
    seconds = results["task_seconds"]
    if seconds["p50"] is not None:
        text += (
            f" A scored attempt took {duration(seconds['p50'])} (median), {duration(seconds['p90'])} "
            f"(90th percentile), {duration(seconds['max'])} at most."
        )
    if not results["causes"]:
        return text + " None was broken."
    rows = [
        (name.replace("_", " "), n, results["broken_causes"].get(name, 0)) for name, n in _causes(results)
    ]
    return text + "\n\n" + _table(["Cause", "Broken attempts", "Tasks broken for good"], rows, right=(1, 2))


def _causes(results: Results) -> list[tuple[str, int]]:
    return sorted(results["causes"].items(), key=lambda pair: (-pair[1], pair[0]))


def _cost(results: Results) -> str:
    cost = results["cost"]
    rows = [
        ("Machines", usd(cost["machines_usd"])),
        ("Models", models_usd(cost)),
        ("A scored task", usd(cost["per_task_usd"]) if cost["per_task_usd"] is not None else "-"),
    ]
    text = "## Cost\n\n" + _table(["", "USD"], rows, right=(1,)) + _metered(results)
    if cost.get("prices_as_of"):
        text += (
            f"\n\nMachines: list prices of {_cell(cost['prices_as_of'])}, disks and addresses included, from "
            "each request until the machine was seen to be gone."
        )
    return text


def _metered(results: Results) -> str:
    """What is known of model calls, and how well."""
    models = results["models"]
    if not models["metered"]:
        return "\n\nModels not metered."
    said = [f"{models['calls']:,} model calls were metered"]
    if models["unknown_calls"]:
        most = models["unknown_usd"]
        more = f", which is up to {usd(most)} more (estimated)" if most else ""
        said.append(f"of {models['unknown_calls']:,} the tokens or the price are unknown{more}")
    if models["retries_usd"]:
        said.append(f"{usd(models['retries_usd'])} went to attempts that did not decide their task")
    if models["untold"]:
        up_to = f", up to {usd(models['lost_usd'])}" if models["lost_usd"] else ""
        said.append(f"what {_attempts_named(models['untold'])} on lost machines used{up_to} is unknown")
    text = "\n\n" + "; ".join(said) + "."
    if models["unseen"]:
        round_it = _attempts_named(models["unseen"])
        text += f" The agent went round the meter: {round_it} told of calls that it did not see."
    if "none" in results["isolation"]:
        text += " Attempts were not isolated: an agent that is root could have read the key."
    rows = [
        (name, use["calls"], use["tokens"].get("in", 0), use["tokens"].get("out", 0), usd(use["usd"]))
        for name, use in models["by_model"].items()
    ]
    head = ["Model", "Calls", "Tokens in", "Tokens out", "USD"]
    text += "\n\n" + _table(head, rows, right=(1, 2, 3, 4)) if rows else ""
    causes = [(name.replace("_", " "), usd(spent)) for name, spent in models["by_cause"].items()]
    if set(models["by_cause"]) - {"scored"}:
        text += "\n\n" + _table(["What became of the attempt", "Models, USD"], causes, right=(1,))
    return text


def _attempts_named(attempts: Sequence[str]) -> str:
    named = ", ".join(_cell(attempt) for attempt in attempts[:ATTEMPTS_NAMED])
    more = len(attempts) - ATTEMPTS_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def _slowest(results: Results) -> str:
    timed = [task for task in results["tasks"] if task["success"] is not None]
    timed.sort(key=lambda task: -(task["duration_seconds"] or 0.0))
    rows = [
        (task["task_id"], duration(task["duration_seconds"]), _verdict(task), task["machine"])
        for task in timed[:SLOWEST]
    ]
    if not rows:
        return ""
    return "## Slowest tasks\n\n" + _table(["Task", "Duration", "Outcome", "Machine"], rows, right=(1,))


def _verdict(task: TaskResult) -> str:
    limit = ", time limit" if task["limit_seconds"] is not None else ""
    return f"{outcome_word(task)} ({_number(task['score'])}){limit}"


def _broken(results: Results) -> str:
    broken = [task for task in results["tasks"] if task["status"] == "broken"]
    rows = [
        (task["task_id"], (task["cause"] or "").replace("_", " "), task["error"] or "", task["attempts"])
        for task in broken[:MOST]
    ]
    if not rows:
        return ""
    head = ["Task", "Cause", "Reason", "Attempts"]
    return "## Broken tasks\n\n" + _table(head, rows, right=(3,)) + _rest(len(broken), "tasks")


def _retried(results: Results) -> str:
    """Scores that are not of a first attempt: whoever compares rates wants to know."""
    retried = [task for task in results["tasks"] if task["success"] is not None and task["broken_attempts"]]
    rows = [
        (task["task_id"], _verdict(task), counted(task["broken_attempts"]), task["attempts"])
        for task in retried[:MOST]
    ]
    if not rows:
        return ""
    head = ["Task", "Outcome", "Broken before", "Attempts"]
    title = "## Scores after broken attempts\n\n"
    return title + _table(head, rows, right=(3,)) + _rest(len(retried), "tasks")


def _unrun(results: Results) -> str:
    names = [_cell(task["task_id"]) for task in results["tasks"] if task["status"] == "unrun"]
    if not names:
        return ""
    return f"## Unrun tasks\n\n{', '.join(names[:MOST])}{_rest(len(names), 'tasks')}"


def _machines(results: Results) -> str:
    machines = results["machines"]
    rows = [
        (
            machine["name"],
            "/".join(filter(None, (machine["place"], machine["region"], machine["size"]))),
            duration(machine["uptime_seconds"]),
            usd(machine["cost_usd"]),
            machine["attempts"],
            machine["scored"],
            _end(machine),
        )
        for machine in machines[:MOST]
    ]
    if not rows:
        return ""
    head = ["Machine", "Where", "Uptime", "Cost", "Attempts", "Scored", "End"]
    ends = counted(_ends(machines))
    text = f"## Machines\n\n{len(machines):,} in all{f'; given up: {ends}' if ends else ''}.\n\n"
    return text + _table(head, rows, right=(2, 3, 4, 5)) + _rest(len(machines), "machines")


def _places(results: Results) -> str:
    """What ran where, and why: said where there were several places."""
    uses = results.get("by_place", [])
    if len(uses) < 2:
        return ""
    head = ["Place", "Machines", "Failed", "Attempts", "Scored", "Broken", "Cost"]
    rows = [
        (use["place"], use["machines"], use["failed_machines"], use["attempts"], use["scored"], use["broken"],
         usd(use["machines_usd"]))
        for use in uses
    ]  # fmt: skip
    said = {"open": "left", "draining": "no new machines", "closed": "machines again"}
    changes = [
        (local_time(change["at"]), use["place"], said[change["phase"]], change["why"])
        for use in uses
        for change in use["changes"]
    ]
    why = "\n\n" + _table(["When", "Place", "What", "Why"], changes) if changes else ""
    return "## Places\n\n" + _table(head, rows, right=(1, 2, 3, 4, 5, 6)) + why


def _steering(results: Results) -> str:
    """What people have changed of the run while it went on: whoever compares runs must know."""
    steered = results.get("steering") or []
    if not steered:
        return ""
    rows = [(entry["at"], entry["what"]) for entry in steered[:MOST]]
    return "## Steering\n\n" + _table(["When", "What"], rows) + _rest(len(steered) - MOST, "changes")


def _ends(machines: list[MachineResult]) -> dict[str, int]:
    causes = [machine["cause"] for machine in machines if machine["cause"]]
    return {cause: causes.count(cause) for cause in set(causes)}


def _end(machine: MachineResult) -> str:
    if machine["phase"] not in ("condemned", "deleted"):
        return str(machine["phase"])
    cause = str(machine["cause"] or "").replace("_", " ")
    return ": ".join(part for part in (cause, machine["detail"]) if part) or "released"


def _next(results: Results) -> str:
    steps = next_steps(results)
    return "## What to do next\n\n" + "\n".join(f"    {step}" for step in steps) if steps else ""


def _rest(count: int, what: str) -> str:
    return f"\n\n... and {count - MOST:,} more {what}; results.json has them all." if count > MOST else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    body = [[_cell(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(head), rule, *body])


def _cell(value: object) -> str:
    """Text that cannot end the cell, nor become a tag or a link: reasons hold whatever a machine said."""
    return re.sub(r"[\\|\[]", r"\\\g<0>", clean(str(value), 200)).replace("<", "&lt;")


# -- CSV -------------------------------------------------------------------------------------------

COLUMNS = (
    "task_id",
    "domain",
    "status",
    "success",
    "score",
    "num_steps",
    "duration_seconds",
    "attempts",
    "cause",
    "error",
    "machine",
    "artifacts",
    "broken_attempts",
    "origin",
    "repeat",
    "model",
    "cost_usd",
)


def _csv(results: Results) -> str:
    """One row a task, by RFC 4180: fixed columns, one for each metric and kind of tokens, and metadata."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    kinds = sorted({kind for task in results["tasks"] for kind in task["tokens"]})
    names = sorted({name for task in results["tasks"] for name in task["metrics"]})
    has_metadata = any(task["metadata"] for task in results["tasks"])
    head = [*COLUMNS, *(f"tokens.{kind}" for kind in kinds), *(f"metrics.{name}" for name in names)]
    writer.writerow([*head, "metadata"] if has_metadata else head)
    for task in results["tasks"]:
        row = {**task, "broken_attempts": counted(task["broken_attempts"])}
        cells = [row[column] for column in COLUMNS]
        cells += [task["tokens"].get(kind) for kind in kinds]
        cells += [task["metrics"].get(name) for name in names]
        if has_metadata:
            cells.append(json.dumps(task["metadata"], ensure_ascii=False) if task["metadata"] else None)
        writer.writerow([_field(cell) for cell in cells])
    return out.getvalue()


def _field(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    # A spreadsheet would run it: the text of an error is the agent's, and no agent is trusted.
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


FORMATS: dict[str, Callable[[Results], str]] = {
    "md": _markdown,
    "json": _json,
    "csv": _csv,
    "junit": junit,
    "github": github_annotations,
}
