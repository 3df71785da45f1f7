"""Ten real minutes without a service's API, or without the storage that its mailboxes are in: what runs goes
on, nothing is lost, and nothing is asked twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evalfleet.events import AttemptEnded, CircuitChanged, MachineCondemned
from evalfleet.model import Scored, after
from standins.azure_ml import Failed, Processes
from tests.cloud.mail_desk import nothing_left
from tests.cloud.services import Service, desk
from tests.waiting import until

CANNOT = Processes.missing()
pytestmark = [
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF JOBS: {CANNOT}"),
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]
AWAY_S = 600.0
TASK_S = 50


def away_api(service: Service, is_away: bool) -> None:
    if is_away:
        service.faults.add(Failed(503))
    else:
        service.faults.rules.clear()


def away_storage(service: Service, is_away: bool) -> None:
    service.storage.is_away = is_away


@pytest.mark.parametrize(
    ("away", "tasks", "meanwhile"),
    [(away_api, 26, 12), (away_storage, 6, 0)],
    ids=["the API", "the storage"],
)
def test_ten_minutes_without_it_cost_no_machine_and_no_score(
    service: Service, tmp_path: Path, away: Callable[[Service, bool], None], tasks: int, meanwhile: int
) -> None:
    """Without the API there is more to do than two machines do meanwhile, and half of that is asked for."""
    at = desk(service, tmp_path, tasks, sleeps=TASK_S)
    bench = tmp_path / "b.toml"
    bench.write_text(bench.read_text().replace("timeout_s = 60", "timeout_s = 600"))
    run = at.start("run", "b.toml", "--on", "p", "--workers", "2", "--name", "r", "--canary", "0")
    until(lambda: at.state("r").running == 2, lambda: f"both machines are at work: {run.said}")
    begun = at.records("r")[-1].at
    service.do(lambda: away(service, True))
    time.sleep(AWAY_S)
    service.do(lambda: away(service, False))
    assert run.lives, run.said
    assert run.wait(1200.0).code == 0, run.said
    told = at.results("r")
    assert (told["scored"], told["broken"], told["status"]) == (tasks, 0, "done")
    state = at.state("r")
    assert len(state.machines) == 2, "none was given up, and none was asked for twice"
    assert len(state.attempts) == tasks, "nothing ran twice"
    assert not [event for event in at.events() if isinstance(event, CircuitChanged)]
    assert not [event for event in at.events() if isinstance(event, MachineCondemned) and event.cause]
    scored = [
        record.at
        for record in at.records("r")
        if isinstance(record.event, AttemptEnded) and isinstance(record.event.outcome, Scored)
    ]
    assert len(scored) == tasks
    assert sum(begun < moment < after(begun, AWAY_S) for moment in scored) >= meanwhile, "what ran went on"
    nothing_left(service)
