"""The commands of docs/slurm.md, on a real Slurm."""

from __future__ import annotations

import getpass
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.desk import Desk
from tests.docs.pages import ROOT, File, steps

from .cluster import Cluster
from .test_login import LoginNode, login

__all__ = ["login"]  # a fixture

PAGE = ROOT / "docs/slurm.md"


def test_what_the_page_tells_to_type_works(cluster: Cluster, tmp_path: Path) -> None:
    at = Desk(tmp_path, tmp_path / "results", dict(cluster.environ))
    for step in steps(PAGE):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
    # polls every ten seconds are kind to a cluster, and slow
    (tmp_path / "evalfleet.toml").write_text((tmp_path / "evalfleet.toml").read_text() + "poll_s = 0.2\n")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        done = at(*command)
        assert done.code == 0, (command, done)
    assert at.results("first")["scored"] == 3


@pytest.mark.nightly
def test_what_the_page_tells_to_set_for_ssh_works(login: LoginNode, cluster: Cluster, tmp_path: Path) -> None:
    """From a computer that has none of Slurm, which has never seen the login node."""
    folder = tmp_path / "own"
    folder.mkdir()
    at = Desk(folder, folder / "results", {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
    for step in steps(PAGE):
        if isinstance(step, File):
            (folder / step.name).write_text(step.content)
    section = PAGE.read_text().partition("\n## Over SSH\n")[2].partition("\n## ")[0]
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    there = f"{getpass.getuser()}@{login.sshd.name}"
    assert "me@login.cluster.example" in toml
    login.known_hosts.write_text("")
    ours = f'key = "{login.key}"\nknown_hosts = "{login.known_hosts}"\npoll_s = 0.2\n'
    (folder / "evalfleet.toml").write_text(toml.replace("me@login.cluster.example", there) + ours)
    at("run", "b.toml", "--on", "hpc").failed(4, "the host key is unknown", "doctor hpc --trust")
    assert at("doctor", "hpc", "--trust", "--yes").code == 0
    done = at("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "first")
    assert done.code == 0, done
    assert at.results("first")["scored"] == 3
    assert not list(login.sshd.home.glob("evalfleet/*")), "files are left on the login node"
