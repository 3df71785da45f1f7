"""Budgets of machines and models in the simulated world; `bench budget-overshoot` runs 1,000 seeds."""

from __future__ import annotations

import pytest

from evalfleet.model import Ended
from sim.checks import violations
from sim.models import MeteredWorld, SimAccount, draw_metered, overshoot, simulate_metered
from sim.world import SimJob

SEEDS = range(0, 48, 4)


def test_spending_passes_the_budget_by_no_more_than_the_calls_in_flight() -> None:
    """In seeds of which some crash, and some are refused, and some of those are tried again."""
    sims = [simulate_metered(seed) for seed in SEEDS]
    for seed, sim in zip(SEEDS, sims, strict=True):
        assert violations(sim) == [], seed
        assert list(overshoot(sim).violations()) == [], seed
    assert sum(sim.crashes for sim in sims) > 10
    refused = [
        sim.state.tasks[attempt.task]
        for sim in sims
        for attempt in sim.state.attempts.values()
        if attempt.metered is not None and attempt.metered.refused
    ]
    assert any(known.status == "waiting" for known in refused)
    assert any(known.status == "scored" for known in refused)
    assert any(sim.state.spend.models.lost for sim in sims)
    assert any(
        attempt.metered.unknown for sim in sims for attempt in sim.state.attempts.values() if attempt.metered
    )
    assert {draw_metered(seed).plan.limits.max_tokens for seed in SEEDS} == {None, 200_000}


class LetsAllCallsBegin(MeteredWorld):
    def _may_call(self, account: SimAccount) -> bool:
        return True


class CallsInFlightCostNothing(MeteredWorld):
    def end_job(self, job: SimJob, ended: Ended) -> None:
        if (account := self.accounts.get(job.id)) is not None:
            account.in_flight.clear()
            account.unknown_usd = 0.0
        super().end_job(job, ended)


@pytest.mark.parametrize("world", [LetsAllCallsBegin, CallsInFlightCostNothing])
def test_a_meter_that_does_not_do_its_duty_is_seen(world: type[MeteredWorld]) -> None:
    assert any(list(overshoot(simulate_metered(seed, world)).violations()) for seed in (2, 7, 10))
