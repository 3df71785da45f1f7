"""The benchmarks run and say what they must. What they measure is for people to read, never asserted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import BENCHES, main
from bench.result import Aim, Result, at_least, at_most, below, table
from lab import Lab

ROOT = Path(__file__).resolve().parent.parent.parent

COUNTS = (
    *("tasks_lost", "tasks_scored_twice", "attempts_started_twice", "jobs_lost", "double_writes"),
    *("resources_left", "jobs_left", "zeros_that_are_not_the_agents", "scores_called_broken"),
    "tokens_miscounted",
)
NEED_LAB = ("ssh-dispatch", "ssh-scale", "lost-host", "reconcile", "waa", "fleet")


def bench(*words: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    argv = [sys.executable, "-m", "bench", *words]
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=170)


NIGHTLY = (
    *NEED_LAB,
    "budget-overshoot",
    "cluster-overhead",
    "dashboard",
    "hostile",
    "leak",
    "makespan",
    "recovery",  # near: dispatch, tests/e2e/test_resume.py
    "sim-scale",
    "store",
)


def when(name: str) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if name in NIGHTLY else []


ALL = [pytest.param(name, marks=when(name)) for name in BENCHES]


@pytest.mark.parametrize("name", ALL)
def test_last_line_is_the_result_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    done = bench(name, "--json", "--quick", scratch=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"bench", "figures", "against", "aims"}
    assert found["bench"] == name
    if name in NEED_LAB and Lab.missing():
        assert set(found["figures"]) == {"error"}  # says so, and does not fall over
        return
    assert found["figures"]
    assert "error" not in found["figures"]
    assert all(set(aim) == {"value", "aim", "met"} for aim in found["aims"].values())
    assert list(tmp_path.iterdir()) == []
    counts = {key: aim for key, aim in found["aims"].items() if key.rpartition(".")[2] in COUNTS}
    assert all(aim["met"] for aim in counts.values()), counts  # unlike timings


def test_a_peer_that_is_missing_is_reported() -> None:
    from bench.dispatch import peer

    assert peer(("no-such-program",), 1) == {"error": "not installed"}


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHES)


def test_an_aim_is_met_on_its_own_side() -> None:
    assert below(1.0, 2.0).met
    assert not below(2.0, 2.0).met
    assert at_most(2.0, 2.0).met
    assert not at_least(1.9, 2.0).met


def test_the_table_says_which_aims_were_missed() -> None:
    result = Result(
        "x", {"a": {"b": 1}, "rate": 1234.5}, {"speed": Aim(3.0, 2.0, "<")}, {"p": {"error": "no"}}
    )
    shown = table("x: a title", result)
    assert "MISSED" in shown
    assert "a.b" in shown
    assert "1,23" in shown
    assert "p.error" in shown
