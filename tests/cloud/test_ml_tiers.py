"""Azure ML as the first of two places: it works, then fails, and the run goes on at the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.events import AttemptEnded, AttemptStarted, CircuitChanged, MachineRequested
from evalfleet.model import Scored
from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.services import desk
from tests.desk import FollowedRun
from tests.waiting import until

CANNOT = Processes.missing()
pytestmark = [
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}"),
    pytest.mark.nightly,
]
TASKS = 8


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(Processes(), ml_timing=ml_places.FAST) as made:
        yield made


@pytest.mark.parametrize("killed", [False, True], ids=["one controller", "a controller that is killed"])
def test_when_azure_ml_begins_to_fail_the_rest_runs_at_the_next_place_and_no_score_is_lost(
    ml: StandIn, tmp_path: Path, killed: bool
) -> None:
    at = desk(ml, tmp_path, TASKS, sleeps=4)
    run = at.start("run", "b.toml", "--on", "p,local", "--workers", "2", "--name", "r")
    results = tmp_path / "results/r"
    until(lambda: list(results.glob("t*/t*.0/result.json")) or None, lambda: f"a first score: {run.said}")
    ml.do(lambda: setattr(ml.troubles_of_jobs, "pull_error", "Error: toomanyrequests: pull rate limit"))
    for machine in {event.machine for event in at.events() if isinstance(event, AttemptStarted)}:
        ml.spoil(machine)

    def opened() -> bool:
        changes = [event for event in at.events() if isinstance(event, CircuitChanged)]
        return any((change.place, change.phase) == ("p", "open") for change in changes)

    until(opened, lambda: f"its circuit opens: {run.said}")
    if killed:
        run.kill()
        done = at("resume", "r")
    else:
        done = run.wait()
    assert done.code == 0, done
    told = at.results("r")
    assert (told["scored"], told["broken"], told["status"]) == (TASKS, 0, "done")
    state = at.state("r")
    places = Counter(
        state.machines[attempt.machine].offer.place
        for attempt in state.attempts.values()
        if isinstance(attempt.outcome, Scored)
    )
    assert places["p"] >= 1, places
    assert places["local"] >= 1, places
    scores = Counter(
        state.attempts[event.attempt].task
        for event in at.events()
        if isinstance(event, AttemptEnded) and isinstance(event.outcome, Scored)
    )
    assert set(scores.values()) == {1}, "no task has two scores"
    report = at("report", "r")
    assert "toomanyrequests" in report.out, "it says why the place was left"
    nothing_left(ml)


def test_a_place_that_works_again_is_tried_by_one_machine_and_gets_tasks_again(
    ml: StandIn, tmp_path: Path
) -> None:
    """A minute after it was left."""
    ml.do(lambda: setattr(ml.troubles_of_jobs, "pull_error", "Error: toomanyrequests: pull rate limit"))
    at = desk(ml, tmp_path, 60, sleeps=4)
    run = at.start("run", "b.toml", "--on", "p,local", "--workers", "2", "--name", "r")
    followed = FollowedRun(at, "r")
    followed.until(lambda state: "p" in state.circuits and state.circuits["p"].phase == "open", "it is left")
    ml.do(lambda: setattr(ml.troubles_of_jobs, "pull_error", ""))
    followed.until(lambda state: state.circuits["p"].phase == "closed", "it is trusted again")
    events = [record.event for record in followed.records]
    opened = next(n for n, e in enumerate(events) if isinstance(e, CircuitChanged) and e.phase == "open")
    closed = next(n for n, e in enumerate(events) if isinstance(e, CircuitChanged) and e.phase == "closed")
    probes = [
        event.machine
        for event in events[opened:closed]
        if isinstance(event, MachineRequested) and event.offer.place == "p"
    ]
    assert len(probes) == 1, "one machine is tried"
    assert run.wait().code == 0, run.said
    state = at.state("r")
    assert state.scored == 60
    assert state.circuits["p"].proofs >= 2, "it has scored since"
    assert "one machine was tried, and works" in at("report", "r").out
    nothing_left(ml)
