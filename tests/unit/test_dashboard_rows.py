"""What a browser is told of a run: the rows of its tables, and the figures at the top of its page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.events import (
    AttemptEnded,
    AttemptGraded,
    AttemptStarted,
    CircuitChanged,
    Event,
    MachineAllocated,
    MachineCondemned,
    MachineDeleted,
    MachineHeard,
    MachineQueued,
    MachineReady,
    MachineRequested,
    MachineSilent,
    MachineStep,
    MachineUp,
    RunEnded,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Store
from evalfleet.model import (
    SECOND,
    Answered,
    AttemptId,
    Broken,
    Cause,
    Cost,
    Lifetime,
    MachineId,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
)
from evalfleet.views.dashboard.board import ATTEMPT_COLUMNS, MACHINE_COLUMNS, TASK_COLUMNS, Board, Touched
from evalfleet.views.dashboard.head import head

CLUSTER = Offer("cluster", "node")
SPOT = Offer("azure_vm", "D8", "westus2", spot=True, cost=Cost(usd_per_hour=0.18, priced="2026-11-01"))
NAMES = ("once", "twice", "answered", "retried", "running", "waiting")


def board(home: Path, events: Sequence[Event]) -> Board:
    tasks = tuple(Task(TaskId(name)) for name in NAMES)
    plan = Plan("r", "bench", ("cluster", "azure_vm"))
    begin: list[Event] = [RunPlanned(plan, len(tasks)), TasksPlanned(tasks)]
    for n, offer in enumerate((CLUSTER, SPOT, SPOT)):
        machine = MachineId(f"m{n}")
        begin += [MachineRequested(machine, f"worker-{n}", offer, 10**15), MachineUp(machine)]
        begin += [MachineReady(machine)]
    store = Store.open(home)
    store.create_past("r", 1, [(n * SECOND, event) for n, event in enumerate((*begin, *events), 1)])
    made = Board(home, store, "r")
    made.advance()
    return made


def started(name: str, n: int = 0, machine: str = "m1") -> AttemptStarted:
    return AttemptStarted(AttemptId(f"{name}.{n}"), TaskId(name), MachineId(machine))


def ended(name: str, outcome: Scored | Broken | Answered, n: int = 0) -> AttemptEnded:
    return AttemptEnded(AttemptId(f"{name}.{n}"), outcome, 1.0)


def test_a_change_tells_of_a_task_what_the_first_look_does(tmp_path: Path) -> None:
    broke, worked = Broken(Cause.TIMEOUT, "late"), Scored(1.0, True)
    shown = board(
        tmp_path,
        [
            *(started("once"), ended("once", worked)),
            *(started("twice"), ended("twice", broke), started("twice", 1), ended("twice", worked, 1)),
            *(started("answered"), ended("answered", Answered())),
            AttemptGraded(AttemptId("answered.0"), Scored(0.0)),
            *(started("retried"), ended("retried", broke)),
            started("running"),
        ],
    )
    tables: dict[str, Any] = json.loads(msgspec.json.encode(shown.tables(100 * SECOND)))
    attempts = [dict(zip(ATTEMPT_COLUMNS, row, strict=True)) for row in tables["attempts"]["rows"]]
    assert [each["id"] for each in attempts] == [
        *("once.0", "twice.0", "twice.1", "answered.0", "retried.0", "running.0"),
    ]
    assert attempts[0]["ended"] - attempts[0]["started"] == 1000
    touched = Touched()
    touched.tasks = dict.fromkeys(shown.state.tasks)
    changed = json.loads(msgspec.json.encode(shown.changes(touched, 100 * SECOND)["tasks"]))
    assert tables["tasks"] == {"columns": list(TASK_COLUMNS), "rows": changed}


def test_the_head_tells_what_ran_where_why_a_place_was_left_and_what_was_bought(tmp_path: Path) -> None:
    shown = board(
        tmp_path,
        [
            *(started("once", machine="m0"), ended("once", Broken(Cause.BOOT, "no answer"))),
            CircuitChanged("cluster", "open", "it keeps failing"),
            *(started("twice"), ended("twice", Scored(1.0, True))),
        ],
    )
    told = head(shown.state, 100 * SECOND, live=True)
    cluster, azure = told["by_place"]
    assert (cluster["place"], cluster["attempts"], cluster["broken"], cluster["circuit"]) == (
        *("cluster", 1, 1),
        "open",
    )
    assert [change["why"] for change in cluster["changes"]] == ["it keeps failing"]
    assert (azure["place"], azure["machines"], azure["scored"], azure["circuit"]) == (
        *("azure_vm", 2, 1),
        "closed",
    )
    assert "cluster is left: it keeps failing" in told["notes"]
    assert told["offers"] == [
        ["azure_vm", "D8", "westus2", True, 0.18, "2026-11-01", 2],
        ["cluster", "node", None, False, 0.0, "", 1],
    ]


def test_the_timeline_knows_every_phase_of_a_machine_and_what_each_hour_cost(tmp_path: Path) -> None:
    queued, id = (
        Offer(
            "cluster", "node", "", cost=Cost(usd_per_hour=1.0, billing_step_s=1.0), life=Lifetime(queues=True)
        ),
        MachineId("m"),
    )
    at = 10 * 3600 * SECOND
    history: list[tuple[int, Event]] = [
        (0, RunPlanned(Plan("r", "bench", ("cluster",)), 1)),
        (0, TasksPlanned((Task(TaskId("t")),))),
        (0, MachineRequested(id, "worker-1", queued, 10**15)),
        (5, MachineQueued(id, "third in line")),
        (100, MachineAllocated(id, at + 90 * SECOND)),
        (130, MachineUp(id, timings={"pull": 25.0})),
        (140, MachineStep(id, "install")),
        (160, MachineReady(id)),
        (200, MachineSilent(id, at + 180 * SECOND)),
        (220, MachineHeard(id)),
        (7290, MachineCondemned(id, "the run is over")),
        (7300, MachineDeleted(id, at + 7295 * SECOND)),
        (7300, RunEnded("done")),
    ]
    store = Store.open(tmp_path)
    store.create_past("r", 1, [(at + s * SECOND, event) for s, event in history])
    made = Board(tmp_path, store, "r")
    made.advance()
    phases = made.machine_row(id, at)[MACHINE_COLUMNS.index("phases")]
    begun = at // 1000
    assert [[name, (since - begun) // 1000, (until - begun) // 1000] for name, since, until in phases] == [
        ["queued", 0, 90],
        ["pull", 90, 115],
        ["boot", 115, 130],
        ["set-up", 130, 140],
        ["install", 140, 160],
        ["ready", 160, 180],
        ["silent", 180, 220],
        ["ready", 220, 7290],
        ["ending", 7290, 7295],
    ]
    now = at + 7300 * SECOND
    money = head(made.state, now, live=False)["money"]
    hours = money["by_hour"]
    assert [hour - begun for hour, _, _ in hours] == [0, 3_600_000, 7_200_000]
    assert [round(usd * 3600) for _, usd, _ in hours] == [3510, 3600, 95], "it is billed from its start on"
    assert sum(usd for _, usd, _ in hours) == pytest.approx(money["machine_usd"], abs=0.001)
