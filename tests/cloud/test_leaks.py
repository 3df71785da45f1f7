"""Whatever happens to controllers, nothing is left at Azure, and strangers' things are as they were.

Machines, disks, addresses, interfaces, schedules and deployments are counted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from evalfleet.api import places
from evalfleet.lab import Lab, LabError, system
from evalfleet.model import SECOND, Micros, after
from evalfleet.planning.workspace import Workspace
from standins.azure import StandIn
from standins.cloud.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.desk import AzureDesk
from tests.cloud.places import left
from tests.cloud.rest import Rest
from tests.desk import Process
from tests.waiting import until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
VM = "Microsoft.Compute/virtualMachines"
ADDRESS = "Microsoft.Network/publicIPAddresses"
DAY_S = 86_400.0
WORKERS = 2


@pytest.fixture(scope="module")
def cloud() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        rest = Rest(made)
        rest.furnish()
        rest.new_vm("stranger", tags={"team": "another"})
        yield made


@pytest.fixture
def azure(cloud: StandIn) -> Iterator[StandIn]:
    """Each test leaves what it found, to the letter."""
    strangers, meters = shown(cloud), len(cloud.meters.running())
    assert len(strangers) == 4, "a machine, its disk, its interface and its address"
    yield cloud
    assert shown(cloud) == strangers
    assert len(cloud.meters.running()) == meters
    assert not deployments(cloud)


@pytest.fixture
def desk(azure: StandIn, tmp_path: Path) -> Iterator[AzureDesk]:
    made = AzureDesk(azure, tmp_path / "desk", inside=True)
    made.bench(4)
    yield made
    made.sweep()


def shown(azure: StandIn) -> dict[str, Any]:
    """All that is there beside networks, which cost nothing."""
    ids = set(left(azure))
    return {each["id"]: each for each in azure.shown() if each["id"] in ids}


def deployments(azure: StandIn) -> list[str]:
    found = Rest(azure).get("/resourceGroups/rg/providers/Microsoft.Resources/deployments").body["value"]
    return [f"{each['name']}: {each['properties']['provisioningState']}" for each in found]


def ours(azure: StandIn, type: str = VM) -> list[str]:
    return [each.id.name for each in azure.resources(type) if "stranger" not in each.id.name]


def run_until(desk: AzureDesk, azure: StandIn, moment: str) -> Process:
    """A controller that has come so far."""
    desk.bench(4, seconds=1.0 if moment == "run" else 0.1)
    process = desk.start_run("--workers", str(WORKERS))
    if moment == "create":
        until(lambda: ours(azure, ADDRESS), "a machine is being made")
        assert not desk.state().ready
    elif moment == "run":
        until(lambda: desk.state().running == WORKERS, "tasks run on all machines")
    else:
        until(lambda: len(ours(azure)) == WORKERS, "all machines are there")
        until(lambda: len(ours(azure)) < WORKERS, "the first machine is gone")
    return process


def all_scored(desk: AzureDesk) -> None:
    assert (desk.state().scored, desk.state().total) == (4, 4)
    assert desk.state().ended_at is not None


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_while_machines_are_made(azure: StandIn, desk: AzureDesk) -> None:
    process = run_until(desk, azure, "create")
    process.signal(signal.SIGINT)
    assert process.wait().code == 130
    assert desk.state().ended_at is not None


def test_ctrl_c_twice_while_machines_are_made_then_cancel(azure: StandIn, desk: AzureDesk) -> None:
    process = run_until(desk, azure, "create")
    process.signal(signal.SIGINT)
    process.signal(signal.SIGINT)
    assert process.wait().code == 130
    desk.say("cancel", "r")
    assert desk.state().ended_at is not None


# -- kill -9 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["create", "delete"])
def test_killed_and_resumed(azure: StandIn, desk: AzureDesk, moment: str) -> None:
    run_until(desk, azure, moment).kill()
    desk.say("resume", "r")
    all_scored(desk)
    used = {attempt.machine for attempt in desk.state().attempts.values()}
    isolated = {desk.state().machines[machine].isolated for machine in used}
    assert {how.kind for how in isolated} == {"user"}, f"the default where we made the machines: {isolated}"


def test_killed_and_cancelled(azure: StandIn, desk: AzureDesk) -> None:
    run_until(desk, azure, "run").kill()
    desk.say("cancel", "r")
    assert desk.state().ended_at is not None


@pytest.mark.parametrize("moment", ["create", "run", "delete"])
def test_killed_and_never_seen_again(
    azure: StandIn, desk: AzureDesk, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure stops the machines by itself, and `reap` finds them by their tags, from another computer."""
    run_until(desk, azure, moment).kill()
    until(lambda: not active(azure), "what was begun has been done")
    azure.jump(DAY_S)
    until(lambda: billed(azure) == ["stranger"], "Azure has stopped the machines")
    other = AzureDesk(azure, tmp_path / "other")
    monkeypatch.chdir(other.folder)
    for name, value in other.environ.items():
        monkeypatch.setenv(name, value)
    now = after(round(time.time()) * SECOND, DAY_S)
    workspace = replace(Workspace.here(), clock=StoppedClock(now))
    found = [each for each in asyncio.run(places.machines(workspace)) if each.why]
    assert found
    assert set(asyncio.run(places.reap(workspace, found)).values()) == {""}


@dataclass(frozen=True)
class StoppedClock:
    """A clock that stands still."""

    at: Micros

    def now(self) -> Micros:
        return self.at


def active(azure: StandIn) -> list[str]:
    done = ("Succeeded", "Failed", "Canceled")
    return [each for each in deployments(azure) if not each.endswith(done)]


def billed(azure: StandIn) -> list[str]:
    """Machines whose meter runs."""
    return [span.id.rsplit("/", 1)[-1] for span in azure.meters.running() if span.kind == "vm"]


# -- asleep, cut off, overtaken --------------------------------------------------------------------


def test_a_laptop_that_slept_past_the_expiry(azure: StandIn, desk: AzureDesk) -> None:
    process = run_until(desk, azure, "run")
    process.suspend()
    azure.jump(DAY_S)
    until(lambda: billed(azure) == ["stranger"], "Azure has stopped the machines")
    process.signal(signal.SIGCONT)
    done = process.wait()
    assert done.code == 0, done
    all_scored(desk)


def test_our_network_is_gone_for_a_while(azure: StandIn, desk: AzureDesk) -> None:
    """Neither Azure nor machines can be reached: none is given up, and the run goes on.

    The first tasks last until we are cut off for sure (a machine that was given back before is replaced by
    one that tells whether it is our network), and not as long as that lasts.
    """
    desk.bench(4, first=[15.0] * WORKERS)
    process = desk.start_run("--workers", str(WORKERS))
    until(lambda: desk.state().running == WORKERS, "tasks run on all machines")
    with CutOff(azure):
        until(lambda: len(desk.state().silent) == WORKERS, "all machines are silent")
        silent_at = time.monotonic()
        lost_s = next(iter(desk.state().machines.values())).offer.lost_s
        until(lambda: time.monotonic() > silent_at + lost_s, "one alone would be given up")
    done = process.wait()
    assert done.code == 0, done
    all_scored(desk)
    machines = desk.state().machines.values()
    assert len(machines) == WORKERS, "machines were given up that were well"
    assert not [each.detail for each in machines if each.cause or each.mends]
    assert len(desk.state().attempts) == 4, "what ran when the network went was not begun anew"


class CutOff:
    """What goes from the controller to the machines, and to Azure, is lost."""

    def __init__(self, azure: StandIn) -> None:
        self._prefix = azure.hosts.lab.prefix
        lost = ["-p", "tcp", "--dport", str(azure.port), "-o", "lo"]
        self._rules = [["OUTPUT", *lost, "-j", "DROP"], ["OUTPUT", "-o", "br0", "-j", "DROP"]]

    def __enter__(self) -> None:
        for rule in self._rules:
            system.run([*self._prefix, self._tool(), "-I", *rule])

    def __exit__(self, *_: object) -> None:
        for rule in self._rules:
            system.run([*self._prefix, self._tool(), "-D", *rule])

    def _tool(self) -> str:
        """Either may be what this kernel supports."""
        for tool in ("iptables", "iptables-legacy"):
            try:
                system.run([*self._prefix, tool, "-S", "OUTPUT"])
            except LabError:
                continue
            return tool
        raise AssertionError("no iptables works here")


def test_a_second_controller_takes_over(azure: StandIn, desk: AzureDesk) -> None:
    """The first is asleep meanwhile; when it wakes up it finds out, and does no harm."""
    first = run_until(desk, azure, "run")
    first.suspend()
    desk.say("resume", "r", "--take-over")
    all_scored(desk)
    attempts = set(desk.state().attempts)
    first.signal(signal.SIGCONT)
    assert first.wait().code == 130
    assert set(desk.state().attempts) == attempts


# -- fewer than asked for ------------------------------------------------------------------------


def test_a_pool_goes_on_with_the_machines_it_got(azure: StandIn, desk: AzureDesk) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 3  # one is the stranger's
    try:
        done = desk.done("pool", "create", "p", "--on", "azure", "--workers", "3")
        assert "1 more was asked for" in done.out
        assert "AllocationFailed" in done.out
        assert len(ours(azure)) == WORKERS
        desk.done("run", "b.toml", "--pool", "p", "--name", "r")
        all_scored(desk)
        (refused,) = json.loads(desk.say("pool", "status", "p", "--json"))["refusals"]
        assert refused["tries"] == 1
    finally:
        azure.cloud.capacity.limits.clear()
        desk.done("pool", "delete", "p", "--yes")
