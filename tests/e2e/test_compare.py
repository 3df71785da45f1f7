"""`compare`: real runs side by side, and what is said when they cannot be."""

from __future__ import annotations

import pytest

import evalfleet
from tests.e2e.harness import Fleet, task

DO = 'case "$EVALFLEET_MODEL $EVALFLEET_TASK_ID" in good*|*"t0") score 1;; *) score 0;; esac'
TASKS = [task(f"t{n}", DO, domain="easy" if n < 4 else "hard") for n in range(8)]


def test_a_difference_and_what_may_be_concluded(fleet: Fleet) -> None:
    fleet.bench(TASKS)
    for model in ("bad", "good"):
        assert fleet.run("--model", model, "--workers", "2", "--name", model).code == 0
    (found,) = fleet("compare", "bad", "good", "--json").json
    assert (found["paired"], found["differences"]) == (8, [])
    assert found["corners"] == {"both_pass": 1, "first_only": 0, "second_only": 7, "neither": 0}
    assert (found["rate"]["mean"], found["p"], found["real"]) == (0.875, 0.015625, True)
    assert found["rate"]["ci"][0] > 0
    assert found["score"] is None, "scores of 0 and 1 say what the rate says"
    assert {flip["task_id"]: flip["passes"] for flip in found["flipped"]} == {
        f"t{n}": "good" for n in range(1, 8)
    }
    kept = [fleet.home / folder for folder in found["flipped"][0]["artifacts"]]
    assert all(folder.is_dir() for folder in kept)
    assert kept[0] != kept[1]

    assert evalfleet.compare("bad", "good", home=fleet.home) == [found]
    said = fleet("compare", "bad", "good").out
    assert "good passes 87.5 points more than bad (95% interval +35.5 to +100.0 points" in said
    assert "p = 0.016 by the exact McNemar test): more than chance explains." in said
    assert "evalfleet show bad t1; evalfleet show good t1" in said
    # beside a third run, the same p must hold against half of 5%
    assert fleet.run("--model", "good", "--task", "t[0-3]", "--workers", "2", "--name", "part").code == 0
    _, part = fleet("compare", "bad", "good", "part", "--json").json
    assert part["differences"] == ["4 tasks in bad alone: only the 4 that both have scored are compared"]
    assert (part["paired"], part["level"], part["real"]) == (4, 0.025, False)
    assert "within noise, held against 0.025 because more are compared" in part["conclusion"]


def test_models_of_one_run_are_compared_over_their_repeats(fleet: Fleet) -> None:
    fleet.bench(TASKS[:3])
    assert fleet.run("--model", "bad,good", "--repeat", "2", "--workers", "2").code == 0
    (found,) = fleet("compare", "r", "--json").json
    assert (found["first"]["label"], found["second"]["label"]) == ("r bad", "r good")
    assert (found["paired"], found["p"], found["rate"]["mean"]) == (3, None, 0.666667)
    assert found["rate"]["method"] == "paired bootstrap over tasks"


def test_what_is_not_alike_is_told_first(fleet: Fleet) -> None:
    fleet.bench(TASKS[:2])
    assert fleet.run("--model", "good", "--name", "one").code == 0
    fleet.bench([task(f"t{n}", f"true; {DO}") for n in range(2)])
    assert fleet.run("--model", "good", "--attempts", "7", "--strict", "--name", "two").code == 0
    said = fleet("compare", "one", "two").out
    assert said.startswith("note: the tasks have the same names, but not the same parameters or time limits")
    assert "note: limit attempts: 3 and 7\n" in said
    assert "note: broken tasks count as failed in two alone\n" in said
    assert "two and one pass equally often" in said
    assert "no difference can be concluded" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [(["r"], "name two runs to compare"), (["r", "r"], "with itself"), (["r", "nope"], "there is no run")],
)
def test_what_cannot_be_compared_is_refused_in_one_line(fleet: Fleet, words: list[str], why: str) -> None:
    fleet.bench(TASKS[:1])
    assert fleet.run().code in (0, 1)
    done = fleet("compare", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert why in done.err
