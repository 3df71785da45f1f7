"""Benchmarks that are scored by exit code, and files that change under a planned run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalfleet.benchmarks.benchmark_file import load_benchmark
from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.errors import RequestError
from evalfleet.model import Broken, Cause, Ended, Outcome, Scored, Task, TaskId


def benchmark(folder: Path, score_from: str = "exit_code") -> CommandBenchmark:
    (folder / "run.sh").write_text("exit 0\n")
    (folder / "b.toml").write_text(
        'name = "b"\ncommand = ["sh", "run.sh"]\nfiles = ["run.sh"]\n'
        f'score_from = "{score_from}"\n[[tasks]]\nid = "a"\n'
    )
    return CommandBenchmark.from_spec(load_benchmark(folder / "b.toml").spec)


def outcome(of: CommandBenchmark, ended: Ended) -> Outcome:
    return of.outcome(Task(TaskId("a"), timeout_s=5), ended, True)


@pytest.mark.parametrize(("code", "score"), [(0, 1.0), (1, 0.0), (125, 0.0)])
def test_an_exit_code_is_a_score_when_asked_for(tmp_path: Path, code: int, score: float) -> None:
    assert outcome(benchmark(tmp_path), Ended("exited", code)) == Scored(score, success=score == 1.0)


@pytest.mark.parametrize("code", [126, 127, 137])
def test_a_command_that_could_not_run_or_was_killed_is_broken_all_the_same(tmp_path: Path, code: int) -> None:
    found = outcome(benchmark(tmp_path), Ended("exited", code))
    assert isinstance(found, Broken)
    assert found.cause is Cause.RESULT


def test_a_written_result_wins_over_the_exit_code(tmp_path: Path) -> None:
    assert outcome(benchmark(tmp_path), Ended("exited", 0, result=b'{"score": 0.5}')) == Scored(0.5)


def test_without_asking_an_exit_code_is_no_score(tmp_path: Path) -> None:
    assert isinstance(outcome(benchmark(tmp_path, "result"), Ended("exited", 0)), Broken)


def test_another_source_of_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"key 'score_from' is 'luck'; write \"result\" or \"exit_code\""):
        benchmark(tmp_path, "luck")


def test_files_that_changed_since_the_plan_are_refused(tmp_path: Path) -> None:
    planned = benchmark(tmp_path)
    (tmp_path / "run.sh").write_text("exit 1\n")
    with pytest.raises(RequestError, match="have changed since the run was planned"):
        _ = planned.bundle
