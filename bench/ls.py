"""How long `evalfleet ls` takes in a home with many runs, and what checking their journals costs.

The first `ls` after an upgrade finds no summaries, folds every journal and keeps what it found; that one is
told apart from those that follow.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    ControllerStarted,
    Event,
    MachineCondemned,
    MachineDeleted,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunEnded,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Store
from evalfleet.model import SECOND, AttemptId, MachineId, Offer, Plan, Scored, Task, TaskId, after

from .result import Figures, Result, below, rounded
from .workspace import Workspace, console_script, environment

RUNS, TASKS, ROUNDS = 1000, 20, 9
AIM_S = 0.3
NOW = 1_800_000_000 * SECOND


def run(quick: bool) -> Result:
    runs, rounds = (5, 1) if quick else (RUNS, ROUNDS)
    with Workspace() as space:
        store = Store.open(space.home)
        for n in range(runs):
            store.create_stream(f"run-{n:04d}", "run", after(NOW, n), run_events(f"run-{n:04d}"))
        listed = [_ls(space.home, runs) for _ in range(rounds + 1)]
        _, verify_cpu_s, _ = _measured(space.home, "verify")
    first, *others = listed
    figures: Figures = {
        "runs": runs,
        "tasks_a_run": TASKS,
        "ls_cpu_s": rounded(statistics.median(cpu_s for _, cpu_s in others)),
        "ls_wall_s": rounded(statistics.median(wall_s for wall_s, _ in others)),
        "first_ls_cpu_s": rounded(first[1]),
        "verify_all_cpu_s": rounded(verify_cpu_s),
        "load": os.getloadavg()[0],
        "measured": f"user + system, median of {rounds}; wall clock says more only on a quiet computer",
    }
    return Result("ls", figures, {"ls_cpu_s": below(figures["ls_cpu_s"], AIM_S)})


def _ls(home: Path, runs: int) -> tuple[float, float]:
    wall_s, cpu_s, lines = _measured(home, "ls")
    if lines != runs + 1:
        raise RuntimeError(f"{lines - 1} runs were listed instead of {runs}")
    return wall_s, cpu_s


def _measured(home: Path, verb: str) -> tuple[float, float, int]:
    """Wall and CPU seconds of a command, and how many lines it printed."""
    start = time.perf_counter()
    process = subprocess.Popen(
        (*console_script(), verb), env=environment(EVALFLEET_HOME=str(home)), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as output:
        lines = sum(1 for _ in output)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"evalfleet {verb} ended with {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, lines


def run_events(name: str) -> list[Event]:
    """A run on one machine in which every other task succeeded."""
    machine = MachineId(f"{name}-abc123-0001")
    tasks = tuple(Task(TaskId(f"t_{n}"), "t") for n in range(TASKS))
    events: list[Event] = [
        RunPlanned(Plan(name, "bench", model="m", home="abc123"), TASKS),
        TasksPlanned(tasks),
        ControllerStarted("host", 1, "0"),
        MachineRequested(machine, "worker-1", 0, Offer("local", "process"), after(NOW, 14_400)),
        MachineUp(machine),
        MachineReady(machine),
    ]
    for n, task in enumerate(tasks):
        attempt = AttemptId(f"{task.id}.0")
        events += [
            AttemptStarted(attempt, task.id, machine),
            AttemptEnded(attempt, Scored(float(n % 2), bool(n % 2)), 1.0),
            AttemptCollected(attempt),
        ]
    events += [MachineCondemned(machine, "the run is over"), MachineDeleted(machine, NOW), RunEnded("done")]
    return events
