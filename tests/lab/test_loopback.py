"""Hosts without root: an sshd each on loopback addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import AnyLab, Lab, LabError, LoopbackLab, loopback
from lab.keys import key_from_seed, new_key, public_bytes, write_private
from tests.lab.clients import session
from tests.waiting import PATIENCE_S, until

CANNOT = LoopbackLab.missing()
needs_sshd = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF LOOPBACK HOSTS: {CANNOT}")


KINDS: list[Callable[[int], AnyLab]] = [Lab.create, LoopbackLab.create]
"""For the type checker: both are labs."""


@pytest.fixture
def lab() -> Iterator[LoopbackLab]:
    with LoopbackLab.create(2) as made:
        yield made


def ssh(lab: LoopbackLab, number: int, command: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    argv = lab.client.ssh(lab.hosts[number], command)
    return subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, check=False
    )


@needs_sshd
def test_hosts_have_homes_and_processes_of_their_own(lab: LoopbackLab) -> None:
    for number, host in enumerate(lab):
        done = ssh(lab, number, "pwd; echo $HOME; setsid sleep 1234 >/dev/null 2>&1 </dev/null &")
        assert done.stdout.split() == [str(host.home)] * 2
    for host in lab:
        assert [process.argv for process in host.workload()] == [("sleep", "1234")]
        assert host.run(["pwd"]).stdout.strip() == str(host.home)


@needs_sshd
def test_a_reboot_ends_what_runs(lab: LoopbackLab) -> None:
    ssh(lab, 0, "touch kept; setsid sleep 1234 >/dev/null 2>&1 </dev/null &")
    host = lab.hosts[0]
    host.power_off()
    assert (host.is_on, host.processes()) == (False, [])
    assert ssh(lab, 0, "true").returncode == 255
    host.power_on()
    assert ssh(lab, 0, "ls").stdout.split() == ["kept"]


@needs_sshd
def test_a_restarted_sshd_keeps_its_sessions_or_drops_them(lab: LoopbackLab) -> None:
    with session(lab, lab.hosts[0]) as client:
        lab.hosts[0].restart_sshd()
        assert client.goes_on()
        lab.hosts[0].restart_sshd(drop_sessions=True)
        client.end()
    assert ssh(lab, 0, "true").returncode == 0


@needs_sshd
@pytest.mark.parametrize("restarted", [False, True])
def test_power_off_cuts_connections_in_which_nothing_runs(
    lab: LoopbackLab, tmp_path: Path, restarted: bool
) -> None:
    host, connected = lab.hosts[0], tmp_path / "c"
    options = ("SessionType=none", "ControlMaster=yes", f"ControlPath={connected}")
    client = subprocess.Popen(lab.client.ssh(host, options=options), stderr=subprocess.PIPE)
    try:
        until(connected.exists, "a connection")
        if restarted:
            host.restart_sshd()
        host.power_off()
        client.communicate(timeout=PATIENCE_S)
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == 255


@needs_sshd
def test_sshd_waits_for_the_last_one_to_give_its_port_back(lab: LoopbackLab) -> None:
    host = lab.hosts[0]
    host.power_off()
    with socket.create_server((host.address, host.port)) as last:
        closing = threading.Timer(0.2, last.close)
        closing.start()
        host.power_on()
        closing.join()
    assert ssh(lab, 0, "true").returncode == 0


@needs_sshd
def test_freeze_and_thaw(lab: LoopbackLab) -> None:
    lab.hosts[0].freeze()
    with pytest.raises(subprocess.TimeoutExpired):
        ssh(lab, 0, "true", timeout=0.5)
    assert ssh(lab, 1, "true").returncode == 0
    lab.hosts[0].thaw()
    assert ssh(lab, 0, "true").returncode == 0


@needs_sshd
def test_a_swapped_host_key_is_refused(lab: LoopbackLab) -> None:
    lab.hosts[0].swap_host_key()
    assert "HOST IDENTIFICATION HAS CHANGED" in ssh(lab, 0, "true").stderr


@needs_sshd
def test_what_needs_a_cable_or_a_disk_is_refused(lab: LoopbackLab) -> None:
    host = lab.hosts[0]
    for fault in (host.partition, host.heal, host.fill_disk, host.free_disk):
        with pytest.raises(LabError, match=r"host-0 cannot .*: that needs a lab of namespaces, with root"):
            fault()
    with pytest.raises(LabError, match="slow link"):
        host.slow_link(100)
    with pytest.raises(LabError, match="lose packets"):
        host.lose_packets(1)


@needs_sshd
def test_what_a_killed_creator_left_is_swept(lab: LoopbackLab) -> None:
    code = "import time; from lab import LoopbackLab; lab = LoopbackLab.create(1)"
    code += "; print(lab.hosts[0].processes()[0].pid, lab.hosts[0].home, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as creator:
        assert creator.stdout is not None
        try:
            pid, home = creator.stdout.readline().split()
        finally:
            creator.send_signal(signal.SIGKILL)
    LoopbackLab.sweep()
    until(lambda: not loopback.argv_of(int(pid)) and not Path(home).exists(), "the lab to be swept")
    assert ssh(lab, 0, "true").returncode == 0


def test_keys_are_those_of_the_standard() -> None:
    # RFC 8032, 7.1, the first and the second test
    for seed, public in (
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        ),
    ):
        assert public_bytes(bytes.fromhex(seed)).hex() == public


@needs_sshd
def test_openssh_reads_our_keys(tmp_path: Path) -> None:
    for number in range(8):  # every length of padding
        pair = key_from_seed(os.urandom(32), "x" * number)
        write_private(tmp_path / "key", pair.private)
        said = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True)
        assert said.stdout.split()[:2] == pair.public.split()


def test_500_keys_take_no_time() -> None:
    start = time.process_time()
    assert len({new_key("x").public for _ in range(100)}) == 100
    assert time.process_time() - start < 2
