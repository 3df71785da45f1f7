"""`evalfleet run ... --on lab3 --workers 3` over three real hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptEnded, ControllerStarted
from evalfleet.journal import Store
from evalfleet.state import fold
from tests.desk import Desk, Process
from tests.planted import UNIQUE
from tests.waiting import until

from .fleet import Fleet, fleet

PLANTED = f"planted-{UNIQUE}-value"
BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["bash", "run.sh", "{task_id}"]
files = ["run.sh"]
setup = [["sh", "-c", "echo ready >ready"]]
secrets = ["TOKEN"]
timeout_s = 60
"""
SCRIPT = """\
test -n "$TOKEN" && test -e ready || exit 9
touch "MEET/$(basename "$(dirname "$HOME")")"
until [ "$(ls "MEET" | wc -l)" -ge 3 ]; do sleep 0.05; done  # every host gets its share
sleep 0.${1#t_}
echo "$1 on $HOME: $TOKEN"
mkdir -p "$EVALFLEET_OUT/shots"
echo "$HOME" >"$EVALFLEET_OUT/where"; echo x >"$EVALFLEET_OUT/shots/1"
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


def write(folder: Path, hosts: Fleet, count: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "b.toml").write_text(BENCH)
    (folder / "meet").mkdir()
    (folder / "run.sh").write_text(SCRIPT.replace("MEET", str(folder / "meet")))
    tasks = [json.dumps({"id": f"t_{n}"}) + "\n" for n in range(1, count + 1)]
    (folder / "tasks.jsonl").write_text("".join(tasks))
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
    (folder / "evalfleet.toml").write_text(f'[places.lab3]\nkind = "ssh"\n{keys}')


def start(folder: Path, *words: str, token: str | None = PLANTED) -> Process:
    return Desk(folder, folder / "results", {} if token is None else {"TOKEN": token}).start(*words)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results/r/results.json").read_text())
    return found


def check(folder: Path, hosts: Fleet, count: int) -> None:
    told = results(folder)
    assert (told["scored"], told["broken"], told["status"]) == (count, 0, "done")
    assert all((folder / "results" / task["artifacts"] / "where").exists() for task in told["tasks"])
    events = [
        record.event for record in Store.open(folder / "results", create=False, read_only=True).read("r")
    ]
    used = {event.node for event in events if isinstance(event, AttemptEnded)}
    assert used == {host.name for host in hosts.hosts}, "not every host was used"
    for path in (folder / "results").rglob("*"):
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path
    assert not [path for host in hosts.hosts for path in host.home.iterdir()], "something is left on a host"
    assert not any(host.leftovers() for host in hosts.hosts)


def test_a_run_over_three_hosts(hosts: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder, hosts, 9)
    run = start(folder, "run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r")
    said = run.finish()
    assert PLANTED not in said
    check(folder, hosts, 9)


def test_the_log_of_a_running_task_is_followed_by_other_commands(hosts: Fleet, tmp_path: Path) -> None:
    folder, go = tmp_path / "f", tmp_path / "go"
    write(folder, hosts, 1)
    script = f"echo before $TOKEN; until [ -e {go} ]; do sleep 0.05; done; echo after\n"
    (folder / "run.sh").write_text(f"""{script}echo '{{"score": 1}}' >"$EVALFLEET_OUT/result.json"\n""")
    run = start(folder, "run", "b.toml", "--on", "lab3", "--name", "r")
    began = folder / "results/fleet.db"
    until(lambda: began.exists() and "AttemptStarted" in start(folder, "logs", "r").wait().out, "it runs")
    followers = [start(folder, "logs", "r", "t_1", "-f"), start(folder, "watch", "r", "t_1")]
    for follower in followers:
        until(lambda follower=follower: "before" in follower.out, "its output is seen while it runs")  # type: ignore[misc]
        assert "after" not in follower.out
    go.touch()
    run.finish()
    for follower in followers:
        said = follower.wait().out
        assert "after" in said
        assert PLANTED not in said


def test_a_killed_controller_is_taken_up_again(hosts: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder, hosts, 9)
    run = start(folder, "run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r")
    until(lambda: list((folder / "results").glob("r/t_*/*/result.json")), "a first result")
    for host in hosts.hosts[:2]:
        host.cut()
    run.kill()
    assert leave_half_collected(folder, hosts), "all was collected when the controller died"
    again = start(folder, "resume", "r")
    again.finish()
    check(folder, hosts, 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF ANOTHER COMPUTER: only root may name one")
def test_another_computer_takes_a_run_over_and_goes_on_with_the_attempt_that_runs(
    hosts: Fleet, tmp_path: Path
) -> None:
    """It has a copy of the journal, a name and a home of its own, and no file of the first one's machines:
    what it must know to speak to them it reads from the hosts, by logging in there."""
    folder, other = tmp_path / "f", tmp_path / "elsewhere"
    script = f"echo x >>{tmp_path}/starts; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    folder.mkdir()
    (folder / "b.toml").write_text(
        'name = "b"\ntasks = [{id = "t_1"}]\nscore_from = "exit_code"\ntimeout_s = 600\n'
        f"command = {json.dumps(['sh', '-c', script])}\n"
    )
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
    (folder / "evalfleet.toml").write_text(f'[places.lab3]\nkind = "ssh"\n{keys}')
    first = start(folder, "run", "b.toml", "--on", "lab3", "--workers", "1", "--name", "r")
    until((tmp_path / "starts").exists, lambda: f"the attempt to start: {first.said}")
    first.kill()
    other.mkdir()
    for name in ("b.toml", "evalfleet.toml"):
        shutil.copy(folder / name, other)
    (other / "results").mkdir()
    for file in (folder / "results").glob("fleet.db*"):
        shutil.copy(file, other / "results")
    named = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
    desk = Desk(other, other / "results", {"HOME": str(other), "USER": "bob"}, named)
    second = desk.start("resume", "r", "--take-over")
    until(lambda: len(desk.recorded(ControllerStarted, 2)) == 2, "the second controller")
    (tmp_path / "go").touch()
    second.finish()
    assert [event.host for event in desk.recorded(ControllerStarted, 2)][1] == "elsewhere"
    assert desk.results()["scored"] == 1
    assert (tmp_path / "starts").read_text() == "x\n", "the attempt was taken over, not started again"
    assert not any(host.leftovers() for host in hosts.hosts)


def leave_half_collected(folder: Path, hosts: Fleet) -> int:
    """As a kill does between the last two steps of a collection: all is here, what arrived not gone yet."""
    store = Store.open(folder / "results", create=False, read_only=True)
    attempts = fold(store.read("r")).attempts.values()
    open_ones = [attempt for attempt in attempts if attempt.collected is None]
    for attempt in open_ones:
        home = folder / f"results/r/{attempt.task}/{attempt.id}"
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "where").exists():
            (home / "where").write_text(str(hosts.hosts[0].home))
        incoming = home.with_name(f"{attempt.id}.incoming")
        incoming.mkdir(exist_ok=True)
        (incoming / "log").write_text(PLANTED)
    return len(open_ones)


def test_a_host_set_aside_is_said_so(hosts: Fleet, tmp_path: Path) -> None:
    folder, bad = tmp_path / "f", hosts.hosts[0]
    write(folder, hosts, 12)
    done = folder / "results/r/t_*/*/result.json"  # ten failures before any score would stop the run
    breaks = f'[ "$HOME" = "{bad.home}" ] && {{ until ls {done}; do sleep 0.1; done; exit 9; }}\nsleep 0.$'
    (folder / "run.sh").write_text((folder / "run.sh").read_text().replace("sleep 0.$", breaks))
    run = start(folder, "run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r", "--attempts", "9")
    said = run.finish()
    assert results(folder)["scored"] == 12
    note = f"evalfleet: note: {bad.name} is set aside for 30 s: attempts broke there, or it fell silent"
    assert said.splitlines().count(note) == 1, said


ISOLATED = """\
name = "b"
tasks = [{id = "t_1"}, {id = "t_2"}, {id = "t_3"}]
command = ["sh", "run.sh", "{task_id}"]
files = ["run.sh"]
timeout_s = 60
"""
INTRUDER = """\
id -u >"$EVALFLEET_OUT/uid"
cat HOME/.evalfleet/*/*/key >"$EVALFLEET_OUT/key" 2>/dev/null
echo "exit 0" >run.sh
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: sshd lets the user in that it runs as")
def test_attempts_on_a_host_where_we_are_root_are_users_of_their_own(hosts: Fleet, tmp_path: Path) -> None:
    folder, host = tmp_path / "f", hosts.hosts[0]
    write(folder, hosts, 1)
    settings = hosts.settings(hosts=[host.name], isolation="user")
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "evalfleet.toml").write_text(f'[places.lab3]\nkind = "ssh"\n{keys}')
    (folder / "b.toml").write_text(ISOLATED)
    (folder / "run.sh").write_text(INTRUDER.replace("HOME", str(host.home)))
    run = start(folder, "run", "b.toml", "--on", "lab3", "--name", "r")
    run.finish()
    attempts = [folder / "results" / task["artifacts"] for task in results(folder)["tasks"]]
    users = [int((attempt / "uid").read_text()) for attempt in attempts]
    assert len(set(users)) == 3
    assert 0 not in users
    assert [(attempt / "key").read_text() for attempt in attempts] == ["", "", ""], (
        "the machine's key was read"
    )
    state = fold(Store.open(folder / "results", create=False, read_only=True).read("r"))
    assert [machine.isolated.kind for machine in state.machines.values()] == ["user"]
    assert not list(host.home.iterdir()), "something is left on the host"


TIERED = """\
touch "MEET/$1"
echo "$HOME" >"$EVALFLEET_OUT/where"
case "$HOME" in
    DOOMED) sleep 600 ;;
    HOSTS/*) until [ -e "MEET/next" ]; do sleep 0.05; done ;;  # the other host waits for the next place
    *) touch "MEET/next" ;;
esac
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


@pytest.mark.nightly  # that the host is gone is certain only after a while
def test_a_host_that_dies_in_mid_run_is_followed_by_a_machine_of_the_next_place(tmp_path: Path) -> None:
    """Its task runs there, no score is lost or given twice, and the host is cleaned once it is back."""
    folder = tmp_path / "f"
    with fleet(tmp_path / "fleet", 2) as hosts:
        doomed = hosts.hosts[0]
        write(folder, hosts, 6)
        meet, toml = folder / "meet", folder / "evalfleet.toml"
        script = TIERED.replace("MEET", str(meet)).replace("DOOMED", str(doomed.home))
        (folder / "run.sh").write_text(script.replace("HOSTS", str(hosts.folder)))
        toml.write_text(f'{toml.read_text()}\n[places.here]\nkind = "local"\n')
        run = start(folder, "run", "b.toml", "--on", "lab3,here", "--workers", "2", "--name", "r")
        until(lambda: len(list(meet.iterdir())) >= 2, "both hosts run a task")
        doomed.stop()
        for pid in doomed.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: _scored(folder) == 6, "all tasks have a score")
        doomed.start()
        run.finish()
        told = results(folder)
        assert (told["scored"], told["broken"], told["status"]) == (6, 0, "done")
        by_place = {use["place"]: use for use in told["by_place"]}
        assert by_place["here"]["scored"] >= 1
        assert by_place["lab3"]["scored"] + by_place["here"]["scored"] == 6
        assert not [path for host in hosts.hosts for path in host.home.iterdir()], "something is left"


def _scored(folder: Path) -> int:
    return fold(Store.open(folder / "results", create=False, read_only=True).read("r")).scored
