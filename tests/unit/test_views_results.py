"""The results document, and the files and reports made of it, against the contract."""

from __future__ import annotations

import copy
import csv
import io
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalfleet import events as ev
from evalfleet.errors import RequestError
from evalfleet.model import Broken, Cause, Collected, Scored, TaskId
from evalfleet.views.documents import Results
from evalfleet.views.report import report
from evalfleet.views.results import results, task_detail
from evalfleet.views.summary import summary
from evalfleet.views.tasks import aggregated, by_machine
from sim.scenario import draw
from sim.simulate import simulate
from tests.unit.views_feed import Feed, a_mixed_run

# As users read it in docs: keys, and their order.
CONTRACT = json.loads("""
{"run": "...", "benchmark": "waa", "model": "...", "status": "running|done|stopped|failed",
 "started_at": "...Z", "ended_at": "...Z", "total_tasks": 154, "scored": 150, "broken": 4, "unrun": 0,
 "succeeded": 61, "failed": 89, "success_rate": 0.407, "success_rate_ci": [0.331, 0.487],
 "by_domain": {"notepad": {"total": 2, "scored": 2, "succeeded": 1, "success_rate": 0.5,
                           "success_rate_ci": []}},
 "causes": {"evicted": 3}, "cost": {"machines_usd": 1.02, "models_usd": null, "per_task_usd": 0.007},
 "tasks": [{"task_id": "...", "domain": "notepad", "success": true, "score": 1.0, "num_steps": 5,
            "duration_seconds": 180.0, "error": null, "cause": null, "attempts": 1, "machine": "...",
            "screenshots": ["step_0.png"], "artifacts": "<run>/notepad_1/notepad_1.0/"}]}
""")
BEYOND = {
    "paused",
    "steering",
    "mean_score",
    "answered",
    "shortfall",
    "graded_again",
    "grading_problem",
    "rerun_of",
    "provenance",
    "by_model",
    "models",
    "by_task",
    "pass_at_k",
    "metrics",
    "tokens",
    "running",
    "places",
    "isolation",
    "workers",
    "duration_seconds",
    "attempts",
    "retries",
    "broken_causes",
    "strict",
    "task_seconds",
    "stop",
    "controllers",
    "refusals",
    "by_place",
    "machines",
}


@pytest.fixture(scope="module")
def mixed() -> Results:
    return results(a_mixed_run().state, Path("/home/x/run1"))


def test_the_keys_are_those_of_the_contract(mixed: Results) -> None:
    assert set(mixed) == set(CONTRACT) | BEYOND
    more = {
        "status",
        "limit_seconds",
        "machine_seconds",
        "machine_usd",
        "model_usd",
        "broken_attempts",
        "origin",
        "repeat",
        "model",
        "cost_usd",
        "tokens",
        "metrics",
        "metadata",
        "tags",
        "task_metadata",
    }
    assert set(mixed["tasks"][0]) == set(CONTRACT["tasks"][0]) | more
    assert set(mixed["cost"]) == set(CONTRACT["cost"]) | {"prices_as_of"}
    assert set(mixed["by_domain"]["odd"]) == set(CONTRACT["by_domain"]["notepad"]) | {"mean_score", "metrics"}


def test_the_counts_are_right(mixed: Results) -> None:
    counts = ("total_tasks", "scored", "broken", "unrun", "succeeded", "failed")
    assert [mixed.get(name) for name in counts] == [5, 3, 1, 1, 1, 2]
    assert mixed["success_rate"] == pytest.approx(1 / 3, abs=1e-6)
    assert (mixed["mean_score"], mixed["status"], mixed["causes"]) == (0.5, "stopped", {"result": 1})
    assert (mixed["started_at"], mixed["ended_at"]) == ("2026-01-02T14:30:52Z", "2026-01-02T14:34:52Z")
    # two machines at $3.60 an hour for four minutes, and the one price that a task told
    costs = {"machines_usd": 0.48, "models_usd": 0.25, "per_task_usd": 0.243333, "prices_as_of": None}
    assert mixed["cost"] == costs
    assert mixed["by_domain"]["even"]["total"] == 3


def test_tasks_tell_their_outcome(mixed: Results) -> None:
    first, second, broken, limited, unrun = mixed["tasks"]
    assert (first["success"], first["num_steps"], first["screenshots"]) == (True, 5, ["step_0.png"])
    assert (first["artifacts"], first["machine"], first["duration_seconds"]) == (
        "run1/t_0/t_0.0/",
        "worker-1",
        60.0,
    )
    assert (second["success"], second["error"], second["cause"]) == (False, "gave up", None)
    assert (broken["success"], broken["score"], broken["cause"], broken["status"]) == (
        None,
        None,
        "result",
        "broken",
    )
    assert str(broken["error"]).startswith("=no result.json")
    assert limited["limit_seconds"] == 60.0
    assert (unrun["status"], unrun["cause"], unrun["machine"], unrun["attempts"]) == ("unrun", None, None, 0)


def test_models_cost_is_null_when_nobody_told_it() -> None:
    feed = Feed(tasks=1, machines=1)
    feed.attempt("t_0", Scored(1.0, True))
    assert results(feed.state, Path("run1"))["cost"]["models_usd"] is None


def test_money_spent_on_attempts_that_broke_is_money_spent() -> None:
    feed = Feed(tasks=1, machines=1)
    feed.attempt("t_0", Broken(Cause.MODEL, "throttled", 0.25))
    feed.attempt("t_0", Scored(1.0, True, cost_usd=0.5))
    assert results(feed.state, Path("run1"))["cost"]["models_usd"] == 0.75


def test_a_task_in_detail_has_every_attempt() -> None:
    feed = Feed(tasks=1, machines=2)
    lost = feed.start("t_0")
    feed.wait(30)
    feed.lose(1)
    feed.add(ev.AttemptEnded(lost, Broken(Cause.EVICTED, "gone")))
    feed.add(ev.AttemptCollected(lost, Collected(problem="late"), superseded=Scored(1.0, True)))
    feed.attempt("t_0", Scored(0.0), machine=2)
    detail = task_detail(feed.state, TaskId("t_0"))
    first, second = detail["attempts"]
    assert (first["cause"], first["error"], first["problem"], first["outcome"]) == (
        "evicted",
        "gone",
        "late",
        "broken",
    )
    assert first["superseded"] is not None
    assert (first["superseded"]["score"], first["duration_seconds"]) == (1.0, 30.0)
    assert (second["machine"], second["score"], detail["decided_by"]) == ("worker-2", 0.0, "t_0.1")
    assert second["artifacts"] == "run1/t_0/t_0.1/"
    with pytest.raises(RequestError, match="did you mean 't_0'"):
        task_detail(feed.state, TaskId("t_O"))


def test_files_for_other_scripts(mixed: Results) -> None:
    assert list(aggregated(mixed)) == [
        "total_tasks",
        "succeeded",
        "failed",
        "success_rate",
        "tasks",
        "by_domain",
    ]
    files = by_machine(mixed)
    assert list(files) == ["worker-1_results.json", "worker-2_results.json"]
    second = files["worker-2_results.json"]
    assert list(second) == ["worker_name", "run_id", "completed_at", "tasks", "summary"]
    assert second["summary"] == {"total": 2, "succeeded": 0, "failed": 1, "success_rate": 0.0}
    assert [task["task_id"] for task in second["tasks"]] == ["t_1", "t_2"]


@pytest.mark.parametrize("seed", range(30))
def test_any_run_can_be_told(seed: int) -> None:
    state = simulate(draw(seed)).state
    document = results(state, Path(f"/h/{state.plan.run}"))
    assert document["scored"] + document["broken"] + document["unrun"] == document["total_tasks"]
    assert sum(task["attempts"] for task in document["tasks"]) == document["attempts"]
    assert sum(machine["scored"] for machine in document["machines"]) == document["scored"]
    assert (
        sum(len(its["tasks"]) for its in by_machine(document).values())
        == document["scored"] + document["broken"]
    )
    assert json.loads(report(document, "json")) == document
    for task in state.tasks:
        json.dumps(task_detail(state, task))
    assert 6 <= len(summary(document, Path("home/run")).splitlines()) <= 16
    assert report(document, "md").startswith(f"# {state.plan.run}\n")


def test_the_csv_survives_what_agents_write(mixed: Results) -> None:
    text = report(mixed, "csv")
    assert text.count("\r\n") == 6
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["task_id"] for row in rows] == ["t_0", "t_1", "t_2", "t_3", "t_4"]
    assert rows[2]["error"] == "'=no result.json | was written\n"  # not a formula any more
    assert (rows[0]["success"], rows[1]["success"], rows[2]["success"]) == ("true", "false", "")


def test_the_report_cannot_be_broken_by_a_reason(mixed: Results) -> None:
    text = report(mixed, "md")
    assert "| t_2 | result | =no result.json \\| was written | 1 |" in text
    assert "**33.3%** (1 of 3 scored tasks)" in text
    assert "evalfleet resume run1 --only broken" in text
    mixed["tasks"][2]["error"] = "[a](javascript:alert()) ![b](//x) <c>"
    assert r"| \[a](javascript:alert()) !\[b](//x) &lt;c> |" in report(mixed, "md")


def test_an_unknown_format_is_refused_with_the_known_ones(mixed: Results) -> None:
    with pytest.raises(RequestError, match="csv"):
        report(mixed, "csw")


def test_the_summary_says_what_to_do_next(
    mixed: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evalfleet").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert summary(mixed, Path("home/run1")) == (
        "run1: stopped after 4m00s (asked)\n"
        "  tasks       5: 3 scored, 1 broken, 1 unrun\n"
        "  pass rate   33.3% (1 of 3), 95% interval 6.1% to 79.2%\n"
        "  mean score  0.500\n"
        "  broken      result 1\n"
        "  attempts    4 on 2 machines, 0 retries (result 1)\n"
        "  cost        $0.48 for machines, $0.25 for models, $0.24 a scored task\n"
        "  results     home/run1/results.json\n"
        "  failed      t_1, t_3\n"
        "  report      evalfleet report run1\n"
        "  next        evalfleet resume run1\n"
        "              evalfleet resume run1 --only broken"
    )
    poor = copy.deepcopy(mixed)
    assert poor["stop"] is not None
    poor["stop"]["reason"] = "budget"
    assert "evalfleet resume run1 --budget MORE\n" in summary(poor)
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"report      {sys.executable} -m evalfleet report run1\n" in summary(mixed, Path("home/run1"))


def test_junit_has_a_case_for_each_task_whatever_agents_write(mixed: Results) -> None:
    mixed = copy.deepcopy(mixed)
    mixed["tasks"][2]["error"] = "bad \x00 \x1b[0m ]]> <x> \ud800"
    root = ElementTree.fromstring(report(mixed, "junit"))
    assert root.attrib["tests"] == "5"
    counts = [int(root.attrib[name]) for name in ("failures", "errors", "skipped")]
    assert counts == [mixed["failed"], mixed["broken"], mixed["unrun"]]
    cases = {case.attrib["name"]: [part.tag for part in case] for case in root.iter("testcase")}
    assert cases == {"t_0": [], "t_1": ["failure"], "t_2": ["error"], "t_3": ["failure"], "t_4": ["skipped"]}


def test_an_annotation_cannot_be_escaped_from(mixed: Results) -> None:
    mixed = copy.deepcopy(mixed)
    mixed["tasks"][2]["error"] = "x\n::set-env name=A::b 100%"
    lines = report(mixed, "github").splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("::warning title=t_1%3A fail (")
    assert "::warning title=t_2%3A broken%3A result::x ::set-env name=A::b 100%25" in lines
    assert lines[-1].startswith("::notice title=run1::1 of 3 passed, 1 broken")
