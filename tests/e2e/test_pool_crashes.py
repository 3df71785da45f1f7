"""Controllers of pools and of their runs are killed: the pool stays usable, and nothing is done twice."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing

import pytest

from evalfleet.events import MachineRequested, StopRequested
from tests.e2e.harness import Fleet, task, tasks
from tests.e2e.pools import folders, holders, machines, pool, say, statuses, used, view
from tests.waiting import suspend, until


def left_run(fleet: Fleet) -> None:
    """Run `r` has both machines of pool `p`, and its controller was killed while a task ran on each."""
    fleet.bench([task("a_1", "gate one; score 1"), task("a_2", "gate one; score 1"), task("a_3")])
    pool(fleet, "create", "--workers", "2")
    run = fleet.start_run("--pool", "p")
    fleet.started("a_1.0", "a_2.0")
    run.kill()


def expire_holds(fleet: Fleet) -> None:
    """As if hours had passed."""
    with closing(sqlite3.connect(fleet.home / "fleet.db")) as conn, conn:
        conn.execute("UPDATE hold SET until = 1")


def test_resume_finishes_what_a_killed_controller_began(fleet: Fleet) -> None:
    left_run(fleet)
    assert {machine["run"] for machine in machines(fleet).values()} == {"r"}
    probed = pool(fleet, "status", "--probe", "--json").json["machines"]
    assert [machine["probe"] for machine in probed] == ["ok", "ok"]
    say(fleet, "run", "./b.toml", "--name", "s", "--pool", "p").refused("held by r", "evalfleet resume r")
    fleet.open_gate("one")
    assert fleet("resume", "r").code == 0
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0"], "an attempt was started twice"
    assert fleet.results()["scored"] == 3
    assert not holders(fleet)
    assert fleet("run", "./b.toml", "--name", "s", "--pool", "p").code == 0
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_cancel_frees_what_a_killed_controller_held(fleet: Fleet) -> None:
    left_run(fleet)
    before = fleet.supervisors()
    assert fleet("cancel", "r").code == 0
    assert not holders(fleet)
    assert set(statuses(fleet).values()) == {"ready"}
    until(lambda: set(fleet.alive()) == set(before.values()), "the end of its attempts")
    fleet.open_gate("one")
    assert fleet("run", "./b.toml", "--name", "s", "--pool", "p").code == 0
    assert fleet.results("s")["scored"] == 3
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_hold_that_ran_out_goes_to_another_run_and_the_first_finds_its_way(fleet: Fleet) -> None:
    left_run(fleet)
    expire_holds(fleet)
    other = fleet.start("run", "./b.toml", "--name", "s", "--pool", "p", "--workers", "1")
    until(lambda: "s" in holders(fleet), "the other run has one")
    until(lambda: used(fleet, "s"), "it works there")
    fleet.open_gate("one")
    assert other.wait().code == 0
    assert fleet("resume", "r").code == 0
    assert fleet.results()["scored"] == 3
    assert not holders(fleet)
    pool(fleet, "delete", "--yes")
    fleet.settled()


@pytest.mark.slow
def test_a_pool_that_was_deleted_under_a_dead_run(fleet: Fleet) -> None:
    left_run(fleet)
    expire_holds(fleet)
    pool(fleet, "delete", "--yes")
    fleet.settled()
    say(fleet, "resume", "r").refused("pool 'p' was deleted")
    assert fleet("cancel", "r").code == 0
    assert fleet.state().ended_at is not None
    assert fleet.state().undeleted == {}


# -- the pool's own controller -------------------------------------------------------------------


def test_a_killed_create_is_completed_by_start(fleet: Fleet) -> None:
    create = fleet.start("pool", "create", "p", "--workers", "6")
    fleet.recorded(MachineRequested, run="p")
    create.kill()
    pool(fleet, "status")
    pool(fleet, "start")
    assert sorted(statuses(fleet)) == [f"worker-{n}" for n in range(1, 7)]
    asked = [event.machine for event in fleet.events("p") if isinstance(event, MachineRequested)]
    assert len(set(asked)) == len(asked) == 6, "a machine was asked for twice"
    assert len(folders(fleet)) == len(fleet.supervisors()) == 6
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_run_goes_on_with_a_killed_create(fleet: Fleet) -> None:
    fleet.bench(tasks(2))
    create = fleet.start("pool", "create", "p", "--workers", "2")
    fleet.recorded(MachineRequested, run="p")
    create.kill()
    assert fleet.run("--pool", "p").code == 0
    until(lambda: set(statuses(fleet).values()) == {"ready"}, "all machines")
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_killed_delete_is_repeated(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    pool(fleet, "create", "--workers", "2")
    stuck = next(iter(fleet.supervisors().values()))
    suspend(stuck)  # so that it is not over before it is killed
    delete = fleet.start("pool", "delete", "p", "--yes")
    fleet.recorded(StopRequested, run="p")
    until(lambda: len(folders(fleet)) == 1, "the other one is gone")
    delete.kill()
    assert view(fleet).state.ended_at is None
    pool(fleet, "status")
    for verb, *flags in (("start",), ("stop",), ("set", "--expires", "1d")):
        say(fleet, "pool", verb, "p", *flags).refused("pool 'p' is being deleted; `evalfleet pool delete p`")
    say(fleet, "run", "./b.toml", "--pool", "p").refused("pool 'p' is being deleted")
    os.kill(stuck, signal.SIGCONT)
    pool(fleet, "delete", "--yes")
    fleet.settled()
    assert view(fleet).state.ended_at is not None


def test_a_killed_prepare_keeps_nobody_out(fleet: Fleet) -> None:
    script = f"echo x >> {fleet.folder}/setups; until [ -e {fleet.folder}/gates/go ]; do sleep 0.03; done"
    fleet.bench(tasks(1), setup=[["sh", "-c", script]])
    pool(fleet, "create")
    prepare = fleet.start("pool", "prepare", "p", "./b.toml")
    until((fleet.folder / "setups").exists, "the set-up")
    prepare.kill()
    assert statuses(fleet) == {"worker-vm": "ready"}
    run = fleet.start_run("--pool", "p")
    until(lambda: (fleet.folder / "setups").read_text() == "x\n" * 2, "its set-up, begun anew")
    fleet.open_gate("go")
    assert run.wait().code == 0
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_killed_stop_is_completed(fleet: Fleet) -> None:
    pool(fleet, "create")
    (stuck,) = fleet.supervisors().values()
    suspend(stuck)
    stop = fleet.start("pool", "stop", "p")
    until(lambda: statuses(fleet) == {"worker-vm": "stopping"}, "the decision")
    stop.kill()
    os.kill(stuck, signal.SIGCONT)
    pool(fleet, "stop")
    assert statuses(fleet) == {"worker-vm": "stopped"}
    pool(fleet, "start")
    assert statuses(fleet) == {"worker-vm": "ready"}
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_a_second_verb_at_once_is_refused_in_one_line(fleet: Fleet) -> None:
    pool(fleet, "create")
    (stuck,) = fleet.supervisors().values()
    suspend(stuck)
    stop = fleet.start("pool", "stop", "p")
    until(lambda: statuses(fleet) == {"worker-vm": "stopping"}, "the decision")
    refused = say(fleet, "pool", "delete", "p", "--yes")
    refused.refused("pool 'p' is held by", "wait until it ends")
    assert "--take-over" not in refused.err
    os.kill(stuck, signal.SIGCONT)
    assert stop.wait().code == 0
    pool(fleet, "delete", "--yes")
    fleet.settled()
