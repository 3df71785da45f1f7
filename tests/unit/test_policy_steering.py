"""What people change of a run that goes on, and what is decided then."""

from __future__ import annotations

import pytest
from msgspec import structs

from evalfleet.events import (
    AttemptEnded,
    Event,
    MachineCondemned,
    MachineReady,
    MachineUp,
    RunEnded,
    RunSteered,
    StopRequested,
)
from evalfleet.model import AttemptId, Broken, Cause, MachineId
from evalfleet.policy import EndAttempt, RunAttempt, effects
from evalfleet.state import accepts, kept_out, objection

from .runs import FREE, PRICED, Run, condemned, of, requested, started

ONE, TWO, THREE = (MachineId(f"r-h-{n}") for n in (1, 2, 3))


def at_work(tasks: int = 8, workers: int = 3, offer: object = FREE, **options: object) -> Run:
    run = Run(tasks, (offer,), workers=workers, **options)  # type: ignore[arg-type]
    run.turn()
    run.ready()
    return run


@pytest.mark.parametrize(
    ("pause", "go_on"),
    [
        (RunSteered("set", "ann", workers=0), RunSteered("set", "ann", workers=3)),
        (RunSteered("pause", "ann"), RunSteered("unpause", "ann")),  # of older journals
    ],
)
def test_a_paused_run_hands_out_nothing_keeps_its_machines_and_goes_on_with_workers(
    pause: RunSteered, go_on: RunSteered
) -> None:
    run = at_work(offer=PRICED)
    assert run.tell(pause) == []
    assert not [event for n in range(3) for event in run.score(f"t{n}.0")]
    assert len(run.state.idle) == 3
    assert not requested(run.lose(ONE)), "no machine is asked for meanwhile"
    run.gone(ONE)
    decided = run.tell(go_on)
    assert len(started(decided)) == 2
    assert len(requested(decided)) == 1


def test_a_paused_run_that_releases_its_machines_deletes_them_when_their_attempts_have_ended() -> None:
    run = at_work(offer=PRICED)
    assert run.tell(RunSteered("set", "ann", workers=0)) == []
    run.score("t0.0")
    decided = run.tell(RunSteered("set", "ann", "lunch", workers=0, release=True))
    assert condemned(decided) == [ONE]
    assert of(MachineCondemned, decided)[0].detail == "drained by ann: lunch"
    assert {*condemned(run.score("t1.0")), *condemned(run.score("t2.0"))} == {TWO, THREE}
    for machine in (ONE, TWO, THREE):
        assert not requested(run.gone(machine))
    assert run.state.ended_at is None
    assert len(requested(run.tell(RunSteered("set", "ann", workers=2)))) == 2


def test_a_paused_run_whose_last_task_has_ended_is_over() -> None:
    run = at_work(tasks=2, workers=2)
    run.tell(RunSteered("set", "ann", workers=0))
    run.score("t0.0")
    run.score("t1.0")
    assert len(condemned(run.log)) == 2
    for machine in list(run.state.machines):
        run.gone(machine)
    assert of(RunEnded, run.log) == [RunEnded("done")]


def test_more_workers_are_asked_for_at_once() -> None:
    run = at_work(workers=1)
    assert len(requested(run.tell(RunSteered("set", "ann", workers=4)))) == 3


@pytest.mark.parametrize("slots", [1, 2])
def test_with_fewer_workers_the_newest_end_what_they_run_and_go(slots: int) -> None:
    run = at_work(tasks=20, slots=slots)
    assert run.tell(RunSteered("set", "ann", workers=1)) == [], "what runs is not ended"
    running = run.open()
    theirs = [attempt for attempt, machine in running.items() if machine != ONE]
    decided: list[Event] = []
    for attempt in theirs:
        decided += run.score(attempt)
    assert set(condemned(decided)) == {TWO, THREE}
    assert {machine for _, machine in started(decided)} <= {ONE}
    own = next(attempt for attempt, machine in running.items() if machine == ONE)
    assert len(started(run.score(own))) == 1, "the one that stays goes on"


def test_with_fewer_workers_machines_that_are_not_there_yet_go_first() -> None:
    run = Run(8, (PRICED,), workers=3)
    run.turn()
    run.ready(ONE)
    assert set(condemned(run.tell(RunSteered("set", "ann", workers=1)))) == {TWO, THREE}


def test_a_budget_below_what_is_promised_is_refused() -> None:
    run = Run(4, (PRICED,), workers=1, budget_usd=1000.0, lease_s=100.0)
    run.turn()
    lower = RunSteered("set", "ann", budget_usd=5.0)
    assert "has spent or reserved" in objection(run.state, lower)
    assert not accepts(run.state, lower)
    assert accepts(run.state, RunSteered("set", "ann", budget_usd=500.0))


def test_a_larger_budget_pays_more_machines() -> None:
    run = Run(8, (PRICED,), workers=4, budget_usd=100.0, lease_s=100.0)
    assert len(requested(run.turn())) < 4 or run.state.spend.machines.reserved <= 100.0
    before = run.state.spend.machines.reserved
    run.tell(RunSteered("set", "ann", budget_usd=1000.0))
    run.ready()
    run.wait(80.0)
    assert before <= 100.0 < run.state.spend.machines.reserved <= 1000.0


def test_fewer_attempts_hold_for_what_breaks_from_then_on() -> None:
    run = at_work(tasks=1, workers=1)
    run.tell(RunSteered("set", "ann", attempts=1))
    run.tell(AttemptEnded(AttemptId("t0.0"), Broken(Cause.RESULT, "no result")))
    assert run.task("t0").status == "broken"


def test_an_attempt_is_ended_on_its_machine_and_counts() -> None:
    run = at_work(tasks=1, workers=1)
    run.tell(RunSteered("end", "ann", "it loops", attempt=AttemptId("t0.0")))
    assert effects(run.state)[AttemptId("t0.0")] == (
        RunAttempt(AttemptId("t0.0")),
        EndAttempt(AttemptId("t0.0")),
    )
    assert "is ending" in objection(run.state, RunSteered("end", "bob", attempt=AttemptId("t0.0")))
    for n in range(3):
        attempt = AttemptId(f"t0.{n}")
        run.tell(RunSteered("end", "ann", attempt=attempt))
        run.tell(AttemptEnded(attempt, Broken(Cause.CANCELLED, "ended by ann: it loops", counts=True)))
        run.wait(60.0)
        assert list(run.open()) == ([f"t0.{n + 1}"] if n < 2 else []), "it is tried again, on any machine"
    assert run.task("t0").status == "broken", "each end uses up an attempt"
    assert not run.state.suspects
    assert not run.state.first_broken


def test_a_drained_machine_ends_what_it_runs_and_another_takes_its_place() -> None:
    run = at_work(offer=PRICED)
    assert run.tell(RunSteered("drain", "ann", "noisy", machine=ONE)) == []
    assert "is draining" in objection(run.state, RunSteered("drain", "bob", machine=ONE))
    decided = run.score("t0.0")
    (gone,) = of(MachineCondemned, decided)
    assert (gone.machine, gone.cause, gone.detail) == (ONE, None, "drained by ann: noisy")
    assert len(requested(decided)) == 1


def test_a_lent_machine_that_was_drained_stays_out_until_that_is_undone() -> None:
    run = Run(8, (structs.replace(FREE, lent=True, capacity=2),), workers=3)
    run.turn()
    run.tell(MachineUp(ONE, name="gpu1"), MachineReady(ONE), MachineUp(TWO, name="gpu2"), MachineReady(TWO))
    drain, undo = (RunSteered(verb, "ann", machine=ONE) for verb in ("drain", "undrain"))
    run.tell(drain)
    run.tell(undo)
    assert not requested(run.score("t0.0")), "it works on"
    run.tell(drain)
    assert not requested(run.score("t2.0"))
    assert not requested(run.gone(ONE))
    assert kept_out(run.state, "here") == ("gpu1",)
    (again,) = requested(run.tell(undo))
    # drained before it was ready, and taken by its place all the same: it goes at once
    run.tell(drain)
    decided = run.tell(MachineUp(again.machine, name="gpu1"))
    assert condemned(decided) == [again.machine]
    assert not requested(decided)


def test_a_machine_that_is_replaced_goes_at_once_spares_its_attempt_and_another_one_comes() -> None:
    run = at_work(offer=PRICED)
    decided = run.tell(RunSteered("replace", "ann", "odd", machine=ONE))
    (ended,) = of(AttemptEnded, decided)
    assert ended.outcome == Broken(Cause.CANCELLED, "its machine was replaced by ann: odd")
    assert condemned(decided) == [ONE]
    assert "is leaving already" in objection(run.state, RunSteered("replace", "ann", machine=ONE))
    assert len(requested([*decided, *run.gone(ONE)])) == 1
    run = Run(8, (PRICED,), workers=1)
    run.turn()
    assert condemned(run.tell(RunSteered("replace", "ann", machine=ONE))) == [ONE], "also before it is ready"


def test_what_cannot_be_done_is_said_and_dropped() -> None:
    run = at_work()
    said = {
        RunSteered("unpause"): "is not paused",
        RunSteered("set", workers=3): "has these limits already",
        RunSteered("end", attempt=AttemptId("nobody.0")): "has no attempt nobody.0",
        RunSteered("drain", machine=MachineId("r-h-9")): "has no machine r-h-9",
        RunSteered("restart", machine=ONE): "drain it",
    }
    for event, words in said.items():
        assert words in objection(run.state, event)
        assert not accepts(run.state, event)
    run.score("t0.0")
    assert "has ended" in objection(run.state, RunSteered("end", attempt=AttemptId("t0.0")))
    run.tell(StopRequested("user", "cancelled"))
    assert "is stopping" in objection(run.state, RunSteered("set", workers=0))
    assert len(run.state.steered) == 0, "nothing of it is on record"
