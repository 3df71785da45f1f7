"""Several places, simulated: the first fails half its jobs, then is away. What that costs, what is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from evalfleet.model import Limits, Micros, Plan, Scored, Task, TaskId, seconds_between
from evalfleet.sim.checks import run_seeds, violations
from evalfleet.sim.scenario import Scenario, draw_tiers, half_fail
from evalfleet.sim.simulate import Simulated, simulate
from evalfleet.sim.world import Faults, Trouble

from .result import Figures, Result, at_least, at_most, below, rounded

T = TypeVar("T")
TASKS, WORKERS = 154, 10
AWAY_S = 3000.0
"""From then on the first place answers nothing."""
DETECTION_S = Limits().fleet_lost_s
"""So long a place may be silent before its machines are given up: it may be our own network."""
FAULT_MIX = Faults(
    call_throttled=0.04,
    call_fails=0.04,
    never_boots=0.05,
    setup_fails=0.03,
    machine_dies_every_s=40_000.0,
    machine_freezes_every_s=40_000.0,
    evicted_every_s=40_000.0,
    service_restarts_every_s=40_000.0,
    channel_fails=0.01,
    job_hangs=0.005,
    queue_s=(0.0, 600.0),
)
"""What people report of managed compute: throttling, nodes that never start or die, preemption, restarts."""


class PairFigures(NamedTuple):
    """Of one seed: the tasks at one place that works, and where the first of two fails."""

    alone_s: float
    """Until the last score."""
    failing_s: float
    scored: int
    to_open_s: float
    broken_rules: int


class ShareFigures(NamedTuple):
    """Of one seed: so many of all."""

    part: int
    whole: int
    broken_rules: int


def run(quick: bool) -> Result:
    tasks, seeds = (20, 3) if quick else (TASKS, 1000)
    with _workers(quick) as each:
        pairs = each(functools.partial(_pair, tasks=tasks), range(1 if quick else 10))
        half = each(_half_failing, range(seeds))
        mixed = each(_mixed, range(2 if quick else 100))
        failures = sum(each(_is_broken, range(seeds)))
    plain_s = sum(pair.alone_s for pair in pairs) / len(pairs)
    extra_s = sum(pair.failing_s for pair in pairs) / len(pairs) - plain_s
    figures: Figures = {
        "tasks": tasks,
        "scored": min(pair.scored for pair in pairs),
        "one_place_s": rounded(plain_s),
        "extra_s": rounded(extra_s),
        "most_extra_s": rounded(max(pair.failing_s - pair.alone_s for pair in pairs)),
        "to_open_s": [rounded(pair.to_open_s) for pair in pairs],
        "simulated_runs": seeds,
        "scored_share": _share(half),
        "jobs_succeeding": _share(mixed),
        "invariants_broken": failures
        + sum(pair.broken_rules for pair in pairs)
        + sum(share.broken_rules for share in (*half, *mixed)),
    }
    aims = {
        "scored": at_least(figures["scored"], tasks),
        "extra_s": below(extra_s, 0.1 * plain_s + DETECTION_S),
        "scored_share": at_least(figures["scored_share"], 0.999),
        "jobs_succeeding": at_least(figures["jobs_succeeding"], 0.95),
        "invariants_broken": at_most(figures["invariants_broken"], 0),
    }
    return Result("tiers", figures, aims)


@contextmanager
def _workers(quick: bool) -> Generator[Callable[[Callable[[int], T], range], list[T]]]:
    """What does something for each seed: in as many processes as there are processors, but for a few."""
    if quick:
        yield lambda work, seeds: [work(seed) for seed in seeds]
        return
    with ProcessPoolExecutor() as pool:
        yield lambda work, seeds: list(pool.map(work, seeds, chunksize=5))


def _pair(seed: int, tasks: int) -> PairFigures:
    alone, failing = _alone(seed, tasks), _failing(seed, tasks)
    broken_rules = _broken_rules(alone) + _broken_rules(failing)
    times = _last_score_s(alone), _last_score_s(failing)
    return PairFigures(*times, failing.state.scored, _to_open_s(failing), broken_rules)


def _half_failing(seed: int) -> ShareFigures:
    """Tasks that were scored."""
    sim = simulate(half_fail(seed))
    return ShareFigures(sim.state.scored, sim.state.total, _broken_rules(sim))


def _mixed(seed: int) -> ShareFigures:
    """Attempts that scored, of all that began."""
    scenario = _scenario(seed, 60, ("service", "vms"), ())
    sim = simulate(Scenario(seed, scenario.plan, scenario.tasks, FAULT_MIX))
    attempts = sim.state.attempts.values()
    scored = sum(isinstance(attempt.outcome, Scored) for attempt in attempts)
    return ShareFigures(scored, len(attempts), _broken_rules(sim))


def _is_broken(seed: int) -> int:
    return len(run_seeds(range(seed, seed + 1), scenario=draw_tiers).failures)


def _broken_rules(sim: Simulated) -> int:
    return int(bool(violations(sim)))


def _scenario(seed: int, tasks: int, places: tuple[str, ...], troubles: tuple[Trouble, ...]) -> Scenario:
    plan = Plan(f"tiers{seed}", "sim", places, limits=Limits(workers=WORKERS), home="abc123", ordered=True)
    made = tuple(Task(TaskId(f"t_{i:03d}"), "t", timeout_s=1500.0) for i in range(tasks))
    return Scenario(seed, plan, made, Faults(queue_s=(0.0, 60.0)), troubles=troubles)


def _alone(seed: int, tasks: int) -> Simulated:
    """The same tasks at the second place alone."""
    return simulate(_scenario(seed, tasks, ("vms",), ()))


def _failing(seed: int, tasks: int) -> Simulated:
    away = Trouble("service", 0.5, away=((AWAY_S, 200_000.0),))
    return simulate(_scenario(seed, tasks, ("service", "vms"), (away,)))


def _last_score_s(sim: Simulated) -> float:
    """When the last score was there: a place that is away cannot say that its machines are gone."""
    scored = (a.ended_at for a in sim.state.attempts.values() if isinstance(a.outcome, Scored))
    return seconds_between(sim.state.started_at, max(filter(None, scored)))


def _to_open_s(sim: Simulated) -> float:
    """From the first failure at the first place until it was left."""
    circuit = sim.state.circuits["service"]
    opened: Micros = next(at for at, change in circuit.history if change.phase == "open")
    failed = (
        a.ended_at
        for a in sim.state.attempts.values()
        if a.ended_at is not None
        and not isinstance(a.outcome, Scored)
        and sim.state.machines[a.machine].offer.place == "service"
    )
    return seconds_between(min(failed), opened)


def _share(figures: Sequence[ShareFigures]) -> float:
    return round(sum(one.part for one in figures) / sum(one.whole for one in figures), 5)
