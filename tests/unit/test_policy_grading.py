"""Answers that are graded after the last task: when that is due, and what a grade settles."""

from __future__ import annotations

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptGraded,
    Event,
    GradingFailed,
    GradingRequested,
    MachineDeleteRefused,
    RunEnded,
    RunResumed,
    StopRequested,
)
from evalfleet.model import Answered, AttemptId, Broken, Cause, Collected, MachineId, Scored, TaskId
from evalfleet.policy import GradeAnswers, effects
from evalfleet.views.summary import exit_code

from .runs import PRICED, Run, of, requested, started

M1, M2 = MachineId("r-h-1"), MachineId("r-h-2")


def answered(run: Run, attempt: str, problem: str = "") -> list[Event]:
    id = AttemptId(attempt)
    return run.tell(AttemptEnded(id, Answered()), AttemptCollected(id, Collected(problem=problem)))


def graded(run: Run, attempt: str, score: float) -> list[Event]:
    return run.tell(AttemptGraded(AttemptId(attempt), Scored(score, score == 1.0)))


def is_grading(run: Run) -> bool:
    return (GradeAnswers(),) in effects(run.state).values()


def all_answered(tasks: int = 2) -> Run:
    """A run of one machine whose tasks are answered, and whose machine is gone."""
    run = Run(tasks, (PRICED,))
    run.turn()
    run.ready()
    for n in range(tasks):
        answered(run, f"t{n}.0")
    run.gone(M1)
    return run


def test_an_answer_is_not_tried_again_and_is_no_score() -> None:
    run = Run(2)
    run.turn()
    run.ready()
    assert started(answered(run, "t0.0")) == [("t1.0", M1)]
    assert (run.state.answered, run.state.scored, run.task("t0").outcome) == (1, 0, None)


def test_an_answer_proves_a_machine() -> None:
    run = Run(9, workers=4, canary=1)
    run.turn()
    run.ready()
    assert len(requested(answered(run, "t0.0"))) == 3
    run.ready()
    for attempt in [attempt for attempt, machine in run.open().items() if machine == M2]:
        run.breaks(attempt, Cause.RESULT)
    assert run.machine(M1).streak == 0
    assert run.state.proofs == 1


def test_grading_begins_when_all_answers_are_here_and_the_machines_are_gone() -> None:
    run = Run(2, (PRICED,))
    run.turn()
    run.ready()
    answered(run, "t0.0")
    assert not is_grading(run), "another task runs"
    run.tell(AttemptEnded(AttemptId("t1.0"), Answered()))
    assert not is_grading(run), "its answer is not here yet"
    run.tell(AttemptCollected(AttemptId("t1.0")))
    assert not is_grading(run), "its machine is paid until it is gone"
    assert not of(RunEnded, run.gone(M1))
    assert is_grading(run)


def test_grading_does_not_wait_for_a_machine_whose_place_refuses_to_delete_it() -> None:
    run = Run(1, (PRICED,))
    run.turn()
    run.ready()
    answered(run, "t0.0")
    assert not is_grading(run)
    run.tell(MachineDeleteRefused(M1, "locked by its owner"))
    assert is_grading(run)
    assert not of(RunEnded, graded(run, "t0.0", 1.0)), "the run ends when the machine is gone"
    assert of(RunEnded, run.gone(M1)) == [RunEnded("done")]


def test_the_run_ends_when_every_answer_has_its_grade() -> None:
    run = all_answered()
    assert not of(RunEnded, graded(run, "t0.0", 1.0))
    assert of(RunEnded, graded(run, "t1.0", 0.0)) == [RunEnded("done")]
    assert (run.state.scored, run.state.succeeded, run.state.answered) == (2, 1, 0)
    assert not is_grading(run)


def test_an_answer_that_cannot_be_graded_is_broken_and_not_tried_again() -> None:
    run = all_answered(1)
    decided = run.tell(AttemptGraded(AttemptId("t0.0"), Broken(Cause.RESULT, "no file")))
    assert decided == [RunEnded("done")]
    assert run.task("t0").status == "broken"
    assert run.task("t0").outcome == Broken(Cause.RESULT, "no file")


def test_a_first_grade_stays_and_a_second_is_kept_beside_it() -> None:
    run = all_answered(1)
    graded(run, "t0.0", 0.0)
    graded(run, "t0.0", 1.0)
    attempt = run.state.attempts[AttemptId("t0.0")]
    assert list(attempt.grades) == [Scored(0.0)], "nobody asked for a second one"
    run.tell(RunResumed(only=()), GradingRequested((attempt.id,)))
    assert is_grading(run)
    assert of(RunEnded, graded(run, "t0.0", 1.0)) == [RunEnded("done")]
    assert list(attempt.grades) == [Scored(0.0), Scored(1.0, True)]
    assert run.task("t0").outcome == Scored(0.0)
    assert (run.state.scored, run.state.succeeded) == (1, 0)


def test_an_answer_that_did_not_come_home_is_asked_for_again() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    decided = answered(run, "t0.0", problem="the machine is gone")
    run.ready()
    assert run.task("t0").status == "running", decided
    answered(run, "t0.1")
    for machine in list(run.state.undeleted):
        run.gone(machine)
    assert is_grading(run)
    graded(run, "t0.1", 1.0)
    assert run.task("t0").decided_by == "t0.1"


def test_a_run_whose_grader_fails_ends_with_its_answers_and_they_can_be_graded_later() -> None:
    run = all_answered()
    graded(run, "t0.0", 1.0)
    assert run.tell(GradingFailed("no such file")) == [RunEnded("stopped")]
    assert (run.state.answered, run.state.scored) == (1, 1)
    assert exit_code(run.state) == 1
    run.tell(RunResumed(only=()))
    assert is_grading(run)
    assert of(RunEnded, graded(run, "t1.0", 1.0)) == [RunEnded("done")]
    assert exit_code(run.state) == 0


def test_who_cancels_does_not_wait_for_grades() -> None:
    run = all_answered()
    assert is_grading(run)
    assert run.tell(StopRequested("user", "cancelled")) == [RunEnded("stopped")]
    assert run.state.answered == 2
    assert exit_code(run.state) == 130


def test_what_was_answered_is_graded_when_a_limit_or_a_drain_stops_the_run() -> None:
    for stop in (StopRequested("budget"), StopRequested("user", drain=True)):
        run = Run(2, (PRICED,))
        run.turn()
        run.ready()
        answered(run, "t0.0")
        run.tell(stop)
        run.breaks("t1.0")  # what a drain waits for; a limit has ended it
        run.gone(M1)
        assert is_grading(run)
        assert of(RunEnded, graded(run, "t0.0", 1.0)) == [RunEnded("stopped")]
        assert run.state.tasks[TaskId("t1")].status == "waiting"
