"""Results as WAA's own client leaves them: read for `evalfleet import waa`, written for WAA's own scripts.

`{result_dir}/{action_space}/{observation_type}/{model}/{trial_id}/{domain}/{task id}/` is one task's. A tree
may hold the result directories of many workers, one beside the other or one in all; a model's name may have
slashes. Any folder of a tree may be given, down to that of one trial.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalfleet.benchmarks.past_results import PastResult, ResultFolder, SettledTask
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
    """Reads result directories of WAA's client, of any number of workers."""

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
        settings = (parts[where - 1], parts[where], "/".join(parts[where + 1 : -3]))
        above = parts[len(top.parts) : where - 1]
        trial, domain = parts[-3], parts[-2]
    else:  # a part of a tree, moved elsewhere: what is above the given folder tells nothing
        inside = parts[len(top.parts) :]
        settings, above = ("", "", ""), inside[:-3]
        trial = inside[-3] if len(inside) >= 3 else "0"
        domain = parts[-2]
    prefix = "/".join((*([top.name] if several else []), *above))
    action, observation, model = map(_written, settings)
    trial, domain, task, worker = map(_written, (trial, domain, parts[-1], _worker(path, prefix)))
    known = (("action_space", action), ("observation_type", observation))
    return ResultFolder(path, known, model, trial, domain, task, worker)


def _written(name: str) -> str:
    """As it can be written down: a file system takes names that are no text."""
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


class WaaResultWriter:
    """Writes WAA's tree of results, and tells the rate that its `show_result.py` computes from it."""

    format = "waa"

    def write(self, plan: Plan, tasks: Sequence[SettledTask], folder: Path) -> Sequence[str]:
        model, spaces = plan.model or "model", _spaces(plan)
        above = folder.joinpath(*spaces, model)
        counted: list[float] = []
        notes: dict[str, int] = {}
        for task in tasks:
            name, _, repeat = task.task.partition("~")
            target = above / str(int(repeat or 1) - 1) / task.domain / name
            target.mkdir(parents=True)
            if task.score is None:
                continue  # WAA's script calls it missing
            text = _copied_result(task, target)
            counted.append(rate_of(text))
            if counted[-1] != task.score:
                note = f"{text.strip()[:20]!r} counts as {counted[-1]:g} there and as {task.score:g} here"
                notes[note] = notes.get(note, 0) + 1
        flags = f"--action_space {spaces[0]} --observation_type {spaces[1]} --use_model {model}"
        return list(_told(tasks, counted, notes, f"python show_result.py --result_dir {folder} {flags}"))


def _spaces(plan: Plan) -> tuple[str, str]:
    """The folders of the client that are called after settings; imported runs have no others."""
    known: dict[str, Any] = {**plan.benchmark_spec.get("spec", {}).get("settings", {}), **plan.settings}
    return str(known.get("action_space", "pyautogui")), str(known.get("observation_type", "a11y_tree"))


def rate_of(text: str) -> float:
    """What one result.txt counts in WAA's own rate, which is the mean of these."""
    try:
        return float(text)
    except ValueError:
        return float(bool(text))


def _copied_result(task: SettledTask, target: Path) -> str:
    """All files of the attempt but ours; the client wrote no result.txt if it was ended at the limit."""
    if task.folder.is_dir():
        shutil.copytree(
            task.folder, target, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(*OURS)
        )
    path = target / RESULT
    if not path.is_file():
        path.write_text(f"{task.score}\n")
    return path.read_text(errors="replace")


def _told(
    tasks: Sequence[SettledTask], counted: Sequence[float], notes: Mapping[str, int], command: str
) -> Iterator[str]:
    ours = [task.score for task in tasks if task.score is not None]
    if not counted:
        yield "no task was scored: WAA's script has nothing to count"
        return
    wins = sum(score == 1.0 for score in ours)
    yield (
        f"WAA's own rate: {sum(counted) / len(counted):.2%}, the mean of {len(counted)} scores; "
        f"tasks with the full score: {wins / len(ours):.2%}; {len(tasks) - len(ours)} tasks without a score "
        "are left out of both"
    )
    yield from (f"{count} of them: {note}" for note, count in sorted(notes.items()))
    yield command
    scored = {task.domain for task in tasks if task.score is not None}
    for group in (OFFICE, DAILY):
        if scored.isdisjoint(group):
            yield f"that script divides by zero here: none of {', '.join(group)} was scored"
