"""Models' own limits, and what earlier runs cost: how many attempts at once, and with what allowance."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from msgspec import structs

from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.model import SECOND, Metered, Metering, Micros, ModelApi, Scored
from evalfleet.planning.models import listed_prices
from evalfleet.planning.past import past_of
from evalfleet.policy.allowances import at_once, first_allowance
from tests.unit.runs import Run

METERING = Metering((ModelApi("openai", "https://models.example", "KEY", "authorization"),))


def metered(tasks: int, workers: int, **plan: object) -> Run:
    run = Run(tasks, workers=workers)
    run.state.plan = structs.replace(run.state.plan, metering=METERING, **plan)
    return run


def end(
    run: Run, started: AttemptStarted, calls: int, throttled: int = 0, tokens: dict[str, int] | None = None
) -> list[AttemptStarted]:
    """The attempt ends a second later; those that are started then."""
    run.now += 1_000_000
    used = Metered(usd=0.1, calls=calls, throttled=throttled, tokens=tokens or {})
    event = AttemptEnded(started.attempt, Scored(1.0, True), 60.0, metered=used)
    return [each for each in run.tell(event) if isinstance(each, AttemptStarted)]


def started(run: Run) -> list[AttemptStarted]:
    run.turn()
    run.ready(*run.state.coming)
    return [event for event in run.log if isinstance(event, AttemptStarted)]


def test_429s_slow_handing_out_and_calls_that_pass_speed_it_up_again() -> None:
    run = metered(200, workers=10)
    first = started(run)
    assert (len(first), at_once(run.state)) == (10, None)
    assert end(run, first[0], calls=10, throttled=5) == []
    assert at_once(run.state) == 7
    assert end(run, first[1], calls=10, throttled=5) == []  # it ran at the same time, and tells the same
    assert at_once(run.state) == 7
    assert end(run, first[2], calls=10) == []
    (next_one,) = end(run, first[3], calls=10)  # six were left
    assert end(run, next_one, calls=10, throttled=10) == []
    assert at_once(run.state) == 4
    left = first[4:]
    for attempt in left:
        left += end(run, attempt, calls=10)
        if at_once(run.state) is None:
            break
    assert at_once(run.state) is None
    assert run.state.running == 10


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


def test_the_first_allowance_is_what_most_attempts_of_earlier_runs_needed(tmp_path: Path) -> None:
    assert past_of(tmp_path, "b").attempt_usd("m") is None
    leave(tmp_path, "one", [0.2, 0.4, 0.6, 0.8])
    assert past_of(tmp_path, "b").attempt_usd("m") is None
    leave(tmp_path, "two", [1.0 + n for n in range(17)])
    assert past_of(tmp_path, "b").attempt_usd("m") == pytest.approx(8.0)  # of two attempts each
    assert past_of(tmp_path, "b").attempt_usd("other") is None
    run = metered(4, workers=2, attempt_usd=8.0)
    run.state.limits = structs.replace(run.state.limits, budget_usd=100.0)
    allowance = first_allowance(run.state)
    assert allowance is not None
    assert allowance.usd == 8.0


def test_listed_prices_are_those_of_the_day() -> None:
    """OpenAI's o3 became cheaper on 10 June 2025."""
    before, listed = listed_prices(METERING.apis, at=wall("2025-05-01"))
    since, _ = listed_prices(METERING.apis, at=wall("2025-07-01"))
    assert listed.startswith("genai-prices ")
    assert [before["o3"]["in"], since["o3"]["in"]] == pytest.approx([10e-6, 2e-6])
    assert since["gpt-4o"] == pytest.approx({"in": 2.5e-6, "cached": 1.25e-6, "out": 10e-6})


def wall(day: str) -> Micros:
    return int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()) * SECOND
