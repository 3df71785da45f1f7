"""What machines cost whose disks go on when they are off, and whose place cannot end them soon."""

from __future__ import annotations

import pytest
from msgspec import structs

from evalfleet.events import MachineCondemned, MachineDeleted, MachineRequested, StopRequested
from evalfleet.model import SECOND, Cause, MachineId, after, seconds_between
from evalfleet.named_pools import changes
from evalfleet.views.stats import hourly_usd, machine_end

from .runs import PRICED, Run, of, requested
from .test_policy_pool import LIFE_S, a_ready_pool

HALF = structs.replace(
    PRICED, cost=structs.replace(PRICED.cost, usd_per_hour=3600.0, idle_usd_per_hour=360.0)
)
"""A dollar a second, of which ten cents are the disk's and the address's."""
SLOW = structs.replace(
    HALF,
    cost=structs.replace(HALF.cost, sweep_s=50.0),
    life=structs.replace(HALF.life, least_life_s=100.0, teardown_s=4.0),
)
"""Its place needs 100 s to end it by itself, and a budget pays its disk for 50 s afterwards ($5)."""
M1 = MachineId("r-h-1")


# -- counted by the second -------------------------------------------------------------------------


def test_a_stopped_machine_costs_its_disk_and_its_address() -> None:
    pool = a_ready_pool(1, HALF)
    pool.wait(10)
    pool.change(changes.stopped(pool.view, pool.now))
    pool.wait(2)
    pool.stopped()
    assert pool.usd == pytest.approx(12.0)
    pool.wait(500)
    assert pool.usd == pytest.approx(12.0 + 50.0)
    assert hourly_usd(pool.state, pool.now) == pytest.approx(360.0)
    pool.change(changes.started(pool.view, pool.now))
    pool.wait(5)
    assert pool.usd == pytest.approx(62.0 + 5.0)
    assert hourly_usd(pool.state, pool.now) == pytest.approx(3600.0)


MINUTE = structs.replace(PRICED, cost=structs.replace(PRICED.cost, usd_per_hour=3600.0, least_billed_s=60.0))
"""A dollar a second, and for a minute at least."""


def test_a_machine_that_lives_shorter_than_its_place_bills_is_paid_for_that_long_each_time() -> None:
    pool = a_ready_pool(1, MINUTE)
    pool.wait(10)
    assert pool.usd == pytest.approx(60.0)
    pool.change(changes.stopped(pool.view, pool.now))
    pool.stopped()
    pool.wait(500)
    pool.change(changes.started(pool.view, pool.now))
    assert pool.usd == pytest.approx(60.0)
    pool.wait(70)
    assert pool.usd == pytest.approx(130.0)
    run = Run(1, [MINUTE], workers=1)
    run.turn()
    run.tell(MachineCondemned(M1, "no quota", Cause.PROVISIONING))
    run.wait(2)
    run.tell(MachineDeleted(M1, run.now))
    assert run.state.spend.machines.spent == pytest.approx(2.0), "what was refused never ran"


def test_a_budget_below_what_is_billed_at_least_buys_no_machine() -> None:
    run = Run(1, [MINUTE], workers=1, budget_usd=59.0)
    assert not of(MachineRequested, run.turn())
    run = Run(1, [MINUTE], workers=1, budget_usd=61.0)
    assert of(MachineRequested, run.turn())


def test_a_stopped_machine_that_is_deleted_has_cost_its_disk_until_then() -> None:
    pool = a_ready_pool(1, HALF)
    pool.wait(10)
    pool.change(changes.stopped(pool.view, pool.now))
    pool.stopped()
    pool.wait(100)
    pool.change(changes.deleted(pool.view, pool.now))
    pool.wait(10)
    pool.gone()
    assert pool.usd == pytest.approx(10.0 + 11.0)
    pool.wait(1000)
    assert pool.usd == pytest.approx(21.0)


def test_an_expired_machine_costs_its_disk_until_somebody_deletes_it() -> None:
    pool = a_ready_pool(1, HALF)
    pool.wait(LIFE_S + 100)
    assert pool.usd == pytest.approx(LIFE_S + 10.0)
    (machine,) = pool.machines()
    assert machine_end(machine, pool.now) == machine.expires_at, "it runs no more"
    pool.change(changes.started(pool.view, pool.now))
    pool.wait(10)
    assert pool.usd == pytest.approx(LIFE_S + 10.0 + 10.0)


def test_a_run_pays_for_what_was_left_behind_until_it_is_seen_to_be_gone() -> None:
    run = Run(1, (HALF,), lease_s=1000.0)
    run.turn()
    (gone,) = of(MachineCondemned, run.wait(1300.0))
    assert gone.cause is Cause.MACHINE_LOST, "nobody came in time"
    run.tell(MachineDeleted(M1, run.now))
    assert run.state.spend.machines.spent == pytest.approx(1000.0 + 30.0)
    assert run.state.machines[M1].open_usd(after(run.now, 500.0)) == 0.0


# -- held although the place is slow ---------------------------------------------------------------


def test_the_budget_pays_until_the_place_can_end_a_machine_and_until_it_is_swept() -> None:
    run = Run(9, (SLOW,), budget_usd=225.0)
    (asked,) = requested(run.turn())
    assert seconds_between(run.now, asked.expires_at) == pytest.approx(220.0)
    assert run.state.spend.machines.reserved == pytest.approx(225.0)


def test_a_budget_that_does_not_pay_until_the_place_can_end_a_machine_buys_none() -> None:
    run = Run(9, (SLOW,), budget_usd=104.0)
    decided = run.turn()
    assert not requested(decided)
    (stop,) = of(StopRequested, decided)
    assert stop.reason == "budget"
    assert "minutes after which cloud can stop it" in stop.detail


def test_a_budget_for_a_few_of_many_buys_these_few() -> None:
    run = Run(9, (SLOW,), workers=9, budget_usd=330.0)
    asked = requested(run.turn())
    assert len(asked) == 3
    assert run.state.spend.machines.reserved == pytest.approx(330.0)


def test_a_time_limit_that_is_sooner_than_the_place_is_paid_for_all_the_same() -> None:
    run = Run(9, (SLOW,), budget_usd=500.0, max_duration_s=30.0)
    (asked,) = requested(run.turn())
    machine = run.state.machines[M1]
    assert seconds_between(run.now, asked.expires_at) == pytest.approx(30.0)
    assert seconds_between(run.now, machine.ends_at) == pytest.approx(100.0), "what the place is told"
    assert run.state.spend.machines.reserved == pytest.approx(105.0)


def test_a_switch_is_not_moved_to_a_time_that_it_could_not_keep() -> None:
    """Money for 50 s more would have the place end it only 100 s from then."""
    run = Run(9, (SLOW,), budget_usd=1000.0, lease_s=120.0)
    run.turn()
    run.ready()
    machine = run.state.machines[M1]
    born = machine.requested_at
    while machine.phase == "ready":
        before = machine.expires_at
        run.wait(1.0)
        moved = machine.expires_at != before
        assert not moved or seconds_between(run.now, machine.expires_at) >= SLOW.life.least_life_s
        assert run.state.spend.machines.spent + run.state.spend.machines.reserved <= 1000.0
    assert seconds_between(born, run.now) > 800.0, "the money is used"
    assert run.now - born < 1000 * SECOND
