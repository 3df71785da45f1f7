"""A whole run on twenty of Azure's machines while Azure is at its worst: all scored, nothing left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.lab import Lab
from evalfleet.model import Broken, Cause, Scored
from evalfleet.sim import ledger
from evalfleet.state import RunState
from standins.azure import Failed, StandIn, Stuck, Throttled
from standins.cloud.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.desk import AzureDesk
from tests.cloud.places import GROUP, left
from tests.cloud.rest import Rest
from tests.desk import FollowedRun, Process

CANNOT = Lab.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}"),
]
RUN = "night"
MACHINES, TASKS = 20, 154
FULL, ROOMY = "eastus", "westus2"
SCRIPT = 'sleep 0.5; echo "{\\"score\\": $1}" >"$EVALFLEET_OUT/result.json"'


@pytest.fixture
def azure() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST, seed=11) as made:
        made.cloud.capacity.limits[FULL, "", ""] = 0
        made.faults.add(Stuck(), method="PUT", path=r"virtualMachines/night-\w+-25$", times=1)
        made.faults.add(Throttled(1), rate=0.10)
        made.faults.add(Failed(), rate=0.05)
        yield made


class Night(FollowedRun):
    """A run of twenty machines while Azure is at its worst."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        super().__init__(AzureDesk(azure, folder, inside=True, regions=[FULL, ROOMY], spot=True), RUN)
        command = ["sh", "-c", SCRIPT, "sh", "{params.score}"]
        (folder / "night.toml").write_text(
            f'name = "night"\ntasks = "tasks.jsonl"\ntimeout_s = 60\ncommand = {json.dumps(command)}\n'
        )
        tasks = [{"id": f"t_{n}", "params": {"score": score(n)}} for n in range(TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def start(self) -> Process:
        """All machines are asked for at once: no canary."""
        words = ("--on", "azure", "--workers", str(MACHINES), "--canary", "0", "--name", RUN, "--yes")
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


def test_twenty_machines_and_154_tasks_while_azure_is_at_its_worst(azure: StandIn, tmp_path: Path) -> None:
    night = Night(azure, tmp_path)
    controller = night.start()
    try:
        night.until(lambda state: state.scored >= 5 and len(at_work(state)) >= 2, "work on two machines")
        for machine, notice_s in zip(at_work(night.state), (0.0, 5.0), strict=False):
            azure.evict(machine, notice_s)
        controller.finish()
    finally:
        night.desk.sweep()
    night.look()
    check_scores(night)
    check_faults(azure, night)
    check_nothing_is_left(azure)


def check_scores(night: Night) -> None:
    assert not list(night.violations())
    outcomes = [known.outcome for known in night.state.tasks.values()]
    assert [each.score for each in outcomes if isinstance(each, Scored)] == [score(n) for n in range(TASKS)]
    assert not night.state.undeleted


def check_faults(azure: StandIn, night: Night) -> None:
    """All of them happened, or this test shows nothing."""
    met = Counter(type(effect) for effect, _, _ in azure.faults.met)
    calls = len(azure.server.calls)
    assert met[Stuck] == 1
    assert 0.05 * calls < met[Throttled] < 0.2 * calls
    assert 0.01 * calls < met[Failed] < 0.1 * calls
    evicted = {machine.id for machine in night.state.machines.values() if machine.cause is Cause.EVICTED}
    assert len(evicted) == 2
    hit = [each.outcome for each in night.state.attempts.values() if each.machine in evicted]
    assert {each.cause for each in hit if isinstance(each, Broken)} == {Cause.EVICTED}
    assert any(FULL in key for key in night.state.blocks)


def check_nothing_is_left(azure: StandIn) -> None:
    azure.do(azure.faults.rules.clear)
    assert not left(azure)
    assert not azure.meters.running()
    assert (
        Rest(azure).get(f"/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments").body["value"]
        == []
    )
    assert not azure.hosts.lab.hosts
