"""Simulated runs on VMs whose end is set when they are made, and cannot be moved while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from evalfleet.errors import PlaceError
from evalfleet.events import MachineExtended, MachineRequested
from evalfleet.model import MachineId, Needs, Offer, seconds_between
from sim.checks import violations
from sim.places import SimVms
from sim.scenario import PLACES, Scenario, draw
from sim.simulate import Parts, Simulated, simulate


class FixedVms(SimVms):
    """As Google's: what runs keeps the end that it was given."""

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        raise PlaceError("its limit cannot be moved while it runs", transient=False, scope="machine")


class BoastingVms(FixedVms):
    """Says that it can give its machines more time, and cannot."""

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        return [
            structs.replace(offer, life=structs.replace(offer.life, extendable=True))
            for offer in await super().offers(needs)
        ]


def fixed(seed: int) -> Scenario:
    """The scenario of a seed, with VMs alone. Short leases, so that machines must be replaced."""
    drawn = draw(seed)
    vms = tuple(
        structs.replace(
            offer,
            mends=(),
            life=structs.replace(offer.life, extendable=False, least_life_s=75.0, max_life_s=7 * 86_400.0),
        )
        for offer in drawn.offers["vms"]
    )
    limits = structs.replace(drawn.plan.limits, lease_s=600.0)
    plan = structs.replace(drawn.plan, places=("vms",), limits=limits)
    return replace(drawn, plan=plan, offers={**drawn.offers, "vms": vms}, troubles=())


def simulated(seed: int, place: type[SimVms] = FixedVms) -> Simulated:
    return simulate(fixed(seed), Parts(places={**PLACES, "vms": place}))


@pytest.mark.parametrize("seed", range(40))
def test_all_invariants_hold_and_no_task_is_handed_to_a_machine_that_it_could_outlive(seed: int) -> None:
    sim = simulated(seed)
    assert violations(sim) == []
    assert not [record for record in sim.store.read() if isinstance(record.event, MachineExtended)]


def test_machines_are_replaced_in_time_and_no_attempt_is_lost_to_a_limit() -> None:
    """In a world without other faults, where leases are far shorter than the run."""
    replaced = 0
    for seed in range(12):
        calm = replace(fixed(seed), faults=type(fixed(seed).faults)(), cancel_after_s=None, resumes=())
        limits = structs.replace(calm.plan.limits, budget_usd=None, max_duration_s=None)
        sim = simulate(
            replace(calm, plan=structs.replace(calm.plan, limits=limits), steering=(), strobe=None),
            Parts(places={**PLACES, "vms": FixedVms}),
        )
        assert violations(sim) == []
        lost = [each.outcome for each in sim.state.attempts.values() if "machine" in str(each.outcome)]
        assert not lost, lost
        asked = [r for r in sim.store.read() if isinstance(r.event, MachineRequested)]
        replaced += len(asked) > sim.state.limits.workers
        for record in asked:
            assert isinstance(record.event, MachineRequested)
            life_s = seconds_between(record.at, record.event.expires_at)
            assert life_s >= sim.state.limits.boot_timeout_s + sim.state.longest_s
    assert replaced, "in some of them machines had to be replaced"


def test_the_check_sees_tasks_that_outlive_their_machines() -> None:
    found = (each for seed in range(25) for each in violations(simulated(seed, BoastingVms)))
    assert any("could outlive" in each for each in found)
