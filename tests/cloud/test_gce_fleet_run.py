"""A whole run on twenty of Google's machines while Google is at its worst: all scored, nothing left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.events import MachineRequested
from evalfleet.lab import Lab
from evalfleet.model import Broken, Cause, Scored, seconds_between
from evalfleet.sim import ledger
from evalfleet.state import RunState
from standins.gce import Failed, Hosts, StandIn, Stuck, Throttled
from tests.cloud.gce_places import FAST, GceDesk
from tests.desk import FollowedRun, Process

CANNOT = Lab.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}"),
]
RUN = "night"
MACHINES, TASKS = 20, 154
FULL, ROOMY = "us-central1-a", "us-central1-b"
SCRIPT = 'sleep 0.5; echo "{\\"score\\": $1}" >"$EVALFLEET_OUT/result.json"'


@pytest.fixture
def google() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST, seed=11) as made:
        made.cloud.catalog.capacity[FULL, ""] = 0
        made.faults.bucket = None  # calls come faster here than time does
        made.faults.add(Stuck(), method="POST", path=rf"{ROOMY}/instances$", times=1, after=5)
        made.faults.add(Throttled(), rate=0.10)
        made.faults.add(Failed(), rate=0.05)
        yield made


class Night(FollowedRun):
    """A run of twenty machines while Google is at its worst."""

    def __init__(self, google: StandIn, folder: Path) -> None:
        super().__init__(GceDesk(google, folder, zones=[FULL, ROOMY], spot=True), RUN)
        command = ["sh", "-c", SCRIPT, "sh", "{params.score}"]
        (folder / "night.toml").write_text(
            f'name = "night"\ntasks = "tasks.jsonl"\ntimeout_s = 60\ncommand = {json.dumps(command)}\n'
        )
        tasks = [{"id": f"t_{n}", "params": {"score": score(n)}} for n in range(TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def start(self) -> Process:
        """All machines are asked for at once: no canary."""
        words = ("--on", "gce", "--workers", str(MACHINES), "--canary", "0", "--name", RUN, "--yes")
        return self.desk.start("run", "night.toml", *words)


def score(n: int) -> float:
    return n % 3 / 2


def at_work(state: RunState) -> list[str]:
    """Machines that run an attempt now, and have scored before: to lose one breaks something."""
    busy = {each.machine for each in state.attempts.values() if each.outcome is None}
    return [machine for machine in sorted(busy) if state.machines[machine].phase == "ready"]


def test_twenty_machines_and_154_tasks_while_google_is_at_its_worst(google: StandIn, tmp_path: Path) -> None:
    night = Night(google, tmp_path)
    controller = night.start()
    try:
        night.until(lambda state: state.scored >= 5 and len(at_work(state)) >= 2, "work on two machines")
        for machine, notice_s in zip(at_work(night.state), (0.0, 5.0), strict=False):
            google.preempt(machine, notice_s)
        controller.finish()
    finally:
        night.desk.sweep()
    night.look()
    state = night.state
    assert not list(ledger.started_and_scored_once(night.records, state))
    assert not list(ledger.artefacts_come_home(night.records, state))
    outcomes = [known.outcome for known in state.tasks.values()]
    assert [each.score for each in outcomes if isinstance(each, Scored)] == [score(n) for n in range(TASKS)]
    check_faults(google, state)
    check_lives(google, night)
    google.do(google.faults.rules.clear)
    assert not state.undeleted
    assert not google.left()
    assert not google.meters.running()
    assert not google.hosts.lab.hosts


def check_faults(google: StandIn, state: RunState) -> None:
    """All of them happened, or this test shows nothing."""
    met = Counter(type(effect) for effect, _, _ in google.faults.met)
    calls = len(google.server.calls)
    assert met[Stuck] == 1
    assert 0.05 * calls < met[Throttled] < 0.2 * calls
    assert 0.01 * calls < met[Failed] < 0.1 * calls
    evicted = {machine.id for machine in state.machines.values() if machine.cause is Cause.EVICTED}
    assert len(evicted) == 2
    hit = [each.outcome for each in state.attempts.values() if each.machine in evicted]
    assert {each.cause for each in hit if isinstance(each, Broken)} == {Cause.EVICTED}
    assert any(FULL in key for key in state.blocks)


def check_lives(google: StandIn, night: Night) -> None:
    """No machine was asked to live past the time that the budget pays for."""
    asked = {
        record.event.machine: seconds_between(record.at, record.event.expires_at)
        for record in night.records
        if isinstance(record.event, MachineRequested)
    }
    assert asked
    assert max(asked.values()) <= 14_400
    assert not [call for call in google.server.calls if call[1].endswith("/setScheduling")]
