"""The lab of real hosts: each is a machine of its own, and nothing of it is ever left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest

from lab import HostLimits, Lab, LabError, NamespaceHost
from tests.lab.clients import needs_lab, session, ssh
from tests.waiting import PATIENCE_S, suspend, until

pytestmark = needs_lab


def test_each_host_is_a_machine_of_its_own(lab: Lab) -> None:
    assert len(lab.hosts) == 5
    seen = [ssh(lab, host, "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id") for host in lab]
    assert [one.returncode for one in seen] == [0] * 5, seen
    assert [one.stdout.split()[0] for one in seen] == [host.name for host in lab]
    assert len({line for one in seen for line in one.stdout.split()}) == 15
    assert len({host.host_public_key for host in lab}) == 5


def test_an_ordinary_user_can_log_in(lab: Lab) -> None:
    done = ssh(lab, lab.hosts[1], "id -un; pwd; touch it; cat /etc/shadow; ls /root", user="lab")
    assert done.stdout.split() == ["lab", "/home/lab"]
    assert done.stderr.count("Permission denied") == 2


def test_hosts_reach_each_other_and_nothing_else(lab: Lab) -> None:
    first, second = lab.hosts[1:3]
    jump = f"ProxyCommand={' '.join(lab.client.ssh(first)[len(lab.prefix) :])} -W %h:%p"
    assert ssh(lab, second, "hostname", options=[jump]).stdout.strip() == second.name
    assert first.run(["ip", "route"]).stdout.split()[0] == "198.18.0.0/16"
    assert len(first.run(["ip", "route"]).stdout.splitlines()) == 1


def test_a_host_does_not_see_this_machine(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    host = lab.hosts[1]
    checkout = Path(__file__).resolve().parents[2]
    for path in (tmp_path, checkout, Path.home() / ".profile", lab.network_path.parent, Path("/boot")):
        assert ssh(lab, host, f"test -e {path}").returncode == 1, f"{path} is in sight"
    assert ssh(lab, host, "ls -A /tmp /var/tmp /home /var/log").stdout.split() == [
        "/home:",
        "lab",
        "/tmp:",
        "/var/log:",
        "/var/tmp:",
    ]
    assert "ssh_host_rsa" not in ssh(lab, host, "ls /etc/ssh").stdout
    inside = ssh(lab, host, "ls /proc").stdout.split()
    assert len([name for name in inside if name.isdecimal()]) < 10
    assert str(os.getpid()) not in inside
    environ = ssh(lab, host, "tr '\\0' '\\n' </proc/1/environ").stdout.splitlines()
    assert {line.split("=")[0] for line in environ} <= {"PATH", "LANG", "PWD"}


@pytest.mark.parametrize(
    "harm",
    [
        "date -s '2020-01-01'",
        "mknod /tmp/disk b 254 0",
        "mount -t devtmpfs none /mnt",
        "mount -o remount,rw /proc/sys",
        "echo 1 > /proc/sys/kernel/panic",
    ],
)
def test_the_root_of_a_host_cannot_harm_this_machine(lab: Lab, harm: str) -> None:
    assert ssh(lab, lab.hosts[1], harm).returncode != 0


def test_processes_are_seen_from_outside(lab: Lab, host: NamespaceHost) -> None:
    assert host.workload() == []
    with session(lab, host, "echo up; exec sleep 1234"):
        until(lambda: [process.argv for process in host.workload()] == [("sleep", "1234")])
        assert len(host.processes()) > 2
        assert host.run(["cat"], text="hello").stdout == "hello"
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert not lab.hosts[1].workload()


def test_init_reaps_orphans(lab: Lab, host: NamespaceHost) -> None:
    ssh(lab, host, "for i in 1 2 3; do (setsid true &); done")
    until(lambda: " Z" not in host.run(["ps", "-axo", "pid,stat"]).stdout)


def test_a_command_that_fails_on_a_host_says_what(lab: Lab) -> None:
    with pytest.raises(LabError, match="host-1: exit code 3: oh"):
        lab.hosts[1].run(["sh", "-c", "echo oh >&2; exit 3"])
    assert lab.hosts[1].run(["false"], check=False).returncode == 1


# -- clients in this process ---------------------------------------------------------------------


def test_a_socket_of_the_lab_can_be_used_from_outside(lab: Lab) -> None:
    with lab.socket() as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect((lab.hosts[1].address, 22))
        assert sock.recv(7) == b"SSH-2.0"


def test_a_thread_can_be_inside_for_a_while(lab: Lab) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with lab.inside(), socket.create_connection((lab.hosts[1].address, 22), timeout=PATIENCE_S) as sock:
        assert sock.recv(7) == b"SSH-2.0"
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before


# -- nothing is left -----------------------------------------------------------------------------


class Traces:
    """What there is of a lab on this machine, whoever made it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        own = network_of("self")  # in which wait those that made the namespaces
        held = [os.open(directory / "net", os.O_RDONLY)]
        for pid in self._pids():
            with contextlib.suppress(OSError):  # gone meanwhile
                held.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        # while they are open, no other lab's networks get their numbers
        weakref.finalize(self, close_all, held)
        self._networks = {f"net:[{os.fstat(file).st_ino}]" for file in held} - {own}

    def found(self) -> list[str]:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found = [f"mount {line}" for line in mounts if self._directory.name in line]
        found += [f"cgroup {path}" for path in self._groups()]
        found += [f"process {pid}" for pid in self._pids()]
        pids = [name for name in os.listdir("/proc") if name.isdecimal()]
        found += [f"network of {pid}" for pid in pids if network_of(pid) in self._networks]
        return found + ([str(self._directory)] if self._directory.exists() else [])

    def _groups(self) -> list[str]:
        tree = os.walk("/sys/fs/cgroup")
        return [folder for folder, _, _ in tree if self._directory.name in folder]

    def _pids(self) -> list[str]:
        pids: list[str] = []
        for path in self._groups():
            with contextlib.suppress(OSError):  # gone meanwhile
                pids += Path(path, "cgroup.procs").read_text().split()
        return pids


def close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)


def network_of(pid: str) -> str:
    """Empty if the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_two_labs_do_not_meet(lab: Lab) -> None:
    with Lab.create(2) as other:
        assert other.hosts[1].address == lab.hosts[1].address
        assert ssh(other, other.hosts[1], "touch /root/other").returncode == 0
        assert ssh(lab, lab.hosts[1], "test -e /root/other").returncode == 1
    assert ssh(lab, lab.hosts[1], "true").returncode == 0


def test_nothing_is_left_of_a_destroyed_lab() -> None:
    with Lab.create(4, limits=HostLimits()) as made:
        traces = Traces(made.network_path.parent)
        assert len(traces.found()) > 20
        made.hosts[0].freeze()
        made.hosts[1].power_off()
        made.hosts[2].partition()
        made.hosts[3].fill_disk()
        made.remove(made.hosts[3])
    assert traces.found() == []
    made.destroy()


FAILS = """
import sys
from lab import Lab, LabError
try:
    Lab.create(24)
except LabError as err:
    print(err, flush=True)
sys.stdin.read()  # as long as it lives, what it left would stay
"""


def lab_of(creator: int) -> Path | None:
    """Where the lab is whose hosts a process has begun to start."""
    for pid in Path(f"/proc/{creator}/task/{creator}/children").read_text().split():
        with contextlib.suppress(OSError):  # gone meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "host-0" in words:
                return Path(words[words.index("host-0") - 1]).parents[1]
    return None


def test_nothing_is_left_of_a_lab_that_failed_half_way() -> None:
    argv = [sys.executable, "-c", FAILS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as creator:
        assert creator.stdout is not None
        try:
            directory = until(lambda: lab_of(creator.pid), "its first host")
            suspend(creator.pid)
            inside = ["nsenter", f"--net={directory / 'net'}", "--"]
            # where the last host's cable would be
            subprocess.run([*inside, "ip", "link", "add", "h23", "type", "bridge"], check=True)
            traces = Traces(directory)
            assert len(traces.found()) > 20
            creator.send_signal(signal.SIGCONT)
            assert "File exists" in creator.stdout.readline()
            assert traces.found() == []
        finally:
            creator.kill()
            creator.wait()
            Lab.sweep()


def test_what_a_killed_creator_left_is_swept_and_live_labs_are_not(lab: Lab) -> None:
    code = "import time; from lab import Lab; lab = Lab.create(2)"
    code += "; print(lab.network_path.parent, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as creator:
        assert creator.stdout is not None
        try:
            traces = Traces(Path(creator.stdout.readline().strip()))
            Lab.sweep()
            assert len(traces.found()) > 10, "it is alive"
        finally:
            creator.send_signal(signal.SIGKILL)
    Lab.sweep()
    until(lambda: traces.found() == [])  # another process may be sweeping, too
    assert ssh(lab, lab.hosts[1], "true").returncode == 0


# -- making one ----------------------------------------------------------------------------------


def test_paths_can_be_masked_and_exposed(tmp_path: Path) -> None:
    shown = tmp_path / "shown here"
    shown.mkdir()
    (shown / "file").write_text("seen")
    with Lab.create(1, mask=[Path("/usr/games"), Path("/opt")], expose=[shown]) as made:
        done = ssh(made, made.hosts[0], f"cat '{shown}/file'; touch '{shown}/new'; ls /opt /usr/games")
    assert done.stdout == "seen"
    assert "Read-only file system" in done.stderr
    assert done.stderr.count("No such file or directory") == 2


def test_what_lies_in_a_hidden_directory_can_be_exposed_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/var/lib") as hidden:
        shown = Path(hidden) / "shown"
        shown.mkdir()
        (shown / "file").write_text("seen")
        (Path(hidden) / "not shown").write_text("secret")
        with Lab.create(1, mask=[Path(hidden)], expose=[shown]) as made:
            done = ssh(made, made.hosts[0], f"cat {shown}/file; ls {hidden}")
    assert (done.stdout, done.stderr) == ("seenshown\n", "")


def test_without_root_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="the lab needs root, iproute2 and openssh-server; missing here: root"):
        Lab.create(1)


def test_a_rootfs_without_sshd_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="install openssh-server there"):
        Lab.create(1, rootfs=tmp_path)


def test_a_host_has_a_limit_of_processes() -> None:
    with Lab.create(1, limits=HostLimits(pids=60)) as made:
        (host,) = made.hosts
        many = "i=0; while [ $i -lt 200 ]; do sleep 60 >/dev/null 2>&1 & i=$((i+1)); done"
        started = subprocess.run(
            made.client.ssh(host, many), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert started.returncode != 0
        assert "fork" in started.stderr.lower()
        assert 20 < len(host.processes()) <= 60
