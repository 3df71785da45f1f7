"""Whatever happens to controllers, nothing is left at the cloud, and strangers' things are as they were.

Machines, disks, addresses and all else that the cloud has of them are counted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evalfleet.api import places
from evalfleet.model import SECOND, Micros, after
from evalfleet.planning.workspace import Workspace
from lab import Lab, LabError, system
from standins import azure, gce
from standins.cloud.hosts import Hosts
from tests.cloud import conftest, gce_places
from tests.cloud.desk import AzureDesk, CloudDesk, GceDesk
from tests.cloud.rest import Rest
from tests.desk import Process
from tests.waiting import PATIENCE_S, until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
VM = "Microsoft.Compute/virtualMachines"
ADDRESS = "Microsoft.Network/publicIPAddresses"
DAY_S = 86_400.0
WORKERS = 2


class AzureWorld:
    """Azure, with a machine of a stranger's."""

    def __init__(self) -> None:
        self.cloud = azure.StandIn(Hosts(), timing=conftest.FAST)

    def furnish(self) -> None:
        rest = Rest(self.cloud)
        rest.furnish()
        rest.new_vm("stranger", tags={"team": "another"})

    def desk(self, folder: Path, *, inside: bool = False) -> CloudDesk:
        return AzureDesk(self.cloud, folder, inside=inside)

    def shown(self) -> dict[str, Any]:
        """All that is there beside networks, which cost nothing."""
        ids = set(self.cloud.left())
        return {each["id"]: each for each in self.cloud.shown() if each["id"] in ids}

    def ours(self) -> list[str]:
        return [each.id.name for each in self.cloud.resources(VM) if "stranger" not in each.id.name]

    def is_making(self) -> bool:
        return any("stranger" not in each.id.name for each in self.cloud.resources(ADDRESS))

    def under_way(self) -> list[str]:
        done = ("Succeeded", "Failed", "Canceled")
        return [each for each in self._deployments() if not each.endswith(done)]

    def check(self) -> None:
        assert not self._deployments()

    def _deployments(self) -> list[str]:
        path = "/resourceGroups/rg/providers/Microsoft.Resources/deployments"
        found = Rest(self.cloud).get(path).body["value"]
        return [f"{each['name']}: {each['properties']['provisioningState']}" for each in found]


class GoogleWorld:
    """Compute Engine, with a machine of a stranger's."""

    def __init__(self) -> None:
        self.cloud = gce.StandIn(Hosts(), timing=gce_places.FAST)

    def furnish(self) -> None:
        image = "projects/debian-cloud/global/images/family/debian-12"
        body = {
            "name": "stranger",
            "machineType": f"zones/{gce_places.ZONE}/machineTypes/{gce_places.TYPE}",
            "labels": {"team": "another"},
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": image}}],
            "networkInterfaces": [{"network": "global/networks/default"}],
        }
        path = f"projects/{self.cloud.project}/zones/{gce_places.ZONE}/instances"
        url, data = f"{self.cloud.anonymous_endpoint}{path}", json.dumps(body).encode()
        with urllib.request.urlopen(url, data, PATIENCE_S):
            until(lambda: not self.under_way(), "it is there")

    def desk(self, folder: Path, *, inside: bool = False) -> CloudDesk:
        return GceDesk(self.cloud, folder, inside=inside)

    def shown(self) -> dict[str, Any]:
        return {
            path: [each.body for each in self.cloud.instances() if each.path == path]
            for path in self.cloud.left()
        }

    def ours(self) -> list[str]:
        return [each.name for each in self.cloud.instances() if each.name != "stranger"]

    def is_making(self) -> bool:
        return bool(self.ours())

    def under_way(self) -> list[str]:
        operations = self.cloud.do(lambda: list(self.cloud.cloud.operations.values()))
        return [each.type for each in operations if each.status != "DONE"]

    def check(self) -> None: ...


World = AzureWorld | GoogleWorld
BOTH = pytest.mark.parametrize(
    "furnished", [AzureWorld, pytest.param(GoogleWorld, marks=pytest.mark.nightly)], indirect=True
)
AZURE = pytest.mark.parametrize("furnished", [AzureWorld], indirect=True)


@pytest.fixture(scope="module")
def furnished(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World = request.param()
    with made.cloud:
        made.furnish()
        yield made


@pytest.fixture
def world(furnished: World) -> Iterator[World]:
    """Each test leaves what it found, to the letter."""
    strangers, meters = furnished.shown(), len(furnished.cloud.meters.running())
    assert strangers
    yield furnished
    assert furnished.shown() == strangers
    assert len(furnished.cloud.meters.running()) == meters
    furnished.check()


@pytest.fixture
def desk(world: World, tmp_path: Path) -> Iterator[CloudDesk]:
    made = world.desk(tmp_path / "desk", inside=True)
    made.bench(4)
    yield made
    made.sweep()


def billed(world: World) -> list[str]:
    """Machines whose meter runs."""
    return [span.id.rsplit("/", 1)[-1] for span in world.cloud.meters.running() if span.kind == "vm"]


def run_until(desk: CloudDesk, world: World, moment: str) -> Process:
    """A controller that has come so far."""
    desk.bench(4, seconds=1.0 if moment == "run" else 0.1)
    process = desk.start_run("--workers", str(WORKERS))
    if moment == "create":
        until(lambda: world.is_making(), "a machine is being made")
        assert not desk.state().ready
    elif moment == "run":
        until(lambda: desk.state().running == WORKERS, "tasks run on all machines")
    else:
        until(lambda: len(world.ours()) == WORKERS, "all machines are there")
        until(lambda: len(world.ours()) < WORKERS, "the first machine is gone")
    return process


def all_scored(desk: CloudDesk) -> None:
    assert (desk.state().scored, desk.state().total) == (4, 4)
    assert desk.state().ended_at is not None


# -- Ctrl-C --------------------------------------------------------------------------------------


@BOTH
def test_ctrl_c_while_machines_are_made(world: World, desk: CloudDesk) -> None:
    process = run_until(desk, world, "create")
    process.signal(signal.SIGINT)
    assert process.wait().code == 130
    assert desk.state().ended_at is not None


@AZURE
def test_ctrl_c_twice_while_machines_are_made_then_cancel(world: World, desk: CloudDesk) -> None:
    process = run_until(desk, world, "create")
    process.signal(signal.SIGINT)
    process.signal(signal.SIGINT)
    assert process.wait().code == 130
    desk.say("cancel", "r")
    assert desk.state().ended_at is not None


# -- kill -9 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("furnished", "moment"),
    [(AzureWorld, "create"), (AzureWorld, "delete"), (GoogleWorld, "create")],
    indirect=["furnished"],
)
def test_killed_and_resumed(world: World, desk: CloudDesk, moment: str) -> None:
    run_until(desk, world, moment).kill()
    desk.say("resume", "r")
    all_scored(desk)
    used = {attempt.machine for attempt in desk.state().attempts.values()}
    isolated = {desk.state().machines[machine].isolated for machine in used}
    # users of their own are the default where we make the machines, but hosts of the lab may not mount
    assert {(how.kind, "mount namespaces" in how.detail) for how in isolated} == {("none", True)}, isolated


@AZURE
def test_killed_and_cancelled(world: World, desk: CloudDesk) -> None:
    run_until(desk, world, "run").kill()
    desk.say("cancel", "r")
    assert desk.state().ended_at is not None


@pytest.mark.parametrize(
    ("furnished", "moment"),
    [(AzureWorld, "create"), (AzureWorld, "run"), (AzureWorld, "delete"), (GoogleWorld, "run")],
    indirect=["furnished"],
)
def test_killed_and_never_seen_again(
    world: World, desk: CloudDesk, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud ends the machines by itself, and `reap` finds what is left, from another computer."""
    run_until(desk, world, moment).kill()
    until(lambda: not world.under_way(), "what was begun has been done")
    world.cloud.jump(DAY_S)
    until(lambda: billed(world) == ["stranger"], "the cloud has stopped the machines")
    other = world.desk(tmp_path / "other")
    monkeypatch.chdir(other.folder)
    for name, value in other.environ.items():
        monkeypatch.setenv(name, value)
    now = after(round(time.time()) * SECOND, DAY_S)
    workspace = replace(Workspace.here(), clock=StoppedClock(now))
    found = [each for each in asyncio.run(places.machines(workspace)) if each.why]
    if isinstance(world, AzureWorld):
        assert found
        assert set(asyncio.run(places.reap(workspace, found)).values()) == {""}
    else:
        assert not found, "Google deletes machines at their limit, with all that is theirs"


@dataclass(frozen=True)
class StoppedClock:
    """A clock that stands still."""

    at: Micros

    def now(self) -> Micros:
        return self.at


# -- asleep, cut off, overtaken --------------------------------------------------------------------


@pytest.mark.nightly
@BOTH
def test_a_laptop_that_slept_past_the_expiry(world: World, desk: CloudDesk) -> None:
    process = run_until(desk, world, "run")
    process.suspend()
    world.cloud.jump(DAY_S)
    until(lambda: billed(world) == ["stranger"], "the cloud has stopped the machines")
    process.signal(signal.SIGCONT)
    done = process.wait()
    assert done.code == 0, done
    all_scored(desk)


@pytest.mark.slow
@AZURE
def test_our_network_is_gone_for_a_while(world: World, desk: CloudDesk) -> None:
    """Neither the cloud nor machines can be reached: none is given up, and the run goes on.

    The first tasks last until we are cut off for sure (a machine that was given back before is replaced by
    one that tells whether it is our network), and not as long as that lasts.
    """
    desk.bench(4, first=[15.0] * WORKERS)
    process = desk.start_run("--workers", str(WORKERS))
    until(lambda: desk.state().running == WORKERS, "tasks run on all machines")
    with CutOff(world):
        until(lambda: len(desk.state().silent) == WORKERS, "all machines are silent")
        silent_at = time.monotonic()
        lost_s = next(iter(desk.state().machines.values())).offer.life.lost_s
        until(lambda: time.monotonic() > silent_at + lost_s, "one alone would be given up")
    done = process.wait()
    assert done.code == 0, done
    all_scored(desk)
    machines = desk.state().machines.values()
    assert len(machines) == WORKERS, "machines were given up that were well"
    assert not [each.detail for each in machines if each.cause or each.mends]
    assert len(desk.state().attempts) == 4, "what ran when the network went was not begun anew"


class CutOff:
    """What goes from the controller to the machines, and to the cloud, is lost."""

    def __init__(self, world: World) -> None:
        self._prefix = world.cloud.hosts.lab.prefix
        lost = ["-p", "tcp", "--dport", str(urlsplit(world.cloud.endpoint).port), "-o", "lo"]
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


@pytest.mark.nightly
@AZURE
def test_a_second_controller_takes_over(world: World, desk: CloudDesk) -> None:
    """The first is asleep meanwhile; when it wakes up it finds out, and does no harm."""
    first = run_until(desk, world, "run")
    first.suspend()
    desk.say("resume", "r", "--take-over")
    all_scored(desk)
    attempts = set(desk.state().attempts)
    first.signal(signal.SIGCONT)
    assert first.wait().code == 130
    assert set(desk.state().attempts) == attempts


# -- fewer than asked for ------------------------------------------------------------------------


@AZURE
def test_a_pool_goes_on_with_the_machines_it_got(world: World, desk: CloudDesk) -> None:
    assert isinstance(world, AzureWorld)
    limits = world.cloud.cloud.capacity.limits
    limits["eastus", "", ""] = 3  # one is the stranger's
    try:
        done = desk.done("pool", "create", "p", "--on", "azure", "--workers", "3")
        assert "1 more was asked for" in done.out
        assert "AllocationFailed" in done.out
        assert len(world.ours()) == WORKERS
        desk.done("run", "b.toml", "--pool", "p", "--name", "r")
        all_scored(desk)
        (refused,) = json.loads(desk.say("pool", "status", "p", "--json"))["refusals"]
        assert refused["tries"] == 1
    finally:
        limits.clear()
        desk.done("pool", "delete", "p", "--yes")
