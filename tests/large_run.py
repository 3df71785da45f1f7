"""Runs that are large in one way or another, written as they would be without running anything."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    BudgetPassed,
    Event,
    MachineDeleted,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunEnded,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Store
from evalfleet.model import (
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Cost,
    MachineId,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
)

EVENTS = 6000


def make_large_run(home: Path) -> None:
    """Write the run `r`, which is over, of several pages of events."""
    events: list[Event] = [RunPlanned(Plan("r", "bench"), 1), TasksPlanned((Task(TaskId("t")),))]
    events += [BudgetPassed(n % 100) for n in range(EVENTS - 3)]
    Store.open(home).create_past("r", 1, [(1, event) for event in (*events, RunEnded("done"))])
    (home / "r").mkdir()


def make_wide_run(home: Path, tasks: int, machines: int) -> None:
    """The run `wide`, which is over, of so many tasks on so many machines."""
    planned = tuple(Task(TaskId(f"task_{n:03d}"), f"domain_{n % 12}") for n in range(tasks))
    events: list[Event] = [RunPlanned(Plan("wide", "bench", ("cloud",)), tasks), TasksPlanned(planned)]
    ids = [MachineId(f"wide-home-{n}") for n in range(machines)]
    for n, machine in enumerate(ids):
        offer = Offer("cloud", "D4", "east", cost=Cost(usd_per_hour=0.2))
        events += [MachineRequested(machine, f"worker-{n + 1}", offer, 10**15), MachineUp(machine)]
        events += [MachineReady(machine)]
    for n, task in enumerate(planned):
        attempt = AttemptId(f"{task.id}.0")
        outcome = Broken(Cause.TIMEOUT, "no end") if n % 50 == 0 else Scored(float(n % 2), bool(n % 2))
        events += [AttemptStarted(attempt, task.id, ids[n % machines]), AttemptEnded(attempt, outcome, 60.0)]
        events += [AttemptCollected(attempt)]
    events += [MachineDeleted(machine, 1) for machine in ids]
    begin = 1_700_000_000 * SECOND
    Store.open(home).create_past(
        "wide", 1, [(begin + n * SECOND, event) for n, event in enumerate((*events, RunEnded("done")))]
    )
    (home / "wide").mkdir()


def damage(home: Path) -> None:
    """Change its event 5000, as a bad disk could."""
    other = """UPDATE event SET body = '{"kind":"BudgetPassed","percent":77}' WHERE seq = 5000"""
    with closing(sqlite3.connect(home / "fleet.db")) as database, database:
        assert database.execute(other).rowcount == 1
