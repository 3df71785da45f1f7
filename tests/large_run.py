"""A run of so many events that the dashboard shows it before it compares them with their checksums."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from evalfleet.events import BudgetPassed, Event, RunEnded, RunPlanned, TasksPlanned
from evalfleet.journal import Store
from evalfleet.model import Plan, Task, TaskId
from evalfleet.views.dashboard.board import MANY_EVENTS

EVENTS = MANY_EVENTS + 4


def make_large_run(home: Path) -> None:
    """The run `r`, which is over."""
    events: list[Event] = [RunPlanned(Plan("r", "bench"), 1), TasksPlanned((Task(TaskId("t")),))]
    events += [BudgetPassed(n % 100) for n in range(EVENTS - 3)]
    Store.open(home).create_past("r", 1, [(1, event) for event in (*events, RunEnded("done"))])
    (home / "r").mkdir()


def damage(home: Path) -> None:
    """Change its event 5000, as a bad disk could."""
    other = """UPDATE event SET body = '{"kind":"BudgetPassed","percent":77}' WHERE seq = 5000"""
    with closing(sqlite3.connect(home / "fleet.db")) as database, database:
        assert database.execute(other).rowcount == 1
