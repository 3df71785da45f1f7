"""Jobs that are users of their own, attacked by real processes: neighbours, files, limits, left-overs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import hostile
from evalfleet.channels.program import FOLDER
from evalfleet.channels.supervisor.files import job_name
from evalfleet.channels.supervisor.isolation import kill_user, new_uid, processes_of
from evalfleet.channels.supervisor.machine import remove_machine
from evalfleet.channels.supervisor.processes import age, birth
from tests.integration.test_supervisor import UNTIL_GO, Host, Peer, dead, hosting
from tests.processes import parent_of
from tests.waiting import slowness, until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs root on Linux: users are made up"
)

TICK_S = 0.02


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosting(tmp_path / "machine") as made:
        (made.directory / "bundles/b/data").mkdir(parents=True, mode=0o700)
        (made.directory / "bundles/b/grade.py").write_text("print('honest')")
        (made.directory / "bundles/b/grade.py").chmod(0o600)
        yield made
        groups = groups_of(made.directory)
    assert not [group for group in groups if os.path.exists(group)]


def groups_of(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        groups: list[str] = json.loads((directory / "groups").read_text())
        return groups
    return []


def run(peer: Peer, id: str, script: str, **more: object) -> dict[str, object]:
    return peer.run(id, script, isolation="user", bundle="b", **more)


def said(host: Host, id: str) -> str:
    return (host.job(id) / "log").read_text()


def box_of(host: Host, id: str) -> dict[str, object]:
    box: dict[str, object] = json.loads((host.job(id) / "job.json").read_text())["box"]
    return box


def test_an_isolated_job_is_a_user_of_its_own_that_no_other_has_been(host: Host) -> None:
    peer = host.peer()
    assert peer.ask("isolation")["state"] == "user"
    script = 'id -u; id -G; echo "{}" > $EVALFLEET_OUT/result.json; grep NoNewPrivs /proc/self/status; exit 3'
    ended = run(peer, "a.0", script)
    assert (ended["reason"], ended["exit_code"], ended["result"]) == ("exited", 3, "{}\n")
    uid, groups, privileges = said(host, "a.0").splitlines()
    assert int(uid) >= 0x70000000
    assert groups == uid
    assert privileges.split()[1] == "1"
    run(peer, "b.0", "id -u")
    assert said(host, "b.0") != uid + "\n"


def test_where_root_may_not_mount_jobs_cannot_be_isolated(tmp_path: Path) -> None:
    """As in most containers."""
    weak = ("setpriv", "--bounding-set", "-sys_admin")
    with hosting(tmp_path / "machine", *weak, sys.executable, "-I", "-S", str(FOLDER)) as host:
        peer = host.peer()
        isolation = peer.ask("isolation")
        assert (isolation["state"], isolation["detail"]) == ("none", "it allows no mount namespaces")
        ended = peer.run("a.0", "true", isolation="user")
        assert ended["reason"] == "failed_to_start"
        assert "it allows no mount namespaces" in str(ended["detail"])


def test_an_isolated_job_knows_who_it_is_and_has_a_home_and_a_tmp_that_go_with_it(host: Host) -> None:
    peer = host.peer()
    ended = run(
        peer,
        "a.0",
        "whoami; echo $USER; touch $HOME/mine /tmp/mine /var/tmp/mine /dev/shm/mine; "
        "ls -A /tmp $HOME /dev/shm; "
        "python3 -c 'import getpass, os; print(getpass.getuser(), os.path.expanduser(\"~\"))'; "
        "echo reopened >>/dev/stderr",
    )
    assert ended["exit_code"] == 0, ended
    words = said(host, "a.0").split()
    assert words[:2] == ["agent", "agent"]
    assert words.count("mine") == 3
    assert words[-1] == "reopened"
    run(peer, "b.0", "ls -A /tmp /var/tmp /dev/shm $HOME")
    assert "mine" not in said(host, "b.0")
    left = {"exit", "job.json", "log", "out", "pid"}
    until(lambda: {path.name for path in host.job("a.0").iterdir()} == left, "home and tmp are gone")


def test_an_isolated_job_cannot_change_the_files_of_its_benchmark_nor_add_to_them(host: Host) -> None:
    grade = host.directory / "bundles/b/grade.py"
    peer = host.peer()
    run(
        peer,
        "a.0",
        "cat grade.py; cd data && ls; cd ..; real=$(readlink -f grade.py); echo forged > grade.py; "
        "echo forged > $real; chmod 777 $real; rm -f $real; touch $(dirname $real)/json.py; "
        "mount -o remount,rw $(dirname $real); umount $(dirname $real); true",
    )
    assert said(host, "a.0").startswith("print('honest')")
    assert grade.read_text() == "print('honest')"
    assert sorted(path.name for path in grade.parent.iterdir()) == ["data", "grade.py"]


def test_a_neighbour_is_out_of_reach(host: Host) -> None:
    """Its environment, its secrets, its result, its log, its processes, its very name."""
    peer = host.peer()
    victim = "echo $$ > $EVALFLEET_OUT/pids; echo '{\"score\": 0}' > $EVALFLEET_OUT/result.json; " + UNTIL_GO
    peer.shell("victim.0", victim, isolation="user", bundle="b", secrets={"API_KEY": "sk-very-secret"})
    (pid,) = host.pids("victim.0")
    connect = 'import socket; socket.socket(socket.AF_UNIX).connect("supervisor.sock"); print("open")'
    jobs = host.directory / "jobs"
    attack = (
        f"cat /proc/{pid}/environ; ls -l /proc/{pid}/fd /proc/{pid}/cwd/; "
        f"cat {jobs}/victim.0/job.json; ls {jobs}; "
        f"kill -9 {pid}; kill -9 -1; kill -9 -{pid}; echo 1 > {jobs}/victim.0/out/result.json; "
        f"echo 1 > {jobs}/victim.0/exit; echo 1 > {jobs}/attack.0/exit; rm -rf {host.directory}; "
        f"cat {host.directory}/supervisor.pid; cat {host.directory}/epoch; "
        f"cd {host.directory} && python3 -c '{connect}'"
    )
    run(peer, "attack.0", attack)
    assert not dead(pid)
    found = said(host, "attack.0")
    assert "sk-very-secret" not in found
    assert "open\n" not in found
    assert "victim.0\n" not in found.replace("No such file", "")
    host.go("victim.0")
    ended = peer.end("victim.0")
    assert (ended["reason"], ended["exit_code"], ended["result"]) == ("exited", 0, '{"score": 0}\n')


def test_an_isolated_job_cannot_kill_the_keeper_that_records_its_end(host: Host) -> None:
    peer = host.peer()
    ended = run(peer, "a.0", "kill -9 $PPID; kill -9 -1; echo 0 > ../exit; rm -f ../pid ../log; exit 7")
    assert (ended["reason"], ended["exit_code"]) == ("exited", 7)


LEAVE = (
    "setsid sleep 1000 & "
    "(env -i sleep 1001 & ) & "
    '(setsid sh -c \'unset EVALFLEET_JOB EVALFLEET_MACHINE; trap "" TERM HUP INT; '
    "(sleep 1002; sleep 1003) & sleep 1004' & ) & "
    "sleep 0.2; id -u"
)


def test_what_an_isolated_job_leaves_is_killed_whatever_it_forked(host: Host) -> None:
    """With another job beside it: without a mark nobody could tell whose a process is."""
    peer = host.peer()
    peer.shell("beside.0", UNTIL_GO, isolation="user")
    run(peer, "a.0", LEAVE)
    uid = int(said(host, "a.0"))
    assert uid == box_of(host, "a.0")["uid"]
    assert processes_of(uid) == []
    assert peer.ask("how", job="beside.0")["state"] == "running"
    host.go("beside.0")
    peer.end("beside.0")


def test_where_no_control_group_can_kill_the_user_is_killed(host: Host) -> None:
    uid = new_uid()
    swarm = "for i in 1 2 3 4 5; do (setsid sleep 1000 &) ; done; sleep 1000"
    process = subprocess.Popen(["sh", "-c", swarm], user=uid, group=uid, extra_groups=[])
    until(lambda: len(processes_of(uid)) >= 6, "a swarm")
    assert kill_user(uid)
    process.wait()
    until(lambda: not processes_of(uid), "the end of all of it")
    assert not kill_user(uid)


def test_a_supervisor_that_was_killed_adopts_isolated_jobs_and_ends_what_they_leave(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", f"id -u > $EVALFLEET_OUT/pids; setsid sleep 1000 & {UNTIL_GO} exit 5", isolation="user")
    (uid,) = host.pids("a.0")
    host.kill()
    host.supervise()
    peer = host.peer(epoch=2)
    assert peer.greeting["jobs"] == {"a.0": "running"}
    host.go("a.0")
    assert peer.end("a.0")["exit_code"] == 5
    assert processes_of(uid) == []


def test_a_machine_without_a_supervisor_is_removed_with_all_that_its_isolated_jobs_forked(
    tmp_path: Path,
) -> None:
    with hosting(tmp_path / "machine") as host:
        peer = host.peer()
        peer.shell(
            "a.0", f"id -u > $EVALFLEET_OUT/pids; env -i setsid sleep 1000 & {UNTIL_GO}", isolation="user"
        )
        (uid,) = host.pids("a.0")
        groups = [Path(path) for path in groups_of(host.directory)]
        assert groups
        host.kill()
        remove_machine(host.directory)
        assert processes_of(uid) == []
        assert not any(path.exists() for path in groups)


def test_a_running_job_is_as_old_as_its_keeper(host: Host) -> None:
    peer = host.peer()
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    peer.shell("b.0", f"echo $$ > $EVALFLEET_OUT/pids; {UNTIL_GO}", isolation="user", timeout_s=600)
    (pid,) = host.pids("b.0")
    keeper = parent_of(pid)
    record = host.job("b.0") / "pid"
    assert int(record.read_text().split()[0]) == keeper
    # files are dated by the kernel's tick, which is some milliseconds behind
    assert age(birth(keeper) or 0, str(record)) <= time.clock_gettime(time.CLOCK_BOOTTIME) - begun + TICK_S
    host.go("b.0")
    assert peer.end("b.0")["exit_code"] == 0


BOMB = """
import os
for n in range(500):
    try:
        if not os.fork():
            os.execvp("sleep", ["sleep", "1000"])
    except OSError:
        print("held at", n)
        break
"""


def test_a_fork_bomb_is_held_by_the_limit_of_its_group(host: Host) -> None:
    """Bounded before it starts: it runs only once the limit was read back."""
    peer = host.peer()
    limited = "pids" in str(peer.ask("isolation")["detail"])
    assert limited, "this host has no control group for pids: the bomb is not set off"
    bomb = f"""
limit=$(cat $(find /sys/fs/cgroup/ -maxdepth 4 -path "*$(id -u)/pids.max" | head -1))
[ "$limit" = 40 ] || exit 99
echo "limit $limit"
exec python3 -c '{BOMB}'
"""
    run(peer, "a.0", bomb, processes=40)
    first, held = said(host, "a.0").splitlines()
    assert first == "limit 40"
    assert int(held.split()[2]) <= 40
    assert processes_of(int(str(box_of(host, "a.0")["uid"]))) == []
    assert run(peer, "b.0", "true")["exit_code"] == 0, "the host is as well as before"


def test_a_job_that_eats_memory_is_ended_and_its_neighbour_is_not(host: Host) -> None:
    peer = host.peer()
    assert "memory" in str(peer.ask("isolation")["detail"]), "this host has no control group for memory"
    peer.shell("beside.0", UNTIL_GO, isolation="user")
    eater = "exec python3 -c 'x = bytearray(200_000_000); print(len(x))'"
    assert run(peer, "a.0", eater, memory_bytes=50_000_000)["exit_code"] == 137
    host.go("beside.0")
    assert peer.end("beside.0")["exit_code"] == 0


def test_the_time_limit_ends_an_isolated_job_that_ignores_signals_and_left_its_session(host: Host) -> None:
    peer = host.peer()
    script = (
        "trap '' TERM; id -u > $EVALFLEET_OUT/pids; setsid sh -c 'trap \"\" TERM; sleep 1000' & sleep 1000"
    )
    peer.shell("a.0", script, isolation="user", timeout_s=0.5 * slowness(), grace_s=0.2)
    ended = peer.end("a.0")
    assert ended["reason"] == "timed_out"
    (uid,) = host.pids("a.0")
    assert processes_of(uid) == []


def test_a_command_that_is_not_there_ends_as_it_does_for_other_jobs(host: Host) -> None:
    peer = host.peer()
    (host.directory / "bundles/b/data/script").write_text("echo a shell script without a first line")
    (host.directory / "bundles/b/data/script").chmod(0o700)
    for number, (argv, code, words) in enumerate(
        (
            (["no-such-command"], 127, "not found"),
            (["./data"], 126, "cannot be executed"),
            (["data/script"], 0, "without a first line"),
        )
    ):
        peer.start(f"a.{number}", *argv, isolation="user", bundle="b")
        assert peer.end(f"a.{number}")["exit_code"] == code
        assert words in said(host, f"a.{number}")


def test_links_in_the_artefacts_of_an_isolated_job_lead_its_supervisor_nowhere(
    host: Host, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sk-of-root")
    peer = host.peer()
    peer.shell(
        "a.0",
        f"cd $EVALFLEET_OUT; ln -s {tmp_path}/key result.json; ln {tmp_path}/key hard; ln -s / root; "
        "mkfifo pipe",
        isolation="user",
        fetch={"bytes": 1 << 20, "files": 100},
    )
    assert "sk-of-root" not in json.dumps(peer.end("a.0"))
    assert not (host.job("a.0") / "out/hard").exists()
    assert job_name("a.0") == "a.0"


@pytest.mark.slow
def test_a_few_attacks_of_the_table_come_to_nothing() -> None:
    """`make nightly` runs them all."""
    result = hostile.run(quick=True)
    assert all(aim.met for aim in result.aims.values()), result.figures
    assert result.figures["none_touched"], "where attempts are one user, the same attacks succeed"
