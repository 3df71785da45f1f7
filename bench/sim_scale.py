"""Large runs, simulated: time, memory, and what an event costs as the run grows.

Each simulation has a process of its own (`python -m bench.sim_scale TASKS MACHINES`).
"""

from __future__ import annotations

import json
import os
import resource
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
from evalfleet.sim.faults import Faults
from evalfleet.sim.journal import SimJournal, SimStore
from evalfleet.sim.scenario import Scenario
from evalfleet.sim.simulate import Parts, simulate
from evalfleet.sim.world import Life
from evalfleet.state import fold

from .result import Figures, Result, below, rounded
from .workspace import ROOT, environment

LARGE, LARGE_MACHINES = 100_000, 1_000
SMALL, SMALL_MACHINES = 1_000, 100
LIMIT_S = 600.0


def run(quick: bool) -> Result:
    small, middle, large = (100, 200, 400) if quick else (SMALL, 10 * SMALL, LARGE)
    machines, many = (10, 20) if quick else (SMALL_MACHINES, LARGE_MACHINES)
    costs: dict[int, list[float]] = {small: [], middle: [], large: []}

    def cost(tasks: int, times: int) -> None:
        costs[tasks] += [_child(tasks, machines)["steady_us"] for _ in range(times)]

    repeats = 1 if quick else 4
    cost(small, repeats)  # before, between and after: the computer may be faster at one time than at another
    cost(middle, 1)
    big = _child(large, many, fold_too=True)
    cost(small, repeats)
    cost(large, 1)
    cost(middle, 1)
    cost(small, repeats)
    steady = {str(tasks): rounded(statistics.median(each)) for tasks, each in costs.items()}
    ratio = rounded(steady[str(large)] / steady[str(small)], 3)
    figures: Figures = {
        f"{large}_tasks_on_{many}_machines": big,
        f"us_an_event_at_{machines}_machines": steady,
        "large_over_small": ratio,
        "measured": "steady_us: CPU an event between 20% and 80% of a run; everything_us: all of simulate()",
    }
    aims = {
        "cpu_s": below(big["cpu_s"], 60.0),
        "wall_s": below(big["wall_s"], 60.0),
        "peak_mb": below(big["peak_mb"], 500.0),
        "event_cost_ratio": below(ratio, 1.3),
    }
    return Result("sim-scale", figures, aims)


def _child(tasks: int, machines: int, fold_too: bool = False) -> Figures:
    argv = [
        sys.executable,
        "-m",
        "bench.sim_scale",
        str(tasks),
        str(machines),
        *(["--fold"] if fold_too else []),
    ]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    figures: Figures = json.loads(done.stdout)
    return figures


# -- in the child ------------------------------------------------------------------------------


class TimedJournal(SimJournal):
    """Notes the CPU time with every tenth commit."""

    def __init__(self, store: SimStore, life: Life) -> None:
        super().__init__(store, life)
        self._commits = 0
        self.samples: list[tuple[int, float]] = []
        _journals.append(self)

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> None:
        await super().append(at, events, answered)
        self._commits += 1
        if self._commits % 10 == 0:
            self.samples.append((len(self._store.rows), time.process_time()))


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
