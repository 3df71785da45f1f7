"""Results as HAL leaves them: read for `evalfleet import hal`, written for HAL's own tools.

`<results_dir>/<benchmark>/<run_id>/` has `<run_id>_RAW_SUBMISSIONS.jsonl`, `<run_id>_WALL_CLOCK_TIMES.jsonl`,
`<run_id>.json` (what the grader gave), `<run_id>_UPLOAD.json` and a folder for each task. Any folder of such
a tree may be given, down to that of one run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

from evalfleet.benchmarks.loaded import PastResult, ResultFolder, SettledTask
from evalfleet.errors import RequestError
from evalfleet.files import git
from evalfleet.model import Broken, Cause, Measured, Outcome, Plan, Scored

from .checkout import first_line
from .grader import SUBMISSION
from .scores import BY_AGENT, score_of

RAW, TIMES, UPLOAD = "_RAW_SUBMISSIONS.jsonl", "_WALL_CLOCK_TIMES.jsonl", "_UPLOAD.json"
LAYOUT = "<benchmark>/<run_id>/<run_id>" + RAW
MOST_DEEP = 8
KEPT = ".files"
"""In a run's folder: what its machines got."""
BESIDE = ("git_info", "agent_hash")
"""What stands in `_UPLOAD.json` beside `config`."""
GRADED = ".grading/hal/0"
"""In a run's folder: the calls of HAL's grader, each in a folder called by its number."""


class HalRun(NamedTuple):
    """The files of one run of HAL."""

    benchmark: str
    submissions: Mapping[str, Any]
    """Task -> the last that was submitted for it."""
    extras: Mapping[str, Mapping[str, Any]]
    """Task -> the whole line of it."""
    seconds: Mapping[str, float]
    results: Any
    metrics: Mapping[str, Any]
    model: str


class HalResultReader:
    """A reader of the trees that hal-eval leaves, of any number of runs."""

    result_file = "output.json"

    def find(self, roots: Sequence[Path]) -> Sequence[ResultFolder]:
        found = list[ResultFolder]()
        for root in roots:
            runs = sorted(_run_folders(root))
            if not runs:
                raise RequestError(f"{root} holds no results of HAL: name a folder with {LAYOUT}")
            for folder in runs:
                run = read_run(folder)
                about = (("benchmark", run.benchmark),)
                found += [
                    ResultFolder(folder / task, about, run.model, folder.name, run.benchmark, task, "hal")
                    for task in run.submissions
                    if not _leaves(task)
                ]
        return found

    def read(self, folder: Path) -> PastResult:
        run_folder = next(above for above in folder.parents if (above / f"{above.name}{RAW}").is_file())
        run, task = read_run(run_folder), folder.relative_to(run_folder).as_posix()
        return PastResult(_outcome(run, task), None, run.seconds.get(task))


def _leaves(task: str) -> bool:
    return not task or task.startswith("/") or ".." in task.split("/")


def _run_folders(root: Path) -> list[Path]:
    found = list[Path]()
    for above, names, files in os.walk(root):
        folder = Path(above).resolve()
        if f"{folder.name}{RAW}" in files:
            found.append(folder)
            names.clear()
        elif len(Path(above).relative_to(root).parts) >= MOST_DEEP:
            names.clear()
    return found


@lru_cache(maxsize=64)
def read_run(folder: Path) -> HalRun:
    """What its files say; those that are missing or damaged say nothing."""
    upload = _json(folder / f"{folder.name}{UPLOAD}")
    config = _table(upload.get("config"))
    lines = _lines(folder / f"{folder.name}{RAW}")
    extras = {task: line for line in lines for task in list(line)[:1]}
    times = _lines(folder / f"{folder.name}{TIMES}")
    seconds = {str(line.get("task_id")): line.get("wall_clock_time") for line in times}
    try:
        results = json.loads((folder / f"{folder.name}.json").read_bytes())
    except (OSError, ValueError):
        results = upload.get("raw_eval_results")
    return HalRun(
        str(config.get("benchmark_name") or folder.parent.name),
        {task: line[task] for task, line in extras.items()},
        extras,
        {task: float(told) for task, told in seconds.items() if _is_duration(told)},
        results,
        _table(upload.get("results")),
        str(_table(config.get("agent_args")).get("model_name") or ""),
    )


def _is_duration(told: object) -> TypeGuard[float]:
    return isinstance(told, int | float) and math.isfinite(told) and 0 <= told < 31_536_000


def _json(path: Path) -> dict[str, Any]:
    try:
        return _table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines that are no JSON objects are passed over, as HAL does."""
    found = list[dict[str, Any]]()
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            if told := _table(json.loads(line)):
                found.append(told)
        except (ValueError, RecursionError):
            continue
    return found


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _outcome(run: HalRun, task: str) -> Outcome:
    if run.results is None:
        return Broken(Cause.GRADING, "HAL has left no grades")
    place = list(run.submissions).index(task)
    score = score_of(run.benchmark, task, place, run.results, run.metrics, run.extras[task])
    if score is None:
        return Broken(Cause.GRADING, "HAL's grades say nothing about it")
    told, error = run.submissions[task], None
    if isinstance(told, str) and told.startswith("ERROR"):
        error = first_line(told)
    marked = Measured(metadata={"score_from": "agent"}) if run.benchmark.startswith(BY_AGENT) else None
    return Scored(score, success=score == 1.0, error=error, measured=marked)


# -- writing ---------------------------------------------------------------------------------------------


class HalResultWriter:
    """A writer of the tree that hal-eval would have left."""

    format = "hal"

    def write(
        self, plan: Plan, tasks: Sequence[SettledTask], folder: Path, cost: Mapping[str, Any]
    ) -> Sequence[str]:
        if any(task.folder.name.count("~") for task in tasks):
            raise RequestError(f"run {plan.run!r} has repeats of tasks, which HAL has no folders for")
        settings = settings_of(plan)
        benchmark = str(settings.get("benchmark") or plan.settings.get("benchmark") or plan.benchmark)
        target = folder / benchmark / plan.run
        target.mkdir(parents=True)
        tree, args = Tree({}, {}, {}, dict(cost), {}), dict[str, Any]()
        for task in tasks:
            submission = _json(task.folder / SUBMISSION)
            if task.task not in submission:
                continue  # hal-eval --continue_run will run it
            own = {task.task: submission.pop(task.task)}
            tree.lines[task.task] = {**own, **submission}  # HAL takes the first key for the task
            tree.costs[task.task] = task.model_usd
            result = _json(task.folder / "result.json")
            if _is_duration(seconds := result.get("seconds")):
                tree.times[task.task] = float(seconds)
            tree.usage[task.task] = dict(task.metered) or _table(result.get("usage"))
            if (task.folder / "task").is_dir():
                shutil.copytree(task.folder / "task", target / task.task, symlinks=True)
                args = args or _json(task.folder / "task/agent_args.json")
        graded = _graded(tasks, tree.lines)
        about = config_of(plan, benchmark, args)
        digest = str(_table(plan.benchmark_spec.get("spec")).get("digest"))
        runs = {task.folder.parent.parent for task in tasks}
        about["agent_hash"] = next((agent_hash(run / KEPT / digest / "hal/agent") for run in runs), None)
        write_tree(target, tree, graded, about)
        said = f"{len(tree.lines)} submissions in {target}"
        if graded is None:
            return [f"{said}; HAL's grades are not there for the whole run"]
        return [f"{said}; HAL's accuracy: {_table(graded.get('metrics')).get('accuracy')}"]


class Tree(NamedTuple):
    """What the tasks of one run of HAL have left."""

    lines: dict[str, dict[str, Any]]
    """Task -> what it submitted, under its own id first."""
    times: dict[str, float]
    costs: dict[str, float | None]
    """Task -> what its models cost in US dollars; None: nobody knows."""
    run_cost: dict[str, Any]
    """What the run cost, machines and all, as `results.json` has it."""
    usage: dict[str, dict[str, Any]]
    """Task -> model -> its tokens, as far as anything tells."""


def read_tree(folder: Path) -> Tree:
    """What a tree says that we, or hal-eval, have left."""
    run, upload = read_run(folder), _json(folder / f"{folder.name}{UPLOAD}")
    ours = _table(upload.get("evalfleet"))
    costs = {task: _usd(told) for task, told in _table(ours.get("task_costs")).items()}
    return Tree(
        {task: dict(line) for task, line in run.extras.items()},
        dict(run.seconds),
        {task: costs.get(task) for task in run.extras},
        _table(ours.get("cost")),
        {task: _table(told) for task, told in _table(ours.get("task_usage")).items()},
    )


def write_tree(folder: Path, tree: Tree, graded: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    """Write the files of a run, whose id is the folder's name; those of its tasks are there."""
    run, lines = folder.name, tree.lines
    _write_lines(folder / f"{run}{RAW}", list(lines.values()))
    times = [{"task_id": task, "wall_clock_time": seconds} for task, seconds in tree.times.items()]
    _write_lines(folder / f"{run}{TIMES}", times)
    (folder / f"{run}.log").write_text(f"{run}: {len(lines)} tasks submitted\n", "utf-8")
    for name in (f"{run}.json", f"{run}{UPLOAD}"):
        (folder / name).unlink(missing_ok=True)
    if graded is not None:
        _write_json(folder / f"{run}.json", graded["results"])
        _write_json(folder / f"{run}{UPLOAD}", _upload(run, tree, graded, config))


def settings_of(plan: Plan) -> dict[str, Any]:
    """What `HalSettings` were when the run was planned."""
    return _table(_table(plan.benchmark_spec.get("spec")).get("settings"))


def config_of(plan: Plan, benchmark: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of `_UPLOAD.json`, but for what the grades tell."""
    settings = settings_of(plan)
    commit, agent = plan.provenance.commit if plan.provenance else "", settings.get("agent_name") or plan.run
    config: dict[str, Any] = {
        "agent_name": agent,
        "benchmark_name": benchmark,
        "agent_args": args,
        "run_command": run_command(settings, benchmark, agent, plan.run, args),
        "prompt_sensitivity": False,
        "git_info": git_info(Path(settings.get("hal_repo") or "."), commit),
    }
    if version := settings.get("agent_version"):
        config["agent_version"] = version
    return config


def run_command(
    settings: Mapping[str, Any], benchmark: str, agent: str, run: str, args: Mapping[str, Any]
) -> str:
    """The line by which hal-eval itself would make such a run, as HAL's schema wants it."""
    folder = Path(settings.get("agent_dir") or ".")
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(settings.get("hal_repo") or ".")
    words = {
        "--benchmark": benchmark,
        "--agent_name": agent,
        "--agent_function": settings.get("agent_function") or "main.run",
        "--agent_dir": folder.name if folder.is_absolute() else str(folder),
        "--run_id": run,
    }
    line = ["hal-eval", *(str(word) for pair in words.items() for word in pair)]
    for name, value in args.items():
        if name != "benchmark_name":  # HAL adds it to the arguments itself
            line += ["-A", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(line)


def git_info(repo: Path, commit: str = "") -> dict[str, str] | None:
    """What HAL calls so: of the checkout, if it still is at the commit of the run."""
    head = git(repo, "rev-parse", "HEAD")
    if not head or commit not in ("", head):
        return {"commit": commit} if commit else None
    url = git(repo, "config", "--get", "remote.origin.url")
    return {
        "commit": head,
        "repository_url": re.sub(r"//[^/@]*@", "//", url),  # a token may stand in it
        "branch": git(repo, "rev-parse", "--abbrev-ref", "HEAD"),
    }


def _graded(tasks: Sequence[SettledTask], lines: Mapping[str, Any]) -> dict[str, Any] | None:
    """What HAL's grader gave for all of them at once, with its metrics."""
    for task in tasks:
        calls = task.folder.parent.parent / GRADED
        told, order = _json(calls / "1/answer.json"), _json(calls / "1/order.json")
        submitted = _table(order.get("submissions"))
        if "results" in told and all(each in submitted for each in lines if is_answer(lines[each][each])):
            return {**told, "at": (calls / "1/answer.json").stat().st_mtime}
    return None


def is_answer(told: object) -> bool:
    """Whether hal-eval --continue_run would leave the task as it is."""
    return not (isinstance(told, str) and told.startswith("ERROR"))


def _usd(told: object) -> float | None:
    return float(told) if _is_duration(told) else None


def _upload(run: str, tree: Tree, graded: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {
        task: line[task]["metrics"]
        for task, line in tree.lines.items()
        if isinstance(line[task], dict) and isinstance(line[task].get("metrics"), dict)
    }
    known = [usd for usd in tree.costs.values() if usd is not None]
    traces = _table(graded.get("wandb"))
    total = sum(known) if len(known) == len(tree.lines) else _usd(traces.get("total_cost"))  # or unknown
    date = datetime.datetime.fromtimestamp(graded["at"], datetime.UTC).strftime("%Y-%m-%d")
    return {
        "config": {**{k: v for k, v in config.items() if k not in BESIDE}, "date": date, "run_id": run},
        "results": {
            **_table(graded.get("metrics")),
            "total_cost": total,
            "latencies": _table(traces.get("latencies")),
        },
        "raw_eval_results": graded["results"],
        "raw_logging_results": traces.get("raw_logging_results") or {},
        "task_prompts": _table(graded.get("prompts")),
        "total_usage": _table(traces.get("total_usage")) or _total_usage(tree),
        "total_cost": total,
        "git_info": config.get("git_info"),
        "agent_hash": config.get("agent_hash"),
        "wall_clock_times": tree.times,
        "task_step_counts": {t: told["step_count"] for t, told in metrics.items() if "step_count" in told},
        "task_metrics": metrics,
        "evalfleet": {"cost": tree.run_cost, "task_costs": tree.costs, "task_usage": tree.usage},
    }


def agent_hash(agent: Path) -> str | None:
    """What HAL calls the hash of an agent: of the names and contents of its files, folder by folder."""
    if not agent.is_dir():
        return None
    total = hashlib.sha256()
    for above, folders, names in os.walk(agent):
        folders.sort()
        for name in sorted(names):
            path = Path(above, name)
            total.update(path.relative_to(agent).as_posix().encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def _total_usage(tree: Tree) -> dict[str, dict[str, int]]:
    """Model -> tokens, in the words of HAL's own files."""
    words = {"input": "prompt_tokens", "output": "completion_tokens", "cached": "cache_read_input_tokens"}
    total = dict[str, dict[str, int]]()
    for by_model in tree.usage.values():
        for model, tokens in by_model.items():
            sums = total.setdefault(model, dict.fromkeys(words.values(), 0))
            for kind, word in words.items():
                count = _table(tokens).get(kind)
                sums[word] += count if isinstance(count, int) else 0
    return total


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")
