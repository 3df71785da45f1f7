"""A whole run on twenty machines while their cloud is at its worst: all scored, nothing left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import MachineRequested
from evalfleet.model import Broken, Cause, Scored, seconds_between
from evalfleet.state import RunState
from lab import Lab
from sim import ledger
from standins import azure, gce
from standins.cloud.faults import Failed, Stuck
from standins.cloud.hosts import Hosts
from tests.cloud import conftest, gce_places
from tests.cloud.desk import AzureDesk, CloudDesk, GceDesk
from tests.cloud.places import GROUP
from tests.cloud.rest import Rest
from tests.desk import FollowedRun, Process

CANNOT = Lab.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}"),
]
RUN = "night"
MACHINES, TASKS = 20, 154
SCRIPT = 'sleep 0.5; echo "{\\"score\\": $1}" >"$EVALFLEET_OUT/result.json"'


@dataclass(frozen=True)
class BadNight:
    """A cloud at its worst. One region, or zone, has no room."""

    cloud: azure.StandIn | gce.StandIn
    desk: CloudDesk
    full: str
    throttled: type

    def take_back(self, machine: str, notice_s: float) -> None:
        if isinstance(self.cloud, azure.StandIn):
            self.cloud.evict(machine, notice_s)
        else:
            self.cloud.preempt(machine, notice_s)


@contextmanager
def azure_at_its_worst(folder: Path) -> Iterator[BadNight]:
    full, roomy = "eastus", "westus2"
    with azure.StandIn(Hosts(), timing=conftest.FAST, seed=11) as made:
        made.cloud.capacity.limits[full, "", ""] = 0
        made.faults.add(Stuck(), method="PUT", path=r"virtualMachines/night-\w+-25$", times=1)
        made.faults.add(azure.Throttled(1), rate=0.10)
        made.faults.add(Failed(), rate=0.05)
        desk = AzureDesk(made, folder, inside=True, regions=[full, roomy], spot=True)
        yield BadNight(made, desk, full, azure.Throttled)
        deployments = f"/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments"
        assert Rest(made).get(deployments).body["value"] == []


@contextmanager
def google_at_its_worst(folder: Path) -> Iterator[BadNight]:
    full, roomy = "us-central1-a", "us-central1-b"
    with gce.StandIn(Hosts(), timing=gce_places.FAST, seed=11) as made:
        made.cloud.catalog.capacity[full, ""] = 0
        made.faults.bucket = None  # calls come faster here than time does
        made.faults.add(Stuck(), method="POST", path=rf"{roomy}/instances$", times=1, after=5)
        made.faults.add(gce.Throttled(), rate=0.10)
        made.faults.add(Failed(), rate=0.05)
        desk = GceDesk(made, folder, zones=[full, roomy], spot=True)
        yield BadNight(made, desk, full, gce.Throttled)
        assert not [call for call in made.server.calls if call[1].endswith("/setScheduling")]


class Night(FollowedRun):
    """A run of twenty machines while their cloud is at its worst."""

    def __init__(self, desk: CloudDesk) -> None:
        super().__init__(desk, RUN)
        command = ["sh", "-c", SCRIPT, "sh", "{params.score}"]
        (desk.folder / "night.toml").write_text(
            f'name = "night"\ntasks = "tasks.jsonl"\ntimeout_s = 60\ncommand = {json.dumps(command)}\n'
        )
        tasks = [{"id": f"t_{n}", "params": {"score": score(n)}} for n in range(TASKS)]
        (desk.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def start(self, place: str) -> Process:
        """All machines are asked for at once: no canary."""
        words = ("--on", place, "--workers", str(MACHINES), "--canary", "0", "--name", RUN, "--yes")
        return self.desk.start("run", "night.toml", *words)

    def violations(self) -> Iterator[str]:
        yield from ledger.started_and_scored_once(self.records, self.state)
        yield from ledger.one_writer_at_a_time(self.records)
        yield from ledger.nothing_under_way(self.state)
        yield from ledger.causes_are_told(self.state)
        yield from ledger.artefacts_come_home(self.records, self.state)


def score(n: int) -> float:
    return n % 3 / 2


def at_work(state: RunState) -> list[str]:
    """Machines that run an attempt now, and have scored before: an eviction there breaks one."""
    busy = {each.machine for each in state.attempts.values() if each.outcome is None}
    return [machine for machine in sorted(busy) if state.machines[machine].phase == "ready"]


@pytest.mark.parametrize(
    "at_its_worst", [pytest.param(azure_at_its_worst, marks=pytest.mark.nightly), google_at_its_worst]
)
def test_twenty_machines_and_154_tasks_while_their_cloud_is_at_its_worst(
    at_its_worst: Any, tmp_path: Path
) -> None:
    with at_its_worst(tmp_path) as bad:
        night = Night(bad.desk)
        controller = night.start(bad.desk.place)
        try:
            night.until(lambda state: state.scored >= 5 and len(at_work(state)) >= 2, "work on two machines")
            for machine, notice_s in zip(at_work(night.state), (0.0, 5.0), strict=False):
                bad.take_back(machine, notice_s)
            controller.finish()
        finally:
            night.desk.sweep()
        night.look()
        check_scores(night)
        check_lives(night)
        check_faults(bad, night)
        check_nothing_is_left(bad.cloud)


def check_scores(night: Night) -> None:
    assert not list(night.violations())
    outcomes = [known.outcome for known in night.state.tasks.values()]
    assert [each.score for each in outcomes if isinstance(each, Scored)] == [score(n) for n in range(TASKS)]
    assert not night.state.undeleted


def check_lives(night: Night) -> None:
    """No machine was asked to live past the time that the budget pays for."""
    asked = [
        seconds_between(record.at, record.event.expires_at)
        for record in night.records
        if isinstance(record.event, MachineRequested)
    ]
    assert max(asked) <= night.state.limits.lease_s


def check_faults(bad: BadNight, night: Night) -> None:
    """All of them happened, or this test shows nothing."""
    met = Counter(type(effect) for effect, _, _ in bad.cloud.faults.met)
    calls = len(bad.cloud.server.calls)
    assert met[Stuck] == 1
    assert 0.05 * calls < met[bad.throttled] < 0.2 * calls
    assert 0.01 * calls < met[Failed] < 0.1 * calls
    machines = night.state.machines.values()
    evicted = {machine.id for machine in machines if machine.cause is Cause.EVICTED}
    in_time = [machine for machine in machines if machine.detail == "it says that its place takes it back"]
    assert len(evicted) + len(in_time) == 2, [(machine.cause, machine.detail) for machine in machines]
    hit = [each.outcome for each in night.state.attempts.values() if each.machine in evicted]
    assert {each.cause for each in hit if isinstance(each, Broken)} <= {Cause.EVICTED}
    assert any(bad.full in key for key in night.state.blocks)


def check_nothing_is_left(cloud: azure.StandIn | gce.StandIn) -> None:
    cloud.do(cloud.faults.rules.clear)
    assert not cloud.left()
    assert not cloud.meters.running()
    assert not cloud.hosts.lab.hosts
