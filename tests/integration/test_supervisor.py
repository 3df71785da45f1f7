"""The resident supervisor, spoken to over its socket: real processes, no controller."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.program import FOLDER, archive
from evalfleet.channels.supervisor.files import job_name, read_key
from evalfleet.channels.supervisor.host import HostClock, expiry_in, seconds_to
from evalfleet.channels.supervisor.machine import open_socket, remove_machine, short_path
from evalfleet.channels.supervisor.processes import birth, marked, marker, parse_stat
from evalfleet.names import safe_name
from tests.folders import below
from tests.planted import UNIQUE
from tests.pythons import python_3_8
from tests.waiting import PATIENCE_S, slowness, until

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root may mount a file system")
UNTIL_GO = 'while [ ! -e "$EVALFLEET_OUT/go" ]; do sleep 0.02; done; '
OLD_PYTHON = python_3_8()


def dead(pid: int) -> bool:
    return birth(pid) is None


class Peer:
    """One connection to a supervisor."""

    def __init__(self, directory: Path, run: str | None = "run", epoch: int = 1) -> None:
        self.key = read_key(str(directory))
        self.sock = open_socket(directory, PATIENCE_S)
        self.file = self.sock.makefile("rwb")
        self.pushed: list[dict[str, Any]] = []
        self.count = 0
        self.greeting = self.ask("hello", protocol=1, run=run, epoch=epoch) if run else {}

    def send(self, op: str, **body: Any) -> int:
        self.count += 1
        self.file.write(json.dumps({"op": op, "n": self.count, "key": self.key, **body}).encode() + b"\n")
        self.file.flush()
        return self.count

    def read(self) -> dict[str, Any]:
        line = self.file.readline()
        if not line:
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def answer(self, n: int) -> dict[str, Any]:
        while True:
            message = self.read()
            if "push" not in message and message.get("n") in (n, None):
                return message
            self.pushed.append(message)

    def ask(self, op: str, **body: Any) -> dict[str, Any]:
        return self.answer(self.send(op, **body))

    def start(self, id: str, *argv: str, **more: Any) -> dict[str, Any]:
        return self.ask("start", job={"id": id, "argv": argv, "timeout_s": PATIENCE_S, **more})

    def shell(self, id: str, script: str, **more: Any) -> dict[str, Any]:
        return self.start(id, "sh", "-c", script, **more)

    def end(self, id: str) -> dict[str, Any]:
        """How a job ended: as pushed, or as asked for if it was over before we could listen."""
        if self.greeting.get("jobs", {}).get(id, "running") != "running":
            return self.ask("how", job=id)
        while True:
            for message in self.pushed:
                if message.get("push") == "ended" and message["job"] == id:
                    return message
            self.pushed.append(self.read())

    def run(self, id: str, script: str, **more: Any) -> dict[str, Any]:
        self.shell(id, script, **more)
        return self.end(id)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        self.sock.close()


class Host:
    """A machine's directory, and whoever supervises it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peers: list[Peer] = []

    def supervise(self, *command: str) -> None:
        subprocess.run(
            [*(command or (sys.executable, "-I", "-S", str(FOLDER))), str(self.directory)],
            check=True,
            timeout=PATIENCE_S,
            env={**os.environ, "EVALFLEET_MACHINE": str(self.directory)},
        )

    def peer(self, run: str | None = "run", epoch: int = 1) -> Peer:
        self.peers.append(Peer(self.directory, run, epoch))
        return self.peers[-1]

    @property
    def pid(self) -> int:
        pid = parse_stat((self.directory / "supervisor.pid").read_bytes())[0]
        assert pid is not None
        return pid

    def kill(self) -> None:
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: dead(pid), "the supervisor's death")

    def job(self, id: str) -> Path:
        return self.directory / "jobs" / job_name(id)

    def go(self, id: str) -> None:
        (self.job(id) / "out" / "go").touch()

    def pids(self, id: str, name: str = "pids", count: int = 1) -> list[int]:
        """What a job wrote into a file of its artefacts, once that many are there."""
        file = self.job(id) / "out" / name
        until(lambda: file.exists() and len(file.read_text().split()) >= count, name)
        return [int(word) for word in file.read_text().split()]

    def processes(self) -> list[int]:
        return marked(marker("EVALFLEET_MACHINE", str(self.directory)))


@contextlib.contextmanager
def hosting(directory: Path, *command: str) -> Iterator[Host]:
    directory.mkdir(parents=True)
    host = Host(directory)
    try:
        host.supervise(*command)
        yield host
    finally:
        for peer in host.peers:
            peer.close()
        remove_machine(directory)
    assert host.processes() == []


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosting(tmp_path / "machine") as made:
        yield made


# -- running -----------------------------------------------------------------------------------


def test_a_job_runs_and_its_end_is_told(host: Host) -> None:
    peer = host.peer()
    ended = peer.run("a.0", "echo said; echo '{\"score\": 1}' > $EVALFLEET_OUT/result.json")
    assert (ended["reason"], ended["exit_code"], ended["result"]) == ("exited", 0, '{"score": 1}\n')
    assert "detail" not in ended
    assert (host.job("a.0") / "log").read_text() == "said\n"
    assert not (host.job("a.0") / "work").exists()


def in_one_packet(peer: Peer, id: str) -> bool:
    """Do the answer to a job's start and the word of its end come together?"""
    n = peer.send("start", job={"id": id, "argv": ["true"], "timeout_s": 60})
    lines = peer.sock.recv(1 << 16).splitlines()
    assert json.loads(lines[0])["n"] == n
    if len(lines) == 1:
        peer.end(id)
    return len(lines) > 1


def test_the_answer_to_a_start_waits_for_company_but_not_for_the_end(host: Host) -> None:
    """A packet saved an attempt: the end of a short job comes with the answer to its start."""
    peer = host.peer()
    assert any(in_one_packet(peer, f"short{n}") for n in range(50))  # a busy computer may be slow at times
    assert peer.shell("long", UNTIL_GO)["state"] == "running"
    assert not [message for message in peer.pushed if message.get("job") == "long"]
    host.go("long")
    peer.end("long")


def test_without_a_result_or_with_an_exit_code_the_end_of_the_log_is_told(host: Host) -> None:
    peer = host.peer()
    ended = peer.run("a.0", "echo why >&2; exit 3")
    assert (ended["reason"], ended["exit_code"], ended["detail"]) == ("exited", 3, "why\n")
    assert peer.run("b.0", "kill -9 $$")["exit_code"] == 137


def test_a_command_that_is_not_there(host: Host) -> None:
    peer = host.peer()
    peer.start("a.0", "no-such-command", "x")
    ended = peer.end("a.0")
    assert (ended["reason"], ended["exit_code"]) == ("exited", 127)
    assert "no-such-command" in ended["detail"]


@pytest.mark.parametrize(
    "id", ["a/b c.0", "..", ".", "", "-n", "tâche é/中.0", "x" * 300, "a\nb", "%41", "'$(x)\""]
)
def test_any_id_names_a_job(host: Host, id: str) -> None:
    peer = host.peer()
    ended = peer.run(id, 'printf "%s\\n" "$EVALFLEET_JOB" > "$EVALFLEET_OUT/result.json"')
    assert ended["result"] == id + "\n"
    assert host.job(id).parent == host.directory / "jobs"
    host.kill()
    host.supervise()
    assert host.peer().greeting["jobs"] == {id: "exited"}


@pytest.mark.parametrize("id", ["a.0", "..", ".x", "", "a/b", "é" * 100, "%" * 90, "x" * 181, "\udc80"])
def test_directories_are_named_as_everywhere_else(id: str) -> None:
    assert job_name(id) == safe_name(id)


def test_a_job_starts_in_a_new_directory_that_links_to_its_bundle(host: Host) -> None:
    bundle = host.directory / "bundles" / "abc"
    bundle.mkdir()
    (bundle / "tool").write_text("#!/bin/sh\necho tool ran")
    (bundle / "tool").chmod(0o755)
    (bundle / "data").mkdir()
    peer = host.peer()
    ended = peer.run("a.0", "./tool; ls; touch new; test -d data", bundle="abc")
    assert (ended["exit_code"], ended["detail"]) == (0, "tool ran\ndata\ntool\n")
    assert sorted(path.name for path in bundle.iterdir()) == ["data", "tool"]
    ended = peer.run("b.0", "ls", bundle="*")
    assert ended["detail"] == "data\ntool\n"
    ended = peer.run("c.0", "pwd", bundle="abc", in_bundle=True)
    assert ended["detail"] == f"{bundle}\n"


def test_a_result_need_not_be_text_nor_a_file(host: Host) -> None:
    peer = host.peer()
    assert peer.run("a.0", "printf '\\377' > $EVALFLEET_OUT/result.json")["result64"] == "/w=="
    assert "result" not in peer.run("b.0", "mkfifo $EVALFLEET_OUT/result.json")
    assert "result" not in peer.run("c.0", "ln -s /etc/passwd $EVALFLEET_OUT/result.json")
    assert "result" not in peer.run("d.0", "head -c 1100000 /dev/zero > $EVALFLEET_OUT/result.json")


def test_deep_and_odd_directories(tmp_path: Path) -> None:
    with hosting(tmp_path / ("d" * 120) / "mit Leerzeichen, é und 中") as host:
        ended = host.peer().run("a.0", "pwd")
        assert ended["detail"].endswith("中/jobs/a.0/work\n")


# -- ending ------------------------------------------------------------------------------------


def test_at_the_limit_the_whole_tree_is_ended(host: Host) -> None:
    peer = host.peer()
    script = (
        'sh -c "sleep 300 & echo \\$! >> $EVALFLEET_OUT/pids; wait" & echo $! >> $EVALFLEET_OUT/pids; wait'
    )
    limit_s = 0.5 * slowness()  # it must have come so far before
    peer.shell("a.0", script, timeout_s=limit_s)
    pids = host.pids("a.0", count=2)
    ended = peer.end("a.0")
    assert ended["reason"] == "timed_out"
    assert limit_s <= ended["seconds"] < 20 * limit_s
    assert all(map(dead, pids))


def test_a_result_at_the_limit_is_kept_and_stubborn_jobs_are_killed(host: Host) -> None:
    peer = host.peer()
    script = "trap '' TERM; echo 1 > $EVALFLEET_OUT/result.json; while :; do sleep 1; done"
    ended = peer.run("a.0", script, timeout_s=0.4 * slowness(), grace_s=0.2)
    assert (ended["reason"], ended["exit_code"], ended["result"]) == ("timed_out", 137, "1\n")


def test_a_job_may_end_properly_within_the_grace(host: Host) -> None:
    peer = host.peer()
    script = "trap 'echo 2 > $EVALFLEET_OUT/result.json; exit 9' TERM; while :; do sleep 0.05; done"
    ended = peer.run("a.0", script, timeout_s=0.4 * slowness())
    assert (ended["reason"], ended["exit_code"], ended["result"]) == ("timed_out", 9, "2\n")


@pytest.mark.parametrize("escape", ["setsid", "setsid setsid nohup", "env -i setsid"])
def test_what_left_the_group_is_ended_with_the_job(host: Host, escape: str) -> None:
    peer = host.peer()
    out = "$EVALFLEET_OUT/pids"
    script = f"{escape} sh -c 'echo $$ > '{out}'; exec sleep 300' & until [ -s {out} ]; do :; done"
    ended = peer.run("a.0", script)
    assert ended["reason"] == "exited"
    assert dead(host.pids("a.0")[0])


def test_another_jobs_daemons_are_left_alone(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "setsid sleep 300 & echo $! > $EVALFLEET_OUT/pids; wait")
    daemon = host.pids("a.0")[0]
    peer.run("b.0", "true")
    assert not dead(daemon)
    peer.ask("stop", job="a.0", grace_s=0.1)
    assert dead(daemon)


def test_stop_is_answered_when_all_is_gone(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "sleep 300 & echo $! > $EVALFLEET_OUT/pids; wait")
    pid = host.pids("a.0")[0]
    assert "error" not in peer.ask("stop", job="a.0")
    assert dead(pid)
    assert peer.end("a.0")["reason"] == "stopped"
    assert "error" not in peer.ask("stop", job="a.0")
    assert "error" not in peer.ask("stop", job="never-heard-of")


def test_quit_ends_everything(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "setsid sleep 300 & echo $! > $EVALFLEET_OUT/pids; sleep 300")
    pid, supervisor = host.pids("a.0")[0], host.pid
    assert host.peer(run=None).ask("quit")["gone"] is True
    assert dead(pid)
    until(lambda: dead(supervisor), "the supervisor's end")
    assert not (host.directory / "supervisor.sock").exists()


def test_a_supervisor_whose_directory_is_gone_ends(tmp_path: Path) -> None:
    with hosting(tmp_path / "machine") as host:
        host.peer().shell("a.0", "echo $$ > $EVALFLEET_OUT/pids; sleep 300")
        pids = [*host.pids("a.0"), host.pid]
        shutil.rmtree(host.directory)
        until(lambda: all(map(dead, pids)), "its end")


# -- crashes -----------------------------------------------------------------------------------


def test_a_job_survives_its_supervisor_and_is_adopted(host: Host) -> None:
    host.peer().shell("a.0", UNTIL_GO + "exit 7")
    until((host.job("a.0") / "pid").exists, "the start")
    host.kill()
    host.supervise()
    peer = host.peer()
    assert peer.greeting["jobs"] == {"a.0": "running"}
    host.go("a.0")
    ended = peer.end("a.0")
    assert (ended["reason"], ended["exit_code"]) == ("exited", 7)
    assert ended["seconds"] > 0


def test_a_job_that_ends_while_there_is_no_supervisor(host: Host) -> None:
    host.peer().shell("a.0", UNTIL_GO + "setsid sleep 300 & echo $! > $EVALFLEET_OUT/pids; exit 7")
    until((host.job("a.0") / "pid").exists, "the start")
    host.kill()
    host.go("a.0")
    until((host.job("a.0") / "exit").exists, "its end")
    host.supervise()
    peer = host.peer()
    # its wrapper may live a moment longer than what it wrote
    until(lambda: peer.ask("how", job="a.0")["state"] == "ended", "its end being known")
    ended = peer.ask("how", job="a.0")
    assert (ended["reason"], ended["exit_code"]) == ("exited", 7)
    assert dead(host.pids("a.0")[0])


def test_a_job_killed_while_there_is_no_supervisor_is_lost(host: Host) -> None:
    host.peer().shell("a.0", "echo $PPID > $EVALFLEET_OUT/pids; sleep 300")
    wrapper = host.pids("a.0")[0]
    host.kill()
    os.killpg(wrapper, signal.SIGKILL)
    host.supervise()
    assert host.peer().ask("how", job="a.0")["reason"] == "lost"


def test_an_adopted_job_has_its_old_limit(host: Host) -> None:
    limit_s = 1.5 * slowness()
    host.peer().shell("a.0", "echo $$ > $EVALFLEET_OUT/pids; sleep 300", timeout_s=limit_s)
    pid = host.pids("a.0")[0]
    host.kill()
    host.supervise()
    ended = host.peer().end("a.0")
    assert ended["reason"] == "timed_out"
    assert limit_s - 0.1 < ended["seconds"] < 10 * limit_s
    assert dead(pid)


def test_the_reason_survives_a_supervisor_that_died_while_ending_a_job(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "trap '' TERM; echo $$ > $EVALFLEET_OUT/pids; while :; do sleep 1; done", grace_s=0.3)
    host.pids("a.0")
    peer.send("stop", job="a.0", grace_s=60)
    until((host.job("a.0") / "why").exists, "the stop")
    host.kill()
    host.supervise()
    assert host.peer().end("a.0")["reason"] == "stopped"


def test_an_id_starts_once_however_often_it_is_asked_for(host: Host) -> None:
    marks = host.directory / "marks"
    script = f"echo x >> {marks}"
    peers = [host.peer() for _ in range(5)]
    for n in [(peer, peer.send("start", job={"id": "a.0", "argv": ["sh", "-c", script]})) for peer in peers]:
        assert "error" not in n[0].answer(n[1])
    peers[0].end("a.0")
    peers[0].shell("a.0", script)
    peers[0].ask("forget", jobs=["a.0"])
    peers[0].shell("a.0", script)
    assert not host.job("a.0").exists()
    host.kill()
    host.supervise()
    assert host.peer().shell("a.0", script)["state"] == "ended"
    assert marks.read_text() == "x\n"


def test_an_id_starts_once_also_when_the_supervisor_dies_at_its_start(host: Host) -> None:
    marks = host.directory / "marks"
    rounds = 12
    for number in range(rounds):
        id, job = f"t{number}", {"argv": ["sh", "-c", f"echo {number} >> {marks}"], "timeout_s": 60}
        host.peer().send("start", job={"id": id, **job})
        time.sleep(0.0015 * number)  # cut it at another point each time
        host.kill()
        host.supervise()
        peer = host.peer()
        peer.ask("start", job={"id": id, **job})
        if peer.ask("how", job=id)["state"] == "running":
            peer.end(id)
        assert peer.ask("how", job=id)["exit_code"] == 0
    assert sorted(map(int, marks.read_text().split())) == list(range(rounds))


def test_a_start_that_was_not_completed_may_be_repeated(host: Host) -> None:
    host.kill()
    (host.job("a.0") / "work").mkdir(parents=True)
    (host.job("a.0") / "job.json").write_text('{"id": "a.0"')
    host.supervise()
    assert host.peer().run("a.0", "true")["exit_code"] == 0


def test_the_wrapper_that_comes_second_runs_nothing_and_the_first_is_watched(host: Host) -> None:
    first = subprocess.Popen(["sleep", "300"])
    try:
        host.job("a.0").mkdir(parents=True)
        (host.job("a.0") / "pid").write_bytes(Path(f"/proc/{first.pid}/stat").read_bytes())
        peer = host.peer()
        peer.shell("a.0", "echo ran")
        assert peer.ask("how", job="a.0")["state"] == "running"
        first.kill()
        first.wait()
        assert peer.end("a.0")["reason"] == "lost"
        assert "ran" not in (host.job("a.0") / "log").read_text()
    finally:
        first.kill()
        first.wait()


def test_one_supervisor_a_directory(host: Host) -> None:
    pid = host.pid
    host.supervise()
    assert host.pid == pid
    assert host.peer().greeting["pid"] == pid


# -- controllers -------------------------------------------------------------------------------


def test_a_newer_controller_takes_over_and_the_old_one_is_refused(host: Host) -> None:
    old = host.peer(epoch=1)
    new = host.peer(epoch=2)
    assert old.read()["error"] == "stale"
    with pytest.raises(EOFError):
        old.read()
    assert host.peer(epoch=1).greeting["error"] == "stale"
    assert new.run("a.0", "true")["exit_code"] == 0
    host.kill()
    host.supervise()
    assert host.peer(epoch=1).greeting["error"] == "stale"
    assert "error" not in host.peer(epoch=2).greeting
    assert "error" not in host.peer(run="another", epoch=0).greeting


def test_without_a_word_for_the_lease_the_job_is_ended(host: Host) -> None:
    peer, lease_s = host.peer(), 4.0 * slowness()
    peer.shell("a.0", "echo 5 > $EVALFLEET_OUT/result.json; sleep 300", lease_s=lease_s)
    until((host.job("a.0") / "out" / "result.json").exists, "the result")
    for _ in range(10):
        time.sleep(lease_s / 8)
        peer.ask("ping")
    assert peer.ask("how", job="a.0")["state"] == "running"
    ended = peer.end("a.0")
    assert (ended["reason"], ended["result"]) == ("lease", "5\n")


def test_at_its_expiry_the_machine_ends_and_its_results_wait(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "echo 5 > $EVALFLEET_OUT/result.json; echo $$ > $EVALFLEET_OUT/pids; sleep 300")
    pids = [*host.pids("a.0"), host.pid]
    host.peer(run=None).ask("expire", seconds=0.2)
    until(lambda: all(map(dead, pids)), "the expiry")
    host.supervise()
    peer = host.peer()
    ended = peer.ask("how", job="a.0")
    assert (ended["reason"], ended["result"]) == ("lease", "5\n")
    assert peer.run("b.0", "true")["reason"] == "failed_to_start"
    peer.ask("expire", seconds=3600)
    assert peer.run("c.0", "true")["reason"] == "exited"


@pytest.mark.parametrize("known", [True, False])
def test_more_time_that_was_asked_for_while_it_was_frozen_is_given(host: Host, known: bool) -> None:
    """By a connection that it has, or by one that it has not seen yet."""
    worker, asker = host.peer(), host.peer(run=None)
    worker.shell("a.0", UNTIL_GO)
    pid = host.pid
    asker.ask("expire", seconds=2.0 * slowness())
    os.kill(pid, signal.SIGSTOP)
    try:
        expiry = json.loads((host.directory / "expiry").read_bytes())
        asker = asker if known else host.peer(run=None)
        asked = asker.send("expire", seconds=3600)
        until(lambda: seconds_to(expiry) < 0, "the expiry")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "error" not in asker.answer(asked)
    host.go("a.0")
    assert worker.end("a.0")["reason"] == "exited"


def test_if_a_supervisor_is_just_leaving_the_next_one_gives_more_time(tmp_path: Path) -> None:
    request = tmp_path / "request"
    request.write_text('{"home": "abc", "folder": "m", "expires_s": 3600, "most": 1}\n')
    with hosting(tmp_path / ".evalfleet" / "abc" / "m") as host:
        host.peer(run=None).ask("expire", seconds=600)
        host.kill()
        with leaving_supervisor(host.directory) as listener, request.open() as asked:
            argv = [sys.executable, "-I", "-S", str(FOLDER), "extend"]
            env = {**os.environ, "EVALFLEET_MACHINE": str(host.directory)}
            asking = subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=asked, stdout=subprocess.PIPE)
            knocked, _ = listener.accept()
            assert knocked.recv(1, socket.MSG_PEEK), "it has asked"
            knocked.close()
        said, _ = asking.communicate(timeout=PATIENCE_S)
        assert json.loads(said) == {}
        assert seconds_to(json.loads((host.directory / "expiry").read_bytes())) > 3000


@contextlib.contextmanager
def leaving_supervisor(directory: Path) -> Iterator[socket.socket]:
    """One that still has its lock and listens, and hears nobody any more."""
    with (directory / "supervisor.lock").open("r+") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with short_path(directory) as path:
            Path(path).unlink()
            listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        yield listener


def test_an_expiry_outlives_the_supervisor(host: Host) -> None:
    host.peer(run=None).ask("expire", seconds=1.0)
    host.kill()
    host.supervise()
    pid = host.pid
    until(lambda: dead(pid), "the expiry")
    assert (host.directory / "expired").exists()


class Clock(HostClock):
    """Clocks that a test sets."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s, self.name = 1e9, 5000.0, "first boot"

    @property
    def boot(self) -> str:
        return self.name

    def wall(self) -> float:
        return self.wall_s

    def steady(self) -> float:
        return self.steady_s


def test_after_a_reboot_a_wall_clock_that_was_set_back_prolongs_no_life() -> None:
    clock = Clock()
    expiry = expiry_in(600.0, clock)
    clock.steady_s += 100
    clock.wall_s -= 7200
    assert seconds_to(expiry, clock) == 500, "in the same boot nobody asks the wall clock"
    clock.name, clock.steady_s = "second boot", 20.0
    assert seconds_to(expiry, clock) == 580, "it has been up for 20 s since, at least"
    assert seconds_to(expiry, clock, 500.0) == 480, "500 were left when it went down"
    assert seconds_to({**expiry, "host": "another one that shares our home"}, clock) == 600
    clock.wall_s += 7200 + 300
    assert seconds_to(expiry, clock) == 300
    clock.steady_s = 5000.0 + 400
    assert seconds_to(expiry, clock) < 0, "it is up for longer than it had to live"
    clock.wall_s = 1e9 + 400
    assert seconds_to(expiry, clock) == 200, "both clocks went on alike, so the steady one was not set anew"
    of_an_earlier_version = {"mono": time.monotonic() + 60, "wall": 0.0, "boot": HostClock().boot}
    assert 59 < seconds_to(of_an_earlier_version) <= 60


def test_a_machine_keeps_how_long_it_was_to_live_and_counts_by_the_boot_that_it_is_in(host: Host) -> None:
    host.peer(run=None).ask("expire", seconds=3600)
    beat, expiry = host.directory / "beat.json", host.directory / "expiry"
    until(lambda: beat.exists() and "life" in json.loads(beat.read_text()), "a beat")
    assert 0 < json.loads(beat.read_text())["life"] <= 3600
    host.kill()
    earlier = {
        **json.loads(expiry.read_text()),
        "boot": "an earlier one",
        "host": "this host, which was renamed",
    }
    expiry.write_text(json.dumps(earlier))
    beat.write_text(json.dumps({"life": 1800.0}))
    host.supervise()
    host.peer(run=None).ask("ping")
    kept = json.loads(expiry.read_text())
    assert kept["boot"] == HostClock().boot
    assert 0 < seconds_to(kept) <= 1800


def test_secrets_are_only_in_the_jobs_environment(host: Host) -> None:
    peer = host.peer()
    secret = f"hush-{UNIQUE}"
    script = f"test ${{#KEY}} = {len(secret)} && echo $$ > $EVALFLEET_OUT/pids && {UNTIL_GO}"
    peer.shell("a.0", script, secrets={"KEY": secret}, secret_names=["KEY"])
    host.pids("a.0")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in (process / "cmdline").read_bytes()
    for path in below(host.directory):
        with contextlib.suppress(FileNotFoundError):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    host.go("a.0")
    assert peer.end("a.0")["exit_code"] == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\xff\n",
        b"{}\n",
        b"[]\n",
        b"1\n",
        b'{"op": 3}\n',
        b'{"op": "start"}\n',
        b"[" * 100_000 + b"\n",
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_garbage_ends_only_its_own_connection(host: Host, garbage: bytes) -> None:
    peer = host.peer()
    with open_socket(host.directory, PATIENCE_S) as sock:
        sock.sendall(garbage)
        answer = b""
        while b"\n" not in answer:
            answer += sock.recv(4096)
        assert "error" in json.loads(answer.partition(b"\n")[0])
    assert peer.run("a.0", "true")["exit_code"] == 0


def test_bad_requests_are_answered(host: Host) -> None:
    peer = host.peer()
    assert peer.ask("dance")["error"] == "unknown"
    assert peer.ask("start", job={"id": 3})["error"] == "bad"
    assert peer.ask("start", job={"id": "x", "argv": ["true"], "timeout_s": "soon"})["error"] == "bad"
    assert peer.ask("forget")["error"] == "bad"
    assert peer.run("a.0", "true")["exit_code"] == 0


def test_the_connection_may_end_with_answers_outstanding(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "sleep 300")
    peer.send("stop", job="a.0")
    peer.sock.shutdown(socket.SHUT_RDWR)
    peer.close()
    other = host.peer()
    if other.ask("how", job="a.0")["state"] == "running":
        other.end("a.0")
    assert other.ask("how", job="a.0")["reason"] == "stopped"


# -- limits ------------------------------------------------------------------------------------


@pytest.fixture(params=["holes", pytest.param("no-holes", marks=NEEDS_ROOT)])
def log_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """A machine on a file system whose files can have holes, or cannot, as on an old NFS."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if request.param == "no-holes":
        subprocess.run(["mount", "-t", "ramfs", "none", disk], check=True)
    try:
        with hosting(disk / "machine") as made:
            yield made
    finally:
        if request.param == "no-holes":
            subprocess.run(["umount", disk], check=True)


SAID = "echo $$ >> $EVALFLEET_OUT/said;"


def numbered(count: int) -> str:
    return f"i=0; while [ $i -lt {count} ]; do echo line $i; i=$((i+1)); done"


def test_a_long_log_keeps_its_head_and_its_tail(log_host: Host) -> None:
    peer = log_host.peer()
    # the pause is for the cut: what is written at that very instant is lost where there are no holes
    peer.shell("a.0", f"{numbered(20_000)}; {SAID} {UNTIL_GO} {numbered(5000)}", log_cap_bytes=100_000)
    log_host.pids("a.0", "said")
    file = log_host.job("a.0") / "log"
    until(lambda: held(file) < 160_000, "the cut")
    log_host.go("a.0")
    peer.end("a.0")
    log = file.read_text()
    assert log.startswith("line 0\nline 1\n")
    assert log.endswith("line 4998\nline 4999\n")
    assert len(log) < 101_000
    assert "\0" not in log
    assert sorted(p.name for p in file.parent.iterdir()) == ["exit", "job.json", "log", "out", "pid"]


def test_of_a_log_that_is_cut_nothing_is_lost_but_what_is_said_to_be(host: Host) -> None:
    peer = host.peer()
    peer.run("a.0", numbered(60_000), log_cap_bytes=100_000)
    log = (host.job("a.0") / "log").read_text()
    head, note, tail = re.split(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", log)
    whole = "".join(f"line {i}\n" for i in range(60_000))
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + int(note) + len(tail) == len(whole)


def test_a_log_that_was_cut_is_cut_on_by_the_next_supervisor(log_host: Host) -> None:
    peer = log_host.peer()
    on = UNTIL_GO.replace("/go", "/on")
    script = f"{numbered(20_000)}; {SAID} {UNTIL_GO} {numbered(30_000)}; {SAID} {on} {numbered(9)}"
    peer.shell("a.0", script, log_cap_bytes=100_000)
    log_host.pids("a.0", "said")
    file = log_host.job("a.0") / "log"
    until(lambda: held(file) < 160_000, "the cut")
    log_host.kill()
    log_host.supervise()
    successor = log_host.peer(epoch=2)
    log_host.go("a.0")
    log_host.pids("a.0", "said", 2)
    until(lambda: held(file) < 160_000, "another cut")
    (log_host.job("a.0") / "out" / "on").touch()
    successor.end("a.0")
    assert file.read_text().startswith("line 0\nline 1\n")
    assert file.read_text().endswith("line 29999\n" + "".join(f"line {i}\n" for i in range(9)))


def held(log: Path) -> int:
    """What a log and the parts of it hold of the disk."""
    parts = [log, *log.parent.glob("log.*")]
    return sum(min(part.stat().st_blocks * 512, part.stat().st_size) for part in parts)


def test_a_fast_log_is_cut_again_and_again(host: Host) -> None:
    """How large it grows meanwhile is the disk's affair: one that is busy holds us up as well as the job."""
    peer = host.peer()
    peer.shell("a.0", "yes " + "x" * 100, log_cap_bytes=1_000_000, timeout_s=3.0 * slowness())
    file = host.job("a.0") / "log"
    cuts = before = 0
    while (host.job("a.0") / "work").exists():
        size = file.stat().st_blocks
        cuts, before = cuts + (size < before), size
        time.sleep(0.01)
    peer.end("a.0")
    assert file.stat().st_size < 1_001_000
    assert cuts >= 1


@contextlib.contextmanager
def limited(pid: int, what: int, limit: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def test_out_of_descriptors_is_told_and_survived(host: Host) -> None:
    peer = host.peer()
    with limited(host.pid, resource.RLIMIT_NOFILE, 3):
        peer.shell("a.0", "true")
        ended = peer.end("a.0")
    assert ended["reason"] == "failed_to_start"
    assert "open files" in ended["detail"]
    assert peer.run("b.0", "true")["exit_code"] == 0


def test_a_disk_that_takes_nothing_is_told_and_survived(host: Host) -> None:
    peer = host.peer()
    with limited(host.pid, resource.RLIMIT_FSIZE, 0):
        peer.shell("a.0", "true")
        ended = peer.end("a.0")
    assert ended["reason"] == "failed_to_start"
    assert ended["detail"]
    assert peer.run("b.0", "true")["exit_code"] == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"argv": []},
        {"argv": ["true"], "bundle": "none"},
        {"argv": ["true"], "bundle": "../.."},
        {"argv": ["a\0b"]},
        {"argv": ["x" * 200_000]},
    ],
    ids=["empty", "no bundle", "bad bundle", "NUL", "long"],
)
def test_what_cannot_start_is_told(host: Host, spec: dict[str, Any]) -> None:
    peer = host.peer()
    peer.ask("start", job={"id": "a.0", **spec})
    ended = peer.end("a.0")
    assert ended["reason"] == "failed_to_start"
    assert ended["detail"]


@pytest.mark.slow
def test_big_leftovers_are_removed_by_and_by(host: Host) -> None:
    peer = host.peer()
    peer.run("a.0", "mkdir -p a/b; touch a/b/c; chmod 500 a a/b; mkdir -p $EVALFLEET_OUT/x/y")
    peer.ask("forget", jobs=["a.0"])
    assert not host.job("a.0").exists()
    until(lambda: not list((host.directory / "trash").iterdir()), "the cleaning")


def test_it_beats(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "echo hello; sleep 300")
    while (beat := peer.read()).get("push") != "beat" or beat["jobs"]["a.0"]["seconds"] < 4:
        pass
    assert beat["jobs"]["a.0"]["log_bytes"] == 6
    assert beat["jobs"]["a.0"]["seconds"] < 30
    assert all(0 <= beat[name] <= 1 for name in ("cpu", "memory", "disk"))
    until((host.directory / "beat.json").exists, "the file")
    assert json.loads((host.directory / "beat.json").read_text())["jobs"] == beat["jobs"]


# -- other Pythons -----------------------------------------------------------------------------


@pytest.mark.parametrize("python", [sys.executable, OLD_PYTHON], ids=["this", "3.8"])
def test_it_runs_as_one_file_on_old_pythons(tmp_path: Path, python: str | None) -> None:
    if python is None:
        pytest.skip("NOT RUN: there is no Python 3.8 here")
    shipped = tmp_path / "supervisor.pyz"
    shipped.write_bytes(archive())
    with hosting(tmp_path / "machine", python, "-I", "-S", str(shipped)) as host:
        peer = host.peer()
        assert len(peer.greeting["hash"]) == 64
        assert peer.run("a.0", "exit 4")["exit_code"] == 4
        peer.shell("b.0", UNTIL_GO + "exit 5")
        until((host.job("b.0") / "pid").exists, "the start")
        host.kill()
        host.supervise(python, "-I", "-S", str(shipped))
        peer = host.peer()
        host.go("b.0")
        assert peer.end("b.0")["exit_code"] == 5
    assert archive() == shipped.read_bytes()
