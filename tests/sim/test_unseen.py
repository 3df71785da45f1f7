"""Simulated runs on a service that answers nobody any more, nor do its machines through it, for good."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from evalfleet.events import AttemptEnded, MachineDeleteRefused
from evalfleet.model import Limits, Scored
from evalfleet.sim.checks import violations
from evalfleet.sim.scenario import OFFERS, Period, Scenario, draw
from evalfleet.sim.simulate import Simulated, simulate
from evalfleet.sim.world import Faults

FOR_GOOD_S = 30 * 86_400.0
LEASE_S, QUEUE_S = 7200.0, 600.0
IN_THE_QUEUE_S, AT_WORK_S = 5.0, 400.0
NOT_SEEN = ("was left behind", "although it was well")
"""Records of jobs that are over stay where nobody can remove them, and who cannot be heard is given up."""


def lost(seed: int, places: tuple[str, ...], at_s: float) -> Scenario:
    """The tasks of a seed, two workers, and a service that goes away at this moment and never comes back."""
    drawn = draw(seed)
    (job,) = OFFERS["service"]
    limits = Limits(workers=2, lease_s=LEASE_S, outage_tries=4)
    plan = structs.replace(drawn.plan, places=places, limits=limits, ordered=True)
    offers = {**OFFERS, "service": (structs.replace(job, max_queue_s=QUEUE_S),)}
    faults = Faults(queue_s=(0.0, 300.0))
    return Scenario(seed, plan, drawn.tasks, faults, api_loss=Period(at_s, FOR_GOOD_S), offers=offers)


def check(sim: Simulated) -> None:
    """It has ended, long before the service would be back; all that ran is paid, and nothing scored twice."""
    assert sim.state.ended_at is not None
    assert sim.virtual_s < FOR_GOOD_S / 10
    assert not sim.state.undeleted
    assert not [
        found for found in violations(sim) if not found.endswith(NOT_SEEN) and "given up" not in found
    ]
    scores = Counter(
        sim.state.attempts[record.event.attempt].task
        for record in sim.store.read()
        if isinstance(record.event, AttemptEnded) and isinstance(record.event.outcome, Scored)
    )
    assert set(scores.values()) <= {1}


@pytest.mark.parametrize("at_s", [IN_THE_QUEUE_S, AT_WORK_S])
@pytest.mark.parametrize("seed", range(6))
def test_a_run_whose_service_is_gone_for_good_goes_on_at_the_next_place(seed: int, at_s: float) -> None:
    sim = simulate(lost(seed, ("service", "hosts"), at_s))
    check(sim)
    assert sim.state.scored + sim.state.counts["broken"] == len(sim.scenario.tasks)
    told = [r.event.detail for r in sim.store.read() if isinstance(r.event, MachineDeleteRefused)]
    assert any("the service does not answer; it ends by itself, within " in each for each in told)


@pytest.mark.parametrize("at_s", [IN_THE_QUEUE_S, AT_WORK_S])
@pytest.mark.parametrize("seed", range(6))
def test_a_run_whose_only_service_is_gone_for_good_ends(seed: int, at_s: float) -> None:
    sim = simulate(lost(seed, ("service",), at_s))
    check(sim)
    assert sim.state.stop is not None
    assert "the service does not answer" in sim.state.stop.detail
