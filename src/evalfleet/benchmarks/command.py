"""A benchmark that is a command: anyone's, described by a TOML file and run without writing Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, Bundle, Command, Ended, Needs, Outcome, Scorer, Task
from evalfleet.names import attempt_number
from evalfleet.ports import Grader
from evalfleet.toml_tables import expand

from .benchmark_file import load_benchmark
from .containers import in_container
from .loaded import Loaded
from .regrading import ScoreGrader
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
from .tasks import own_of


class CommandSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[benchmarks.NAME]`."""

    path: Annotated[str, Meta(description="the benchmark's TOML file, beside evalfleet.toml")]
    set: Annotated[
        Mapping[str, str | int | float | bool],
        Meta(description="settings that every run has unless --set says otherwise"),
    ] = field(default_factory=dict[str, str | int | float | bool])


class CommandBenchmark:
    """Runs the file's command for each task; a task is scored when the command wrote result.json.

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
        return cls(msgspec.convert(spec, CommandSpec), model=model, agent=agent, settings=settings)

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

        Attempts are scored on their machines. What runs in containers is graded there alone.
        """
        if not self.spec.score or self.spec.image:
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
