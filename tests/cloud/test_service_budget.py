"""A budget that is used up in the middle of a run on a service: its machines end, no further ones are asked
for, and the tasks that are left say why. Pilots and mailboxes are real."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted, MachineRequested
from evalfleet.model import Needs
from standins.azure_batch import ProcessNodes
from standins.azure_batch import StandIn as Batch
from standins.azure_ml import Processes
from standins.azure_ml import StandIn as MachineLearning
from tests.cloud import batch_places, ml_places
from tests.cloud.mail_desk import JobService, nothing_left
from tests.cloud.services import desk
from tests.desk import Desk, Done, Process
from tests.waiting import slowness, until

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF PILOTS: {CANNOT}")
USD_A_SECOND = 0.001
TASKS = 200
TASK_S, GRACE_S, END_S = 10.0, 30.0, 60.0
"""Of a task's own limit, how long it is waited for after that, and of the end of a machine's job."""


def begin(at: Desk, budget_usd: float) -> Process:
    with (at.folder / "evalfleet.toml").open("a") as settings:
        settings.write(f"[places.p.prices]\n{ml_places.SIZE} = {USD_A_SECOND * 3600}\n")
    bench = at.folder / "b.toml"
    bench.write_text(bench.read_text().replace("timeout_s = 60", f"timeout_s = {TASK_S:g}"))
    words = ("--workers", "2", "--canary", "1", "--name", "r", "--budget", f"{budget_usd:.3f}")
    return at.start("run", "b.toml", "--on", "p", *words)


def ended_by_its_budget(at: Desk, service: JobService, done: Done, budget_usd: float) -> None:
    assert done.code == 3, done
    nothing_left(service)
    told = at.results("r")
    assert 0 < told["scored"] < TASKS, done.out
    assert told["scored"] + told["unrun"] == TASKS, "no task is lost, and none is broken for want of money"
    assert 0 < told["cost"]["machines_usd"] <= budget_usd
    why = f"the budget of ${budget_usd:g} does not pay another machine"
    assert told["stop"]["reason"] == "budget"
    assert why in told["stop"]["detail"]
    assert why in at("report", "r").out
    assert len([event for event in at.events() if isinstance(event, MachineRequested)]) == 1


def budget_of(life_s: float, sweep_s: float, spare_s: float) -> float:
    """Of one machine, and a little more."""
    return round(USD_A_SECOND * (life_s + sweep_s + spare_s), 3)


@pytest.mark.nightly
def test_a_budget_that_pays_one_job_of_azure_ml_for_its_life_ends_the_run_with_it(tmp_path: Path) -> None:
    limits = {"prepare_s": 5.0, "start_s": 5.0, "idle_s": 60.0}
    budget_usd = budget_of(5.0 + 5.0 + TASK_S + GRACE_S + END_S, 60.0 + 180.0, 20.0)
    with MachineLearning(Processes(), ml_timing=ml_places.FAST) as ml:
        at = desk(ml, tmp_path, TASKS, sleeps=1.0, **limits)
        ended_by_its_budget(at, ml, begin(at, budget_usd).wait(), budget_usd)


@pytest.mark.slow
def test_a_budget_that_pays_one_node_of_batch_pays_no_other_one_when_that_is_lost(tmp_path: Path) -> None:
    with Batch(nodes=ProcessNodes(), timing=batch_places.FAST) as batch:
        at = desk(batch, tmp_path, TASKS, sleeps=1.0, isolation="none", lost_s=12 * slowness())
        (offer,) = asyncio.run(batch_places.place(batch, tmp_path, reach="mailbox").offers(Needs()))
        assert offer.life.boot_s is not None
        life_s = offer.life.boot_s + TASK_S + GRACE_S + offer.life.teardown_s
        budget_usd = budget_of(life_s, offer.cost.sweep_s, 2.0)
        run = begin(at, budget_usd)
        until(lambda: len([e for e in at.events() if isinstance(e, AttemptStarted)]) > 3, lambda: run.said)
        node = batch.node("r-")
        batch._await(batch.service.release(node))
        ended_by_its_budget(at, batch, run.wait(), budget_usd)
