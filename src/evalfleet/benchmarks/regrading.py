"""Grading once more by a benchmark's score command, where the controller is, from the artefacts at home."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from evalfleet.model import (
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Ended,
    EndReason,
    Grade,
    Outcome,
    Scored,
    Scorer,
    Task,
)
from evalfleet.names import safe_name
from evalfleet.ports import Answer

PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ")
RESULT_CAP = 1 << 20
LOG_TAIL = 2000


class Scoring(Protocol):
    """What is needed of the benchmark."""

    @property
    def bundle(self) -> Bundle: ...

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None: ...

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome: ...


class ScoreGrader:
    """Runs the score command for each answer that is wanted, one after another, in a folder of its own.

    The attempt's artefacts are all there is of it: its working directory, and what set-up made, stayed on
    its machine.
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
        for name, path in {**self._benchmark.bundle.files, **scorer.bundle.files}.items():
            target = work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                target.symlink_to(path)
        environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environ |= {
            **scorer.command.env,
            "EVALFLEET_OUT": str(out),
            "EVALFLEET_GRADED_OUT": str(answer.folder),
        }
        environ |= {name: secrets[name] for name in scorer.command.secrets if secrets.get(name)}
        ended = await _run(scorer, work, environ, folder / "log")
        with contextlib.suppress(OSError), (out / "result.json").open("rb") as file:
            ended = Ended(ended.reason, ended.exit_code, result=file.read(RESULT_CAP), detail=ended.detail)
        outcome = self._benchmark.scored(answer.task, Ended("exited", 0), ended)
        if isinstance(outcome, Scored | Broken):
            return outcome
        return Broken(Cause.RESULT, "the score command gave no score")


async def _run(scorer: Scorer, work: Path, environ: Mapping[str, str], log: Path) -> Ended:
    """To its end, or to its time limit; all of its process group is gone then."""
    reason: EndReason = "exited"
    with log.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *scorer.command.argv,
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
            await asyncio.wait_for(process.wait(), scorer.timeout_s)
        except TimeoutError:
            reason = "timed_out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
    tail = log.read_bytes()[-LOG_TAIL:].decode("utf-8", "replace")
    return Ended(reason, code, detail=tail)
