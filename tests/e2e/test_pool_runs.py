"""Runs that borrow the machines of a pool: one at a time has a machine, and all come back."""

from __future__ import annotations

from evalfleet.events import MachineRequested
from tests.e2e.harness import Fleet, task, tasks
from tests.e2e.pools import folders, holders, machines, pool, say, statuses, used
from tests.waiting import until


def test_a_run_borrows_all_machines_and_gives_them_back(fleet: Fleet) -> None:
    fleet.bench(tasks(4, "sleep 0.1; score 1"))
    pool(fleet, "create", "--workers", "2")
    before = folders(fleet)
    done = fleet.run("--pool", "p")
    assert done.code == 0, done
    assert "4 scored" in done.out
    assert folders(fleet) == before, "it made or deleted machines"
    assert used(fleet, "r") == {machine["address"] for machine in machines(fleet).values()}
    assert {m.name for m in fleet.state().machines.values()} == {"worker-1", "worker-2"}
    assert not holders(fleet)
    assert set(statuses(fleet).values()) == {"ready"}
    again = fleet("run", "./b.toml", "--pool", "p", "--name", "s", "--workers", "1")
    assert again.code == 0
    assert len(used(fleet, "s")) == 1
    assert [row["run"] for row in say(fleet, "ls", "--json").json] == ["s", "r"]
    jobs = [path.name for folder in before for path in (fleet.home / ".machines" / folder / "jobs").iterdir()]
    assert jobs == [], "a run left something on a machine"
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_what_excludes_a_pool_and_what_is_planned(fleet: Fleet) -> None:
    fleet.bench(tasks(2))
    pool(fleet, "create", "--workers", "2")
    say(fleet, "run", "./b.toml", "--pool", "p", "--on", "local").refused(
        "--on and --pool exclude each other"
    )
    say(fleet, "run", "./b.toml", "--pool", "p", "--keep").refused("--keep makes a pool, and 'p' is one")
    planned = say(fleet, "run", "./b.toml", "--pool", "p", "--dry-run")
    assert planned.code == 0
    assert "on         pool p (local), 2 workers" in planned.out
    assert not holders(fleet)
    assert say(fleet, "ls", "--json").json == []
    pool(fleet, "delete", "--yes")


def test_two_runs_share_a_pool_and_no_machine(fleet: Fleet) -> None:
    fleet.bench([*tasks(2, "gate a; score 1", "a"), *tasks(3, "gate b; score 1", "b")])
    pool(fleet, "create", "--workers", "3")
    first = fleet.start_run("--pool", "p", "--workers", "2", "--domain", "a")
    fleet.started("a_1.0", "a_2.0")
    second = fleet.start("run", "./b.toml", "--name", "s", "--pool", "p", "--domain", "b", "--workers", "1")
    fleet.started("b_1.0")
    assert holders(fleet) == {"r", "s"}
    assert sorted(str(machine["run"]) for machine in machines(fleet).values()) == ["r", "r", "s"]
    assert not used(fleet, "r") & used(fleet, "s"), "a machine was shared"
    say(fleet, "run", "./b.toml", "--name", "t", "--pool", "p").refused(
        "all machines of pool 'p' are held by r, s", "evalfleet cancel r"
    )
    fleet.open_gate("a")
    assert first.wait().code == 0
    fleet.open_gate("b")
    assert second.wait().code == 0
    assert not used(fleet, "r") & used(fleet, "s")
    assert not holders(fleet)
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_verbs_leave_held_machines_alone(fleet: Fleet) -> None:
    fleet.bench([task("a_1", "gate go; score 1")])
    pool(fleet, "create", "--workers", "2")
    run = fleet.start_run("--pool", "p", "--workers", "1")
    fleet.started("a_1.0")
    (name,) = [name for name, machine in machines(fleet).items() if machine["run"] == "r"]
    assert statuses(fleet)[name] == "held"
    for words in (["stop"], ["delete", "--yes"], ["prepare", "./b.toml"], ["restart", name]):
        refused = say(fleet, "pool", words[0], "p", *words[1:])
        refused.refused("is held by run 'r'", "evalfleet cancel r")
    pool(fleet, "set", "--workers", "1")
    assert list(statuses(fleet)) == [name], "the other one went"
    probed = pool(fleet, "status", "--probe", "--json").json["machines"]
    assert [machine["probe"] for machine in probed] == ["ok"]
    for count in ("2", "3"):  # the pool's epoch passes the run's
        pool(fleet, "set", "--workers", count)
    pool(fleet, "set", "--expires", "3d")
    pool(fleet, "status", "--probe")
    fleet.open_gate("go")
    assert run.wait().code == 0, "a verb disturbed the run"
    assert fleet.starts() == ["a_1.0"]
    pool(fleet, "stop")
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_run_waits_for_machines_that_a_verb_works_on(fleet: Fleet) -> None:
    fleet.bench(tasks(1), setup=[["sh", "-c", f"until [ -e {fleet.folder}/gates/go ]; do sleep 0.03; done"]])
    pool(fleet, "create")
    prepare = fleet.start("pool", "prepare", "p", "./b.toml")
    until(lambda: holders(fleet) == {"p"}, "the pool has its machine")
    run = fleet.start_run("--pool", "p")
    fleet.recorded(MachineRequested)
    assert holders(fleet) == {"p"}
    fleet.open_gate("go")
    assert prepare.wait().code == 0
    assert run.wait().code == 0
    assert len([e for e in fleet.events() if isinstance(e, MachineRequested)]) == 1
    pool(fleet, "delete", "--yes")


# -- keep ----------------------------------------------------------------------------------------


def test_keep_leaves_the_machines_as_a_pool(fleet: Fleet) -> None:
    fleet.bench(tasks(2))
    done = fleet.run("--keep", "--workers", "2")
    assert done.code == 0
    assert "the machines stay, as pool r-pool" in done.err
    assert set(statuses(fleet, "r-pool").values()) == {"ready"}
    assert not holders(fleet, "r-pool")
    assert fleet("run", "./b.toml", "--name", "s", "--pool", "r-pool").code == 0
    assert used(fleet, "s") <= {machine["address"] for machine in machines(fleet, "r-pool").values()}
    pool(fleet, "delete", "--yes", name="r-pool")
    fleet.settled()


def test_keep_where_the_name_of_the_pool_is_taken(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    pool(fleet, "create", name="r-pool")
    say(fleet, "run", "./b.toml", "--name", "r", "--keep").refused("'r-pool' is taken")
    assert say(fleet, "ls", "--json").json == [], "half of it was made"
    pool(fleet, "delete", "--yes", name="r-pool")


def test_keep_of_a_run_in_the_background(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    assert fleet.run("--keep", "--detach").code == 0
    assert fleet("watch", "r").code == 0
    until(lambda: statuses(fleet, "r-pool") == {"worker-vm": "ready"}, "its machine is free")
    until(lambda: not holders(fleet, "r-pool"), "it is given back")
    pool(fleet, "delete", "--yes", name="r-pool")
