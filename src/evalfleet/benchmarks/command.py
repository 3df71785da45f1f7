"""A benchmark that is a command: anyone's, described by a TOML file and run without writing Python."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct, field

from evalfleet.channels import children
from evalfleet.errors import RequestError
from evalfleet.model import (
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Command,
    Ended,
    EndReason,
    Grade,
    Needs,
    Outcome,
    Scored,
    Scorer,
    Task,
    Trajectory,
    decodable,
)
from evalfleet.names import attempt_number, safe_name
from evalfleet.ports import Answer, Grader
from evalfleet.toml_tables import expand

from .benchmark_file import load_benchmark
from .containers import IMAGE_STEP, in_container
from .loaded import Loaded
from .results import outcome_of, scored_apart
from .spec import (
    PLACEHOLDER,
    CommandSpec,
    bundle_of,
    keep_bundles,
    score_bundle_of,
    spec_data,
    task_bundle_of,
    task_env,
)
from .steps import read_steps
from .tasks import own_of


class CommandSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[benchmarks.NAME]`."""

    path: Annotated[str, Meta(description="the benchmark's TOML file, beside evalfleet.toml")]
    set: Annotated[
        Mapping[str, str | int | float | bool],
        Meta(description="settings that every run has unless --set says otherwise"),
    ] = field(default_factory=dict[str, str | int | float | bool])


class CommandBenchmark:
    """A benchmark that runs its file's command for each task. A task is scored when the command wrote
    result.json.

    The command sees EVALFLEET_TASK_ID, EVALFLEET_ATTEMPT (0, 1, ...), EVALFLEET_PARAMS (JSON) and, when
    given, EVALFLEET_MODEL, EVALFLEET_AGENT and EVALFLEET_SETTINGS (JSON). A result may also say
    `{"broken": "model", "error": "..."}` (or setup, readiness, internal): the attempt is then broken by
    that cause and tried again, instead of scored.
    """

    Settings = CommandSettings
    declares_settings = True

    def __init__(
        self,
        spec: CommandSpec,
        *,
        model: str = "",
        agent: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        kept: Path | None = None,
    ) -> None:
        self.spec = spec
        self._given = (model, agent, settings)
        self._kept = kept
        self._task_bundles: dict[str, Bundle] = {}
        settings = {**spec.settings, **(settings or {})}
        self._env = {
            key: value
            for key, value in (
                ("EVALFLEET_MODEL", model),
                ("EVALFLEET_AGENT", as_json(agent) if agent else ""),
                ("EVALFLEET_SETTINGS", as_json(settings) if settings else ""),
            )
            if value
        }

    @classmethod
    def load(cls, name: str, settings: CommandSettings, base: Path, home: Path) -> Loaded:
        return load_benchmark(base / expand(settings.path))

    @classmethod
    def from_spec(
        cls,
        spec: Mapping[str, Any],
        *,
        model: str = "",
        agent: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> CommandBenchmark:
        return cls(msgspec.convert(spec, decodable(CommandSpec)), model=model, agent=agent, settings=settings)

    def keep(self, tasks: Sequence[Task], folder: Path, twins: Callable[[str], Path | None]) -> None:
        keep_bundles(self.spec, tasks, folder, twins)

    def with_kept(self, folder: Path) -> CommandBenchmark:
        model, agent, settings = self._given
        return CommandBenchmark(self.spec, model=model, agent=agent, settings=settings, kept=folder)

    def check_files(self, tasks: Sequence[Task]) -> None:
        _ = self._bundle, self._score_bundle
        for task in tasks:
            self.task_bundle(task)

    def to_spec(self) -> dict[str, Any]:
        """Plain data: `from_spec` makes an equal benchmark of it, also after a trip through JSON."""
        return spec_data(self.spec)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def needs(self) -> Needs:
        return self.spec.needs

    @property
    def steps(self) -> str:
        return self.spec.steps

    def read_steps(self, data: bytes) -> Trajectory:
        return read_steps(data)

    @property
    def bundle(self) -> Bundle:
        return self._bundle

    @cached_property
    def _bundle(self) -> Bundle:
        return bundle_of(self.spec, self._kept)

    @property
    def probe(self) -> Command | None:
        return Command(self.spec.probe, self.spec.env) if self.spec.probe else None

    def task_bundle(self, task: Task) -> Bundle:
        if not task.own:
            return Bundle()
        if task.id not in self._task_bundles:
            self._task_bundles[task.id] = task_bundle_of(self.spec, task, self._kept)
        return self._task_bundles[task.id]

    def command(self, task: Task, attempt: AttemptId) -> Command:
        return self._command(self.spec.command, task, attempt)

    def _command(self, words: Sequence[str], task: Task, attempt: AttemptId) -> Command:
        number = attempt_number(attempt)
        env = {**self.spec.env, **own_of(task).env, **task_env(task), "EVALFLEET_ATTEMPT": str(number)}
        argv = tuple(fill(word, task, number) for word in words)
        return self._contained(task, Command(argv, {**env, **self._env}, self.spec.secrets))

    def _contained(self, task: Task, command: Command) -> Command:
        image = own_of(task).image or self.spec.image
        return in_container(command, image, self.spec.container) if image else command

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        return outcome_of(
            task,
            ended,
            healthy,
            zero_on_timeout=self.spec.on_timeout == "zero",
            exit_code_scores=self.spec.score_from == "exit_code",
        )

    @cached_property
    def _score_bundle(self) -> Bundle:
        return score_bundle_of(self.spec, self._kept)

    @property
    def grader(self) -> Grader | None:
        """Grades once more, when that is asked for, with the grader as it is now: it may have been corrected.

        Attempts are scored on their machines.
        """
        if not self.spec.score:
            return None
        spec = msgspec.structs.replace(self.spec, digest="", score_digest="")
        model, agent, settings = self._given
        now = CommandBenchmark(spec, model=model, agent=agent, settings=settings)
        try:
            now.check_files(())
        except RequestError:  # the benchmark's folder is gone: the run has its files
            return ScoreGrader(self)
        return ScoreGrader(now)

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None:
        if not self.spec.score:
            return None
        grading = self._command(self.spec.score, task, attempt)
        return Scorer(grading, self._score_bundle, self.spec.score_timeout_s)

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome:
        if ended.reason == "timed_out" and self.spec.on_timeout == "broken":
            return self.outcome(task, msgspec.structs.replace(ended, result=None, unusable=""), True)
        return scored_apart(task, ended, scorer, exit_code_scores=self.spec.score_from == "exit_code")


def fill(word: str, task: Task, attempt: int) -> str:
    """The word with its placeholders replaced, once: what is put in is not looked at again."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("params."):
            given = task.params[name.removeprefix("params.")]
            return given if isinstance(given, str) else as_json(given)
        return {"task_id": task.id, "domain": task.domain, "attempt": str(attempt)}[name]

    return PLACEHOLDER.sub(value, word)


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ")
RESULT_CAP = 1 << 20
LOG_TAIL = 2000


END_S = 10.0
"""What a container has to be removed, once its time limit is reached."""


class Scoring(Protocol):
    """What is needed of the benchmark."""

    @property
    def bundle(self) -> Bundle: ...

    def task_bundle(self, task: Task) -> Bundle: ...

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None: ...

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome: ...


class ScoreGrader:
    """A grader that runs the score command for each answer that is wanted, one after another, in its own
    folder.

    The attempt's artefacts are all there is of it: its working directory, and what set-up made, stayed on
    its machine. What was graded in a container there is graded in one here, of the same image.
    """

    def __init__(self, benchmark: Scoring) -> None:
        self._benchmark = benchmark

    async def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncIterator[tuple[AttemptId, Grade]]:
        for answer in answers:
            if answer.wanted:
                yield answer.attempt, await self._grade(answer, scratch, secrets)

    async def _grade(self, answer: Answer, scratch: Path, secrets: Mapping[str, str]) -> Grade:
        scorer = self._benchmark.scorer(answer.task, answer.attempt)
        if scorer is None:
            return Broken(Cause.RESULT, "the benchmark has no score command")
        folder = scratch / safe_name(answer.attempt)
        shutil.rmtree(folder, ignore_errors=True)
        work, out = folder / "work", folder / "out"
        work.mkdir(parents=True)
        out.mkdir()
        bundles = self._benchmark.bundle, self._benchmark.task_bundle(answer.task)
        images = [step for bundle in bundles for step in bundle.steps if step.name == IMAGE_STEP]
        for name, path in {**bundles[0].files, **scorer.bundle.files}.items():
            target = work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                if not images:
                    target.symlink_to(path)
                elif os.path.isdir(path):  # a container sees nothing but this folder
                    shutil.copytree(path, target, dirs_exist_ok=True)
                else:
                    shutil.copy2(path, target)
        environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environ |= {
            **scorer.command.env,
            "EVALFLEET_OUT": str(out),
            "EVALFLEET_GRADED_OUT": str(answer.folder),
            "EVALFLEET_JOB": f"{answer.attempt}.grade",
            "EVALFLEET_MACHINE": str(scratch),
        }
        for step in images:
            had = await _run(step.command, step.timeout_s, work, environ, folder / "image.log")
            if had.exit_code != 0:
                return Broken(Cause.RESULT, f"it cannot be graded here: {had.detail.strip() or had.reason}")
        environ |= {name: secrets[name] for name in scorer.command.secrets if secrets.get(name)}
        ended = await _run(scorer.command, scorer.timeout_s, work, environ, folder / "log")
        with contextlib.suppress(OSError), (out / "result.json").open("rb") as file:
            ended = Ended(ended.reason, ended.exit_code, result=file.read(RESULT_CAP), detail=ended.detail)
        outcome = self._benchmark.scored(answer.task, Ended("exited", 0), ended)
        if isinstance(outcome, Scored | Broken):
            return outcome
        return Broken(Cause.RESULT, "the score command gave no score")


async def _run(
    command: Command, timeout_s: float, work: Path, environ: Mapping[str, str], log: Path
) -> Ended:
    """Run a command to its end, or to its time limit; all of its process group is gone then."""
    reason: EndReason = "exited"
    with log.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                cwd=work,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as err:
            return Ended("failed_to_start", detail=str(err))
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            reason = "timed_out"
            with contextlib.suppress(TimeoutError):
                children.send_signal(process, signal.SIGTERM)  # so that it can remove its container
                await asyncio.wait_for(process.wait(), END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
    tail = log.read_bytes()[-LOG_TAIL:].decode("utf-8", "replace")
    return Ended(reason, code, detail=tail)
