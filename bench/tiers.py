"""Several places, simulated: the first fails half its jobs, then is away. What that costs, what is lost."""

from __future__ import annotations

from evalfleet.model import Limits, Micros, Plan, Scored, Task, TaskId, seconds_between
from evalfleet.sim.checks import run_seeds, violations
from evalfleet.sim.scenario import Scenario, draw_tiers, half_fail
from evalfleet.sim.simulate import Simulated, simulate
from evalfleet.sim.world import Faults, Trouble

from .result import Figures, Result, at_least, at_most, below, rounded

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


def run(quick: bool) -> Result:
    tasks, seeds = (20, 3) if quick else (TASKS, 1000)
    alone = [_alone(seed, tasks) for seed in range(1 if quick else 10)]
    failing = [_failing(seed, tasks) for seed in range(len(alone))]
    plain_s = sum(map(_last_score_s, alone)) / len(alone)
    extra_s = sum(map(_last_score_s, failing)) / len(failing) - plain_s
    pairs = list(zip(alone, failing, strict=True))
    half = [simulate(half_fail(seed)) for seed in range(seeds)]
    mixed = [simulate(_mixed(seed)) for seed in range(2 if quick else 100)]
    checked = run_seeds(range(seeds), scenario=draw_tiers)
    broken_rules = sum(bool(violations(sim)) for sim in (*alone, *failing, *half, *mixed))
    figures: Figures = {
        "tasks": tasks,
        "scored": min(sim.state.scored for sim in failing),
        "one_place_s": rounded(plain_s),
        "extra_s": rounded(extra_s),
        "most_extra_s": rounded(max(_last_score_s(f) - _last_score_s(a) for a, f in pairs)),
        "to_open_s": [rounded(_to_open_s(sim)) for sim in failing],
        "simulated_runs": seeds,
        "scored_share": _share(sum(s.state.scored for s in half), sum(s.state.total for s in half)),
        "jobs_succeeding": _share(*_jobs(mixed)),
        "invariants_broken": broken_rules + len(checked.failures),
    }
    aims = {
        "scored": at_least(figures["scored"], tasks),
        "extra_s": below(extra_s, 0.1 * plain_s + DETECTION_S),
        "scored_share": at_least(figures["scored_share"], 0.999),
        "jobs_succeeding": at_least(figures["jobs_succeeding"], 0.95),
        "invariants_broken": at_most(figures["invariants_broken"], 0),
    }
    return Result("tiers", figures, aims)


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


def _mixed(seed: int) -> Scenario:
    scenario = _scenario(seed, 60, ("service", "vms"), ())
    return Scenario(seed, scenario.plan, scenario.tasks, FAULT_MIX)


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


def _jobs(sims: list[Simulated]) -> tuple[int, int]:
    """Attempts that scored, of all that began."""
    attempts = [a for sim in sims for a in sim.state.attempts.values()]
    return sum(isinstance(a.outcome, Scored) for a in attempts), len(attempts)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 5)
