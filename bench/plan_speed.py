"""How long `evalfleet plan` simulates: 200 drawn runs of 154 tasks on 40 spot machines."""

from __future__ import annotations

import time

from evalfleet.model import Limits, Offer, Plan, Task, TaskId
from evalfleet.sim.chances import Chances, MachineTimes
from evalfleet.sim.forecast import Option, OptionDraws, draw, forecasts

from .makespan import lengths
from .result import Result, below, rounded

TASKS, WORKERS, DRAWS = 154, 40, 200
AIM_S = 5.0


def run(quick: bool) -> Result:
    draws = 5 if quick else DRAWS
    option = Option(WORKERS, (Offer("vms", "D4", "east", 0.05, True, billing_step_s=60.0, settle_s=60.0),))
    job = OptionDraws(
        Plan("plan", "sim", ("vms",), limits=Limits(WORKERS, canary=1, lease_s=86_400.0), home="abc123"),
        tuple(Task(TaskId(f"t_{n}"), timeout_s=7200.0) for n in range(TASKS)),
        option,
        chances(option, lengths(0, TASKS, 300.0)),
    )
    began = time.perf_counter()
    (forecast,) = forecasts([job], draws)
    took_s, cpu = time.perf_counter() - began, time.process_time()
    for seed in range(5):
        draw(job, seed)
    cpu_s = time.process_time() - cpu
    figures = {
        "runs": draws,
        "tasks": TASKS,
        "workers": WORKERS,
        "seconds": rounded(took_s, 3),
        "cpu_s": rounded(draws * cpu_s / 5, 3),
        "cpu_ms_a_run": rounded(1000 * cpu_s / 5, 3),
        "minutes_90": [rounded(each / 60, 3) for each in forecast.seconds],
        "evictions": forecast.evictions,
    }
    return Result("plan-speed", figures, {"seconds": below(took_s, AIM_S)})


def chances(option: Option, seconds: tuple[float, ...]) -> Chances:
    """Tasks of these lengths, give or take, on machines that take five to ten minutes."""
    return Chances(
        tasks={TaskId(f"t_{n}"): (each, 0.3) for n, each in enumerate(seconds)},
        guessed=frozenset(),
        shared=0.1,
        machines={option.offer.key: MachineTimes.guessed(300.0, 600.0)},
        spot={},
        breaks=0.02,
        leads=(),
    )
