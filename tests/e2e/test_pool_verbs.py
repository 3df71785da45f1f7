"""`evalfleet pool VERB` on this computer: every verb, and what each refuses."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

from evalfleet.events import MachinePrepared
from tests.desk import Done, Process
from tests.e2e.harness import Fleet, task, tasks
from tests.e2e.pools import folders, machines, pool, registry, say, statuses, view
from tests.waiting import PATIENCE_S, until


def test_create_status_ls_and_delete(fleet: Fleet) -> None:
    made = pool(fleet, "create", "--workers", "2")
    assert "worker-2 ready after" in made.err
    assert re.search(r"^pool p: 2 machines on local, until 20..-", made.out)
    assert statuses(fleet) == {"worker-1": "ready", "worker-2": "ready"}
    (row,) = say(fleet, "pool", "ls", "--json").json
    assert (row["pool"], row["place"], row["workers"], len(row["machines"])) == ("p", "local", 2, 2)
    assert say(fleet, "ls", "--json").json == [], "a pool is no run"
    probed = pool(fleet, "status", "--probe", "--json").json["machines"]
    assert [machine["probe"] for machine in probed] == ["ok", "ok"]
    gone = pool(fleet, "delete", "--yes")
    assert gone.out == "pool p is deleted: 2 machines\n"
    fleet.settled()
    assert "no pools" in say(fleet, "pool", "ls").out
    for verb in ("status", "start", "stop", "delete"):
        say(fleet, "pool", verb, "p").refused("pool 'p' was deleted")


def test_names_and_a_prefix(fleet: Fleet) -> None:
    pool(fleet, "create")
    assert list(statuses(fleet)) == ["worker-vm"]
    pool(fleet, "create", "--workers", "2", "--prefix", "mine", name="q")
    assert list(statuses(fleet, "q")) == ["mine-1", "mine-2"]
    say(fleet, "pool", "create", "r", "--prefix", "a/b").refused("a/b")
    for name in ("p", "q"):
        pool(fleet, "delete", "--yes", name=name)


def test_names_that_are_taken_or_unknown(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    say(fleet, "pool", "status", "p").refused("holds no journal")
    assert fleet.run().code == 0
    say(fleet, "pool", "status", "r").refused("there is no pool 'r'")
    say(fleet, "pool", "create", "r").refused("the name 'r' is taken by a run")
    pool(fleet, "create", name="mine")
    say(fleet, "pool", "create", "mine").refused("the name 'mine' is taken by a pool")
    say(fleet, "run", "./b.toml", "--name", "mine").refused("'mine' is taken")
    say(fleet, "pool", "status", "mein").refused("there is no pool 'mein'; did you mean 'mine'?")
    say(fleet, "run", "./b.toml", "--pool", "mein").refused("did you mean 'mine'?")
    say(fleet, "pool", "restart", "mine", "worker-1").refused("no machine 'worker-1'; did you mean")
    say(fleet, "pool", "ssh", "mine", "nobody").refused("no machine 'nobody'")
    say(fleet, "pool", "logs", "mine", "nobody").refused("no machine 'nobody'")
    fleet("pool").refused("VERB")
    for verb in ("watch", "show", "logs", "report", "resume", "cancel"):
        say(fleet, verb, "mine").refused("'mine' is a pool, not a run", "evalfleet pool status mine")
    pool(fleet, "delete", "--yes", name="mine")
    assert len(folders(fleet)) == 0
    pool(fleet, "create", name="mine")  # a name that came free
    assert next(iter(machines(fleet, "mine").values()))["id"].endswith("-2"), "an id came twice"
    pool(fleet, "delete", "--yes", name="mine")


def test_stop_and_start(fleet: Fleet) -> None:
    pool(fleet, "create", "--workers", "2")
    before = folders(fleet)
    pool(fleet, "stop")
    until(lambda: not fleet.alive(), "the end of all processes")
    assert set(statuses(fleet).values()) == {"stopped"}
    assert folders(fleet) == before, "their disks stay"
    fleet.bench(tasks(1))
    say(fleet, "run", "./b.toml", "--pool", "p").refused(
        "no machine of pool 'p' is running", "evalfleet pool start p"
    )
    assert [worker["status"] for worker in registry(fleet, "p")["workers"]] == ["completed"] * 2
    say(fleet, "pool", "restart", "p", "worker-1").refused("worker-1 is not running")
    pool(fleet, "set", "--expires", "2h")
    assert not fleet.alive(), "extending it started a stopped machine"
    pool(fleet, "start")
    assert set(statuses(fleet).values()) == {"ready"}
    assert folders(fleet) == before
    pool(fleet, "start")  # there is nothing to do
    assert len(fleet.supervisors()) == 2
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_resize_both_ways(fleet: Fleet) -> None:
    pool(fleet, "create", "--workers", "2")
    assert list(statuses(fleet)) == ["worker-1", "worker-2"]
    pool(fleet, "set", "--workers", "3")
    assert list(statuses(fleet)) == ["worker-1", "worker-2", "worker-3"]
    pool(fleet, "set", "--workers", "1")
    assert list(statuses(fleet)) == ["worker-1"]
    assert len(folders(fleet)) == 1
    say(fleet, "pool", "set", "p", "--workers", "0").refused("--workers")
    pool(fleet, "delete", "--yes")


def test_prepare_once_for_all_runs(fleet: Fleet) -> None:
    fleet.bench(tasks(3), setup=[["sh", "-c", f"echo x >> {fleet.folder}/setups"]], probe=["true"])
    pool(fleet, "create", "--workers", "2")
    done = pool(fleet, "prepare", "./b.toml")
    assert "worker-1 is prepared for b after" in done.err
    assert {machine["prepared"] for machine in machines(fleet).values()} == {"b"}
    assert (fleet.folder / "setups").read_text() == "x\n" * 2
    assert fleet.run("--pool", "p").code == 0
    assert fleet("run", "./b.toml", "--pool", "p", "--name", "s").code == 0
    assert (fleet.folder / "setups").read_text() == "x\n" * 2, "it was set up again"
    pool(fleet, "prepare", "./b.toml")
    assert (fleet.folder / "setups").read_text() == "x\n" * 2
    assert len([e for e in fleet.events("p") if isinstance(e, MachinePrepared)]) == 4
    pool(fleet, "delete", "--yes")


def test_prepare_says_what_fails_where(fleet: Fleet) -> None:
    fleet.bench(tasks(1), setup=[["sh", "-c", "echo no such luck; exit 3"]])
    pool(fleet, "create")
    done = say(fleet, "pool", "prepare", "p", "./b.toml")
    assert done.code == 1
    assert "evalfleet: worker-vm: set-up step" in done.err
    assert "no such luck" in done.err
    fleet.bench(tasks(1), probe=["false"])
    assert "its probe does not succeed" in say(fleet, "pool", "prepare", "p", "./b.toml").err
    assert machines(fleet)["worker-vm"]["prepared"] is None
    pool(fleet, "delete", "--yes")


def test_ssh_restart_and_logs(fleet: Fleet) -> None:
    pool(fleet, "create", "--workers", "2")
    here = machines(fleet)["worker-2"]["address"]
    assert fleet("pool", "ssh", "p", "worker-2", "--", "pwd").out.strip() == here
    assert fleet("pool", "ssh", "p", "worker-2", "--", "sh", "-c", "exit 7").code == 7
    assert fleet("pool", "ssh", "p", "worker-2", "echo", "a  b").out == "a  b\n"
    say(fleet, "pool", "ssh", "p").refused("say which machine of pool 'p': worker-1, worker-2")
    old = fleet.supervisors()
    assert pool(fleet, "restart", "worker-2").out == "worker-2 was restarted and answers\n"
    new = fleet.supervisors()
    changed = {Path(here).name}
    assert {name for name in new if new[name] != old[name]} == changed
    log = pool(fleet, "logs").out
    assert "PoolPlanned" in log
    one = pool(fleet, "logs", "worker-2").out
    assert one.count("MachineReady") == 1
    assert "PoolPlanned" not in one
    pool(fleet, "delete", "--yes")


def test_logs_are_followed_until_the_pool_is_deleted_or_ctrl_c(fleet: Fleet) -> None:
    pool(fleet, "create")
    log, other = fleet.start("pool", "logs", "p", "-f"), fleet.start("pool", "logs", "p", "worker-vm", "-f")
    until(lambda: "MachineReady" in log.out and "MachineReady" in other.out, "what has happened")
    other.interrupt()
    assert other.wait().code == 130
    pool(fleet, "stop")
    until(lambda: "MachineStopped" in log.out, "what happens")
    pool(fleet, "delete", "--yes")
    done = log.wait()
    assert done.code == 0, done
    assert "RunEnded" in done.out.splitlines()[-1]


def test_followed_logs_end_when_nobody_reads_them(fleet: Fleet) -> None:
    pool(fleet, "create")
    piped = f"{sys.executable} -m evalfleet pool logs p -f | head -n 1"
    done = subprocess.run(
        ["sh", "-c", piped],
        cwd=fleet.folder,
        env=fleet.environ,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    assert b"PoolPlanned" in done.stdout
    pool(fleet, "delete", "--yes")


def test_a_pool_of_one_needs_no_machine_before_a_command(fleet: Fleet) -> None:
    pool(fleet, "create")
    here = machines(fleet)["worker-vm"]["address"]
    assert fleet("pool", "ssh", "p", "--", "pwd").out.strip() == here
    assert fleet("pool", "ssh", "p", "worker-vm", "--", "echo", "--").out == "--\n"
    say(fleet, "pool", "ssh", "p", "pwd").refused("no machine 'pwd'")
    say(fleet, "pool", "ssh").refused("say which pool")
    pool(fleet, "delete", "--yes")


def test_ctrl_c_ends_what_was_run_on_a_machine_by_hand(fleet: Fleet) -> None:
    pool(fleet, "create")
    mark = fleet.folder / "begun"
    argv = ["sh", "-c", f"touch {mark}; exec sleep 987"]
    script = (
        "import asyncio; from evalfleet.api.pools import open_pool; "
        "from evalfleet.planning.workspace import Workspace; "
        f"asyncio.run(open_pool(Workspace.here(), 'p').execute(['worker-vm'], {argv}, 999))"
    )
    popen = subprocess.Popen(
        [sys.executable, "-c", script], cwd=fleet.folder, env=fleet.environ, stderr=subprocess.DEVNULL
    )
    try:
        until(mark.exists, "its start")
        popen.send_signal(signal.SIGINT)
        popen.wait(PATIENCE_S)
    finally:
        popen.kill()
        popen.wait()
    until(
        lambda: not any("987" in argv for argv in fleet.alive().values()),
        "its end",
    )
    pool(fleet, "delete", "--yes")


def test_prepare_of_a_stopped_pool_is_refused(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    pool(fleet, "create")
    pool(fleet, "stop")
    say(fleet, "pool", "prepare", "p", "./b.toml").refused(
        "no machine of pool 'p' is running", "evalfleet pool start p"
    )
    pool(fleet, "delete", "--yes")


def test_an_expiry_that_is_near_or_over_is_told(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    made = pool(fleet, "create")
    assert "expires" not in made.out
    assert say(fleet, "pool", "ls").err == ""
    soon = "pool 'p' expires in 60 min; `evalfleet pool set p --expires 14d` keeps it"
    assert soon in pool(fleet, "set", "--expires", "1h").out
    assert soon in say(fleet, "pool", "ls").err
    assert soon in say(fleet, "run", "./b.toml", "--pool", "p", "--dry-run").err
    assert pool(fleet, "status", "--json").json["warning"] == soon
    pool(fleet, "set", "--expires", "1s")
    until(lambda: "has expired" in pool(fleet, "status").out, "its end")
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_extend_and_expiry(fleet: Fleet) -> None:
    pool(fleet, "create", "--expires", "1h")
    pool(fleet, "set", "--expires", "1s")
    fleet.bench(tasks(1))
    until(lambda: not fleet.alive(), "the machines' own end")
    until(lambda: statuses(fleet) == {"worker-vm": "expired"}, "the word about it")
    assert pool(fleet, "status", "--probe", "--json").json["machines"][0]["probe"] is None
    say(fleet, "run", "./b.toml", "--pool", "p").refused(
        "no machine of pool 'p' is running", "evalfleet pool start p"
    )
    pool(fleet, "set", "--expires", "1h")
    assert statuses(fleet) == {"worker-vm": "ready"}
    assert fleet.run("--pool", "p").code == 0
    pool(fleet, "set", "--expires", "1s")
    until(lambda: statuses(fleet) == {"worker-vm": "expired"}, "its end again")
    pool(fleet, "start")
    assert statuses(fleet) == {"worker-vm": "ready"}, "start gives it another life"
    assert pool(fleet, "status", "--probe", "--json").json["machines"][0]["probe"] == "ok"
    pool(fleet, "delete", "--yes")
    fleet.settled()


# -- delete asks ---------------------------------------------------------------------------------


def answered(fleet: Fleet, answer: bytes) -> Done:
    """`pool delete p` on a terminal, where somebody types the answer."""
    master, slave = pty.openpty()
    try:
        process: Process = fleet.start("pool", "delete", "p", stdin=slave)
        until(lambda: "Type yes to go on" in process.out, "the question")
        os.write(master, answer)
        return process.wait()
    finally:
        os.close(master)
        os.close(slave)


def test_only_yes_is_yes(fleet: Fleet) -> None:
    pool(fleet, "create")
    for answer in (b"y\n", b"YES\n", b"\n", b"\x04"):
        done = answered(fleet, answer)
        assert done.code == 2, answer
        assert "This will delete pool p and its 1 machine" in done.out
        assert done.err == "evalfleet: nothing was deleted\n"
        assert statuses(fleet) == {"worker-vm": "ready"}, answer
    pool(fleet, "delete", "--yes")


def test_yes_deletes_and_nobody_to_ask_needs_a_flag(fleet: Fleet) -> None:
    pool(fleet, "create")
    say(fleet, "pool", "delete", "p").refused("this would delete pool p and its 1 machine: say --yes")
    assert statuses(fleet) == {"worker-vm": "ready"}
    assert answered(fleet, b"yes\n").code == 0
    fleet.settled()


# -- places that give less than was asked for ----------------------------------------------------


def test_fewer_machines_than_asked_for(fleet: Fleet) -> None:
    done = pool(fleet, "create", "--workers", "3", "--set", "max_machines=2")
    assert "1 more was asked for: `evalfleet pool start p` tries again" in done.out
    assert list(statuses(fleet)) == ["worker-1", "worker-2"]
    again = say(fleet, "pool", "start", "p")
    assert "1 more was asked for" in again.out, "it asks again, in vain"
    assert (again.code, again.err.splitlines()[-1]) == (
        4,
        "evalfleet: pool 'p' lacks 1 of 3 machines; `evalfleet pool start p` tries again",
    )
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_no_machine_at_all(fleet: Fleet) -> None:
    pool(fleet, "create", "--set", "max_machines=1")
    done = say(fleet, "pool", "create", "q", "--set", "max_machines=1")
    assert done.code == 4
    assert done.err.splitlines()[-1].startswith("evalfleet: pool 'q' got no machine: all 1 machines of local")
    assert [row["pool"] for row in say(fleet, "pool", "ls", "--json").json] == ["p"]
    assert len(folders(fleet)) == 1
    pool(fleet, "delete", "--yes")
    pool(fleet, "create", name="q")
    pool(fleet, "delete", "--yes", name="q")


def test_wrong_requests_cost_nothing(fleet: Fleet) -> None:
    say(fleet, "pool", "create", "p", "--on", "nowhere").refused("nowhere")
    say(fleet, "pool", "create", "p", "--workers", "0").refused("--workers")
    say(fleet, "pool", "create", "p", "--expires", "soon").refused("--expires")
    say(fleet, "pool", "create", "p", "--set", "colour=red").refused("colour")
    say(fleet, "pool", "create", "a b").refused("a b")
    assert say(fleet, "pool", "ls", "--json").json == []


# -- vm_pool_registry.json -----------------------------------------------------------------------

KEYS = [
    *("pool_id", "created_at", "resource_group", "location", "vm_size", "workers"),
    *("total_tasks", "completed_tasks", "failed_tasks"),
]
WORKER = [
    *("name", "ip", "status", "docker_container", "waa_ready", "assigned_tasks", "completed_tasks"),
    *("current_task", "error", "created_at", "updated_at"),
]


def test_the_registry_of_a_pool_and_of_its_run(fleet: Fleet) -> None:
    fleet.bench(
        [task(f"a_{n}", f"echo a_{n} begins; gate go; score {n % 2}") for n in (1, 2)],
    )
    pool(fleet, "create", "--workers", "3")
    own = registry(fleet, "p")
    assert registry(fleet) == own, "the home's copy is the newest one's"
    assert list(own) == KEYS
    assert [list(worker) for worker in own["workers"]] == [WORKER] * 3
    assert re.fullmatch(r"\d{8}_\d{6}", own["pool_id"])
    assert {worker["status"] for worker in own["workers"]} == {"ready"}
    assert {worker["ip"] for worker in own["workers"]} == {"127.0.0.1"}
    run = fleet.start_run("--pool", "p", "--workers", "2")

    def busy(of: str) -> list[tuple[str, str]]:
        workers = registry(fleet, of)["workers"]
        return sorted((w["name"], w["current_task"]) for w in workers if w["status"] == "running")

    until(lambda: (fleet.home / "r/vm_pool_registry.json").exists() and len(busy("r")) == 2, "the run's")
    until(lambda: busy("p") == busy("r") == busy(""), "all three files to say the same")
    assert {task for _, task in busy("r")} == {"a_1", "a_2"}
    assert {f"{name}: {task} begins" for name, task in busy("r")} <= set(
        pool(fleet, "logs").out.splitlines()
    ), "the log of the pool has what its workers write"
    (name, current), _ = busy("r")
    assert pool(fleet, "logs", name).out.splitlines()[-1] == f"{name}: {current} begins"
    pool(fleet, "set", "--workers", "4")  # while the run has machines
    until(lambda: busy("p") == busy("r"), "the pool's file, written over and then corrected")
    assert len(registry(fleet, "p")["workers"]) == 4
    fleet.open_gate("go")
    assert run.wait().code == 0
    told = registry(fleet, "r")
    assert (told["total_tasks"], told["completed_tasks"], told["failed_tasks"]) == (2, 2, 0)
    assert {worker["status"] for worker in told["workers"]} == {"ready"}, "the pool's machines live on"
    assert told["vm_size"] == own["vm_size"] != "pool"
    assert registry(fleet) == told
    assert list(told) == KEYS
    back = registry(fleet, "p")
    assert {worker["status"] for worker in back["workers"]} == {"ready"}
    assert sorted(t for w in back["workers"] for t in w["completed_tasks"]) == ["a_1", "a_2"]
    assert [w["created_at"] for w in back["workers"]][:3] == [w["created_at"] for w in own["workers"]]
    pool(fleet, "delete", "--yes")
    assert {worker["status"] for worker in registry(fleet, "p")["workers"]} == {"deleted"}
    assert registry(fleet) == told, "an older pool wrote over the newest run's"
    assert view(fleet).state.ended_at is not None
