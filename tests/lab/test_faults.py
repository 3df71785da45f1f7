"""What each fault of a lab's host looks like to a client."""

from __future__ import annotations

import subprocess
import time

import pytest

from lab import HostLimits, Lab, LabError, NamespaceHost
from tests.lab.clients import needs_lab, session, ssh
from tests.waiting import PATIENCE_S, until

pytestmark = needs_lab


def test_power_loss_is_silence_until_keep_alive_notices(lab: Lab, host: NamespaceHost) -> None:
    with session(lab, host) as client:
        host.power_off()
        assert client.is_silent()
        assert "not responding" in client.end()
    assert (host.is_on, host.processes()) == (False, [])
    with pytest.raises(LabError, match="is off"):
        host.partition()
    done = ssh(lab, host, "true", options=["ConnectTimeout=1"])
    assert "timed out" in done.stderr, "silence, rather than a refusal"
    host.power_on()
    assert ssh(lab, host, "true").returncode == 0


def test_a_shutdown_is_noticed_at_once(lab: Lab, host: NamespaceHost) -> None:
    with session(lab, host) as client:
        host.stop()
        client.end()
    host.start()
    assert ssh(lab, host, "true").returncode == 0


def test_a_frozen_host_goes_on_where_it_was(lab: Lab, host: NamespaceHost) -> None:
    with session(lab, host) as client:
        host.freeze()
        assert client.is_silent()
        host.thaw()
        assert client.goes_on()
        host.freeze()
        host.power_off()  # frozen processes die, too
    host.power_on()
    assert ssh(lab, host, "true").returncode == 0


def test_a_partition_heals(lab: Lab, host: NamespaceHost) -> None:
    with session(lab, host) as client:
        host.partition()
        assert client.is_silent()
        assert host.workload(), "what runs on the host goes on"
        host.heal()
        assert client.goes_on()


def test_a_reboot_keeps_the_disk_and_nothing_else(lab: Lab, host: NamespaceHost) -> None:
    look = "cat /root/kept; ls /run/lost /dev/shm/lost; cat /etc/machine-id /proc/sys/kernel/random/boot_id"
    ssh(lab, host, "echo data > /root/kept; touch /run/lost /dev/shm/lost; setsid sleep 1234 >&- 2>&- &")
    before = ssh(lab, host, look).stdout.split()
    assert host.workload()
    host.reboot()
    after = ssh(lab, host, look).stdout.split()
    assert (before[0], after[0]) == ("data", "data")
    assert "/run/lost" not in after
    assert "/dev/shm/lost" not in after
    assert before[-2] == after[-2], "the machine is the same"
    assert before[-1] != after[-1], "but has booted anew"
    assert host.workload() == []


def test_a_full_disk_is_full(lab: Lab, host: NamespaceHost) -> None:
    host.fill_disk(100_000)
    done = ssh(lab, host, "head -c 50000 /dev/zero > a; head -c 200000 /dev/zero > b; stat -c %s a b")
    assert "No space left on device" in done.stderr
    kept, cut = map(int, done.stdout.split())
    assert (kept, cut < 100_000) == (50_000, True)
    host.reboot()
    assert "No space left" in ssh(lab, host, "head -c 200000 /dev/zero > c").stderr, "a reboot frees nothing"
    host.free_disk()
    assert ssh(lab, host, "head -c 200000 /dev/zero > c").returncode == 0


def test_a_swapped_host_key_is_refused(lab: Lab, host: NamespaceHost) -> None:
    before = host.known_hosts_line()
    host.swap_host_key()
    assert host.known_hosts_line() != before
    done = ssh(lab, host, "true")
    assert done.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in done.stderr
    host.reboot()
    assert "HOST IDENTIFICATION HAS CHANGED" in ssh(lab, host, "true").stderr, "the key is on the disk"


def test_a_restarted_sshd_keeps_its_sessions_or_drops_them(lab: Lab, host: NamespaceHost) -> None:
    with session(lab, host) as client:
        host.restart_sshd()
        assert client.goes_on()
        host.restart_sshd(drop_sessions=True)
        client.end()
    assert ssh(lab, host, "true").returncode == 0


def test_a_slow_link_is_slow_both_ways(lab: Lab, host: NamespaceHost) -> None:
    def seconds(command: str, text: bytes) -> float:
        start = time.monotonic()
        argv = lab.client.ssh(host, command)
        subprocess.run(argv, input=text, stdout=subprocess.DEVNULL, timeout=PATIENCE_S, check=True)
        return time.monotonic() - start

    data = bytes(150_000)
    host.slow_link(300)  # 4 s
    assert seconds("cat > /dev/null", data) > 3.5
    assert seconds("head -c 150000 /dev/zero", b"") > 3.5
    host.slow_link(None)
    until(lambda: seconds("cat > /dev/null", data) < 3.5, "it is quick again, once nothing else is slow here")


def test_lost_packets(lab: Lab, host: NamespaceHost) -> None:
    try:
        host.lose_packets(100)
    except LabError as err:
        pytest.skip(f"NO TEST OF PACKET LOSS: {err}")
    assert "timed out" in ssh(lab, host, "true", options=["ConnectTimeout=1"]).stderr
    host.lose_packets(10)
    assert ssh(lab, host, "true").returncode == 0
    host.lose_packets(0)
    assert ssh(lab, host, "true").returncode == 0


def test_limits_are_kept() -> None:
    hog = "x = bytearray(200 << 20); x[::4096] = b'x' * len(x[::4096]); print('fits')"
    try:
        made = Lab.create(1, limits=HostLimits(memory_bytes=64 << 20, cpus=0.5))
    except LabError as err:
        pytest.skip(f"NO TEST OF LIMITS: {err}")
    with made:
        done = ssh(made, made.hosts[0], f'/usr/bin/python3 -c "{hog}"; echo $?')
        assert done.stdout == "137\n", "killed for want of memory"
