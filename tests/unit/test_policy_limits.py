"""Policy on silence, money, time and resumption: data in, data out."""

from __future__ import annotations

import msgspec
import pytest

from evalfleet.events import (
    ControllerStarted,
    MachineAnswered,
    MachineCondemned,
    MachineExtended,
    MachineHeard,
    MachineSilent,
    RunEnded,
    RunResumed,
    StopRequested,
    TasksReopened,
)
from evalfleet.model import Cause, Cost, Lifetime, MachineId, Offer, TaskId, after, seconds_between
from evalfleet.policy import Listen, effects, next_deadline
from evalfleet.state import accepts

from .runs import FREE, PRICED, Run, condemned, of, requested, tasks_of

M1, M2, M3 = (MachineId(f"r-h-{n}") for n in (1, 2, 3))


def silent(run: Run, machine: str) -> MachineSilent:
    return MachineSilent(MachineId(machine), after(run.now, -FREE.life.silent_s))


# -- silence -------------------------------------------------------------------------------------


def test_a_machine_that_is_silent_while_another_answers_is_given_up_soon() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    assert run.tell(silent(run, M1)) == []
    run.wait(1.0)
    assert run.tell(MachineAnswered(M2)) == []
    due = next_deadline(run.state, run.now)
    assert due is not None
    assert seconds_between(run.now, due) == FREE.life.lost_s - FREE.life.silent_s - 1.0
    decided = run.wait(seconds_between(run.now, due))
    assert condemned(decided) == [M1]
    assert of(MachineCondemned, decided)[0].cause is Cause.CONNECTION
    assert run.task("t0").used == 1, "its task may have cut it off"


def test_a_place_may_pause_its_machines_for_longer() -> None:
    run = Run(
        9,
        workers=3,
        offers=(msgspec.structs.replace(FREE, life=msgspec.structs.replace(FREE.life, lost_s=45.0)),),
    )
    run.turn()
    run.ready()
    run.tell(silent(run, M1))
    run.wait(1.0)
    run.tell(MachineAnswered(M2))
    assert condemned(run.wait(30.0)) == []
    assert condemned(run.wait(10.0)) == [M1]


def test_what_was_heard_before_its_silence_was_noticed_proves_nothing() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    run.wait(7.0)
    run.score("t1.0")
    run.wait(1.0)
    run.tell(silent(run, M1))
    assert condemned(run.wait(500.0)) == []
    assert condemned(run.tell(MachineAnswered(M2))) == [], "it may answer now, too"
    assert condemned(run.wait(12.0)) == [M1]


def test_while_a_machine_is_silent_it_and_others_are_asked() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    assert Listen(M1) not in effects(run.state).get(M1, ())
    run.tell(silent(run, M1))
    assert Listen(M1) in effects(run.state)[M1]
    run.tell(MachineHeard(M1))
    assert Listen(M1) not in effects(run.state).get(M1, ())


def test_an_answer_is_no_news_while_none_is_silent() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    assert not accepts(run.state, MachineAnswered(M1))
    run.tell(silent(run, M1))
    assert not accepts(run.state, MachineAnswered(M1))
    assert accepts(run.state, MachineAnswered(M2))


def test_a_silent_machine_that_answers_again_is_kept() -> None:
    run = Run(9, workers=2)
    run.turn()
    run.ready()
    run.tell(silent(run, M1))
    run.wait(1.0)
    run.tell(MachineAnswered(M2))
    run.wait(2.0)
    run.tell(MachineHeard(M1))
    assert condemned(run.wait(3600.0)) == []


def test_a_silent_fleet_is_our_own_network() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    for machine in (M1, M2, M3):  # each channel notices at its own time
        run.tell(silent(run, machine))
        assert condemned(run.wait(15.0)) == []
    assert condemned(run.wait(400.0)) == []
    run.tell(MachineHeard(M2))
    assert condemned(run.wait(11.0)) == [], "the others get time to answer, too"
    run.tell(MachineHeard(M1), MachineHeard(M3))
    assert condemned(run.wait(3600.0)) == []


def test_a_fleet_that_stays_silent_is_given_up_at_last() -> None:
    run = Run(3, workers=3)
    run.turn()
    run.ready()
    for machine in (M1, M2, M3):
        run.tell(silent(run, machine))
    assert condemned(run.wait(590.0)) == []
    assert condemned(run.wait(2.0)) == [M1, M2, M3]


def test_a_store_that_all_machines_speak_through_may_be_away_for_as_long_as_one_of_them_may_be_silent() -> (
    None
):
    mailed = Offer("cloud", "vm", life=Lifetime(silent_s=60.0, lost_s=600.0))
    run = Run(9, (mailed,), workers=2)
    run.turn()
    run.ready()
    for machine in (M1, M2):
        run.tell(MachineSilent(MachineId(machine), after(run.now, -mailed.life.silent_s)))
    assert condemned(run.wait(600.0)) == [], "ten minutes of it, and the minute until it was noticed"
    assert condemned(run.wait(241.0)) == [M1, M2], "a quarter of an hour at last"


def test_a_new_controller_gives_silent_machines_time_to_answer() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    for machine in (M1, M2, M3):
        run.tell(silent(run, machine))
    run.now = after(run.now, 5000.0)
    assert condemned(run.tell(ControllerStarted())) == []
    assert not run.state.silent


def test_one_that_does_not_come_back_with_the_others_is_given_up() -> None:
    run = Run(9, workers=3)
    run.turn()
    run.ready()
    for machine in (M1, M2, M3):
        run.tell(silent(run, machine))
    run.wait(100.0)
    run.tell(MachineHeard(M1), MachineHeard(M2))
    assert condemned(run.wait(11.0)) == []
    assert condemned(run.wait(1.0)) == [M3]


def test_a_silent_machine_that_is_alone_gets_a_witness() -> None:
    run = Run(1, workers=2)
    run.turn()
    run.ready()
    (witness,) = requested(run.tell(silent(run, M1)))
    assert requested(run.wait(1.0)) == [], "one is enough"
    assert condemned(run.ready(witness.machine)) == []
    assert condemned(run.wait(3.0)) == [M1]
    assert run.machine(witness.machine).open, "the task goes on there"


def test_one_that_is_to_tell_whether_it_is_our_network_may_arrive() -> None:
    run = Run(1, (PRICED,), workers=2)
    run.turn()
    run.ready()
    (witness,) = requested(run.tell(silent(run, M1)))
    assert condemned(run.wait(1.0)) == []
    assert condemned(run.tell(MachineHeard(M1))) == [witness.machine]


def test_no_witness_when_another_one_was_heard_meanwhile_and_has_left() -> None:
    run = Run(2, (PRICED,), workers=2)
    run.turn()
    run.ready()
    run.tell(silent(run, M1))
    run.tell(silent(run, M2))
    run.wait(30.0)
    run.tell(MachineHeard(M1))
    decided = run.score("t0.0")
    assert condemned(decided) == [M1], "nothing is left for it"
    assert requested(decided) == []
    run.tell(MachineHeard(M2))
    assert condemned(run.score("t1.0")) == [M2]


def test_no_witness_beyond_the_workers_that_were_allowed() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    run.tell(silent(run, M1))
    assert requested(run.wait(60.0)) == []


def test_the_end_of_an_attempt_proves_that_we_are_online() -> None:
    run = Run(2, workers=2)
    run.turn()
    run.ready()
    run.tell(silent(run, M1))
    run.wait(2.0)
    run.score("t1.0")
    assert condemned(run.wait(2.0)) == [M1]


# -- money and time ------------------------------------------------------------------------------


def reserved(run: Run) -> float:
    return run.state.spend.machines.spent + run.state.spend.machines.reserved


def test_a_budget_is_shared_by_the_machines_that_are_asked_for() -> None:
    run = Run(9, (PRICED,), workers=3, budget_usd=300.0)
    lives = [seconds_between(run.now, m.expires_at) for m in requested(run.turn())]
    assert lives == pytest.approx([100.0, 100.0, 100.0])
    assert reserved(run) <= 300.0


def test_what_is_reserved_never_passes_the_budget() -> None:
    run = Run(50, (PRICED,), workers=4, budget_usd=500.0, lease_s=100.0)
    run.turn()
    run.ready()
    for step in range(400):
        run.wait(3.0)
        assert reserved(run) <= 500.0 + 1e-9
        if step % 7 == 0 and run.open():
            run.score(next(iter(run.open())))
        for machine in list(run.state.undeleted):
            if run.machine(machine).phase == "condemned":
                run.gone(machine)
        run.ready()
    assert run.stop.reason == "budget"
    assert run.state.ended_at is not None


def test_a_renewal_extends_as_far_as_money_allows() -> None:
    run = Run(50, (PRICED,), workers=1, budget_usd=150.0, lease_s=100.0)
    run.turn()
    run.ready()
    assert next_deadline(run.state, run.now) == after(run.now, 75.0)
    (extended,) = of(MachineExtended, run.wait(75.0))
    assert seconds_between(run.machine(M1).requested_at, extended.expires_at) == pytest.approx(150.0)
    assert reserved(run) == pytest.approx(150.0)


def test_a_machine_whose_money_is_up_is_ended_before_its_expiry() -> None:
    run = Run(50, (PRICED,), workers=1, budget_usd=100.0)
    run.turn()
    run.ready()
    for _ in range(200):
        if condemned(run.wait(0.5)):
            break
    assert run.machine(M1).phase == "condemned"
    assert seconds_between(run.now, run.machine(M1).expires_at) >= -0.5
    run.gone(M1)
    assert run.stop.reason == "budget"
    assert run.state.spend.machines.spent <= 100.0


def test_a_teardown_that_takes_time_is_paid_from_the_budget() -> None:
    slow = Offer(
        "cloud", "D4", cost=Cost(usd_per_hour=3600.0, billing_step_s=60.0), life=Lifetime(teardown_s=120.0)
    )
    run = Run(50, (slow,), workers=1, budget_usd=600.0)
    run.turn()
    run.ready()
    while not condemned(run.wait(10.0)):
        assert run.machine(M1).phase == "ready"
    assert 90 <= seconds_between(run.now, run.machine(M1).expires_at) <= 130


def test_a_budget_that_pays_no_machine_stops_the_run_before_it_begins() -> None:
    run = Run(3, (PRICED,), workers=1, budget_usd=0.0)
    run.turn()
    assert run.stop.reason == "budget"
    assert not run.state.machines


def test_money_that_a_machine_leaves_over_pays_the_next() -> None:
    run = Run(50, (PRICED,), workers=1, budget_usd=100.0)
    run.turn()
    run.wait(10.0)
    run.lose(M1)
    run.gone(M1)
    assert run.state.spend.machines.spent == pytest.approx(10.0)
    assert seconds_between(run.now, run.machine(M2).expires_at) == pytest.approx(90.0)


def test_free_machines_are_not_bound_by_a_budget() -> None:
    run = Run(3, workers=3, budget_usd=0.0)
    assert len(requested(run.turn())) == 3


def test_the_time_limit_stops_the_run_and_bounds_every_life() -> None:
    run = Run(50, workers=2, max_duration_s=1000.0)
    asked = requested(run.turn())
    assert all(seconds_between(run.now, m.expires_at) <= 1000.0 for m in asked)
    run.ready()
    run.wait(999.0)
    assert run.state.stop is None
    run.wait(1.0)
    assert run.stop.reason == "time"
    assert not run.open()


# -- resume --------------------------------------------------------------------------------------


def ended_run() -> Run:
    """t0 scored, t1 broken, t2 and t3 unrun."""
    run = Run(4, workers=1, attempts=1)
    run.turn()
    run.ready()
    run.score("t0.0")
    run.breaks("t1.0")
    run.tell(StopRequested("user"))
    run.gone(M1)
    assert run.state.status == "stopped"
    return run


def test_resume_runs_what_is_unrun() -> None:
    run = ended_run()
    assert len(requested(run.tell(RunResumed()))) == 1
    run.ready()
    assert list(run.open()) == ["t2.1"]


def test_resume_only_broken_holds_the_others() -> None:
    run = ended_run()
    broken = (TaskId("t1"),)
    run.tell(TasksReopened(broken), RunResumed(only=broken))
    run.ready()
    assert list(run.open()) == ["t1.1"]
    run.score("t1.1")
    assert {known.task.id: known.status for known in run.state.tasks.values()} == {
        "t0": "scored",
        "t1": "scored",
        "t2": "held",
        "t3": "held",
    }
    assert run.gone(M2) == [RunEnded("stopped")]
    run.tell(RunResumed())
    run.ready()
    assert list(run.open()) == ["t2.1"]


def test_a_score_is_not_reopened() -> None:
    run = ended_run()
    run.tell(TasksReopened((TaskId("t0"), TaskId("t2"))), RunResumed())
    assert run.task("t0").status == "scored"
    assert run.task("t0").decided_by == "t0.0"
    assert run.state.waiting == 2


def test_resume_with_other_limits() -> None:
    run = Run(4, (PRICED,), workers=1, budget_usd=0.0)
    run.turn()
    assert run.state.ended_at is not None
    limits = Run(1, workers=3, budget_usd=90.0).state.limits
    assert len(requested(run.tell(RunResumed(limits)))) == 3


def test_the_time_limit_starts_anew() -> None:
    run = Run(tasks_of(4), workers=1, max_duration_s=100.0)
    run.turn()
    run.wait(100.0)
    run.gone(M1)
    run.tell(RunResumed())
    assert run.state.stop is None
    assert run.wait(99.0) is not None
    assert run.state.stop is None


@pytest.mark.parametrize("schedule", ["dynamic", "round-robin", "slices"])
@pytest.mark.parametrize("workers", [1, 2, 6])
def test_a_run_resumed_with_another_number_of_workers_ends(schedule: str, workers: int) -> None:
    run = Run(9, workers=4, schedule=schedule)
    run.turn()
    run.tell(StopRequested("user"))
    for machine in list(run.state.undeleted):
        run.gone(machine)
    run.tell(RunResumed(Run(1, workers=workers).state.limits))
    for _ in range(40):
        assert run.state.live <= workers
        run.ready()
        for attempt in list(run.open()):
            run.score(attempt)
        for machine in list(run.state.undeleted):
            if run.machine(machine).phase == "condemned":
                run.gone(machine)
    assert run.state.status == "done"
    assert run.state.ended_at is not None
