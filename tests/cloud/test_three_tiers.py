"""One run over three services of Azure, each a stand-in with real pilots or hosts: the first begins to fail,
the controller is killed, the second goes away, and the rest is done by virtual machines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptEnded, CircuitChanged, MachineRequested
from evalfleet.model import Scored
from evalfleet.state import RunState
from lab import Lab
from standins import azure, azure_batch, azure_ml
from standins.cloud.faults import Failed
from standins.cloud.hosts import Hosts
from tests.cloud import batch_places, ml_places, places
from tests.cloud.mail_desk import BENCH, nothing_left
from tests.desk import Desk, FollowedRun
from tests.waiting import until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
TASKS = 16
ORDER = ("azure_ml", "azure_batch", "azure")
LIMITED = "Error: toomanyrequests: pull rate limit"


@dataclass(frozen=True)
class Azure:
    """A subscription with a workspace and virtual machines, and a Batch account beside them."""

    ml: azure_ml.StandIn
    batch: azure_batch.StandIn

    def settings(self, ca: Path) -> dict[str, dict[str, Any]]:
        ml, batch = self.ml, self.batch
        common = {"ca": str(ca), "owner": "tester", "settle_s": 0.5}
        mail = {**common, "poll_s": 0.2, "isolation": "none"}
        return {
            "azure_ml": {
                "workspace": ml.workspace,
                "resource_group": ml.group,
                "endpoint": ml.endpoint_inside,
                "storage_endpoint": ml.storage_endpoint_inside,
                "sizes": [ml_places.SIZE],
                **mail,
            },
            "azure_batch": {
                "account": f"{batch.account}.{batch.region}",
                "endpoint": batch.endpoint_inside,
                "management": batch.endpoint_inside,
                "storage_endpoint": batch.storage_endpoint_inside,
                "sizes": [batch_places.SIZE],
                "reach": "mailbox",
                **mail,
            },
            "azure": {
                "kind": "azure_vm",
                "subscription": ml.subscription,
                "resource_group": ml.group,
                "endpoint": ml.endpoint_inside,
                "sizes": [places.SIZE],
                "regions": ["eastus"],
                "ssh_from": ["*"],
                "lost_s": places.lost_s(),
                **common,
            },
        }

    def lose_batch(self) -> None:
        """All its nodes are gone at once, and it takes no new work."""
        batch = self.batch
        batch.do(lambda: batch.faults.add(Failed(503), method="POST"))
        pools = batch.service.pools
        for node in batch.do(lambda: [each for pool in pools.values() for each in pool.nodes.values()]):
            batch._await(batch.service.release(node))


@pytest.fixture
def clouds() -> Iterator[Azure]:
    hosts = Hosts()
    within = hosts.lab.prefix
    with azure_ml.StandIn(azure_ml.Processes(within=within), machines=hosts, ml_timing=ml_places.FAST) as ml:
        nodes = azure_batch.ProcessNodes(within=within)
        with azure_batch.StandIn(nodes=nodes, beside=ml, timing=batch_places.FAST) as batch:
            yield Azure(ml, batch)


@pytest.fixture
def desk(clouds: Azure, tmp_path: Path) -> Desk:
    (tmp_path / "b.toml").write_text(BENCH)
    score = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'
    (tmp_path / "run.sh").write_text(f"sleep 2\n{score}\n")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(TASKS)))
    ca = tmp_path / "ca.pem"
    ca.write_text(clouds.ml.ca.read_text() + clouds.batch.ca.read_text())
    tables = [f"[tiers]\nall = {json.dumps(ORDER)}\n"]
    for name, given in clouds.settings(ca).items():
        tables.append(f"[places.{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in given.items()))
    (tmp_path / "evalfleet.toml").write_text("\n".join(tables))
    environ = clouds.ml.service_principal(inside=True)
    return Desk(tmp_path, tmp_path / "results", environ, clouds.ml.hosts.lab.prefix, forks=True)


def scored_at(state: RunState) -> Counter[str]:
    """By place, how many attempts have scored there."""
    return Counter(
        state.machines[attempt.machine].offer.place
        for attempt in state.attempts.values()
        if isinstance(attempt.outcome, Scored)
    )


def is_left(state: RunState, place: str) -> bool:
    return place in state.circuits and state.circuits[place].phase == "open"


@pytest.mark.slow
def test_a_run_goes_from_azure_ml_to_batch_to_machines_and_loses_no_score(clouds: Azure, desk: Desk) -> None:
    ml = clouds.ml
    first = desk.start("run", "b.toml", "--on", "all", "--workers", "3", "--name", "r")
    run = FollowedRun(desk, "r")
    run.until(lambda state: scored_at(state)["azure_ml"], "a score at Azure ML")
    ml.do(lambda: setattr(ml.troubles_of_jobs, "pull_error", LIMITED))
    for job in ml.living():
        ml.spoil(job)
    run.until(lambda state: is_left(state, "azure_ml"), "Azure ML is left")
    first.kill()
    known = len(run.records)
    desk.start("resume", "r")
    run.until(lambda state: scored_at(state)["azure_batch"], "a score at Batch")
    clouds.lose_batch()
    run.until(lambda state: is_left(state, "azure_batch"), "Batch is left")
    run.until(lambda state: scored_at(state)["azure"], "a score on a virtual machine")
    clouds.batch.do(clouds.batch.faults.rules.clear)
    assert desk.processes[-1].wait().code == 0, desk.processes[-1].said
    told = desk.results("r")
    assert (told["scored"], told["broken"], told["status"]) == (TASKS, 0, "done")
    state = run.look()
    assert set(scored_at(state)) == set(ORDER), scored_at(state)
    scores = Counter(
        state.attempts[record.event.attempt].task
        for record in run.records
        if isinstance(record.event, AttemptEnded) and isinstance(record.event.outcome, Scored)
    )
    assert set(scores.values()) == {1}, "no task has two scores"
    opened = [event for event in desk.events() if isinstance(event, CircuitChanged) and event.phase == "open"]
    assert list(dict.fromkeys(event.place for event in opened)) == ["azure_ml", "azure_batch"]
    early = [
        record.event
        for record in run.records[known:]
        if isinstance(record.event, MachineRequested) and record.at < opened[0].until
    ]
    assert early, "the new controller has asked for machines"
    assert "azure_ml" not in {event.offer.place for event in early}, "and knew which place was left"
    report = desk("report", "r").out
    for words in ("| azure_ml | left | ", LIMITED, "| azure_batch | left | ", "its node was lost"):
        assert words in report, report
    by_place = {each["place"]: each["scored"] for each in told["by_place"]}
    assert by_place == scored_at(state)
    nothing_left(ml)
    nothing_left(clouds.batch)
    until(lambda: not azure.StandIn.left(ml), lambda: f"nothing is left but {azure.StandIn.left(ml)}")
