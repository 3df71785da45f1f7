"""HAL's own grader, asked for a whole run at once, after its machines are gone.

Some graders need all answers of a run. If one fails on them, the batch is halved until the answers are known
that it cannot grade; those are broken by the cause `grading`, and all others have their scores.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from evalfleet.errors import FleetError
from evalfleet.model import AttemptId, Broken, Cause, Grade, Measured, Scored
from evalfleet.ports import Answer

from .checkout import HalAnswer, ask_in_background, first_line, last_line, tasks_in_file
from .costs import ModelPrice, traced_costs
from .elsewhere import grade_elsewhere
from .scores import BY_AGENT, score_of
from .settings import HERE, HalSettings

SUBMISSION = "submission.json"
HOPELESS = 12
"""So many calls that failed, and none that did not: the grader itself does not work."""
HOPELESS_ELSEWHERE = 5
"""The same where each call costs a machine."""
NEEDS_ALL = ("scienceagentbench",)
TIMED_OUT = "timed out after"


class HalGrader:
    """A grader that asks HAL's own, in HAL's Python, on this computer or on a machine made for it."""

    def __init__(
        self,
        settings: HalSettings,
        args: Mapping[str, Any],
        base: Path = Path(),
        prices: Mapping[str, ModelPrice] | None = None,
    ) -> None:
        """`base` is where evalfleet.toml is looked for, which tells about places; `prices` are of models."""
        self._settings = settings
        self._args = args
        self._base = base
        self._prices = prices or {}

    async def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncIterator[tuple[AttemptId, Grade]]:
        given = {name: secrets[name] for name in self._settings.grader_secrets if secrets.get(name)}
        for number, round_ in enumerate(_rounds(answers)):
            if any(answer.wanted for answer in round_):
                folder = scratch / "hal" / str(number)
                shutil.rmtree(folder, ignore_errors=True)
                one = _Round(self._settings, self._args, self._base, folder, given, self._prices)
                async for graded in one.grade(round_):
                    yield graded


class FileGrader:
    """A grader of tasks from a JSON file: right is the answer that stands there, as a value or a text."""

    def __init__(self, path: Path, kept: Path | None) -> None:
        self._path = path
        self._kept = kept
        """Where the run keeps the file as it was planned with."""

    async def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncIterator[tuple[AttemptId, Grade]]:
        tasks = tasks_in_file(self._kept if self._kept is not None and self._kept.is_file() else self._path)
        for answer in answers:
            if not answer.wanted:
                continue
            submission = submission_of(answer)
            told: object = submission[answer.task.id]
            if isinstance(told, dict):
                fields = cast("dict[str, object]", told)
                told = fields.get("answer", fields)
            right = tasks[answer.task.id]["answer"]
            is_right = told == right or str(told).strip() == str(right).strip()
            error = error_of(answer.task.id, submission)
            yield answer.attempt, Scored(float(is_right), success=is_right, error=error or None)


class _Round:
    """Answers of one run, at most one a task."""

    def __init__(
        self,
        settings: HalSettings,
        args: Mapping[str, Any],
        base: Path,
        folder: Path,
        secrets: Mapping[str, str],
        prices: Mapping[str, ModelPrice],
    ) -> None:
        self._prices = prices
        self._settings = settings
        self._args = args
        self._base = base
        self._folder = folder
        self._secrets = secrets
        self._calls = 0
        self._worked = False

    async def grade(self, answers: Sequence[Answer]) -> AsyncIterator[tuple[AttemptId, Grade]]:
        waiting = [list(answers)]
        while waiting:
            batch = waiting.pop()
            submissions = {str(answer.task.id): submission_of(answer) for answer in batch}
            told = await self._ask(submissions)
            if not told.problem:
                self._worked = True
                costs = traced_costs(told.wandb, self._prices)
                for place, answer in enumerate(batch):
                    if answer.wanted:
                        grade = self._grade(answer, place, submissions, told)
                        if isinstance(grade, Scored) and not _tells_cost(answer):
                            grade = msgspec.structs.replace(grade, cost_usd=costs.get(answer.task.id))
                        yield answer.attempt, grade
                continue
            self._give_up_if_hopeless(told)
            if len(batch) == 1:
                if batch[0].wanted:
                    what = " ".join(told.problem.split())[:1000]
                    yield batch[0].attempt, Broken(Cause.GRADING, f"HAL's grader failed on it: {what}")
                continue
            half = len(batch) // 2
            waiting += [batch[half:], batch[:half]]

    def _give_up_if_hopeless(self, told: HalAnswer) -> None:
        """Raises FleetError: all answers stay as they are, and can be graded later."""
        name = self._settings.benchmark
        where = f"see {self._folder / str(self._calls) / 'log'}"
        if told.stage in ("import", "benchmark", "machine"):
            raise FleetError(f"HAL cannot grade {name}: {last_line(told.problem)}; {where}")
        hopeless = HOPELESS_ELSEWHERE if self._is_elsewhere else HOPELESS
        if name in NEEDS_ALL or (not self._worked and self._calls >= hopeless):
            raise FleetError(f"HAL's grader for {name} fails: {last_line(told.problem)}; {where}")

    async def _ask(self, submissions: Mapping[str, Mapping[str, Any]]) -> HalAnswer:
        self._calls += 1
        folder = self._folder / str(self._calls)
        merged = dict[str, Any]()
        for task, submission in submissions.items():
            merged[task] = submission[task]
        order = {
            "benchmark": self._settings.benchmark,
            "agent_dir": self._settings.agent_dir,
            "args": self._args,
            "submissions": merged,
            "run_id": "evalfleet",
            "results_dir": str(folder / "results"),
            "wandb": self._settings.wandb,
        }
        if self._is_elsewhere:
            return await grade_elsewhere(self._settings, self._base, order, folder, self._secrets)
        return await ask_in_background(self._settings, "grade", order, folder, self._secrets)

    @property
    def _is_elsewhere(self) -> bool:
        return self._settings.grade_on not in ("", HERE)

    def _grade(
        self, answer: Answer, place: int, submissions: Mapping[str, Mapping[str, Any]], told: HalAnswer
    ) -> Grade:
        submission = submissions[answer.task.id]
        name, task = self._settings.benchmark, answer.task.id
        score = score_of(name, task, place, told.results, told.metrics, submission, told.steps)
        if score is None:
            return Broken(Cause.GRADING, "HAL's grader says nothing about it")
        error = error_of(answer.task.id, submission)
        by_agent = self._settings.benchmark.startswith(BY_AGENT)
        return Scored(
            score,
            success=score == 1.0,
            error=error or None,
            limit_s=answer.task.timeout_s if error and TIMED_OUT in error[:60] else None,
            measured=Measured(metadata={"score_from": "agent"}) if by_agent else None,
        )


def _tells_cost(answer: Answer) -> bool:
    """Has the attempt itself told what its models cost, or what they took and gave? Then that counts."""
    try:
        told = msgspec.json.decode((answer.folder / "result.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return False
    return bool(told.get("metrics") or told.get("usage"))


def _rounds(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Repeats of a task are graded one after another: HAL knows one answer a task."""
    rounds = list[dict[str, Answer]]()
    for answer in answers:
        free = next((each for each in rounds if answer.task.id not in each), None)
        if free is None:
            rounds.append(free := {})
        free[answer.task.id] = answer
    return [list(each.values()) for each in rounds]


def submission_of(answer: Answer) -> dict[str, Any]:
    """What the agent submitted, under the task's id; HAL's own words for an error if that is nothing."""
    task = answer.task.id
    try:
        found = msgspec.json.decode((answer.folder / SUBMISSION).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        found = None
    if isinstance(found, dict) and task in found:
        return cast("dict[str, Any]", found)
    if (answer.folder / "left_out.json").exists():
        return {task: "ERROR: the answer was left out, as left_out.json says"}
    return {task: f"ERROR: Task {TIMED_OUT} {answer.task.timeout_s:g} seconds"}


def error_of(task: str, submission: Mapping[str, Any]) -> str:
    """Why there is no answer, if so: its first line. All of it is in the attempt's `submission.json`."""
    told = submission[task]
    return first_line(told) if isinstance(told, str) and told.startswith("ERROR") else ""
