"""Runs that are drawn to plan by are those that the engine would make."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from evalfleet.engine import Tempo
from evalfleet.model import Limits, Offer, Plan, ScheduleName, Task, TaskId
from evalfleet.sim.montecarlo import draw_run, last_result_s
from evalfleet.sim.scenario import Scenario
from evalfleet.sim.simulate import simulate
from evalfleet.sim.world import Faults

CALM = Faults(latency_s=(0.0, 0.0), commit_s=(0.0, 0.0), boot_s=(90.0, 90.0), create_lands_late_s=0.1)
BRISK = Tempo(requests_s=86_400.0, survey_s=86_400.0, poll_s=0.2, poll_cap_s=0.2, longest_wait_s=86_400.0)
HOST = Offer("hosts", "host", capacity=5)
VM = Offer("vms", "D4", "east", 0.36, billing_step_s=1.0, teardown_s=120.0, settle_s=60.0)
SPOT = Offer("vms", "D4", "east", 0.1, spot=True, billing_step_s=1.0, settle_s=60.0)


class Given:
    """Nothing by chance but, where a test wants it, evictions and attempts that break."""

    def __init__(self, seconds: tuple[float, ...], boot_s: float = 0.0, every_s: float = 0.0) -> None:
        self._seconds, self._boot_s, self._every_s = seconds, boot_s, every_s
        self._rng = random.Random(1)

    def task_s(self, task: Task, offer: Offer) -> float:
        index: int = task.params["index"]
        return self._seconds[index]

    def machine_s(self, offer: Offer) -> float:
        return self._boot_s

    def queue_s(self, offer: Offer) -> float:
        return 300.0

    def evicted_s(self, offer: Offer) -> float:
        return self._rng.expovariate(1 / self._every_s) if self._every_s and offer.spot else math.inf

    def breaks(self) -> bool:
        return self._every_s > 0 and self._rng.random() < 0.1


def lengths(count: int) -> tuple[float, ...]:
    rng = random.Random("lengths")
    return tuple(round(rng.lognormvariate(5.0, 0.7), 3) for _ in range(count))


def tasks(seconds: tuple[float, ...]) -> tuple[Task, ...]:
    return tuple(
        Task(TaskId(f"t_{n:03d}"), "t", {"index": n}, timeout_s=100_000.0) for n in range(len(seconds))
    )


def planned(offer: Offer, schedule: ScheduleName = "dynamic", **limits: Any) -> Plan:
    bounds = Limits(workers=5, lease_s=200_000.0, **limits)
    return Plan("p", "sim", (offer.place,), schedule=schedule, limits=bounds, home="abc123")


@pytest.mark.parametrize(
    ("offer", "schedule", "canary"),
    [
        (HOST, "dynamic", 0),
        (HOST, "round-robin", 0),
        (HOST, "slices", 0),
        (VM, "dynamic", 1),
        (VM, "dynamic", 0),
    ],
)
def test_a_drawn_run_takes_and_costs_what_the_engines_own_does(
    offer: Offer, schedule: ScheduleName, canary: int
) -> None:
    seconds = lengths(40)
    plan, every = planned(offer, schedule, canary=canary), tasks(seconds)
    offers: dict[str, tuple[Offer, ...]] = {offer.place: (offer,)}
    engine = simulate(Scenario(0, plan, every, CALM, durations=seconds, offers=offers), tempo=BRISK)
    drawn = draw_run(plan, every, (offer,), Given(seconds, 0.0 if offer is HOST else 90.0))
    assert drawn.done
    # a simulated machine comes up to a moment later than it was drawn to
    assert drawn.seconds == pytest.approx(last_result_s(engine.state), abs=1.0)
    assert drawn.machines_usd == pytest.approx(engine.state.closed_usd, abs=0.002)
    assert (drawn.attempts, drawn.machines) == (len(engine.state.attempts), len(engine.state.machines))


def test_what_is_evicted_or_breaks_is_run_again_and_paid() -> None:
    seconds = lengths(40)
    calm = draw_run(planned(SPOT), tasks(seconds), (SPOT, VM), Given(seconds, 90.0))
    lossy = draw_run(planned(SPOT), tasks(seconds), (SPOT, VM), Given(seconds, 90.0, every_s=1200.0))
    assert calm.evictions == 0
    assert lossy.evictions > 0
    assert lossy.done
    assert lossy.attempts > calm.attempts == 40
    assert lossy.machines > calm.machines == 5
    assert lossy.seconds > calm.seconds
    assert lossy.machines_usd > calm.machines_usd


def test_machines_of_a_queue_come_later_and_wait_for_nothing() -> None:
    job = Offer("service", "job", usd_per_hour=0.36, queues=True, extendable=False, max_life_s=200_000.0)
    seconds = (100.0,) * 5
    drawn = draw_run(planned(job), tasks(seconds), (job,), Given(seconds, 20.0))
    assert drawn.done
    assert drawn.seconds == pytest.approx(300 + 20 + 100)
    assert drawn.machines_usd == pytest.approx(5 * 0.36 * 120 / 3600, rel=0.02)
