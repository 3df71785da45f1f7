"""A run on a cloud's machines is taken over by another computer, through the store and the cloud's API."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.files import KEY
from evalfleet.events import AttemptStarted, ControllerStarted, MachineCondemned, MachineRequested
from evalfleet.places.azure import AzureSettings
from evalfleet.places.gce import GceSettings
from lab import Lab, LabError
from standins import azure, gce
from standins.azure.vms import VM, Vm
from standins.cloud.hosts import GuestHost, Hosts
from tests.cloud import conftest, gce_places
from tests.cloud.desk import AzureDesk, CloudDesk, GceDesk
from tests.planted import UNIQUE, forms, holding, private_lines
from tests.ssh.fleet import keygen
from tests.waiting import until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
PLANTED = f"planted-{UNIQUE}-value"
LONG = "4242.0"
"""Seconds that only a test's hand cuts short."""
SCRIPT = """\
echo "the token is $TOKEN"; echo "$TOKEN" >"$EVALFLEET_OUT/leak"
sleep "$1"
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[azure.StandIn | gce.StandIn]:
    if request.param == "gce":
        with gce.StandIn(Hosts(), timing=gce_places.FAST) as google:
            yield google
    else:
        with azure.StandIn(Hosts(), timing=conftest.FAST) as microsoft:
            yield microsoft


class TakeOver:
    """Two computers, a bucket, and a run of three tasks: one is over, two wait to be woken."""

    def __init__(self, cloud: azure.StandIn | gce.StandIn, folder: Path, own_key: Path | None) -> None:
        """`own_key`: the user's, which both computers have; None: each makes one."""
        self._cloud, self._own_key = cloud, own_key
        self.bucket = folder / "bucket"
        self.bucket.mkdir()
        self.one, self.two = (self._desk(folder / name) for name in ("first", "second"))
        self._machine_keys: list[str] = []
        """What supervisors on the machines know their controllers by."""

    def _desk(self, folder: Path) -> CloudDesk:
        desk: CloudDesk
        if isinstance(self._cloud, gce.StandIn):
            desk = GceDesk(self._cloud, folder)
        else:
            desk = AzureDesk(self._cloud, folder, inside=True)
        desk.environ["TOKEN"] = PLANTED
        desk.configure(**({} if self._own_key is None else {"key": str(self._own_key)}))
        return desk

    def _hosts(self) -> list[GuestHost]:
        """The hosts of all machines that are up."""
        if isinstance(self._cloud, gce.StandIn):
            up = [each.path for each in self._cloud.instances() if each.up_at]
        else:
            machines = [each for each in self._cloud.resources(VM) if isinstance(each, Vm)]
            up = [str(vm.id) for vm in machines if vm.power == "running"]
        with suppress(KeyError):  # it goes just now
            return [self._cloud.hosts.host(id) for id in up]
        return []

    def machines(self) -> list[str]:
        """What there is of machines, also of those that are coming up."""
        if isinstance(self._cloud, gce.StandIn):
            return [each.path for each in self._cloud.instances()]
        return [str(each.id) for each in self._cloud.resources(VM)]

    def sleeping(self) -> list[int]:
        """The processes, on all machines, that wait to be woken."""
        with suppress(LabError):  # one goes just now
            processes = [process for host in self._hosts() for process in host.processes()]
            return [process.pid for process in processes if list(process.argv) == ["sleep", LONG]]
        return []

    def woken(self) -> bool:
        """Wake what waits. True, always."""
        for pid in self.sleeping():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return True

    def let_in(self) -> list[int]:
        """How many keys let one in, by machine."""
        user = GceSettings().user if isinstance(self._cloud, gce.StandIn) else AzureSettings().user
        count = ["grep", "-c", "^ssh-", f"/home/{user}/.ssh/authorized_keys"]
        return [int(host.run(count).stdout) for host in self._hosts()]

    def begin(self) -> None:
        """Run it on the first computer, and kill its controller when two attempts wait."""
        folder = self.one.folder
        self.one.bench(3, float(LONG), first=[0.1], timeout_s=10_000)
        (folder / "b.toml").write_text((folder / "b.toml").read_text() + 'secrets = ["TOKEN"]\n')
        (folder / "run.sh").write_text(SCRIPT)
        run = self.one.start_run("--yes", "--workers", "2", "--store", str(self.bucket))
        until(lambda: len(self.sleeping()) == 2, "two attempts that wait")
        left = "r/artefacts/t_0/t_0.0/evalfleet.log"
        until(lambda: list(self.bucket.glob(left)), "what the first one left")
        until(lambda: len(self.machines()) == 2, "that one which came too late is deleted")
        search = ["find", "/home", "-type", "f", "-name", KEY, "-exec", "cat", "{}", "+"]
        self._machine_keys = [host.run(search).stdout.strip() for host in self._hosts()]
        assert [len(key) > 30 for key in self._machine_keys] == [True, True]
        run.kill()

    def finish(self, keys: int) -> None:
        """Take it over on the second computer, and wake what waits once so many keys let one in."""
        taken = self.two.start("resume", "--from", str(self.bucket))
        until(lambda: self.two.state().controllers == 2, "the second computer")
        place = self.two.place
        until(lambda: (self.two.home / f".{place}/{place}/hosts").is_dir(), "host keys, from the journal")
        until(lambda: self.let_in() == [keys, keys], lambda: f"{keys} keys that let in: {self.let_in()}")
        assert self.woken()
        taken.finish()

    def check_adopted(self) -> None:
        events = list(self.two.events())
        starts = {event.attempt: event.machine for event in events if isinstance(event, AttemptStarted)}
        assert self.two.results()["scored"] == 3
        assert sorted(starts) == ["t_0.0", "t_1.0", "t_2.0"], "none was started again"
        _, taken = (n for n, event in enumerate(events) if isinstance(event, ControllerStarted))
        asked = [event.machine for event in events[taken:] if isinstance(event, MachineRequested)]
        assert not asked, "no machine was replaced"
        # on a busy computer one may take so long to come that the first controller asks for a third one
        before = {event.machine for event in events if isinstance(event, MachineRequested)}
        gone = {event.machine: event for event in events if isinstance(event, MachineCondemned)}
        assert len(set(starts.values())) == 2
        assert {gone[machine].cause for machine in before} == {None}, "each was let go, and none was lost"
        assert not self._cloud.left()

    def check_no_secret_is_stored(self) -> None:
        """No secret, no private key and no token is in the bucket."""
        folders = [desk.home / f".{desk.place}" for desk in (self.one, self.two)]
        keys = [path for folder in folders for path in folder.glob("*/id_ed25519")]
        assert len(keys) == (2 if self._own_key is None else 0)
        keys += [] if self._own_key is None else [self._own_key]
        keys += [self._cloud.key] if isinstance(self._cloud, gce.StandIn) else []
        assert "the token is " in (self.bucket / "r/artefacts/t_1/t_1.0/evalfleet.log").read_text()
        secrets = [*forms(PLANTED), *private_lines(*keys), *self._machine_keys, "PRIVATE KEY", "ya29."]
        assert holding(self.bucket, *secrets) == []


@pytest.mark.parametrize(
    ("cloud", "key"),
    [
        ("gce", "made"),
        ("azure", "made"),
        pytest.param("gce", "own", marks=pytest.mark.nightly),
        pytest.param("azure", "own", marks=pytest.mark.nightly),
    ],
    indirect=["cloud"],
)
def test_another_computer_gets_in_and_adopts_what_runs(
    cloud: azure.StandIn | gce.StandIn, tmp_path: Path, key: str
) -> None:
    """With one's own key; or, where evalfleet made one on the first computer, the cloud puts another beside
    it: Google by the machines' metadata, Azure by a command that its agent runs there."""
    own_key = tmp_path / "key" if key == "own" else None
    if own_key is not None:
        keygen(own_key)
    run = TakeOver(cloud, tmp_path, own_key)
    try:
        run.begin()
        run.finish(1 if own_key else 2)
    finally:
        run.one.sweep()
        run.two.sweep()
    run.check_adopted()
    run.check_no_secret_is_stored()


@pytest.mark.nightly
@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_a_machine_is_not_given_up_while_azure_takes_its_time_to_let_us_in(
    cloud: azure.StandIn, tmp_path: Path
) -> None:
    """A script takes half a minute there, and more on the next machine: longer than silence is borne."""
    cloud.cloud.timing.run_command_s = (20.0, 35.0)
    run = TakeOver(cloud, tmp_path, None)
    try:
        run.begin()
        run.finish(2)
    finally:
        run.one.sweep()
        run.two.sweep()
    run.check_adopted()


@pytest.mark.nightly
@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_who_may_run_no_command_on_azures_machines_gets_new_ones(
    cloud: azure.StandIn, tmp_path: Path
) -> None:
    run = TakeOver(cloud, tmp_path, None)
    try:
        run.begin()
        cloud.faults.denied_actions.append("Microsoft.Compute/virtualMachines/runCommand/action")
        # with one more than there were: it tells that it is not our network which is down
        taken = run.two.start("resume", "--from", str(run.bucket), "--workers", "3")
        until(lambda: run.woken() and not taken.lives, "the end", 400)
        said = taken.finish()
    finally:
        run.one.sweep()
        run.two.sweep()
    assert run.two.results()["scored"] == 3
    assert said.count("our key cannot be put onto it") == 2, "once for each machine"
    assert "runCommand/action" in said
    assert not cloud.left()


@pytest.mark.nightly
@pytest.mark.parametrize("cloud", ["azure", "gce"], indirect=True)
def test_machines_that_were_still_coming_up_are_had_or_replaced_and_nothing_is_left(
    cloud: azure.StandIn | gce.StandIn, tmp_path: Path
) -> None:
    """The first computer is lost while its machines boot: nobody has put a supervisor onto them."""
    if isinstance(cloud, gce.StandIn):
        cloud.cloud.timing = replace(cloud.cloud.timing, boot=(15.0, 20.0))
    else:
        cloud.cloud.timing.boot_s = (15.0, 20.0)
    run = TakeOver(cloud, tmp_path, None)
    try:
        run.one.bench(3, 0.1)
        first = run.one.start_run("--yes", "--workers", "2", "--store", str(run.bucket))
        until(lambda: len(run.machines()) == 2, "two machines that come up")
        first.kill()
        # with one more than there were: it tells that it is not our network which is down
        taken = run.two.start("resume", "--from", str(run.bucket), "--workers", "3")
        until(lambda: not taken.lives, "the end", 500)
        taken.finish()
    finally:
        run.one.sweep()
        run.two.sweep()
    assert run.two.results()["scored"] == 3
    starts = [event.attempt for event in run.two.events() if isinstance(event, AttemptStarted)]
    assert sorted(starts) == ["t_0.0", "t_1.0", "t_2.0"]
    assert not cloud.left()
