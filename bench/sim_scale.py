"""Large runs, simulated: time, memory, and what an event costs as the run grows.

Each simulation has a process of its own (`python -m bench.sim_scale TASKS MACHINES`).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evalfleet.events import Event
from evalfleet.journal import Store
from evalfleet.model import Limits, Micros, Plan, Task, TaskId
from evalfleet.state import fold
from sim.journal import SimJournal, SimStore
from sim.scenario import Scenario
from sim.simulate import Parts, simulate
from sim.world import Faults, Life

from .result import Figures, Result, below, rounded
from .workspace import ROOT, environment

LARGE, LARGE_MACHINES = 100_000, 1_000
SMALL, SMALL_MACHINES = 1_000, 100
LIMIT_S = 600.0
EVERY_S = 2.0


def run(quick: bool) -> Result:
    small, large = (100, 400) if quick else (SMALL, LARGE)
    machines, many = (10, 20) if quick else (SMALL_MACHINES, LARGE_MACHINES)
    big = _finish(_start(large, many, fold_too=True))
    growth = _growth(small, large, machines)
    figures: Figures = {
        f"{large}_tasks_on_{many}_machines": big,
        f"steady_us_at_{machines}_machines": growth,
        "measured": "steady_us: CPU an event between 20% and 80% of a run; everything_us: all of simulate()",
    }
    aims = {
        "cpu_s": below(big["cpu_s"], 60.0),
        "wall_s": below(big["wall_s"], 60.0),  # beside other work on the same cores, CPU is the fairer one
        "peak_mb": below(big["peak_mb"], 500.0),
        "event_cost_ratio": below(growth["large_over_small"], 1.3),
    }
    return Result("sim-scale", figures, aims)


def _growth(small: int, large: int, machines: int) -> Figures:
    """What an event costs in a large run and in small ones, at the same time.

    The large one is halted again and again for a small one: however fast the computer is just then, it
    is so for both.
    """
    process = _start(large, machines)
    costs: list[float] = []
    try:
        while process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            costs.append(_finish(_start(small, machines))["steady_us"])
            process.send_signal(signal.SIGCONT)
            time.sleep(EVERY_S)
        grown = _finish(process)["steady_us"]
    finally:
        process.kill()
    usual = rounded(statistics.median(costs))
    return {
        f"{small}_tasks": usual,
        f"{large}_tasks": grown,
        "large_over_small": rounded(grown / usual, 3),
        "small_runs": len(costs),
    }


def _start(tasks: int, machines: int, fold_too: bool = False) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "bench.sim_scale", str(tasks), str(machines), "--fold" * fold_too]
    return subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> Figures:
    try:
        told, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    figures: Figures = json.loads(told)
    return figures


# -- in the child ------------------------------------------------------------------------------


class TimedJournal(SimJournal):
    """Notes the CPU time with every tenth commit."""

    def __init__(self, store: SimStore, life: Life) -> None:
        super().__init__(store, life)
        self._commits = 0
        self.samples: list[tuple[int, float]] = []
        _journals.append(self)

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        everywhere = await super().append(at, events, answered)
        self._commits += 1
        if self._commits % 10 == 0:
            self.samples.append((len(self._store.rows), time.process_time()))
        return everywhere


_journals: list[TimedJournal] = []


def scenario(tasks: int, machines: int) -> Scenario:
    plan = Plan("scale", "sim", ("vms",), limits=Limits(workers=machines), home="abc123")
    planned = tuple(Task(TaskId(f"t_{i:06d}"), "t", timeout_s=1500.0) for i in range(tasks))
    return Scenario(1, plan, planned, Faults())


def _simulate(tasks: int, machines: int, fold_too: bool) -> Figures:
    wall, cpu = time.perf_counter(), time.process_time()
    sim = simulate(scenario(tasks, machines), Parts(journal=TimedJournal))
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    if sim.state.scored != tasks or sim.world.violations:
        raise RuntimeError(f"{sim.state.scored} of {tasks} scored; {sim.world.violations[:3]}")
    figures: Figures = {
        "cpu_s": rounded(cpu_s),
        "wall_s": rounded(wall_s),
        "peak_mb": rounded(_peak_mb()),
        "events": len(sim.store.rows),
        "everything_us": rounded(1e6 * cpu_s / len(sim.store.rows)),
        "steady_us": rounded(_steady_us(_journals[-1].samples)),
        "virtual_hours": rounded(sim.virtual_s / 3600),
    }
    if fold_too:
        figures["fold_events_per_s"] = _rate(len(sim.store.rows), lambda: fold(sim.store.read()))
        figures |= _from_sqlite(sim.store)
    return figures


def _steady_us(samples: Sequence[tuple[int, float]]) -> float:
    """Without the machines' beginnings and ends, which cost the same however long a run is."""
    last = samples[-1][0]
    middle = [sample for sample in samples if 0.2 * last <= sample[0] <= 0.8 * last]
    (first, begin), (end, stop) = middle[0], middle[-1]
    return 1e6 * (stop - begin) / (end - first)


def _peak_mb() -> float:
    """Of this program alone: ru_maxrss remembers what the parent had before our exec."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _from_sqlite(journal: SimStore) -> Figures:
    """The same journal in the store that real runs have."""
    events = [record.event for record in journal.read()]
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        store = Store.open(Path(folder))
        store.create_stream("scale", "run", 0, events)
        size = os.stat(store.path).st_size
        return {
            "sqlite_read_events_per_s": _rate(len(events), lambda: sum(1 for _ in store.read("scale"))),
            "sqlite_read_and_fold_events_per_s": _rate(len(events), lambda: fold(store.read("scale"))),
            "sqlite_bytes_an_event": rounded(size / len(events)),
        }


def _rate(count: int, work: Any) -> int:
    start = time.process_time()
    work()
    return round(count / (time.process_time() - start))


if __name__ == "__main__":
    print(json.dumps(_simulate(int(sys.argv[1]), int(sys.argv[2]), "--fold" in sys.argv)))
