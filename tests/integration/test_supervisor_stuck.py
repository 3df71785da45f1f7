"""Jobs that get stuck, vanish, or outlast a wall clock that jumps: real processes, no controller."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.program import FOLDER
from tests.waiting import slowness, until

from .test_supervisor import UNTIL_GO, Host, dead, hosting

QUIET = "echo working; sleep 300 & echo $! > $EVALFLEET_OUT/pids; wait"
JUMPING = """\
import random, sys, time
sys.path.insert(0, {parent!r})
time.time = lambda real=time.time: real() + random.choice((-1, 1)) * random.uniform(86400, 8640000)
from supervisor.main import main
sys.exit(main(sys.argv))
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosting(tmp_path / "machine") as made:
        yield made


# -- nothing is written ------------------------------------------------------------------------


def test_a_job_that_writes_nothing_is_ended_with_no_controller_there(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", QUIET, stall_s=0.5)
    pid = host.pids("a.0")[0]
    peer.close()
    until(lambda: not (host.job("a.0") / "work").exists(), "its end")
    ended = host.peer().ask("how", job="a.0")
    assert ended["reason"] == "stalled"
    assert ended["detail"].startswith("working\n")
    assert 0.5 <= ended["seconds"] < 15 * slowness()
    assert dead(pid)


def test_a_result_written_before_is_told(host: Host) -> None:
    ended = host.peer().run("a.0", "echo 5 > $EVALFLEET_OUT/result.json; sleep 300", stall_s=0.3 * slowness())
    assert (ended["reason"], ended["result"]) == ("stalled", "5\n")


@pytest.mark.parametrize("write", ["echo on", "date >> $EVALFLEET_OUT/a/b/trace"])
def test_a_job_that_writes_goes_on_until_it_stops_writing(host: Host, write: str) -> None:
    begun = time.monotonic()
    script = f"mkdir -p $EVALFLEET_OUT/a/b; for i in $(seq 50); do {write}; sleep 0.1; done; sleep 300"
    stall_s = 4.0 * slowness()
    ended = host.peer().run("a.0", script, stall_s=stall_s)
    assert ended["reason"] == "stalled"
    assert time.monotonic() - begun > 5.0 + stall_s


def test_one_that_was_not_asked_about_may_be_silent(host: Host) -> None:
    peer = host.peer()
    peer.shell("stuck.0", "sleep 300", stall_s=0.3)
    peer.shell("silent.0", UNTIL_GO + "exit 3", stall_s=0)
    assert peer.end("stuck.0")["reason"] == "stalled"
    host.go("silent.0")
    assert peer.end("silent.0")["exit_code"] == 3


def test_an_adopted_job_is_watched_on(host: Host) -> None:
    host.peer().shell("a.0", QUIET, stall_s=1.0)
    pid = host.pids("a.0")[0]
    host.kill()
    host.supervise()
    peer = host.peer()
    assert peer.greeting["jobs"]["a.0"] in ("running", "stalled")
    ended = peer.end("a.0")
    assert ended["reason"] == "stalled"
    assert ended["detail"].startswith("working\n")
    assert dead(pid)


def test_the_reason_survives_a_supervisor_that_dies_while_it_ends_it(host: Host) -> None:
    script = "trap '' TERM; echo $$ > $EVALFLEET_OUT/pids; while :; do sleep 1; done"
    host.peer().shell("a.0", script, stall_s=0.3, grace_s=2)
    until((host.job("a.0") / "why").exists, "the end of patience")
    host.kill()
    host.supervise()
    assert host.peer().end("a.0")["reason"] == "stalled"


# -- processes that vanish ---------------------------------------------------------------------


@pytest.mark.parametrize("adopted", [False, True])
def test_a_job_killed_with_its_wrapper_is_lost_at_once(host: Host, adopted: bool) -> None:
    peer = host.peer()
    peer.shell("a.0", "echo last words; echo $PPID > $EVALFLEET_OUT/pids; sleep 300")
    wrapper = host.pids("a.0")[0]
    if adopted:
        host.kill()
        host.supervise()
        peer = host.peer()
    os.killpg(wrapper, signal.SIGKILL)
    ended = peer.end("a.0")
    assert (ended["reason"], ended["detail"], ended.get("exit_code")) == ("lost", "last words\n", None)


def test_a_wrapper_killed_alone_takes_its_job_along(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "echo $PPID $$ > $EVALFLEET_OUT/pids; sleep 300")
    wrapper, job = host.pids("a.0", count=2)
    os.kill(wrapper, signal.SIGKILL)
    assert peer.end("a.0")["reason"] == "lost"
    assert dead(job)


def test_a_job_that_is_killed_alone_has_exited(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", "echo $$ > $EVALFLEET_OUT/pids; while :; do sleep 0.1; done")
    os.kill(host.pids("a.0")[0], signal.SIGKILL)
    ended = peer.end("a.0")
    assert (ended["reason"], ended["exit_code"]) == ("exited", 137)


# -- clocks that jump --------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_by_months_changes_nothing(tmp_path: Path) -> None:
    """Each time anybody asks for the time of day it is some months earlier or later."""
    driver = tmp_path / "jumping.py"
    driver.write_text(JUMPING.format(parent=str(FOLDER.parent)))
    command = (sys.executable, "-I", "-S", str(driver))
    with hosting(tmp_path / "machine", *command) as host:
        peer = host.peer()
        peer.ask("expire", seconds=3600)
        peer.shell("ok.0", UNTIL_GO, timeout_s=3600, lease_s=3600, stall_s=3600)
        peer.shell("adopted.0", "sleep 300", timeout_s=4, lease_s=3600)
        ends = [peer.run(f"limit{n}.0", "sleep 300", timeout_s=0.5) for n in range(3)]
        assert all(end["reason"] == "timed_out" and 0.5 <= end["seconds"] < 10 * slowness() for end in ends)
        assert peer.run("stuck.0", "sleep 300", stall_s=0.3)["reason"] == "stalled"
        host.kill()
        host.supervise(*command)
        peer = host.peer()
        assert peer.greeting["jobs"]["ok.0"] == "running"
        assert peer.greeting["jobs"]["adopted.0"] in ("running", "timed_out")
        until(lambda: peer.ask("how", job="adopted.0").get("reason") == "timed_out", "the old limit")
        assert 4 <= peer.ask("how", job="adopted.0")["seconds"] < 20 * slowness()
        peer.shell("leased.0", "sleep 300", lease_s=0.4)
        peer.close()
        until((host.job("leased.0") / "why").exists, "the lease")
        peer = host.peer()
        assert peer.ask("how", job="ok.0")["state"] == "running"
        host.go("ok.0")
        assert peer.end("ok.0")["exit_code"] == 0
