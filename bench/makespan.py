"""How near a run comes to the shortest possible one: 154 tasks of very different lengths on 10 machines.

Simulated runs go through the real engine and policy, in a world where nothing but the tasks takes time.
A ratio is the time from the first start to the last end over max(sum / machines, longest).
"""

from __future__ import annotations

import heapq
import os
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from evalfleet.engine import Tempo
from evalfleet.events import AttemptEnded, AttemptStarted, Record
from evalfleet.journal import Store
from evalfleet.model import Limits, Offer, Plan, ScheduleName, Task, TaskId, seconds_between
from evalfleet.schedules import orders
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.world import Faults

from .result import Figures, Result, at_most, rounded
from .workspace import Workspace

TASKS, MACHINES, SIGMA = 154, 10, 0.7
DRAWS, STATIC_DRAWS = 1_000, 100
SIM_MEDIAN_S, REAL_MEDIAN_S = 300.0, 2.0
CALM = Faults(latency_s=(0.0, 0.0), commit_s=(0.0, 0.0))
BRISK = Tempo(requests_s=86_400.0, survey_s=86_400.0, poll_s=0.2, longest_wait_s=86_400.0)


@dataclass(frozen=True)
class Kind:
    """A way to hand out tasks. `known`: durations are known beforehand, as from an earlier run."""

    name: str
    schedule: ScheduleName
    known: bool = False


KINDS = (
    Kind("dynamic", "dynamic"),
    Kind("dynamic_known", "dynamic", known=True),
    Kind("round_robin", "round-robin"),
    Kind("slices", "slices"),
)


@dataclass(frozen=True)
class Drawn:
    """One draw under one schedule: over the lower bound, in the engine and as a list schedule."""

    engine: float | None
    direct: float


def run(quick: bool) -> Result:
    draws, static = (3, 2) if quick else (DRAWS, STATIC_DRAWS)
    figures: Figures = {"draws": draws, "tasks": TASKS, "machines": MACHINES}
    with processes() as pool:
        for kind in KINDS:
            # the static schedules need no engine to be judged: a part of the draws shows that it agrees
            through = draws if kind.schedule == "dynamic" else static
            found = list(pool.map(partial(_draw, kind, through), range(draws), chunksize=5))
            figures[kind.name] = _summary(found)
    figures["real"] = _real(*((20, 5, 0.1) if quick else (TASKS, MACHINES, REAL_MEDIAN_S)))
    aims = {
        "dynamic_mean": at_most(figures["dynamic"]["mean"], 1.12),
        "dynamic_known_mean": at_most(figures["dynamic_known"]["mean"], 1.02),
        "real_over_ideal": at_most(figures["real"]["over_ideal"], 1.03),
    }
    against = {
        "ideal_queue": {"mean": figures["dynamic"]["ideal_mean"]},
        "ideal_queue_known": {"mean": figures["dynamic_known"]["ideal_mean"]},
    }
    return Result("makespan", figures, aims, against)


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Interrupted, it starts no more draws."""
    pool = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _summary(found: Sequence[Drawn]) -> Figures:
    """Of the engine's runs; where those are fewer, of all as list schedules, with the largest difference."""
    engine = [(each.engine, each.direct) for each in found if each.engine is not None]
    ratios = [ratio for ratio, _ in engine] if len(engine) == len(found) else [each.direct for each in found]
    return {
        "mean": rounded(statistics.fmean(ratios), 5),
        "p95": rounded(sorted(ratios)[int(0.95 * len(ratios))], 5),
        "ideal_mean": rounded(statistics.fmean(each.direct for each in found), 5),
        "through_engine": len(engine),
        "largest_difference": rounded(max(abs(ratio - direct) for ratio, direct in engine), 2),
    }


# -- draws -------------------------------------------------------------------------------------


def lengths(seed: int, count: int, median_s: float) -> tuple[float, ...]:
    rng = random.Random(f"makespan {seed}")
    return tuple(median_s * rng.lognormvariate(0.0, SIGMA) for _ in range(count))


def bound(durations: Sequence[float], machines: int) -> float:
    return max(sum(durations) / machines, max(durations))


def list_schedule(durations: Iterable[float], machines: int) -> float:
    """Whoever is free takes the next: how long until all are done."""
    free = [0.0] * machines
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def direct(kind: Kind, durations: Sequence[float]) -> float:
    if kind.schedule == "dynamic":
        return list_schedule(sorted(durations, reverse=True) if kind.known else durations, MACHINES)
    tasks = [Task(TaskId(str(index))) for index in range(len(durations))]
    lanes = orders(kind.schedule, tasks, MACHINES)
    return max(sum(durations[index] for index in order) for order in lanes)


def _draw(kind: Kind, through_engine: int, seed: int) -> Drawn:
    durations = lengths(seed, TASKS, SIM_MEDIAN_S)
    least = bound(durations, MACHINES)
    engine = span(simulated(kind, durations)) / least if seed < through_engine else None
    return Drawn(engine, direct(kind, durations) / least)


def simulated(kind: Kind, durations: tuple[float, ...]) -> Iterable[Record]:
    tasks = tuple(
        Task(
            TaskId(f"t_{index:03d}"),
            "t",
            {"index": index},
            timeout_s=100_000.0,
            weight_s=duration if kind.known else None,
        )
        for index, duration in enumerate(durations)
    )
    limits = Limits(workers=MACHINES, lease_s=200_000.0)
    plan = Plan("makespan", "sim", ("hosts",), schedule=kind.schedule, limits=limits, home="abc123")
    hosts: dict[str, tuple[Offer, ...]] = {"hosts": (Offer("hosts", "host", capacity=MACHINES),)}
    done = simulate(Scenario(0, plan, tasks, CALM, durations=durations, offers=hosts), tempo=BRISK)
    return done.store.read()


def span(records: Iterable[Record]) -> float:
    """Seconds from the first start to the last end: machines' boot and deletion are left out."""
    starts: list[int] = []
    ends: list[int] = []
    for record in records:
        if isinstance(record.event, AttemptStarted):
            starts.append(record.at)
        elif isinstance(record.event, AttemptEnded):
            ends.append(record.at)
    if len(starts) != len(ends):
        raise RuntimeError(f"{len(starts)} attempts began, {len(ends)} ended")
    return seconds_between(starts[0], ends[-1])


# -- a real run --------------------------------------------------------------------------------


def _real(tasks: int, machines: int, median_s: float) -> Figures:
    """`sleep` on this computer, beside the list schedule of the very same draw."""
    durations = [round(seconds, 3) for seconds in lengths(0, tasks, median_s)]
    with Workspace() as space:
        lines = [{"id": f"t_{i}", "params": {"s": seconds}} for i, seconds in enumerate(durations)]
        path = space.benchmark(["sleep", "{params.s}"], lines)
        space.finish(space.start_run(path, machines))
        took_s = span(Store.open(space.home, create=False).read("run"))
        left = space.left_behind()
    if left:
        raise RuntimeError(f"left behind: {left}")
    ideal_s = list_schedule(durations, machines)
    return {
        "took_s": rounded(took_s),
        "ideal_s": rounded(ideal_s),
        "over_ideal": rounded(took_s / ideal_s, 5),
        "over_bound": rounded(took_s / bound(durations, machines), 5),
    }
