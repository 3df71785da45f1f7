"""`evalfleet plan`: from nothing, from an earlier run, and a command that does what it says."""

from __future__ import annotations

import shlex

from tests.e2e.harness import Fleet, task


def test_a_plan_says_what_it_rests_on_and_its_command_runs(fleet: Fleet) -> None:
    fleet.bench([task(f"{d}_{n}", "sleep 0.2; score 1") for d in ("a", "b") for n in range(3)], timeout_s=60)
    first = fleet("plan", "b.toml", "--workers", "1,3")
    assert first.code == 0, first.err
    assert "6 guessed: 1% to 100% of their time limit" in first.out
    assert "no earlier runs here" in first.out
    with (fleet.folder / "b.toml").open("a") as file:
        file.write("\nusual_s = 2")
    told = fleet("plan", "b.toml", "--workers", "1", "--json").json
    assert told["basis"]["tasks"] == {"default": 6}, "the benchmark says what its tasks take"
    took = told["options"][0]["seconds"]
    assert 3 < took["low"] < 12 < took["high"] < 60, "twelve seconds, or about as many"

    assert fleet.run("--workers", "2", "--domain", "a").code == 0
    second = fleet("plan", "b.toml", "--workers", "1,3", "--deadline", "1h", "--json")
    assert second.code == 0, second.err
    plan = second.json
    assert plan["basis"] == {
        "runs": 1,
        "tasks": {"task": 3, "benchmark": 3},
        "machines_known": True,
        "models_known": False,
    }
    assert plan["chosen"]["workers"] == 3
    assert plan["chosen"]["best"] is True
    assert len(plan["options"]) == 2
    words = shlex.split(plan["command"])
    assert words == ["evalfleet", "run", "b.toml", "--workers", "3", "--deadline", "1h"]
    assert fleet(*words[1:], "--name", "again").code == 0

    late = fleet("run", "b.toml", "--workers", "1", "--deadline", "0.1s", "--name", "late")
    assert late.code == 0, "a deadline stops nothing"
    assert "note: --deadline 0s: it will take about " in late.err
    dry = fleet("run", "b.toml", "--workers", "1", "--deadline", "0.1s", "--dry-run", "--json")
    assert dry.json["warnings"][-1].startswith("--deadline 0s: it will take about ")
    assert "note: --deadline 0s: it will take about " in dry.err


def test_promises_that_nothing_keeps_and_bad_numbers_are_one_line(fleet: Fleet) -> None:
    fleet.bench([task("a_1")])
    assert "`evalfleet plan --review` was removed; " in fleet("plan", "--review").err
    late = fleet("plan", "b.toml", "--deadline", "0.001s")
    assert late.code == 2
    assert late.err.startswith("evalfleet: no way is done in ")
    assert late.err.count("\n") == 1
    for words, told in (
        (("--deadline", "soon"), "--deadline is 'soon'"),
        (("--workers", "1,x"), "--workers is 'x'"),
        (("--spot",), "--spot: local has no spot machines"),
    ):
        wrong = fleet("plan", "b.toml", *words)
        assert wrong.code == 2
        assert told in wrong.err
        assert wrong.err.count("\n") == 1
    for more, told in (
        ((), "--workers auto needs something to choose by: a --deadline, a --budget or both"),
        (("--deadline", "1h", "--schedule", "slices"), "--schedule slices must know how many workers"),
        (("--deadline", "0"), "--deadline is '0'"),
    ):
        wrong = fleet("run", "b.toml", "--workers", "auto", *more)
        assert (wrong.code, wrong.err.count("\n")) == (2, 1), wrong.err
        assert told in wrong.err
    assert fleet("run", "b.toml", "--workers", "auto", "--deadline", "10m").code == 0
