"""Runs on nodes of Azure Batch that are hosts of the lab: pilots, SSH and tasks are real."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted
from evalfleet.model import Broken, Cause, Machine, MachineId, Needs
from evalfleet.state import RunState
from lab import Lab
from standins.azure_batch import StandIn
from standins.cloud.hosts import Hosts
from tests.cloud import batch_places
from tests.cloud.running import Stage, when
from tests.desk import Desk
from tests.docs.pages import ROOT, File, steps
from tests.waiting import until, until_async

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")


@pytest.fixture
def batch() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=batch_places.FAST) as made:
        yield made


def test_a_task_that_batch_runs_anew_costs_no_score_and_gives_no_second_one(
    batch: StandIn, tmp_path: Path
) -> None:
    """The node of a machine restarts in the middle of an attempt; what is left afterwards is nothing."""

    async def main() -> tuple[RunState, Stage]:
        made = batch_places.place(batch, tmp_path, inside=True, name_of_place="azure")
        stage = Stage(made, tmp_path, 1, [3.0, 0.1])

        async def act(state: RunState) -> None:
            await when(lambda: any(each.started_at for each in state.attempts.values()), "an attempt runs")
            await asyncio.to_thread(batch.reboot, "pool-")

        try:
            return await stage.play(act), stage
        finally:
            await made.close()

    with batch.hosts.lab.inside():
        state, stage = asyncio.run(main())
    assert all(task.outcome is not None for task in state.tasks.values()), state.tasks
    broken = [each.outcome.cause for each in state.attempts.values() if isinstance(each.outcome, Broken)]
    assert broken == [Cause.EVICTED], "the attempt that was cut off, and no other"
    started = [event.attempt for event in stage.events() if isinstance(event, AttemptStarted)]
    assert len(started) == len(set(started)) == 3
    until(lambda: not batch.left(), "nothing is left")
    assert not batch.meters.running()


def test_a_node_without_kvm_is_refused_by_trying_it(batch: StandIn, tmp_path: Path) -> None:
    """Hosts of the lab have no /dev/kvm: the pilot finds out on the node, before any task."""

    async def main() -> Machine:
        made = batch_places.place(batch, tmp_path, inside=True)
        try:
            (offer,) = await made.offers(Needs(nested_virtualization=True))
            machine = MachineId("run-abc123-1")
            await made.create(machine, offer, 600.0)

            async def look() -> Machine | None:
                found = await made.list("run")
                return found[0] if found and found[0].phase == "gone" else None

            gone = await until_async(look, "it is refused")
            await made.delete(machine)
            return gone
        finally:
            await made.close()

    with batch.hosts.lab.inside():
        gone = asyncio.run(main())
    assert "/dev/kvm" in gone.detail
    until(lambda: not batch.left(), "nothing is left")


@pytest.mark.nightly
def test_what_the_page_tells_to_type_works(batch: StandIn, tmp_path: Path) -> None:
    page = ROOT / "docs/azure-batch.md"
    environ = batch.service_principal(inside=True)
    at = Desk(tmp_path, tmp_path / "results", environ, prefix=batch.hosts.lab.prefix)
    for step in steps(page):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
    here = {"endpoint": batch.endpoint_inside, "management": batch.endpoint_inside, "ca": str(batch.ca)}
    lines = "".join(f'{key} = "{value}"\n' for key, value in here.items()) + "poll_s = 0.2\nsettle_s = 0.5\n"
    (tmp_path / "evalfleet.toml").write_text((tmp_path / "evalfleet.toml").read_text() + lines)
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        done = at(*command)
        assert done.code == 0, (command, done)
    assert at.results("first")["scored"] == 3
    until(lambda: not batch.left(), "nothing is left")
