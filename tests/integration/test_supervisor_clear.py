"""A machine is cleared for whoever has it next: nothing runs, ids are free again, what was set up stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.machine import halt_machine
from tests.integration.test_supervisor import UNTIL_GO, Host, dead, hosting
from tests.waiting import until

DAEMON = "{escape} sh -c 'echo $$ > '{out}'; exec sleep 300' & until [ -s {out} ]; do :; done; {then}"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosting(tmp_path / "machine") as made:
        yield made


def daemon(escape: str, then: str = "sleep 300") -> str:
    return DAEMON.format(escape=escape, out="$EVALFLEET_OUT/pids", then=then)


@pytest.mark.parametrize("escape", ["", "setsid", "setsid setsid nohup", "env -i setsid"])
def test_everything_ends(host: Host, escape: str) -> None:
    peer = host.peer()
    peer.shell("a.0", daemon(escape))
    pid, supervisor = host.pids("a.0")[0], host.pid
    assert "error" not in peer.ask("clear")
    assert dead(pid)
    until(lambda: host.processes() == [supervisor], "the supervisor alone, once it has cleaned up")
    assert not (host.directory / "jobs" / "a.0").exists()


def test_what_an_adopted_job_runs_ends_too(host: Host) -> None:
    host.peer().shell("a.0", daemon("setsid"))
    pid = host.pids("a.0")[0]
    host.kill()
    host.supervise()
    peer = host.peer(epoch=2)
    assert peer.greeting["jobs"] == {"a.0": "running"}
    assert "error" not in peer.ask("clear")
    assert dead(pid)
    before = _cpu_ticks(host.pid)
    assert host.peer(epoch=2).run("a.0", "sleep 0.3; exit 3")["exit_code"] == 3
    assert _cpu_ticks(host.pid) - before < 20, "it spins on what it watched before"


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_ids_of_the_run_before_can_be_started_again(host: Host) -> None:
    peer = host.peer()
    assert peer.run("a.0", "exit 3")["exit_code"] == 3
    assert peer.run("b.0", "exit 4")["exit_code"] == 4
    peer.ask("forget", jobs=["b.0"])
    peer.ask("clear")
    other = host.peer("run", epoch=2)
    assert other.greeting["jobs"] == {}
    assert other.ask("how", job="a.0")["state"] == "unknown"
    assert other.run("a.0", "exit 5")["exit_code"] == 5
    assert other.run("b.0", "exit 6")["exit_code"] == 6, "its tombstone was not removed"
    host.kill()
    host.supervise()
    assert host.peer("run", epoch=2).greeting["jobs"] == {"a.0": "exited", "b.0": "exited"}


def test_what_was_set_up_stays_and_what_failed_to_does_not(host: Host) -> None:
    bundle = host.directory / "bundles" / "abc"
    bundle.mkdir()
    peer = host.peer()
    for id, script in (("setup.1", "echo once >> product"), ("setup.2", "exit 1")):
        peer.run(id, script, bundle="abc", in_bundle=True)
    peer.shell("setup.3", "sleep 300", bundle="abc", in_bundle=True)
    peer.ask("clear")
    assert host.peer().greeting["jobs"] == {"setup.1": "exited"}
    assert (bundle / "product").read_text() == "once\n"
    host.peer().run("setup.2", "echo mended >> product", bundle="abc", in_bundle=True)
    assert (bundle / "product").read_text() == "once\nmended\n"


def test_a_turn_is_cleared_once_and_the_next_one_again(host: Host) -> None:
    peer = host.peer()
    peer.ask("clear", once="hold 1")
    peer.shell("a.0", UNTIL_GO)
    until((host.job("a.0") / "pid").exists, "the start")
    peer.ask("clear", once="hold 1")
    assert peer.ask("how", job="a.0") == {"state": "running", "n": peer.count}
    host.kill()
    host.supervise()
    peer = host.peer()
    peer.ask("clear", once="hold 1")
    assert peer.ask("how", job="a.0")["state"] == "running", "a successor forgot the turn"
    peer.ask("clear", once="hold 2")
    assert peer.ask("how", job="a.0")["state"] == "unknown"
    peer.shell("a.0", UNTIL_GO)
    peer.ask("clear")
    peer.ask("clear", once="hold 2")
    assert peer.ask("how", job="a.0")["state"] == "unknown", "without a turn it is cleared always"


def test_a_stale_controller_cannot_clear(host: Host) -> None:
    old = host.peer(epoch=1)
    new = host.peer(epoch=2)
    new.shell("a.0", UNTIL_GO)
    until((host.job("a.0") / "pid").exists, "the start")
    assert old.read()["error"] == "stale"
    with pytest.raises((EOFError, OSError)):
        old.ask("clear")
    assert host.peer(epoch=1).greeting["error"] == "stale"
    assert new.ask("how", job="a.0")["state"] == "running"


def test_halt_ends_all_and_keeps_the_files(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", daemon("setsid"))
    pid = host.pids("a.0")[0]
    (host.directory / "bundles" / "abc").mkdir()
    halt_machine(host.directory)
    assert dead(pid)
    assert host.processes() == []
    assert (host.directory / "bundles" / "abc").is_dir()
    halt_machine(host.directory)  # may be repeated
    host.supervise()
    assert "error" not in host.peer().ask("ping")
