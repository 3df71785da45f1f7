"""How near each schedule comes to the shortest possible run, and what that costs.

154 tasks of six kinds of durations, on 1 to 100 machines, with and without faults.

`python -m bench.policies FIGURES.json` draws what `python -m bench policies --json` has printed, as SVG.

Runs are drawn as `evalfleet plan` draws them, by the real policy. A ratio is the time until the last result
over max(sum / machines, longest), both without boots; a run with faults is held against the same bound. The
cost is that of machines that are paid by the second and let go when nothing is left for them, over the sum
of all tasks.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from evalfleet.model import Limits, Offer, Plan, ScheduleName, Task, TaskId
from evalfleet.sim.montecarlo import draw_run

from .makespan import bound, processes
from .result import Figures, Result, at_most, rounded

TASKS, SEEDS, USD_PER_HOUR = 154, 20, 3600.0
WORKERS = (1, 2, 5, 10, 20, 50, 100)
MEAN_S = 300.0
AT = 10
"""Where the aims are: so many machines."""

DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda rng: 1.0,
    "uniform": lambda rng: rng.uniform(0.2, 1.8),
    "exponential": lambda rng: rng.expovariate(1.0),
    "lognormal": lambda rng: rng.lognormvariate(-0.245, 0.7),
    "two_kinds": lambda rng: 0.5 if rng.random() < 0.9 else 5.5,
    "limited": lambda rng: min(3.0, rng.lognormvariate(-0.3, 1.0)),
}
"""Of mean 1, about. `two_kinds`: one task of ten takes eleven times as long. `limited`: many tasks end at
their time limit, as those of agents that do not succeed."""


@dataclass(frozen=True)
class Policy:
    """A schedule. `known`: durations are known beforehand, as from an earlier run, to within a tenth."""

    name: str
    schedule: ScheduleName
    known: bool = False


POLICIES = (
    Policy("default_known", "dynamic", known=True),
    Policy("default_unknown", "dynamic"),
    Policy("fifo", "fifo", known=True),
    Policy("round_robin", "round-robin"),
    Policy("slices", "slices"),
)


ROUND_ROBIN = POLICIES[3]


class Given:
    """Durations that are given; with faults, machines are taken back and attempts break."""

    def __init__(self, seconds: tuple[float, ...], faults: bool, seed: int) -> None:
        self._seconds, self._faults = seconds, faults
        self._rng = random.Random(f"faults {seed}")

    def task_s(self, task: Task, offer: Offer) -> float:
        index: int = task.params["index"]
        return self._seconds[index]

    def machine_s(self, offer: Offer) -> float:
        return 0.0

    def queue_s(self, offer: Offer) -> float:
        return 0.0

    def evicted_s(self, offer: Offer) -> float:
        return self._rng.expovariate(1 / (4 * 3600.0)) if self._faults else math.inf

    def breaks(self) -> bool:
        return self._faults and self._rng.random() < 0.02


@dataclass(frozen=True)
class Case:
    policy: Policy
    distribution: str
    workers: int
    faults: bool


def run(quick: bool) -> Result:
    seeds, workers = (2, (2, AT)) if quick else (SEEDS, WORKERS)
    cases = [
        Case(policy, distribution, count, faults)
        for policy in POLICIES
        for distribution in DISTRIBUTIONS
        for count in workers
        for faults in (False, True)
    ]
    with processes() as pool:
        found = dict(zip(cases, pool.map(partial(measured, seeds=seeds), cases, chunksize=4), strict=True))
    figures: Figures = {"seeds": seeds, "tasks": TASKS}
    for policy in POLICIES:
        figures[policy.name] = {
            f"{count}_workers": {
                "calm": _mean(found, policy, count, faults=False),
                "faults": _mean(found, policy, count, faults=True),
            }
            for count in workers
        }
        figures[policy.name]["by_distribution"] = {
            name: rounded(found[Case(policy, name, AT, False)][0], 4) for name in DISTRIBUTIONS
        }
    worse = {
        case: ratio / found[Case(ROUND_ROBIN, case.distribution, case.workers, case.faults)][0]
        for case, (ratio, _) in found.items()
        if case.policy.name.startswith("default")
    }
    worst = max(worse, key=lambda case: worse[case])
    figures["worst_over_round_robin"] = f"{worst.distribution}, {worst.workers} workers"
    aims = {
        "known_over_bound": at_most(figures["default_known"][f"{AT}_workers"]["calm"]["time"], 1.03),
        "unknown_over_bound": at_most(figures["default_unknown"][f"{AT}_workers"]["calm"]["time"], 1.10),
        "default_over_round_robin": at_most(rounded(worse[worst], 4), 1.01),
    }
    return Result("policies", figures, aims)


def _mean(
    found: dict[Case, tuple[float, float]], policy: Policy, workers: int, *, faults: bool
) -> dict[str, float]:
    """Over all distributions."""
    each = [found[Case(policy, name, workers, faults)] for name in DISTRIBUTIONS]
    return {
        "time": rounded(statistics.fmean(time for time, _ in each), 4),
        "cost": rounded(statistics.fmean(cost for _, cost in each), 4),
    }


def measured(case: Case, seeds: int) -> tuple[float, float]:
    """Time over the bound, and cost over the least cost, on average."""
    pairs = [_draw(case, seed) for seed in range(seeds)]
    return statistics.fmean(time for time, _ in pairs), statistics.fmean(cost for _, cost in pairs)


def _draw(case: Case, seed: int) -> tuple[float, float]:
    rng = random.Random(f"{case.distribution} {seed}")
    seconds = tuple(MEAN_S * DISTRIBUTIONS[case.distribution](rng) for _ in range(TASKS))
    tasks = tuple(
        Task(
            TaskId(f"t_{n:03d}"),
            "t",
            {"index": n},
            timeout_s=100_000.0,
            weight_s=each * rng.lognormvariate(0.0, 0.1) if case.policy.known else None,
        )
        for n, each in enumerate(seconds)
    )
    offer = Offer("vms", "D4", usd_per_hour=USD_PER_HOUR, spot=case.faults)
    limits = Limits(workers=case.workers, attempts=10, lease_s=10_000_000.0)
    plan = Plan("p", "sim", ("vms",), schedule=case.policy.schedule, limits=limits, home="abc123")
    drawn = draw_run(plan, tasks, (offer,), Given(seconds, case.faults, seed))
    if not drawn.done:
        raise RuntimeError(f"{case} left a task without a score")
    return drawn.seconds / bound(seconds, case.workers), drawn.machines_usd / sum(seconds)


# -- the picture of the docs -------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 320, 50, 20, 190, 40
COLOURS = {
    "default_known": "#1b7837",
    "default_unknown": "#2166ac",
    "fifo": "#762a83",
    "round_robin": "#e08214",
    "slices": "#b2182b",
}


def svg(figures: Figures) -> str:
    """Time over the bound by the number of machines: lines without faults, dashed ones with them."""
    counts = [int(key.partition("_")[0]) for key in figures["round_robin"] if key.endswith("_workers")]
    top = max(
        figures[name][f"{n}_workers"]["faults"]["time"] for name in COLOURS if name in figures for n in counts
    )

    def point(count: int, ratio: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * math.log(count) / math.log(counts[-1])
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (ratio - 1) / (top - 1)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for count in counts:
        x, y = point(count, 1.0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle">{count}</text>')
    for tick in range(10, math.floor(10 * top) + 1, 2):
        x, y = point(1, tick / 10).split(",")
        line = f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>'
        parts.append(
            f'{line}<text x="{float(x) - 8:.1f}" y="{float(y) + 4:.1f}" text-anchor="end">{tick / 10}</text>'
        )
    for n, (name, colour) in enumerate((name, each) for name, each in COLOURS.items() if name in figures):
        for kind, dash in (("calm", ""), ("faults", ' stroke-dasharray="4 4"')):
            points = " ".join(point(c, figures[name][f"{c}_workers"][kind]["time"]) for c in counts)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            )
        at = TOP + 20 * n + 10
        parts.append(
            f'<text x="{WIDTH - RIGHT + 15}" y="{at}" fill="{colour}">{name.replace("_", " ")}</text>'
        )
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 6}">machines; time over the bound, dashed: with faults</text></svg>'
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1]) as told:
        print(svg(json.load(told)["figures"]), end="")
