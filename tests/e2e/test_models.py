"""Several models and repeats in one run: they share machines and one journal, and each result says whose."""

from __future__ import annotations

import csv
import io

import pytest

from tests.e2e.harness import Fleet, task

DO = """
echo "$EVALFLEET_TASK_ID $EVALFLEET_MODEL $EVALFLEET_REPEAT" >> "$EVALFLEET_OUT/seen"
case "$EVALFLEET_TASK_ID $EVALFLEET_MODEL $EVALFLEET_REPEAT" in
  "a good"*|"b good 1"|"a bad 2") score 1;;
  *) score 0;;
esac
"""


def test_models_and_repeats_are_one_run(fleet: Fleet) -> None:
    fleet.bench([task("a", DO), task("b", DO)])
    done = fleet.run("--model", "good,bad", "--repeat", "3", "--workers", "2", "--json")
    assert done.code == 0, done
    found = fleet.results()
    assert (found["model"], found["total_tasks"], found["scored"], len(found["machines"])) == (
        "good, bad",
        12,
        12,
        2,
    )
    one = fleet.task("a@bad~2")
    assert (one["origin"], one["model"], one["repeat"], one["success"]) == ("a", "bad", 2, True)
    assert (fleet.home / one["artifacts"] / "seen").read_text() == "a bad 2\n"

    models = found["by_model"]
    assert (models["good"]["succeeded"], models["bad"]["succeeded"]) == (4, 1)
    assert models["good"]["pass_at_k"]["1"]["mean"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-6)
    assert models["good"]["pass_at_k"]["3"]["mean"] == 1.0
    assert models["bad"]["pass_at_k"]["2"]["mean"] == pytest.approx((2 / 3 + 0) / 2, abs=1e-6)
    by_task = {(each["task_id"], each["model"]): each for each in found["by_task"]}
    assert by_task["b", "good"]["pass_at_k"] == {"1": 0.333333, "2": 0.666667, "3": 1.0}
    assert (by_task["b", "bad"]["mean_score"], by_task["b", "bad"]["scored"]) == (0.0, 3)
    # repeats of two tasks tell less than twelve tasks would
    low, high = found["success_rate_ci"]
    assert high - low > 0.5

    shown = " ".join(fleet("show", "r").out.split())
    assert "good 66.7% (4 of 6)" in shown
    assert "pass@1 41.7%, pass@2 58.3%, pass@3 75.0%" in shown
    repeats = fleet("show", "r", "a").out.splitlines()
    assert repeats[0] == "r: 6 of 12 tasks"
    assert {line.split()[0] for line in repeats[3:]} == {
        f"a@{m}~{k}" for m in ("good", "bad") for k in (1, 2, 3)
    }
    report = fleet("report", "r").out
    assert "## By model" in report
    assert "| b | good | 3 of 3 | 1 |" in report
    rows = list(csv.DictReader(io.StringIO(fleet("report", "r", "--format", "csv").out)))
    assert {(row["origin"], row["model"], row["repeat"]) for row in rows} >= {
        ("a", "good", "1"),
        ("b", "bad", "3"),
    }
    again = fleet(
        "run", "--from", "r", "--task", "a@bad~*", "--only", "failed", "--name", "again", "--json"
    ).json
    assert [each["task_id"] for each in again["tasks"]] == ["a@bad~1", "a@bad~3"]


def test_one_model_without_repeats_is_as_it_was(fleet: Fleet) -> None:
    fleet.bench([task("a", DO), task("b", DO)])
    done = fleet.run("--model", "good", "--quiet")
    assert (done.code, done.out.splitlines()[0].startswith("r: done after"), done.err) == (0, True, "")
    found = fleet.results()
    assert [each["task_id"] for each in found["tasks"]] == ["a", "b"]
    assert (found["model"], found["by_model"], found["by_task"], found["pass_at_k"]) == ("good", {}, [], {})
    assert found["tasks"][0]["model"] == "good"


def test_a_run_of_models_is_resumed_with_each_task_by_its_model(fleet: Fleet) -> None:
    fleet.bench([task("a", f"gate go; {DO}")])
    run = fleet.start_run("--model", "good,bad")
    fleet.started("a.0")
    run.kill()
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    outcomes = {each["model"]: each["success"] for each in fleet.results()["tasks"]}
    assert outcomes == {"good": True, "bad": False}
