"""Policy on machines that queue, and on lives that cannot be extended: data in, data out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    MachineAllocated,
    MachineAnswered,
    MachineCondemned,
    MachineDeleted,
    MachineExtended,
    MachineHeard,
    MachineQueued,
    MachineReady,
    MachineSilent,
    MachineUp,
    StopRequested,
)
from evalfleet.model import (
    AttemptId,
    Cause,
    Cost,
    Lifetime,
    MachineId,
    Offer,
    Scored,
    Task,
    TaskId,
    after,
    seconds_between,
)
from evalfleet.policy import BringUp, effects, next_deadline
from evalfleet.state import accepts

from .runs import FREE, Run, condemned, of, requested, started, tasks_of

JOB = Offer(
    "slurm", "job", cost=Cost(usd_per_hour=3600.0), life=Lifetime(queues=True, silent_s=20.0, lost_s=60.0)
)  # a dollar a second
FIXED = structs.replace(JOB, life=structs.replace(JOB.life, extendable=False))
M1, M2, M3 = (MachineId(f"r-h-{n}") for n in (1, 2, 3))
QUICK: dict[str, Any] = {"boot_timeout_s": 100.0, "grace_s": 0.0}
"""A machine with a fixed life needs so much more of it than its longest task."""


def queued(run: Run, *machines: MachineId) -> None:
    run.tell(*(MachineQueued(machine) for machine in machines))


def allocated(run: Run, machine: MachineId, ago_s: float = 0.0) -> None:
    run.tell(MachineAllocated(machine, after(run.now, -ago_s), "start 1"))


def work(run: Run, machine: MachineId) -> list[tuple[str, str]]:
    """It leaves the queue and is ready at once: what it is given."""
    allocated(run, machine)
    return started(run.tell(MachineUp(machine), MachineReady(machine)))


# -- in the queue ----------------------------------------------------------------------------------


def test_a_machine_that_queues_costs_nothing_and_nothing_falls_due() -> None:
    run = Run(4, (JOB,), workers=1, lease_s=100.0)
    run.turn()
    queued(run, M1)
    assert next_deadline(run.state, run.now) is None
    assert run.wait(100_000.0) == []
    assert run.machine(M1).open_usd(run.now) == 0.0


def test_it_is_brought_up_through_all_of_it() -> None:
    run = Run(4, (JOB,), workers=1)
    run.turn()
    queued(run, M1)
    assert effects(run.state)[M1] == (BringUp(M1),)
    allocated(run, M1)
    assert effects(run.state)[M1] == (BringUp(M1),)


def test_those_that_queue_count_as_coming() -> None:
    run = Run(9, (JOB,), workers=3)
    assert len(requested(run.turn())) == 3
    queued(run, M1, M2, M3)
    assert requested(run.wait(3600.0)) == []


def test_those_that_queue_cannot_overspend_together() -> None:
    run = Run(9, (JOB,), workers=3, budget_usd=300.0, lease_s=1000.0)
    run.turn()
    queued(run, M1, M2, M3)
    assert run.state.spend.machines.reserved == pytest.approx(300.0)
    run.wait(50_000.0)
    for machine in (M1, M2, M3):
        allocated(run, machine)
    assert run.state.spend.machines.reserved == pytest.approx(300.0), (
        "started, they may cost what was reserved"
    )


def test_money_and_expiry_count_from_the_start() -> None:
    run = Run(9, (JOB,), workers=1, lease_s=1000.0)
    run.turn()
    queued(run, M1)
    run.wait(5000.0)
    allocated(run, M1, ago_s=10.0)
    assert seconds_between(run.now, run.machine(M1).expires_at) == 990.0
    assert run.machine(M1).open_usd(run.now) == pytest.approx(10.0)


def test_a_lease_is_renewed_from_its_start_on() -> None:
    run = Run(9, (JOB,), workers=1, lease_s=1000.0)
    run.turn()
    queued(run, M1)
    run.wait(5000.0)
    work(run, M1)
    assert of(MachineExtended, run.wait(700.0)) == []
    (extended,) = of(MachineExtended, run.wait(100.0))
    assert seconds_between(run.now, extended.expires_at) == 1000.0


def test_one_that_queues_for_nothing_is_let_go_and_costs_nothing() -> None:
    run = Run(1, (JOB, FREE), workers=1)
    run.turn()
    queued(run, M1)
    assert condemned(run.tell(StopRequested("user"))) == [M1]
    run.wait(60.0)
    run.gone(M1)
    assert run.state.spend.machines.spent == run.state.spend.machines.reserved == 0.0
    assert run.state.ended_at is not None


def test_one_that_may_have_started_before_its_delete_got_there_is_paid() -> None:
    run = Run(1, (JOB,), workers=1)
    run.turn()
    queued(run, M1)
    run.tell(StopRequested("user"))
    run.wait(60.0)
    run.tell(MachineDeleted(M1, run.now, 3.0))
    assert run.state.spend.machines.spent == pytest.approx(3.0)


def test_one_that_was_found_started_when_it_was_let_go_is_paid() -> None:
    run = Run(1, (JOB,), workers=1)
    run.turn()
    queued(run, M1)
    run.tell(StopRequested("user"))
    run.wait(60.0)
    allocated(run, M1, ago_s=20.0)
    assert run.machine(M1).phase == "condemned"
    run.gone(M1)
    assert run.state.spend.machines.spent == pytest.approx(20.0)


def test_a_machine_starts_once() -> None:
    run = Run(1, (JOB,), workers=1)
    run.turn()
    queued(run, M1)
    allocated(run, M1)
    assert not accepts(run.state, MachineAllocated(M1, run.now, "start 2"))
    assert not accepts(run.state, MachineQueued(M1))


# -- lives that have an end ------------------------------------------------------------------------


def test_no_task_is_handed_to_a_machine_that_it_could_outlive() -> None:
    run = Run(tasks_of(3, timeout_s=400.0), (FIXED,), workers=1, lease_s=1000.0, **QUICK)
    run.turn()
    assert work(run, M1) == [("t0.0", M1)]
    run.now = after(run.now, 500.0)
    assert started(run.score("t0.0")) == [("t1.0", M1)]
    run.now = after(run.now, 101.0)
    decided = run.score("t1.0")
    assert condemned(decided) == [M1], "it makes room for another one"
    assert [m.machine for m in requested(decided)] == [M2]


def test_a_shorter_task_is_handed_out_before_its_turn() -> None:
    tasks = (*tasks_of(2, timeout_s=400.0), Task(TaskId("short"), timeout_s=50.0))
    run = Run(tasks, (FIXED,), workers=1, lease_s=1000.0, **QUICK)
    run.turn()
    work(run, M1)
    run.now = after(run.now, 700.0)
    assert started(run.score("t0.0")) == [("short.0", M1)]


def test_what_gets_a_machine_ready_counts_for_a_task() -> None:
    tasks = tasks_of(2, timeout_s=400.0, ready_s=300.0)
    run = Run(tasks, (FIXED,), workers=1, lease_s=1000.0, **QUICK)
    run.turn()
    work(run, M1)
    run.now = after(run.now, 350.0)
    assert condemned(run.score("t0.0")) == [M1]


def test_a_life_that_can_be_extended_holds_nothing_back() -> None:
    run = Run(tasks_of(2, timeout_s=400.0), (JOB,), workers=1, lease_s=1000.0, **QUICK)
    run.turn()
    work(run, M1)
    run.now = after(run.now, 900.0)
    assert started(run.score("t0.0")) == [("t1.0", M1)]


def test_a_life_is_extended_up_to_what_its_place_allows() -> None:
    longest = structs.replace(JOB, life=structs.replace(JOB.life, max_life_s=1500.0))
    run = Run(tasks_of(9, timeout_s=400.0), (longest,), workers=1, lease_s=1000.0, **QUICK)
    run.turn()
    work(run, M1)
    (extended,) = of(MachineExtended, run.wait(750.0))
    assert seconds_between(run.machine(M1).billed_at, extended.expires_at) == 1500.0
    run.now = after(run.machine(M1).billed_at, 1101.0)
    assert condemned(run.score("t0.0")) == [M1]


def test_a_life_that_cannot_be_extended_is_long_enough_from_the_beginning() -> None:
    run = Run(tasks_of(1, timeout_s=5000.0), (FIXED,), workers=1, lease_s=1000.0, **QUICK)
    (asked,) = requested(run.turn())
    assert seconds_between(run.now, asked.expires_at) >= 5100.0
    assert work(run, M1) == [("t0.0", M1)]


def test_a_life_that_cannot_be_extended_is_as_long_as_is_planned_and_a_margin() -> None:
    tasks = [structs.replace(task, weight_s=300.0) for task in tasks_of(40, timeout_s=400.0)]
    run = Run(tuple(tasks), (FIXED,), workers=4, lease_s=1000.0, **QUICK)
    asked = requested(run.turn())
    assert len(asked) == 4
    for each in asked:
        assert seconds_between(run.now, each.expires_at) == pytest.approx(500 + 1.5 * 3000, abs=1)
    few = Run(tuple(tasks[:4]), (FIXED,), workers=4, lease_s=9000.0, **QUICK)
    assert seconds_between(few.now, requested(few.turn())[0].expires_at) < 1000, "no four hours for minutes"


def test_one_that_replaces_another_is_asked_for_what_is_left() -> None:
    tasks = [structs.replace(task, weight_s=300.0) for task in tasks_of(40, timeout_s=400.0)]
    run = Run(tuple(tasks), (FIXED,), workers=1, lease_s=1000.0, **QUICK)
    (first,) = requested(run.turn())
    work(run, M1)
    for n in range(20):
        run.now = after(run.now, 100.0)
        attempt = AttemptId(f"t{n}.0")
        run.tell(AttemptEnded(attempt, Scored(1.0, True), 100.0), AttemptCollected(attempt))
    (second,) = requested(run.lose(M1))
    assert seconds_between(run.now, second.expires_at) == pytest.approx(500 + 1.5 * 100 * 20, abs=1), (
        "tasks take 100 s here, whatever was expected"
    )
    assert second.expires_at < first.expires_at


def test_a_budget_buys_as_many_whole_lives_as_it_pays() -> None:
    run = Run(tasks_of(9, timeout_s=400.0), (FIXED,), workers=4, budget_usd=1100.0, lease_s=600.0, **QUICK)
    assert len(requested(run.turn())) == 2
    assert run.state.spend.machines.reserved <= 1100.0


def test_an_offer_whose_machines_live_too_short_is_passed_over() -> None:
    brief = structs.replace(
        FIXED,
        cost=structs.replace(FIXED.cost, usd_per_hour=0.0),
        life=structs.replace(FIXED.life, max_life_s=300.0),
    )
    run = Run(tasks_of(1, timeout_s=400.0), (brief, FREE), workers=1, **QUICK)
    assert [m.offer for m in requested(run.turn())] == [FREE]


def test_a_run_for_which_every_machine_lives_too_short_is_refused() -> None:
    brief = structs.replace(FIXED, life=structs.replace(FIXED.life, max_life_s=300.0))
    run = Run(tasks_of(1, timeout_s=400.0), (brief,), workers=1, **QUICK)
    run.turn()
    assert run.stop.reason == "refused"
    assert "400 s" in run.stop.detail


def test_a_run_whose_time_leaves_no_machine_enough_stops_then() -> None:
    run = Run(tasks_of(9, timeout_s=400.0), (FIXED,), workers=1, max_duration_s=1000.0, **QUICK)
    run.turn()
    work(run, M1)
    run.now = after(run.now, 590.0)
    run.lose(M1)
    assert run.state.stop is None
    run.gone(M1)
    assert run.stop.reason == "time"


# -- silence, by place -----------------------------------------------------------------------------


def mixed() -> Run:
    """Two machines of the service at work, and one that is reached by itself."""
    run = Run(9, (structs.replace(JOB, capacity=2), FREE), workers=3)
    run.turn()
    for machine in (M1, M2):
        work(run, machine)
    run.ready(M3)
    return run


def fall_silent(run: Run, machine: MachineId) -> None:
    run.tell(MachineSilent(machine, after(run.now, -run.machine(machine).offer.life.silent_s)))


def test_the_silence_of_a_service_is_not_that_of_its_machines() -> None:
    run = mixed()
    fall_silent(run, M1)
    fall_silent(run, M2)
    run.wait(1.0)
    run.score("t2.0")
    assert condemned(run.wait(500.0)) == [], "that others are heard says nothing about the service"


def test_a_mailbox_that_is_away_for_ten_minutes_ends_nothing_that_runs() -> None:
    mailed = structs.replace(JOB, capacity=3, life=structs.replace(JOB.life, silent_s=60.0, lost_s=900.0))
    run = Run(9, (mailed,), workers=3)
    run.turn()
    for machine in (M1, M2, M3):
        work(run, machine)
    for machine in (M1, M2, M3):
        fall_silent(run, machine)
    assert condemned(run.wait(600.0)) == [], "for all of them the store was away"
    run.tell(MachineHeard(M2))
    run.wait(1.0)
    assert condemned(run.tell(MachineHeard(M3))) == [], "the first ones are heard again"
    assert condemned(run.wait(300.0)) == [M1], "its silence had another cause"


def test_one_that_is_silent_while_its_service_speaks_is_given_up() -> None:
    run = mixed()
    fall_silent(run, M1)
    run.wait(1.0)
    run.tell(MachineAnswered(M2))
    assert condemned(run.wait(38.0)) == []
    decided = run.wait(1.0)
    assert condemned(decided) == [M1]
    assert of(MachineCondemned, decided)[0].cause is Cause.CONNECTION


def test_each_place_has_its_own_patience() -> None:
    run = mixed()
    fall_silent(run, M1)
    fall_silent(run, M3)
    run.wait(1.0)
    run.tell(MachineAnswered(M2))
    assert condemned(run.wait(3.0)) == [M3], "a service that is slow to answer holds nobody back"
