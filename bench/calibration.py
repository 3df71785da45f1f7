"""How often a run takes a time that its plan said: 100 varied runs on this computer, then `plan --review`.

Ten benchmarks are run ten times each, with different tasks, lengths and numbers of machines. From one run to
the next all tasks of a run change together, and each by itself, as agents and models do. Each run's plan
rests on those before it; the first one's is a guess.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence

from .result import Figures, Result, at_least, rounded
from .workspace import EVALFLEET, Workspace, environment

BENCHMARKS, RUNS = 10, 10
TOGETHER, ALONE = 0.15, 0.25
"""By how much durations change from one run to the next, as standard deviations of logarithms."""
AIM = 0.85


def run(quick: bool) -> Result:
    benchmarks, runs = (2, 3) if quick else (BENCHMARKS, RUNS)
    with Workspace() as space:
        for number in range(benchmarks):
            _run_often(space, number, runs)
        told = subprocess.run(
            [*EVALFLEET, "plan", "--review", "--json"],
            cwd=space.folder,
            env=environment(EVALFLEET_HOME=str(space.home)),
            capture_output=True,
            check=True,
        )
    review = json.loads(told.stdout)
    rows = review["runs"]
    figures: Figures = {
        "runs": len(rows),
        "inside": rounded(review["times_inside"], 3),
        "inside_with_earlier_runs": _inside([row for row in rows if row["earlier_runs"]]),
        "inside_guessed": _inside([row for row in rows if not row["earlier_runs"]]),
        "too_long": sum(row["took_seconds"] > row["seconds"]["high"] for row in rows),
        "too_short": sum(row["took_seconds"] < row["seconds"]["low"] for row in rows),
        "high_over_low": rounded(
            sorted(row["seconds"]["high"] / max(0.1, row["seconds"]["low"]) for row in rows)[len(rows) // 2]
        ),
    }
    return Result("calibration", figures, {"inside": at_least(review["times_inside"], AIM)})


def _inside(rows: Sequence[Figures]) -> float:
    return rounded(sum(row["inside"] for row in rows) / max(1, len(rows)), 3)


def _run_often(space: Workspace, number: int, runs: int) -> None:
    rng = random.Random(f"calibration {number}")
    median_s, tasks = rng.uniform(0.2, 0.8), rng.randint(4, 20)
    lengths = [median_s * rng.lognormvariate(0.0, rng.uniform(0.2, 0.8)) for _ in range(tasks)]
    for n in range(runs):
        pace = rng.lognormvariate(0.0, TOGETHER)
        seconds = [round(each * pace * rng.lognormvariate(0.0, ALONE), 3) for each in lengths]
        lines = [{"id": f"d{i % 3}_{i}", "params": {"s": each}} for i, each in enumerate(seconds)]
        path = space.benchmark(["sleep", "{params.s}"], lines)
        text = path.read_text().replace('name = "bench"', f'name = "bench{number}"')
        path.write_text(text.replace("timeout_s = 600", "timeout_s = 30"))
        space.finish(space.start_run(path, rng.randint(1, 6), f"b{number}-{n}"))
