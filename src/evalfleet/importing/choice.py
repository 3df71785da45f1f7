"""Which of the results found are a run's: one configuration, and one score a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from evalfleet.benchmarks.waa.reading import Reading, read_task
from evalfleet.benchmarks.waa.trees import TaskFolder
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, TaskId
from evalfleet.names import attempt_id

Keep = Literal["first", "newest"]


@dataclass(frozen=True)
class Past:
    """One try at a task, as its files tell it."""

    folder: TaskFolder
    reading: Reading

    @property
    def is_scored(self) -> bool:
        return self.reading.is_scored

    @property
    def began(self) -> float:
        return self.reading.started or 0.0


def chosen(folders: list[TaskFolder], trial: str | None, keep: Keep | None) -> dict[TaskId, list[Past]]:
    """The tries at each task, the one that settles it last. Raises RequestError when it must be asked."""
    some = _by_task(_one_configuration(_of_trial(folders, trial)))
    return _settled({task: _tries(its) for task, its in some.items()}, keep)


def _of_trial(folders: list[TaskFolder], trial: str | None) -> list[TaskFolder]:
    if trial is None:
        return folders
    chosen = [folder for folder in folders if folder.trial == trial]
    if not chosen:
        there = ", ".join(sorted({folder.trial for folder in folders})[:12])
        raise RequestError(f"there is no trial {trial!r} in these results: there is {there}")
    return chosen


def _one_configuration(folders: list[TaskFolder]) -> list[TaskFolder]:
    known = sorted({folder.settings for folder in folders})
    if len(known) > 1:
        shown = ", ".join("/".join(settings) for settings in known[:4]) + (", ..." if len(known) > 4 else "")
        raise RequestError(
            f"these are results of {len(known)} configurations ({shown}), and a run has one: "
            "name the folder of one of them"
        )
    return folders


def _by_task(folders: list[TaskFolder]) -> dict[TaskId, list[TaskFolder]]:
    """By id; where two domains have the same one, by both."""
    domains: dict[str, set[str]] = {}
    for folder in folders:
        domains.setdefault(folder.task, set()).add(folder.domain)
    found: dict[TaskId, list[TaskFolder]] = {}
    for folder in folders:
        unique = len(domains[folder.task]) == 1
        task = TaskId(folder.task if unique else f"{folder.domain}/{folder.task}")
        found.setdefault(task, []).append(folder)
    return found


def _tries(folders: Iterable[TaskFolder]) -> list[Past]:
    """In the order they were made, but one with a score last: with a score a task is settled."""
    tries = [Past(folder, read_task(str(folder.path))) for folder in folders]
    return sorted(tries, key=lambda past: (past.is_scored, past.began, _natural(past.folder.trial)))


def _natural(trial: str) -> tuple[int, str]:
    return (int(trial), "") if trial.isdecimal() else (0, trial)


def _settled(tries: dict[TaskId, list[Past]], keep: Keep | None) -> dict[TaskId, list[Past]]:
    """One score a task. Which one it is, when there are several, is for the user to say."""
    twice = {task: some for task, some in tries.items() if sum(past.is_scored for past in some) > 1}
    if twice and keep is None:
        task, some = next(iter(twice.items()))
        trials = sorted({past.folder.trial for past in some if past.is_scored}, key=_natural)
        where = f"in trials {', '.join(trials)}" if len(trials) > 1 else "from several workers"
        raise RequestError(
            f"{len(twice)} of {len(tries)} tasks have more than one score ({task} has {where}): "
            "choose with --trial T, or with --keep first or --keep newest"
        )
    return {task: _with_one_score(some, keep or "first") for task, some in tries.items()}


def _with_one_score(tries: list[Past], keep: Keep) -> list[Past]:
    scored = [past for past in tries if past.is_scored]
    chosen = scored[:1] if keep == "first" else scored[-1:]
    return [*(past for past in tries if not past.is_scored), *chosen]


def numbered(task: TaskId, tries: Sequence[Past]) -> list[tuple[AttemptId, Past]]:
    """An attempt is called after its trial, where trials are numbers and each was one try."""
    trials = [past.folder.trial for past in tries]
    plain = all(trial.isdecimal() and str(int(trial)) == trial for trial in trials)
    named = plain and len(set(trials)) == len(trials)
    numbers = [int(trial) for trial in trials] if named else range(len(tries))
    return [(attempt_id(task, number), past) for number, past in zip(numbers, tries, strict=True)]
