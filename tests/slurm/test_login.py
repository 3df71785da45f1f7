"""A cluster that is used over SSH to a login node: a real sshd, beside a real Slurm."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.errors import PlaceError
from evalfleet.events import AttemptEnded, MachineAllocated
from evalfleet.model import Scored
from evalfleet.places.slurm import remote
from evalfleet.places.slurm.commands import Slurm
from evalfleet.places.ssh.place import SshSettings, access_of
from evalfleet.ports import PlaceContext
from tests.desk import Desk
from tests.ssh.fleet import Sshd, keygen
from tests.waiting import until

from .cluster import Cluster
from .test_run import desk, nothing_left

BIG = 400_000
"""More than goes with a message to a supervisor."""


class LoginNode:
    """An sshd that gives its logins the cluster's configuration, and what is needed to go there."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        folder.mkdir()
        self.key, self.known_hosts = folder / "key", folder / "known_hosts"
        keygen(self.key)
        self.sshd = Sshd(folder / "login", self.key)
        config, home = folder / "login/sshd_config", f"SetEnv HOME={self.sshd.home}"
        given = f"{home} SLURM_CONF={cluster.config}"  # the first SetEnv counts
        config.write_text(config.read_text().replace(home, given))
        self.known_hosts.write_text(self.sshd.known)
        self.sshd.start()

    def settings(self) -> str:
        return (
            f'login = "{getpass.getuser()}@{self.sshd.name}"\nkey = "{self.key}"\n'
            f'known_hosts = "{self.known_hosts}"\n'
        )


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[LoginNode]:
    made = LoginNode(tmp_path / "ssh", cluster)
    try:
        yield made
    finally:
        made.sshd.stop()


def away(login: LoginNode, cluster: Cluster, folder: Path, count: int, settings: str = "") -> Desk:
    """A desk that has the cluster neither by its configuration nor by its folder."""
    at = desk(cluster, folder, count, login.settings() + settings)
    del at.environ["SLURM_CONF"]
    toml = folder / "evalfleet.toml"
    toml.write_text(toml.read_text().replace('"shared"', '"~/shared"'))
    return at


@pytest.mark.parametrize("reach", ["step", pytest.param("mailbox", marks=pytest.mark.nightly)])
def test_a_run_over_ssh_goes_on_when_the_connection_is_cut(
    login: LoginNode, cluster: Cluster, tmp_path: Path, reach: str
) -> None:
    at = away(login, cluster, tmp_path / "f", 2, f'reach = "{reach}"\n')
    gate = tmp_path / "gate"
    (tmp_path / "f/run.sh").write_text(
        f"until [ -e {gate} ]; do sleep 0.1; done\n"
        f'head -c {BIG} /dev/urandom >"$EVALFLEET_OUT/big"\n'
        'cp large "$EVALFLEET_OUT/large"\n'
        """echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"\n"""
    )
    (tmp_path / "f/large").write_bytes(bytes(BIG))
    (tmp_path / "f/b.toml").write_text(
        (tmp_path / "f/b.toml").read_text().replace('["run.sh"]', '["run.sh", "large"]')
    )
    run = at.start("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r")
    until(lambda: len(list(login.sshd.home.glob("shared/*/*/jobs/t*/pid"))) == 2, lambda: run.said)
    steps = cluster.ask("squeue", "--steps", "--noheader", "--format=%i").split()
    assert all(step.endswith(".batch") for step in steps) == (reach == "mailbox")
    login.sshd.cut()
    gate.touch()
    assert run.wait().code == 0, run.said
    ended = [event for event in at.events() if isinstance(event, AttemptEnded)]
    assert len(ended) == 2, "a cut has ended attempts"
    assert all(isinstance(event.outcome, Scored) for event in ended)
    journal = "\n".join(map(str, at.events()))
    assert len([event for event in at.events() if isinstance(event, MachineAllocated)]) == 2, journal
    for task in ("t0", "t1"):
        out = tmp_path / f"f/results/r/{task}/{task}.0"
        assert ((out / "big").stat().st_size, (out / "large").stat().st_size) == (BIG, BIG)
    nothing_left(cluster, login.sshd.home)
    assert not list(login.sshd.home.glob("shared/*")), "files are left on the login node"


def test_a_login_node_that_cannot_be_used_is_told_in_one_line(
    login: LoginNode, cluster: Cluster, tmp_path: Path
) -> None:
    at = away(login, cluster, tmp_path / "f", 1)
    known = login.known_hosts.read_text()
    login.known_hosts.write_text("")
    at("run", "b.toml", "--on", "hpc").failed(4, "the host key is unknown", "doctor hpc --trust")
    assert at("doctor", "hpc", "--trust", "--yes").code == 0
    assert login.known_hosts.read_text().split() == known.split()[:3]
    login.sshd.give_tool("sbatch", "exit 127")
    at("run", "b.toml", "--on", "hpc").failed(4, "has no sbatch", "`login` of the place")
    login.sshd.stop()
    done = at("doctor", "hpc")
    assert done.code != 0
    assert "the login node" in done.said
    assert "Connection refused" in done.said or "does not answer" in done.said, done


def test_doctor_looks_at_the_cluster_over_ssh(login: LoginNode, cluster: Cluster, tmp_path: Path) -> None:
    at = away(login, cluster, tmp_path / "f", 1)
    (login.sshd.home / ".bashrc").write_text("echo Welcome to the cluster\n")
    done = at("doctor", "hpc")
    assert done.code == 0, done
    assert "commands: slurm" in done.said
    assert f"{login.sshd.home}/shared" in done.said


@pytest.mark.nightly  # what hangs there is ended a while after we have given it up
def test_a_squeue_that_hangs_on_the_login_node_is_told_and_ended_there(
    login: LoginNode, cluster: Cluster, tmp_path: Path
) -> None:
    login.sshd.give_tool("squeue", f"echo $$ >{tmp_path}/pid; exec sleep 600")
    by_ssh = SshSettings(
        (f"{getpass.getuser()}@{login.sshd.name}",), key=str(login.key), known_hosts=str(login.known_hosts)
    )

    async def ask() -> None:
        context = PlaceContext(tmp_path, "0a1b2c", environ={})
        node = remote.LoginNode(by_ssh.hosts[0], access_of("hpc", by_ssh, context), "hpc", context.home_id)
        try:
            await Slurm(node, answer_s=5.0).jobs()
        finally:
            await node.close()

    with pytest.raises(PlaceError, match="squeue has not answered for 5 s") as told:
        asyncio.run(ask())
    assert told.value.transient
    pid = (tmp_path / "pid").read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists(), "its end on the login node")
