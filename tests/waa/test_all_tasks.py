"""All 154 tasks on ten hosts, two of which die, and five guests hang: 154 scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.waa import DOMAINS
from evalfleet.events import AttemptEnded, MachineReady
from evalfleet.model import Broken, Cause
from standins.waa.standin import Tasks
from tests.lab.clients import needs_lab
from tests.waa.arena import Arena
from tests.waiting import until

QUICK = {"steps": 1, "seconds": 0.02}


def all_tasks() -> Tasks:
    return {domain: [f"{domain}-{n}" for n in range(many)] for domain, many in DOMAINS.items()}


def hanging(tasks: Tasks) -> list[str]:
    return [tasks[domain][0] for domain in ("chrome", "vlc", "vs_code", "msedge", "clock")]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    tasks = all_tasks()
    hung = {id: [{"do": "hang-guest", **QUICK}, QUICK] for id in hanging(tasks)}
    made = Arena(tmp_path, 10, tasks=tasks, plan={"default": QUICK, "tasks": hung, "boot_s": 0.05})
    yield made
    made.destroy()


def await_ends(arena: Arena, count: int) -> None:
    def ended() -> int:
        return sum(isinstance(event, AttemptEnded) for event in arena.events("all"))

    until(lambda: ended() >= count, lambda: f"the end of {count} attempts, not {ended()}", look_s=0.2)


@needs_lab
@pytest.mark.nightly  # what dies and hangs is seen by day in test_runs.py and tests/lab/chaos
def test_every_task_is_scored_though_machines_die_and_guests_hang(arena: Arena) -> None:
    run = arena.start_run("all", "--task-timeout", "6")
    await_ends(arena, 15)
    for host in arena.lab.hosts[:2]:
        host.power_off()
    said = run.finish(timeout_s=400)
    results = arena.results("all")
    assert (results["scored"], results["broken"], results["total_tasks"]) == (154, 0, 154), said
    assert len({task["task_id"] for task in results["tasks"]}) == 154
    events = arena.events("all")
    broken = [e for e in events if isinstance(e, AttemptEnded) and isinstance(e.outcome, Broken)]
    causes = Counter(e.outcome.cause for e in broken if isinstance(e.outcome, Broken))
    stuck = {e.attempt.rpartition(".")[0] for e in broken if _cause(e) is Cause.STUCK}
    assert set(hanging(arena.tasks)) <= stuck | {e.attempt.rpartition(".")[0] for e in broken}
    assert causes[Cause.STUCK] >= 3, "up to two of the five may have gone with their machine"
    assert len([e for e in events if isinstance(e, MachineReady)]) == 10


def _cause(event: AttemptEnded) -> Cause | None:
    return event.outcome.cause if isinstance(event.outcome, Broken) else None
