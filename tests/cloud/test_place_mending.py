"""Machines that run but cannot be reached, and spot machines that are taken back: on real hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import MachineMute
from evalfleet.events import AttemptEnded, AttemptStarted, MachineCondemned, MachineMending, MachineReady
from evalfleet.model import Broken, Cause, Machine, MachineId, Scored
from evalfleet.places.azure import AzurePlace
from evalfleet.ports import Fence
from evalfleet.state import MachineState, RunState
from evalfleet.testing.harness import find, raised
from lab import Lab
from standins.azure import StandIn
from standins.azure.vms import VM
from standins.cloud.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.desk import AzureDesk
from tests.cloud.places import offer, place
from tests.cloud.running import Sleepy, Stage, when
from tests.cloud.test_place_life import says
from tests.waiting import slowness

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
ONE = MachineId("pool-abc123-1")
LONG_S = 7200.0


@pytest.fixture(scope="module")
def azure() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        yield made


def use(azure: StandIn, home: Path, work: Callable[[AzurePlace], Awaitable[None]], **more: Any) -> None:
    """With a place, in the machines' network; nothing is left afterwards."""

    async def main() -> None:
        made = place(azure, home, inside=True, **more)
        try:
            await work(made)
        finally:
            await asyncio.gather(*(made.delete(each.id) for each in await made.list("pool")))
            await made.close()

    with azure.hosts.lab.inside():
        asyncio.run(main())
    assert not azure.left()
    assert not azure.meters.running()


async def prepared(made: AzurePlace) -> Machine:
    """The machine as it is now, set up."""
    seen = await find(made, ONE)
    assert seen is not None
    assert seen.phase == "up"
    channel = made.channel(seen, Fence("r", 1, 20.0))
    await channel.prepare(Sleepy.bundle)
    await channel.prepare(Sleepy.bundle)
    await channel.close()
    return seen


def test_restarted_then_redeployed_and_set_up_again(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        await made.create(ONE, offer(), LONG_S)
        seen = await prepared(made)
        assert await says(made, seen, "cat ~/runs /mnt/made") == "x\nmade", "set up once"
        azure.make_unreachable(ONE)
        await made.mend(ONE, "restart", LONG_S)
        seen = await prepared(made)
        assert await says(made, seen, "cat ~/runs /mnt/made") == "x\nx\nmade\nmade", "its disks are the same"
        azure.make_unreachable(ONE, also_after_restart=True)
        error = await raised(MachineMute, made.mend(ONE, "restart", LONG_S))
        assert error.step == "ssh"
        assert "Server listening" in str(error), "what its console said"
        await made.mend(ONE, "redeploy", LONG_S)
        seen = await prepared(made)
        assert await says(made, seen, "cat ~/runs /mnt/made") == "x\nx\nx\nmade", "the local disk was empty"

    use(azure, tmp_path, work, answer_s=2.0 * slowness())


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_while_a_machine_is_restarted(azure: StandIn, tmp_path: Path) -> None:
    lost: list[MachineId] = []

    async def act(state: RunState) -> None:
        await when(lambda: len(state.ready) == 2 and state.running == 2, "two machines at work")
        attempt = state.attempts[state.tasks[next(iter(state.tasks))].attempts[0]]
        lost.append(attempt.machine)
        await asyncio.to_thread(azure.make_unreachable, attempt.machine)
        await when(lambda: bool(state.machines[lost[0]].mends), "a restart")
        await when(lambda: state.machines[lost[0]].phase == "ready", "ready again")

    async def work(made: AzurePlace) -> None:
        stage = Stage(made, tmp_path, 2, [12.0 * slowness()] * 4)
        state = await stage.play(act)
        assert {known.status for known in state.tasks.values()} == {"scored"}
        assert len(state.machines) == 2, "nothing was replaced"
        ((decided, mending),) = stage.moments(MachineMending)
        assert isinstance(mending, MachineMending)
        assert (mending.machine, mending.step) == (lost[0], "restart")
        broken = [
            at for at, e in stage.moments(AttemptEnded) if isinstance(e, AttemptEnded) and is_connection(e)
        ]
        assert broken == [decided], "what ran there is over at once"
        again = [
            e for at, e in stage.moments(AttemptStarted, MachineReady) if at > decided and lost[0] in str(e)
        ]
        assert isinstance(again[0], MachineReady), "nothing is started there before"
        assert "restart" in again[0].timings

    use(azure, tmp_path, work)


def is_connection(event: AttemptEnded) -> bool:
    return isinstance(event.outcome, Broken) and event.outcome.cause is Cause.CONNECTION


@pytest.mark.slow
def test_a_notice_ends_the_attempt_as_evicted_when_its_place_confirms_it(
    azure: StandIn, tmp_path: Path
) -> None:
    notice_s = 60.0

    async def act(state: RunState) -> None:
        await when(lambda: state.running == 1, "an attempt")
        machine = next(iter(state.ready))
        assert state.machines[machine].offer.spot
        await asyncio.to_thread(azure.evict, machine, notice_s)

    async def work(made: AzurePlace) -> None:
        stage = Stage(made, tmp_path, 1, [3.0 * slowness()])
        state = await stage.play(act)
        first, second = (attempt.outcome for attempt in state.attempts.values())
        assert isinstance(first, Broken)
        assert first.cause is Cause.EVICTED
        assert isinstance(second, Scored)
        causes = [e.cause for e in stage.events() if isinstance(e, MachineCondemned)]
        assert causes == [Cause.EVICTED, None]
        kept = next(iter(state.attempts.values())).collected
        assert kept is not None
        assert not kept.problem, "its files came home in time"
        for machine in state.machines.values():
            check_timings(machine)

    use(azure, tmp_path, work, spot=True)


def check_timings(machine: MachineState) -> None:
    """Each step of its coming up is timed, and together they are all of it."""
    assert {"boot", "ssh", "boot.cloud_init", "setup", "probe"} <= machine.timings.keys()
    assert machine.ready_at is not None
    steps = sum(seconds for step, seconds in machine.timings.items() if step != "boot.cloud_init")
    assert steps == pytest.approx((machine.ready_at - machine.requested_at) / 1e6, abs=1.5)


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_pools_machine_that_comes_up_unreachable_is_redeployed(azure: StandIn, tmp_path: Path) -> None:
    desk = AzureDesk(azure, tmp_path, inside=True, answer_s=3.0)

    def say(*words: str, code: int = 0) -> str:
        return desk.done(*words, code=code).said

    try:
        say("pool", "create", "p", "--on", "azure", "--workers", "1")
        (vm,) = azure.resources(VM)
        assert vm.tags["evalfleet-kind"] == "pool"
        soon = say("pool", "set", "p", "--expires", "20m", code=2)
        assert "azure cannot end a machine by itself before 40m" in soon
        azure.make_unreachable(vm.id.name)
        assert "restarted and answers" in say("pool", "restart", "p", "worker-vm")
        azure.make_unreachable(vm.id.name, also_after_restart=True)
        say("pool", "stop", "p")
        told = say("pool", "start", "p")
        assert "worker-vm: restart" in told
        assert "cannot be reached" in told
        assert "worker-vm is well again after redeploy" in told
        assert [each.id for each in azure.resources(VM)] == [vm.id]
    finally:
        say("pool", "delete", "p", "--yes")
    assert not azure.left()


def test_a_machine_that_azure_does_not_start_again_is_kept_until_its_user_replaces_it(
    azure: StandIn, tmp_path: Path
) -> None:
    desk = AzureDesk(azure, tmp_path, inside=True, regions=["eastus", "westus2"])

    def say(*words: str, code: int = 0) -> str:
        return desk.done("pool", *words, code=code).said

    limits, denied = azure.cloud.capacity.limits, azure.faults.denied_actions
    try:
        say("create", "p", "--on", "azure", "--workers", "1")
        say("ssh", "p", "--", "sh", "-c", "echo kept >file")
        say("stop", "p")
        (vm,) = azure.resources(VM)
        limits["eastus", "", ""] = 0
        for _ in range(2):
            told = say("start", "p", code=4)
            assert "We do not have sufficient capacity for the requested VM size" in told
            assert "(AllocationFailed); start it again later" in told
            assert "1 of 1 machines did not start and keep their disks" in told
        limits.clear()
        denied.append("Microsoft.Compute/virtualMachines/start/action")
        assert "ask for the role Contributor" in say("start", "p", code=4)
        denied.clear()
        assert "(AuthorizationFailed)" in say("status", "p")
        assert {span.kind for span in azure.meters.running()} == {"disk", "address"}
        say("start", "p")
        assert [each.id for each in azure.resources(VM)] == [vm.id]
        assert say("ssh", "p", "--", "cat", "file") == "kept\n"
        say("stop", "p")
        limits["eastus", "", ""] = 0
        say("start", "p", "--replace")
        assert [each.location for each in azure.resources(VM)] == ["westus2"]
    finally:
        limits.clear()
        denied.clear()
        say("delete", "p", "--yes")
    assert not azure.left()
