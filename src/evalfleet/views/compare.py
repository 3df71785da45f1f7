"""Two runs side by side: paired by task, with what may be concluded from their difference. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from msgspec import Meta

from .documents import Interval, Rate
from .format import clean, duration, percent, plural, table, usd
from .stats import Z95, percentile
from .tasks import by_task

if TYPE_CHECKING:
    from .documents import RepeatedTask, Results

LEVEL = 0.05
"""How likely chance may look like a difference, over all comparisons that are made together."""
RESAMPLES = 10_000
MANY = 1_000
"""With so many tasks the normal interval of a mean is the bootstrap's, and much quicker."""
ALIKE = 1e-5
"""Rates are rounded to six digits, so equal differences may differ by less."""
SHOWN = 20
TELLING_LIMITS = ("attempts", "attempts_ceiling", "task_budget_usd", "max_tokens")
"""Limits that change what an agent can reach. Others change how long a run takes, and what it costs."""


class Side(TypedDict):
    """One of the two that are compared: a run, or the share that one model has in a run."""

    label: Annotated[str, Meta(description="the run's name; with the model, where a run has several")]
    run: str
    model: str | None
    agent: Annotated[dict[str, str], Meta(description="-A")]
    tasks: Annotated[int, Meta(description="of the benchmark; repeats are not counted apart")]
    success_rate: Annotated[Rate | None, Meta(description="of the tasks that are compared")]
    mean_score: Annotated[float | None, Meta(description="of the tasks that are compared")]
    broken: Annotated[int, Meta(description="tasks, or repeats of them, without a score")]
    unrun: int
    median_seconds: Annotated[float | None, Meta(description="of scored tasks")]
    duration_seconds: Annotated[float | None, Meta(description="of the whole run")]
    machines_usd: Annotated[float | None, Meta(description="of the whole run")]
    models_usd: Annotated[float | None, Meta(description="of the whole run; null if unknown")]


class Corners(TypedDict):
    """How many tasks went how in both. With repeats, a task passes where most of its repeats do."""

    both_pass: int
    first_only: int
    second_only: int
    neither: int


class Flip(TypedDict):
    """A task that passes on one side and fails on the other."""

    task_id: str
    domain: str
    passes: Annotated[str, Meta(description="the label of the side on which it passes")]
    rates: Annotated[list[float], Meta(description="the share of its repeats that pass, on each side")]
    scores: Annotated[list[float | None], Meta(description="mean score, on each side")]
    artifacts: Annotated[list[str | None], Meta(description="relative to the home, of the last repeat")]


class Difference(TypedDict):
    """The second side's mean less the first's, of the tasks that both have scored."""

    mean: float
    ci: Annotated[Interval | None, Meta(description="95%; null of fewer than two tasks")]
    method: str


class Comparison(TypedDict):
    """`compare RUN RUN --json` is a list of these: each other run beside the first one."""

    first: Side
    second: Side
    paired: Annotated[int, Meta(description="tasks that both have scored: all figures are of these")]
    differences: Annotated[list[str], Meta(description="what else is not alike, and may explain them")]
    corners: Corners
    rate: Difference | None
    score: Annotated[Difference | None, Meta(description="null where every score is 0 or 1, as the rate is")]
    p: Annotated[float | None, Meta(description="exact McNemar; null with repeats, or without a pair")]
    level: Annotated[float, Meta(description="what p is held against: less where more are compared")]
    real: Annotated[bool, Meta(description="the rates differ by more than chance explains")]
    conclusion: str
    flipped: list[Flip]


# -- statistics ------------------------------------------------------------------------------------


def mcnemar(first_only: int, second_only: int) -> float:
    """How likely chance alone splits the tasks that flipped so unevenly, or worse (exact, two-sided)."""
    flipped, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(flipped, k) for k in range(fewer + 1))
    return min(1.0, tail / (1 << flipped) * 2)


def paired_rates(corners: Corners) -> Difference:
    """The difference of two rates over the same tasks, with Agresti and Min's interval.

    Wald's, with half a task more in each corner: where no task flipped, it still says how little is known.
    """
    up, down = corners["second_only"], corners["first_only"]
    return _agresti_min(sum(_counts(corners)), up - down, up + down)


def _agresti_min(n: int, total: float, squares: float) -> Difference:
    """Of so many differences, by their sum and that of their squares."""
    all_ = n + 2.0
    middle = total / all_
    half = Z95 * math.sqrt((squares + 1.0) / all_ - middle**2) / math.sqrt(all_)
    ci = [max(-1.0, middle - half), min(1.0, middle + half)]
    return {"mean": round(total / n, 6), "ci": _rounded(ci), "method": "paired, Agresti and Min"}


def paired_means(differences: Sequence[float]) -> Difference:
    """The mean of one difference for each task, with an interval from resampling the tasks. Differences that
    are all alike scatter in no sample, and still leave doubt."""
    n = len(differences)
    mean = sum(differences) / n
    if n < 2:
        return {"mean": round(mean, 6), "ci": None, "method": "none: one task is too few"}
    if max(differences) - min(differences) < ALIKE:
        return _agresti_min(n, sum(differences), sum(value**2 for value in differences))
    if n > MANY:
        scatter = sum((value - mean) ** 2 for value in differences) / (n - 1)
        half = Z95 * math.sqrt(scatter / n)
        ci = _rounded([mean - half, mean + half])
        return {"mean": round(mean, 6), "ci": ci, "method": "paired, normal"}
    rng = random.Random(0)  # the same two runs compare alike, every time
    means = [sum(rng.choices(differences, k=n)) / n for _ in range(min(RESAMPLES, 2_000_000 // n))]
    ends = [percentile(means, share) or 0.0 for share in (0.025, 0.975)]
    return {"mean": round(mean, 6), "ci": _rounded(ends), "method": "paired bootstrap over tasks"}


def _counts(corners: Corners) -> tuple[int, int, int, int]:
    return corners["both_pass"], corners["first_only"], corners["second_only"], corners["neither"]


def _rounded(ends: Sequence[float]) -> list[float]:
    return [round(end, 6) for end in ends]


# -- comparing -------------------------------------------------------------------------------------


def sides_of(results: Results) -> list[tuple[Results, str | None]]:
    """What can be compared within one run: its models."""
    return [(results, model) for model in results["by_model"]] or [(results, None)]


def compare(sides: Sequence[tuple[Results, str | None]]) -> list[Comparison]:
    """Each other side beside the first. A side is a run, or with a model that model's share in it."""
    first, *others = sides
    level = LEVEL / max(1, len(others))
    return [_compare(first, other, level) for other in others]


def _compare(
    first: tuple[Results, str | None], second: tuple[Results, str | None], level: float
) -> Comparison:
    tasks = [_judged(*side) for side in (first, second)]
    both = [id for id in tasks[0] if id in tasks[1]]
    pairs = [(tasks[0][id], tasks[1][id]) for id in both]
    labels = [_label(*side) for side in (first, second)]
    columns = zip(*pairs, strict=True) if pairs else ((), ())
    sides = [
        _side(*side, label, column)
        for side, label, column in zip((first, second), labels, columns, strict=True)
    ]
    corners = _corners(pairs)
    repeated = any(task["scored"] + task["broken"] > 1 for pair in pairs for task in pair)
    rate, score = _rates(pairs, corners, repeated), _scores(pairs)
    p = mcnemar(corners["first_only"], corners["second_only"]) if pairs and not repeated else None
    real = p < level if p is not None else rate is not None and not _holds_zero(rate)
    flipped = [
        _flip(pair, labels, (first, second))
        for pair in pairs
        if (_rate(pair[0]) > 0.5) != (_rate(pair[1]) > 0.5)
    ]
    return {
        "first": sides[0],
        "second": sides[1],
        "paired": len(pairs),
        "differences": unlike(first[0], second[0], len(both)),
        "corners": corners,
        "rate": rate,
        "score": score,
        "p": None if p is None else round(p, 6),
        "level": level,
        "real": real,
        "conclusion": _conclusion(labels, rate, p, level, real),
        "flipped": flipped,
    }


def _judged(results: Results, model: str | None) -> dict[str, RepeatedTask]:
    """The benchmark's own id of a task -> its repeats taken together, of those that have a score."""
    own = [task for task in results["tasks"] if model is None or task["model"] == model]
    judged = (task for task in by_task(own, results["strict"]) if task["success_rate"] is not None)
    return {task["task_id"]: task for task in judged}


def _label(results: Results, model: str | None) -> str:
    return results["run"] if model is None else f"{results['run']} {model}"


def _side(results: Results, model: str | None, label: str, paired: Sequence[RepeatedTask]) -> Side:
    own = [task for task in results["tasks"] if model is None or task["model"] == model]
    seconds = [task["duration_seconds"] or 0.0 for task in own if task["success"] is not None]
    scores = [task["mean_score"] for task in paired if task["mean_score"] is not None]
    metered = results["models"]["by_model"].get(model or "")
    models = results["cost"]["models_usd"] if model is None else metered["usd"] if metered else None
    return {
        "label": label,
        "run": results["run"],
        "model": model or results["model"],
        "agent": results["provenance"]["agent"],
        "tasks": len({task["origin"] for task in own}),
        "success_rate": _mean([_rate(task) for task in paired]),
        "mean_score": _mean(scores),
        "broken": sum(task["status"] == "broken" for task in own),
        "unrun": sum(task["status"] not in ("broken", "scored") for task in own),
        "median_seconds": percentile(seconds, 0.5),
        "duration_seconds": results["duration_seconds"],
        "machines_usd": results["cost"]["machines_usd"],
        "models_usd": models,
    }


def _rate(task: RepeatedTask) -> float:
    return task["success_rate"] or 0.0


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _corners(pairs: Sequence[tuple[RepeatedTask, RepeatedTask]]) -> Corners:
    passes = [(_rate(first) > 0.5, _rate(second) > 0.5) for first, second in pairs]
    return {
        "both_pass": passes.count((True, True)),
        "first_only": passes.count((True, False)),
        "second_only": passes.count((False, True)),
        "neither": passes.count((False, False)),
    }


def _rates(
    pairs: Sequence[tuple[RepeatedTask, RepeatedTask]], corners: Corners, repeated: bool
) -> Difference | None:
    if not pairs:
        return None
    if not repeated:
        return paired_rates(corners)
    return paired_means([_rate(second) - _rate(first) for first, second in pairs])


def _scores(pairs: Sequence[tuple[RepeatedTask, RepeatedTask]]) -> Difference | None:
    scores = [(first["mean_score"] or 0.0, second["mean_score"] or 0.0) for first, second in pairs]
    rates = [(_rate(first), _rate(second)) for first, second in pairs]
    return None if scores == rates else paired_means([second - first for first, second in scores])


def _holds_zero(difference: Difference) -> bool:
    ci = difference["ci"]
    return ci is None or ci[0] <= 0.0 <= ci[1]


def _flip(
    pair: tuple[RepeatedTask, RepeatedTask],
    labels: Sequence[str],
    sides: Sequence[tuple[Results, str | None]],
) -> Flip:
    first, second = pair
    return {
        "task_id": first["task_id"],
        "domain": first["domain"],
        "passes": labels[0] if _rate(first) > 0.5 else labels[1],
        "rates": [_rate(first), _rate(second)],
        "scores": [first["mean_score"], second["mean_score"]],
        "artifacts": [_artefacts(*side, first["task_id"]) for side in sides],
    }


def _artefacts(results: Results, model: str | None, task: str) -> str | None:
    own = (t for t in results["tasks"] if t["origin"] == task and (model is None or t["model"] == model))
    return [each["artifacts"] for each in own][-1]


# -- what else differs -----------------------------------------------------------------------------


def unlike(first: Results, second: Results, both: int) -> list[str]:
    """What is not alike in two runs beside the agent and the model, in words: it may explain a difference."""
    if first is second:
        return []
    if first["benchmark"] != second["benchmark"]:
        names = f"{first['benchmark']} and {second['benchmark']}"
        return [f"they are of different benchmarks ({names}): tasks are paired by their names alone"]
    a, b = first["provenance"], second["provenance"]
    found = [
        f"{each['run']} is not over: {plural(each['unrun'], 'task')} of it may still change this"
        for each in (first, second)
        if each["status"] == "running"
    ]
    found += _unlike_tasks(first, second, both)
    for name, what in (("files", "the benchmark's files"), ("score_files", "the files of its grader")):
        if a["digests"].get(name) != b["digests"].get(name):
            found.append(f"{what} are not the same")
    limits = [{name: each["limits"].get(name) for name in TELLING_LIMITS} for each in (a, b)]
    found += _unlike_values("limit", *limits)
    found += _unlike_values("setting", a["settings"], b["settings"])
    found += _unlike_values("version of", a["versions"], b["versions"])
    if first["strict"] != second["strict"]:
        strict = first["run"] if first["strict"] else second["run"]
        found.append(f"broken tasks count as failed in {strict} alone")
    if first["isolation"] != second["isolation"] and first["isolation"] and second["isolation"]:
        kinds = " and ".join(", ".join(each["isolation"]) for each in (first, second))
        found.append(f"attempts were kept apart in different ways ({kinds})")
    return found


def _unlike_tasks(first: Results, second: Results, both: int) -> list[str]:
    ids, others = ({task["origin"] for task in each["tasks"]} for each in (first, second))
    if ids != others:
        alone = [
            f"{plural(len(rest), 'task')} in {each['run']} alone"
            for each, rest in ((first, ids - others), (second, others - ids))
            if rest
        ]
        return [f"{' and '.join(alone)}: only the {both:,} that both have scored are compared"]
    digests = [each["provenance"]["digests"].get("tasks") for each in (first, second)]
    repeats = [len(each["tasks"]) for each in (first, second)]
    if None not in digests and digests[0] != digests[1] and repeats[0] == repeats[1]:
        return ["the tasks have the same names, but not the same parameters or time limits"]
    return []


def _unlike_values(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return [
        f"{what} {name}: {clean(str(first.get(name, 'none')), 60)} and "
        f"{clean(str(second.get(name, 'none')), 60)}"
        for name in names
    ]


# -- in words --------------------------------------------------------------------------------------


def _points(share: float) -> str:
    return f"{100 * abs(share):.1f} points"


def _conclusion(
    labels: Sequence[str], rate: Difference | None, p: float | None, level: float, real: bool
) -> str:
    if rate is None:
        return "Nothing can be concluded: they have no scored task in common."
    ci = rate["ci"]
    proof = [f"95% interval {_signed(ci[0])} to {_signed(ci[1])} points"] if ci else []
    proof += [f"p = {p:.2g} by the exact McNemar test"] if p is not None else []
    shown = f" ({'; '.join(proof)})" if proof else ""
    held = "" if p is None or level == LEVEL else f", held against {level:.2g} because more are compared"
    if rate["mean"] == 0:
        return f"{labels[1]} and {labels[0]} pass equally often{shown}: no difference can be concluded."
    more = "more" if rate["mean"] > 0 else "fewer"
    said = f"{labels[1]} passes {_points(rate['mean'])} {more} than {labels[0]}{shown}"
    if real:
        return f"{said}: more than chance explains{held}."
    return f"{said}: this is within noise{held}, and neither can be called better."


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}"


def comparison_text(comparison: Comparison) -> str:
    """For people: what is not alike first, then both sides, the corners, the sentence, and what flipped."""
    first, second = comparison["first"], comparison["second"]
    parts = ["\n".join(f"note: {line}" for line in comparison["differences"])]
    parts.append(_sides_table(comparison, first, second))
    if comparison["paired"]:
        parts.append(_corners_table(comparison["corners"], first["label"], second["label"]))
    if (score := comparison["score"]) is not None and score["ci"] is not None:
        low, high = score["ci"]
        proof = f"95% interval {low:+.3f} to {high:+.3f}, {score['method']}"
        parts.append(f"mean score: {score['mean']:+.3f} ({proof})")
    parts += [comparison["conclusion"], _flipped_table(comparison["flipped"], first, second)]
    return "\n\n".join(part for part in parts if part)


def _sides_table(comparison: Comparison, first: Side, second: Side) -> str:
    both = (first, second)
    rows: list[tuple[object, ...]] = [
        ("model", *(side["model"] for side in both)),
        ("tasks", *(f"{side['tasks']:,}" for side in both)),
        ("scored in both", *(f"{comparison['paired']:,}" for _ in both)),
        ("broken, unrun", *(f"{side['broken']:,}, {side['unrun']:,}" for side in both)),
        ("pass rate", *(percent(side["success_rate"]) for side in both)),
        ("mean score", *(None if s["mean_score"] is None else f"{s['mean_score']:.3f}" for s in both)),
        ("median task", *(duration(side["median_seconds"]) for side in both)),
        ("whole run", *(duration(side["duration_seconds"]) for side in both)),
        ("machines", *(usd(side["machines_usd"]) for side in both)),
        ("models", *(usd(side["models_usd"]) for side in both)),
    ]
    names = sorted({*first["agent"], *second["agent"]})
    rows += [
        (name, first["agent"].get(name), second["agent"].get(name))
        for name in names
        if first["agent"].get(name) != second["agent"].get(name)
    ]
    labels = (first["label"], second["label"])
    return table(("", *labels), rows, right=labels, width=100)


def _corners_table(corners: Corners, first: str, second: str) -> str:
    rows = [
        (f"{first} passes", corners["both_pass"], corners["first_only"]),
        (f"{first} fails", corners["second_only"], corners["neither"]),
    ]
    head = ("tasks", f"{second} passes", f"{second} fails")
    return table(head, rows, right=head[1:], width=100)


def _flipped_table(flipped: Sequence[Flip], first: Side, second: Side) -> str:
    if not flipped:
        return ""
    rows = [(flip["task_id"], flip["domain"], flip["passes"]) for flip in flipped[:SHOWN]]
    shown = table(("flipped", "domain", "passes in"), rows, width=100)
    more = f"\n... and {len(flipped) - SHOWN} more: --json has them all" if len(flipped) > SHOWN else ""
    task = flipped[0]["task_id"]
    runs = dict.fromkeys((first["run"], second["run"]))
    look = f"\nsee both: {'; '.join(f'evalfleet show {run} {task}' for run in runs)}"
    return shown + more + look
