"""Results as WAA's own client leaves them: read for `evalfleet import waa`, written for WAA's own scripts.

`{result_dir}/{action_space}/{observation_type}/{model}/{trial_id}/{domain}/{task id}/` is one task's. A tree
may hold the result directories of many workers, one beside the other or one in all; a model's name may have
slashes. Any folder of a tree may be given, down to that of one trial.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.benchmarks.loaded import PastResult, ResultFolder, SettledTask
from evalfleet.errors import RequestError
from evalfleet.model import Broken, Cause, Outcome, Plan, Scored

from .task_folder import PAGE, RESULT, TRAJECTORY, Reading, read_task

OBSERVATIONS = frozenset({"screenshot", "a11y_tree", "screenshot_a11y_tree", "som"})
MARKS = frozenset({RESULT, TRAJECTORY, PAGE})
LAYOUT = "<action_space>/<observation_type>/<model>/<trial_id>/<domain>/<task id>/result.txt"
OUR_HOME = "fleet.db"
MOST_DEEP = 24
_TASK_LOG = re.compile(r"^task-(\d+)-.*\.log$")
_NOT_TASKS = frozenset({"onboard", "logs"})


class WaaResultReader:
    """A reader of the result directories of WAA's client, of any number of workers."""

    result_file = RESULT

    def find(self, roots: Sequence[Path]) -> Sequence[ResultFolder]:
        return find_tasks(roots)

    def read(self, folder: Path) -> PastResult:
        reading = read_task(str(folder))
        return PastResult(_outcome(reading), reading.started, reading.seconds)


def _outcome(reading: Reading) -> Outcome:
    if reading.score is None:
        return Broken(Cause(reading.cause), reading.error)
    return Scored(
        reading.score,
        success=reading.score == 1.0,
        num_steps=reading.steps,
        error=reading.error or None,
        screenshots=reading.screenshots,
    )


# -- where the client puts what -------------------------------------------------------------------------


def find_tasks(roots: Sequence[Path]) -> list[ResultFolder]:
    """All that the trees hold, by path. Raises RequestError when one is no directory or holds nothing."""
    found: dict[Path, ResultFolder] = {}
    for root in roots:
        if not root.is_dir():
            what = "is no folder" if root.exists() else "is not there"
            raise RequestError(f"{root} {what}: name a results folder of WAA")
        top = root.resolve()
        some = [_described(path, top, len(roots) > 1) for path in _task_folders(top)]
        if not some:
            raise RequestError(f"{root} holds no results of WAA; looked for .../{LAYOUT}")
        found.update((each.path, each) for each in some)
    return sorted(found.values())


def _task_folders(top: Path) -> Iterator[Path]:
    """Links are not followed, and nothing is looked for inside a task's folder."""
    for folder, names, files in os.walk(top):
        path = Path(folder)
        names[:] = sorted(name for name in names if name not in _NOT_TASKS)
        if OUR_HOME in files:
            names.clear()  # what was imported or run before
        elif not MARKS.isdisjoint(files) or _is_placed(path):
            names.clear()
            if path.name not in _NOT_TASKS:
                yield path
        elif len(path.parts) - len(top.parts) >= MOST_DEEP:
            names.clear()


def _is_placed(path: Path) -> bool:
    """A task that left no mark yet is known by where it is, if the model's name has no slash."""
    parts = path.parts
    here = len(parts) >= 6 and parts[-5] in OBSERVATIONS
    return here and not any((path / name).is_dir() for name in os.listdir(path) if name != "logs")


def _described(path: Path, top: Path, several: bool) -> ResultFolder:
    parts = path.parts
    seen = [n for n, part in enumerate(parts[:-4]) if part in OBSERVATIONS and n > 0]
    if seen:
        where = seen[-1]
        settings = (
            _experiment(Path(*parts[: where - 1])),
            *(parts[where - 1], parts[where], "/".join(parts[where + 1 : -3])),
        )
        above = parts[len(top.parts) : where - 1]
        trial, domain = parts[-3], parts[-2]
    else:  # a part of a tree, moved elsewhere: what is above the given folder tells nothing
        inside = parts[len(top.parts) :]
        settings, above = ("", "", "", ""), inside[:-3]
        trial = inside[-3] if len(inside) >= 3 else "0"
        domain = parts[-2]
    prefix = "/".join((*([top.name] if several else []), *above))
    experiment, action, observation, model = map(_written, settings)
    trial, domain, task, worker = map(_written, (trial, domain, parts[-1], _worker(path, prefix)))
    known = (("experiment", experiment), ("action_space", action), ("observation_type", observation))
    return ResultFolder(path, known, model, trial, domain, task, worker)


def _experiment(folder: Path) -> str:
    """The folder's name, if each of its workers left the file that WAA's script for Azure has it write."""
    pattern = f"output_{glob.escape(folder.name)}_worker_*.txt"
    return folder.name if any(folder.glob(pattern)) else ""


def _written(name: str) -> str:
    """The name as it can be written down: a file system takes names that are no text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _worker(path: Path, prefix: str) -> str:
    """Workers that share a result directory are told apart by the names of their logs."""
    logs = path / "logs"
    numbers = [int(match[1]) for match in map(_TASK_LOG.match, _names(logs)) if match]
    number = f"worker-{max(numbers)}" if numbers else ""
    return "/".join(filter(None, (prefix, number))) or "worker-0"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# -- written for WAA's own scripts -----------------------------------------------------------------

OURS = ("result.json", "evalfleet.log", "left_out.json", "client_logs", "container.log", "guest.png")
OFFICE = ("libreoffice_calc", "libreoffice_impress", "libreoffice_writer")
DAILY = ("vlc", "thunderbird", "chrome")


AZURE = "azure"
"""The folder for `show_azure.py`. It links to the tree, so that a result is not there twice."""
AZURE_PATH = ("pyautogui", "a11y_tree")
"""Where that script looks, whatever the settings were."""
AZURE_KEYS = ("agent", "som_origin", "a11y_backend")
"""What an experiment says beside its model; our settings have the same names."""


class _Result(NamedTuple):
    """A score as it was written for WAA's scripts."""

    trial: int
    domain: str
    text: str
    """What is in its result.txt."""
    score: float
    """What it counts here."""


class WaaResultWriter:
    """Writes WAA's tree of results, and tells the rate that its `show_result.py` computes from it.

    `show_azure.py` wants the same below the name of an experiment, and a file that describes experiments.
    """

    format = "waa"

    def write(
        self, plan: Plan, tasks: Sequence[SettledTask], folder: Path, cost: Mapping[str, object]
    ) -> Sequence[str]:
        settings = _settings(plan)
        model = plan.model or "model"
        spaces = tuple(str(settings.get(key, usual)) for key, usual in USUAL_SPACES.items())
        above = folder.joinpath(*spaces, model)
        results: list[_Result] = []
        for task in tasks:
            name, _, repeat = task.task.partition("~")
            trial = int(repeat or 1) - 1
            target = above / str(trial) / task.domain / name
            target.mkdir(parents=True)
            if task.score is not None:  # else WAA's scripts call it missing
                text = _copied_result(task, task.score, target)
                results.append(_Result(trial, task.domain, text, task.score))
        _describe_experiment(plan, settings, model, folder, spaces)
        if not results:
            return ["no task was scored: WAA's scripts have nothing to count"]
        flags = ("--action_space", spaces[0], "--observation_type", spaces[1], "--use_model", model)
        command = shlex.join(("python", "show_result.py", "--result_dir", str(folder), *flags))
        return [*_told(results, len(tasks), command), *_told_of_azure(results, folder / AZURE)]


USUAL_SPACES = {"action_space": "pyautogui", "observation_type": "a11y_tree"}
"""The folders of the client that are called after settings."""


def _settings(plan: Plan) -> dict[str, Any]:
    """What the run's settings were; an imported run knows only what its folders told."""
    return {**plan.benchmark_spec.get("spec", {}).get("settings", {}), **plan.settings}


def _describe_experiment(
    plan: Plan, settings: Mapping[str, Any], model: str, folder: Path, spaces: Sequence[str]
) -> None:
    """The run as the one experiment of `experiments.json`, and its results where that looks for them."""
    link = folder.joinpath(AZURE, plan.run, *AZURE_PATH)
    link.parent.mkdir(parents=True)
    tree = folder.joinpath(*spaces)
    tree.mkdir(parents=True, exist_ok=True)  # a run without tasks
    link.symlink_to(os.path.relpath(tree, link.parent), target_is_directory=True)
    known = {key: settings[key] for key in AZURE_KEYS if key in settings}
    experiment = {"exp_name": plan.run, "model_name": model, **known}
    path = folder / AZURE / "experiments.json"
    path.write_text(json.dumps({plan.run: experiment}, indent=2) + "\n")


def rate_of(text: str) -> float:
    """What one result.txt counts in WAA's own rate, which is the mean of these."""
    return float(text) if _is_number(text) else float(bool(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _copied_result(task: SettledTask, score: float, target: Path) -> str:
    """All files of the attempt but ours; the client wrote no result.txt if it was ended at the limit."""
    if task.folder.is_dir():
        shutil.copytree(
            task.folder, target, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(*OURS)
        )
    path = target / RESULT
    if not path.is_file():
        path.write_text(f"{score}\n")
    return path.read_text(errors="replace")


def _told(results: Sequence[_Result], tasks: int, command: str) -> Iterator[str]:
    """WAA's own rate beside ours, where they differ, and how to have WAA's script say it."""
    wins = sum(result.score == 1.0 for result in results)
    yield (
        f"WAA's own rate: {_rate(results):.2%}, the mean of {len(results)} scores; "
        f"tasks with the full score: {wins / len(results):.2%}; {tasks - len(results)} tasks without a score "
        "are left out of both"
    )
    notes = Counter(
        f"{result.text.strip()[:20]!r} counts as {rate_of(result.text):g} there and as {result.score:g} here"
        for result in results
        if rate_of(result.text) != result.score
    )
    yield from (f"{count} of them: {note}" for note, count in sorted(notes.items()))
    trials = sorted({result.trial for result in results})
    for trial in trials:
        its = [result for result in results if result.trial == trial]
        if len(trials) > 1:
            yield f"that script reads one repeat at a time; of this one it says {_rate(its):.2%}:"
        yield f"{command} --trial_id {trial}" if trial else command
        for group in (OFFICE, DAILY):
            if not any(result.domain in group for result in its):
                yield f"that script divides by zero here: none of {', '.join(group)} was scored"


def _rate(results: Sequence[_Result]) -> float:
    return sum(rate_of(result.text) for result in results) / len(results)


def _told_of_azure(results: Sequence[_Result], folder: Path) -> Iterator[str]:
    """How to run `show_azure.py`, and where it counts otherwise than `show_result.py`."""
    words = ("--result_dir", str(folder), "--json_config", str(folder / "experiments.json"))
    yield shlex.join(("python", "show_azure.py", *words))
    yield "that script tells rates by domain, and none of the whole run"
    strange = sum(not _is_number(result.text) for result in results)
    if strange:
        yield f"{strange} of them, no numbers, are errors for that script, and no part of its rates"
    if any(result.trial for result in results):
        yield "that script reads trial 0 alone: other repeats are no part of its rates"
