"""Models' own limits, and what earlier runs cost: how many attempts at once, and with what allowance."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from msgspec import structs

from evalfleet.events import AttemptCollected, AttemptEnded, AttemptStarted
from evalfleet.model import (
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Cost,
    Metered,
    Metering,
    Micros,
    ModelApi,
    Offer,
    Scored,
)
from evalfleet.planning.models import listed_prices
from evalfleet.planning.past import past_of
from evalfleet.policy.allowances import at_once
from tests.unit.runs import Run

METERING = Metering((ModelApi("openai", "https://models.example", "KEY", "authorization"),))


def metered(tasks: int, workers: int) -> Run:
    run = Run(tasks, workers=workers)
    run.state.plan = structs.replace(run.state.plan, metering=METERING)
    return run


def end(run: Run, started: AttemptStarted, calls: int, tokens: dict[str, int] | None = None) -> None:
    used = Metered(usd=0.1, calls=calls, tokens=tokens or {})
    run.tell(AttemptEnded(started.attempt, Scored(1.0, True), 60.0, metered=used))


def started(run: Run) -> list[AttemptStarted]:
    run.turn()
    run.ready(*run.state.coming)
    return [event for event in run.log if isinstance(event, AttemptStarted)]


def test_what_was_said_of_the_models_limits_bounds_attempts_at_once() -> None:
    run = metered(50, workers=10)
    run.state.plan = structs.replace(run.state.plan, metering=structs.replace(METERING, concurrency=3))
    assert len(started(run)) == 3
    run = metered(50, workers=10)
    run.state.plan = structs.replace(run.state.plan, metering=structs.replace(METERING, rpm=60.0))
    first = started(run)
    assert len(first) == 10
    end(run, first[0], calls=30)  # in a minute: two at once make 60 calls
    assert at_once(run.state) == 2
    run = metered(50, workers=10)
    run.state.plan = structs.replace(run.state.plan, metering=structs.replace(METERING, tpm=3500.0))
    first = started(run)
    assert len(first) == 10
    end(run, first[0], calls=30, tokens={"in": 700, "out": 300, "cached": 600})  # `in` has the cached ones
    assert at_once(run.state) == 3


def leave(home: Path, run: str, usd: list[float], model: str = "m") -> None:
    tasks = [{"task_id": f"t{n}", "attempts": 2, "model_usd": each} for n, each in enumerate(usd)]
    (home / run).mkdir()
    told = {"benchmark": "b", "model": model, "tasks": tasks}
    (home / run / "results.json").write_text(json.dumps(told))


def test_what_attempts_of_earlier_runs_cost_is_known(tmp_path: Path) -> None:
    assert past_of(tmp_path, "b").attempt_usd("m") is None
    leave(tmp_path, "one", [0.2, 0.4, 0.6, 0.8])
    assert past_of(tmp_path, "b").attempt_usd("m") is None
    leave(tmp_path, "two", [1.0 + n for n in range(17)])
    assert past_of(tmp_path, "b").attempt_usd("m") == pytest.approx(8.0)  # of two attempts each
    assert past_of(tmp_path, "b").attempt_usd("other") is None


def with_budget(run: Run, usd: float | None, **limits: object) -> Run:
    run.state.limits = structs.replace(run.state.limits, budget_usd=usd, **limits)
    return run


def ended(run: Run, attempt: str, usd: float, refused: str = "") -> list[tuple[str, float | None]]:
    """The attempt ends. Returns the attempts that start then, each with its allowance."""
    outcome = Broken(Cause.CANCELLED) if refused else Scored(1.0, True)
    metered = Metered(usd=usd, calls=1, refused=refused)
    events = run.tell(AttemptEnded(AttemptId(attempt), outcome, 1.0, metered=metered))
    events += run.tell(AttemptCollected(AttemptId(attempt)))
    return [(each.attempt, each.allowance.usd) for each in events if isinstance(each, AttemptStarted)]


def test_attempts_at_once_share_what_is_left_and_what_one_does_not_use_is_free_again() -> None:
    run = with_budget(metered(50, workers=4), 8.0)
    assert [each.allowance.usd for each in started(run)] == [2.0] * 4
    assert run.state.spend.models.reserved == 8.0
    ((attempt, usd),) = ended(run, "t0.0", 0.4)
    assert attempt == "t4.0"
    assert usd == pytest.approx(1.6)
    assert run.state.spend.models.spent == 0.4


def test_where_machines_cost_money_half_of_what_is_left_is_theirs() -> None:
    run = Run(50, [Offer("cloud", "D4", cost=Cost(usd_per_hour=0.36, billing_step_s=1.0))], workers=1)
    run.state.plan = structs.replace(run.state.plan, metering=METERING)
    with_budget(run, 10.0)
    (first,) = started(run)
    machine_usd = run.state.spend.machines.reserved
    assert machine_usd == pytest.approx(0.36, abs=0.01)
    assert first.allowance.usd == pytest.approx((10.0 - machine_usd) / 2)


def test_an_allowance_is_twice_the_mean_where_the_share_is_less_and_others_wait_for_it() -> None:
    run = with_budget(metered(50, workers=4), 8.0)
    started(run)
    for n in range(6):
        ended(run, f"t{n}.0", 1.0)
    assert run.state.running == 2
    assert [run.state.attempts[AttemptId(f"t{n}.0")].allowance.usd for n in (6, 7)] == [1.0, 1.0]


def test_a_task_that_used_up_its_allowance_comes_last() -> None:
    run = with_budget(metered(5, workers=2), 8.0)
    assert [each.allowance.usd for each in started(run)] == [4.0, 4.0]
    assert ended(run, "t0.0", 4.1, refused="used up") == []  # the other one has all the rest
    ended(run, "t1.0", 0.1)
    for task in ("t2.0", "t3.0", "t4.0"):
        assert run.state.attempts[AttemptId(task)].allowance.usd is not None
        ended(run, task, 0.1)
    assert list(run.open()) == ["t0.1"], "nothing else runs: it has all that is left"
    assert run.state.attempts[AttemptId("t0.1")].allowance.usd == pytest.approx(3.5)
    ended(run, "t0.1", 3.5, refused="used up")
    assert run.stop.reason == "budget"
    assert (run.state.scored, run.state.waiting) == (4, 1)


def test_a_dear_task_gets_what_the_others_left() -> None:
    run = with_budget(metered(9, workers=4), 8.0)
    assert [each.allowance.usd for each in started(run)] == [2.0] * 4
    ended(run, "t0.0", 2.0, refused="used up")
    for n in range(1, 9):
        ended(run, f"t{n}.0", 0.1)
    assert run.open() == {"t0.1": run.state.attempts[AttemptId("t0.1")].machine}
    allowed = run.state.attempts[AttemptId("t0.1")].allowance.usd
    assert allowed is not None
    assert allowed >= 3.0


def test_the_allowance_that_the_user_sets_is_reserved_for_each_attempt() -> None:
    run = with_budget(metered(9, workers=4), 5.0, task_budget_usd=2.0)
    assert [each.allowance.usd for each in started(run)] == [2.0, 2.0, 1.0]
    assert ended(run, "t0.0", 0.5) == [("t3.0", 1.5)]


def test_the_run_stops_when_nothing_is_left() -> None:
    run = with_budget(metered(9, workers=1), 1.0)
    assert [each.allowance.usd for each in started(run)] == [1.0]
    assert ended(run, "t0.0", 1.0) == []
    assert (run.stop.reason, run.stop.drain) == ("budget", True)
    assert run.stop.detail == "the budget of $1 does not pay another attempt: nothing is left"


def test_tokens_are_shared_as_money_is() -> None:
    run = with_budget(metered(50, workers=4), None, max_tokens=1000)
    assert [each.allowance.tokens for each in started(run)] == [250] * 4
    run.tell(
        AttemptEnded(AttemptId("t0.0"), Scored(1.0, True), metered=Metered(tokens={"in": 70, "out": 30}))
    )
    assert run.state.spend.tokens.spent == 100
    assert run.state.attempts[AttemptId("t4.0")].allowance.tokens == 150


def test_listed_prices_are_those_of_the_day() -> None:
    """OpenAI's o3 became cheaper on 10 June 2025."""
    before, listed = listed_prices(METERING.apis, at=wall("2025-05-01"))
    since, _ = listed_prices(METERING.apis, at=wall("2025-07-01"))
    assert listed.startswith("genai-prices ")
    assert [before["o3"]["in"], since["o3"]["in"]] == pytest.approx([10e-6, 2e-6])
    assert since["gpt-4o"] == pytest.approx({"in": 2.5e-6, "cached": 1.25e-6, "out": 10e-6})


def wall(day: str) -> Micros:
    return int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()) * SECOND
