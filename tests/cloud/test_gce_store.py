"""A run on Google's machines is taken over by another computer, through the store and Google's API."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.files import KEY
from evalfleet.events import AttemptStarted, MachineRequested
from evalfleet.lab import Lab
from standins.cloud.hosts import GuestHost
from standins.gce import Hosts, StandIn
from standins.gce.cloud import Instance
from tests.cloud.desk import GceDesk
from tests.cloud.gce_places import FAST
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


@pytest.fixture(scope="module")
def google() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        yield made


def hosts(google: StandIn) -> list[GuestHost]:
    """The hosts of all machines that are up."""
    return [google.hosts.host(each.path) for each in google.instances() if each.up_at]


def sleeping(google: StandIn) -> list[int]:
    """The processes, on all machines, that wait to be woken."""
    return [
        each.pid for host in hosts(google) for each in host.processes() if list(each.argv) == ["sleep", LONG]
    ]


def logins(instance: Instance) -> list[str]:
    return instance.metadata["ssh-keys"].splitlines()


@pytest.mark.parametrize("key", ["made", pytest.param("own", marks=pytest.mark.nightly)])
def test_another_computer_gets_in_and_adopts_what_runs(google: StandIn, tmp_path: Path, key: str) -> None:
    """With one's own key, or, where evalfleet made one on the first computer, by the metadata of machines."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    one, two = (GceDesk(google, tmp_path / name) for name in ("first", "second"))
    if key == "own":
        keygen(tmp_path / "key")
    for desk in (one, two):
        desk.environ["TOKEN"] = PLANTED
        desk.configure(**({"key": str(tmp_path / "key")} if key == "own" else {}))
    one.bench(3, float(LONG), first=[0.1], timeout_s=10_000)
    (one.folder / "b.toml").write_text((one.folder / "b.toml").read_text() + 'secrets = ["TOKEN"]\n')
    (one.folder / "run.sh").write_text(SCRIPT)
    try:
        run = one.start_run("--yes", "--workers", "2", "--store", str(bucket))
        until(lambda: len(sleeping(google)) == 2, "two attempts that wait")
        until(lambda: list(bucket.glob("r/artefacts/t_0/t_0.0/evalfleet.log")), "what the first one left")
        search = ["find", "/home", "-type", "f", "-name", KEY, "-exec", "cat", "{}", "+"]
        machine_keys = [host.run(search).stdout.strip() for host in hosts(google)]
        assert all(len(each) > 30 for each in machine_keys)
        assert len(machine_keys) == 2
        run.kill()
        taken = two.start("resume", "--from", str(bucket))
        until(lambda: two.state().controllers == 2, "the second computer")
        until(lambda: (two.home / ".gce/gce/hosts").is_dir(), "host keys, which the journal tells")
        if key == "made":
            until(
                lambda: all(len(logins(each)) == 2 for each in google.instances()),
                "its key, beside the first",
            )
        for pid in sleeping(google):
            os.kill(pid, signal.SIGTERM)
        taken.finish()
    finally:
        one.sweep()
        two.sweep()
    assert two.results()["scored"] == 3
    starts = [event.attempt for event in two.events() if isinstance(event, AttemptStarted)]
    assert sorted(starts) == ["t_0.0", "t_1.0", "t_2.0"], "none was started again"
    assert sum(isinstance(event, MachineRequested) for event in two.events()) == 2, "no machine was replaced"
    assert not google.left()
    home_made = [path for desk in (one, two) for path in desk.home.glob(".gce/*/id_ed25519")]
    assert len(home_made) == (0 if key == "own" else 2)
    private = private_lines(google.key, *home_made, *([tmp_path / "key"] if key == "own" else []))
    assert "the token is " in (bucket / "r/artefacts/t_1/t_1.0/evalfleet.log").read_text()
    secrets = [*forms(PLANTED), *private, *machine_keys, "PRIVATE KEY", "ya29."]
    assert holding(bucket, *secrets) == []
