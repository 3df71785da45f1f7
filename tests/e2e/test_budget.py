"""One budget for machines and models: what cannot be paid is refused, and nothing passes what was granted."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from evalfleet.events import AttemptEnded, BudgetPassed
from evalfleet.model import AttemptId, Broken
from tests.e2e.harness import Fleet, task
from tests.e2e.metered import Served, calls_of, metered, models_usd
from tests.waiting import until

KEY = "sk-some-key"
Say = Callable[..., str]


def test_a_task_that_needs_more_than_its_share_is_tried_again_with_more_and_is_no_zero(
    fleet: Fleet, models: Served
) -> None:
    """Its controller is dead when its four calls of $0.000796 have used up a quarter of the budget."""
    greedy = (
        "call(); gate('go')\ntry:\n    [call() for _ in range(4)]\nexcept OSError:\n    pass\nscore(attempt)"
    )
    metered(fleet, models, [task("a", greedy), *(task(f"b_{n}", "call(); score(1)") for n in (1, 2, 3))])
    run = fleet.start_run("--budget", "0.012", "--workers", "4")
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] >= 1)
    run.kill()
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    ends = {event.attempt: event for event in fleet.recorded(AttemptEnded, 5)}
    first, second = ends[AttemptId("a.0")], ends[AttemptId("a.1")]
    assert isinstance(first.outcome, Broken)
    assert "model calls were refused: the $0.003 that it may cost are used up" in first.outcome.detail
    assert first.metered is not None
    assert second.metered is not None
    assert (first.metered.calls, second.metered.calls, fleet.task("a")["score"]) == (4, 5, 1)
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_a_task_that_reaches_its_task_budget_is_broken_and_the_others_go_on(
    fleet: Fleet, models: Served
) -> None:
    many = [task("a", "[call() for _ in range(5)]; score(1)"), task("b", "call(); score(1)")]
    metered(fleet, models, many)
    assert fleet.run("--budget", "1", "--task-budget", "0.0009", "--attempts", "2").code == 1
    results = fleet.results()
    assert (results["scored"], results["causes"], results["models"]["calls"]) == (1, {"model": 2}, 5)
    assert "the $0.0009 that it may cost are used up" in fleet.task("a")["error"]


def test_the_budget_bounds_models_and_what_was_refused_is_unrun(fleet: Fleet, models: Served) -> None:
    """Each task needs 5 calls of $0.000796, and the budget pays for 12."""
    many = [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in range(1, 6)]
    metered(fleet, models, many)
    done = fleet.run("--budget", "0.0096")
    assert done.code == 3, done
    results = fleet.results()
    assert (results["scored"], results["broken"], results["unrun"]) == (2, 0, 3)
    assert models.usd() <= 0.0096 + 0.0008
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert [event.percent for event in fleet.recorded(BudgetPassed)] == [80]
    assert "does not pay another attempt" in results["stop"]["detail"]
    assert fleet("resume", "r", "--budget", "1").code == 0
    assert fleet.results()["scored"] == 5
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_half_of_the_budget_and_four_fifths_are_told(fleet: Fleet, models: Served) -> None:
    """A call costs $0.000796: 29, 59 and 88 percent."""
    metered(fleet, models, [task(f"a_{n}", "call(); score(1)") for n in (1, 2, 3)])
    done = fleet.run("--budget", "0.0027", "--workers", "1")
    assert done.code == 0, done
    assert [event.percent for event in fleet.recorded(BudgetPassed)] == [50, 80]
    assert "50% of the budget of $0.00" in done.out
    assert "80% of the budget of $0.00" in done.out


def test_a_call_of_which_nobody_tells_uses_up_the_budget_by_what_it_can_have_cost(
    fleet: Fleet, models: Served
) -> None:
    """A call can put in 90 tokens or so, and put out 100: less than $0.0012, and the budget pays ten."""
    metered(
        fleet,
        models,
        [task(f"a_{n}", "[call('any+silent') for _ in range(5)]; score(1)") for n in range(1, 6)],
        'max_output_tokens = 100\n[model.prices]\n"any+silent" = {in = 2, cache_write = 3, out = 8}\n',
    )
    assert fleet.run("--budget", "0.0105").code == 3
    told = fleet.results()["models"]
    assert 5 <= told["unknown_calls"] == told["calls"] == models.sums()["requests"] <= 11
    assert (told["usd"], told["by_model"]["any+silent"]["unknown_usd"]) == (0, told["unknown_usd"])
    assert 0.0105 - 0.0012 <= told["unknown_usd"] <= 0.0105 + 0.0012
    line = calls_of(fleet, "a_1.0")[0]
    assert "usd" not in line
    assert 100 * 8e-6 < line["at_most_usd"] < 0.0012
    assert "(estimated)" in fleet("report", "r").out


def test_the_budget_bounds_what_a_score_command_asks_of_models(fleet: Fleet, models: Served) -> None:
    code = "[call() for _ in range(50)]; score(1)"
    metered(
        fleet,
        models,
        [task("a", "call(); call()")],
        score=[sys.executable, "agent.py", code],
    )
    assert fleet.run("--budget", "0.0096").code == 3
    assert models.sums()["calls"] == 13
    results = fleet.results()
    assert (results["scored"], results["unrun"]) == (0, 1)
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert fleet("resume", "r", "--budget", "1").code == 0
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_a_run_that_is_taken_up_by_two_at_once_is_taken_by_one_and_pays_every_call_once(
    fleet: Fleet, models: Served
) -> None:
    metered(fleet, models, [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in (1, 2, 3)])
    assert fleet.run("--budget", "0.0044").code == 3
    before = models.sums()["calls"]
    both = [fleet.start("resume", "r", "--budget", budget) for budget in ("1", "2")]
    ended = sorted((each.wait() for each in both), key=lambda done: done.code)
    assert ended[0].code == 0, ended
    if ended[1].code != 0:  # it came while the other had the run, or when there was nothing left to do
        assert (ended[1].code, ended[1].err.count("\n")) == (2, 1), ended
    assert fleet.results()["scored"] == 3
    assert models.sums()["calls"] == before + 10
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_tokens_are_bounded(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in (1, 2, 3)])
    assert fleet.run("--max-tokens", "1000").code == 3
    assert fleet.results()["scored"] == 1
    assert "--max-tokens" in fleet.results()["stop"]["detail"]


def test_a_model_without_a_price_is_refused_where_there_is_a_budget(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "call('other'); score(1)")])
    assert fleet.run("--budget", "1", "--attempts", "1").code == 1
    assert fleet.results()["causes"] == {"model": 1}
    assert "no price is known for the model 'other'" in fleet.task("a")["error"]
    assert models.sums()["requests"] == 0


def test_a_budget_below_one_call_is_refused_before_anything_is_spent(
    fleet: Fleet, models: Served, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens in and 10 out cost $0.00028, and a call of this agent $0.0008."""
    metered(fleet, models, [task("a", "[call() for _ in range(20)]; score(1)")])
    monkeypatch.setenv("OPENAI_API_KEY", models.key)
    run = ("run", "./b.toml", "--name", "s")
    planned = say(*run, "--budget", "1", "--dry-run")
    assert f"metered    {models.url} (OPENAI_API_KEY); prices of [model.prices]" in planned
    for words, told in {
        ("--budget", "0.0002"): "100 tokens in and 10 out of 'any' cost $0.00028",
        ("--budget", "1", "--task-budget", "0.0002"): "--task-budget 0.0002 pays no call of a model",
        ("--budget", "1", "--task-budget", "2"): "--task-budget 2 is more than --budget 1",
        ("--max-tokens", "50"): "--max-tokens 50 is less than one call of a model uses; write 110 or more",
    }.items():
        assert told in say(*run, *words, code=2)
    assert models.sums()["requests"] == 0
    assert not (fleet.home / "fleet.db").exists(), "no run was begun"
    assert fleet.run("--budget", "0.01").code == 3, "it pays 13 calls of 20"
    rest = str(models.usd() + 0.0001)
    assert "has cost $0.01 already; give more" in say("resume", "r", "--budget", "0.01", code=2)
    assert "rest does not pay one call of a model ($0.0008)" in say("resume", "r", "--budget", rest, code=2)
    assert fleet("resume", "r", "--budget", "1").code == 0
    told = say(*run, "--budget", "0.0005", code=2)
    assert "one has cost $0.0008 on average in earlier runs" in told
    assert models.sums()["calls"] == 13 + 20


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ('[model]\nkey = "sk-abc/def"', (), "never its value"),
        ('[model]\nkey = "K"\nupstream = "http://models.example"', (), "begins with https://"),
        ('[model]\nupstream = "https://models.example"', (), "needs 'key'"),
        ('[model]\nkey = "OPENAI_API_KEY"\nrpm = 0', (), "above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\nsame_errors = 0', (), "above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 0}', (), "dollars above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {out = 1}', (), "what input costs"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {inn = 1}', (), "did you mean 'in'"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 1}', (), "what output costs"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = -1, out = 1}', (), "dollars above 0"),
        ('[model]\nkey = "OTHER_KEY"', (), "the key of no API that is known"),
        ('[model]\nkey = "OPENAI_API_KEY"', ("--task-budget", "1"), "give --budget"),
        (
            '[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 1, out = 1}',
            ("--budget", "1", "--model", "anything"),
            "--model anything costs",
        ),
        ("[owners]\nann = 5", (), "[owners] was removed; give each run a --budget"),
        ("", ("--max-tokens", "5"), "nobody has said which secret"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    fleet: Fleet, say: Say, monkeypatch: pytest.MonkeyPatch, config: str, words: tuple[str, ...], told: str
) -> None:
    fleet.config(config)
    fleet.bench([task("a")])
    for name in ("OPENAI_API_KEY", "OTHER_KEY"):
        monkeypatch.setenv(name, KEY)
    assert told in say("run", "./b.toml", *words, code=2)
