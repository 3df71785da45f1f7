"""`ls` reads a summary of each run, which is made again when it is missing, old or of another version."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalfleet.api.home import list_runs
from evalfleet.events import Event, MachineRequested, RunEnded, RunPlanned, RunResumed, TasksPlanned
from evalfleet.journal import Holder, Store
from evalfleet.model import SECOND, Cost, MachineId, Micros, Offer, Plan, Task, TaskId, after
from evalfleet.planning.workspace import Workspace
from evalfleet.views.results import RunSummary
from tests.e2e.harness import Fleet, tasks

NOW = 1_800_000_000 * SECOND


def query(home: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(home / "fleet.db")) as database:
        found = database.execute(statement).fetchall()
        database.commit()
        return found


def events(name: str, *more: Event, model: str = "", benchmark: str = "b") -> list[Event]:
    plan = Plan(name, benchmark, model=model)
    return [RunPlanned(plan, 2), TasksPlanned((Task(TaskId("a")), Task(TaskId("b")))), *more]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run that was stopped, and one that nobody works on."""
    store = Store.open(tmp_path / "home")
    store.create_stream("old", "run", NOW, events("old", RunEnded("stopped"), model="m1"))
    store.create_stream("new", "run", after(NOW, 60), events("new", model="m2", benchmark="c"))
    return store


def listed(store: Store) -> list[tuple[str, str, int]]:
    return [(run.run, run.status, run.unrun) for run in list_runs(Workspace.here(store.home))]


def test_a_summary_is_kept_with_the_run_when_it_ends(fleet: Fleet) -> None:
    fleet.bench([*tasks(2), {"id": "z", "params": {"do": "score 0"}}])
    assert fleet.run("--model", "m").code == 0
    ((seq,),) = query(fleet.home, "SELECT seq FROM summary")
    assert seq == len(fleet.events())
    (run,) = fleet("ls", "--json").json
    shown = fleet("show", "r", "--json").json
    assert {key: shown[key] for key in run if key in shown} == {key: run[key] for key in run if key in shown}
    assert (run["model"], run["machines_usd"], run["success_rate"]) == ("m", 0.0, 0.666667)
    head, row = (line.split() for line in fleet("ls").out.splitlines())
    assert " ".join(head).startswith("run benchmark status tasks scored broken unrun pass started")
    assert head[9:] == ["took", "cost", "model"]
    assert row[:8] == ["r", "b", "done", "3", "3", "0", "0", "66.7%"]
    assert row[-1] == "m"


def test_a_missing_summary_is_computed_and_kept(store: Store) -> None:
    expected = [("new", "left", 2), ("old", "stopped", 2)]
    assert query(store.home, "SELECT * FROM summary") == []
    assert listed(store) == expected
    assert query(store.home, "SELECT stream FROM summary ORDER BY stream") == [("new",), ("old",)]
    query(store.home, "DELETE FROM event")  # who reads the summaries does not miss them
    assert listed(store) == expected


class Noon:
    """A clock that stands still."""

    def __init__(self, at: Micros) -> None:
        self.at = at

    def now(self) -> Micros:
        return self.at


def test_a_run_that_was_left_with_a_machine_costs_more_from_hour_to_hour(store: Store) -> None:
    expires_at = after(NOW, 10 * 3600)
    vm = MachineRequested(
        MachineId("vm-1"), "worker-1", Offer("cloud", "D4", cost=Cost(usd_per_hour=2.0)), expires_at
    )
    store.create_stream("up", "run", after(NOW, 120), events("up", vm))
    found = [
        list_runs(replace(Workspace.here(store.home), clock=Noon(after(NOW, 120 + hours * 3600))))[0]
        for hours in (1, 3, 3)
    ]
    assert [(run.run, run.machines_up, run.machines_usd) for run in found] == [
        ("up", 1, 2.0),
        ("up", 1, 6.0),
        ("up", 1, 6.0),
    ]


def test_a_summary_is_void_when_events_follow(store: Store) -> None:
    assert ("old", "stopped", 2) in listed(store)

    async def go_on() -> None:
        journal = store.acquire("old", Holder.here(NOW), NOW)
        await journal.append(NOW, [RunResumed(), RunEnded("failed")])
        await journal.close()

    asyncio.run(go_on())
    assert ("old", "failed", 2) in listed(store)


@pytest.mark.parametrize("damage", ["v = 0", "body = '{}'", "body = 'rubbish'", "seq = 99"])
def test_a_summary_that_is_not_ours_is_not_believed(store: Store, damage: str) -> None:
    expected = listed(store)
    query(store.home, f"UPDATE summary SET {damage}")
    assert listed(store) == expected


def test_a_damaged_run_does_not_hide_the_others(store: Store) -> None:
    query(store.home, "UPDATE event SET at = at + 1 WHERE stream = 'old' AND seq = 2")
    assert listed(store) == [("new", "left", 2), ("old", "damaged", 0)]


def test_runs_are_chosen_by_what_they_are(store: Store) -> None:
    def names(**wanted: Any) -> list[str]:
        return [run.run for run in list_runs(Workspace.here(store.home), **wanted)]

    assert names(model="m1") == ["old"]
    assert names(benchmark="c") == ["new"]
    assert names(status="left") == ["new"]
    assert names(status="left", model="m1") == []
    assert names(since_s=10.0**12) == ["new", "old"]


def test_filters_of_the_command_line(fleet: Fleet, store: Store) -> None:
    environ = {"EVALFLEET_HOME": str(store.home)}
    assert [run["run"] for run in fleet("ls", "--json", "--model", "m2", env=environ).json] == ["new"]
    assert fleet("ls", "--status", "failed", env=environ).out.startswith("no runs like that")
    fleet("ls", "--since", "soon", env=environ).refused("--since")


def test_an_older_home_is_listed_and_left_as_it_is(store: Store) -> None:
    query(store.home, "DROP TABLE summary")
    for table, column in (("event", "checksum"), ("stream", "seq"), ("stream", "checksum")):
        query(store.home, f"ALTER TABLE {table} DROP COLUMN {column}")
    query(store.home, "PRAGMA user_version = 2")
    assert listed(store) == [("new", "left", 2), ("old", "stopped", 2)]
    assert query(store.home, "PRAGMA user_version") == [(2,)]


def test_the_version_of_summaries_is_told(store: Store) -> None:
    list_runs(Workspace.here(store.home))
    assert query(store.home, "SELECT DISTINCT v FROM summary") == [(RunSummary.VERSION,)]
