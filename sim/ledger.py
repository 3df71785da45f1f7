"""Invariants that a run's journal shows by itself, whether the world was simulated or real."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptGraded,
    AttemptStarted,
    MachineCondemned,
    MachineMending,
    MachineReady,
    Record,
    RunSteered,
)
from evalfleet.model import (
    Answered,
    AttemptId,
    Broken,
    Cause,
    MachineId,
    Micros,
    Outcome,
    Scored,
    TaskId,
    after,
)
from evalfleet.policy import effects
from evalfleet.state import RunState, TaskState


def started_and_scored_once(records: Sequence[Record], state: RunState) -> Iterator[str]:
    """2: a score is never overwritten; each attempt is started and ended at most once."""
    started: dict[TaskId, list[AttemptId]] = {}
    ended: set[AttemptId] = set()
    scored: dict[TaskId, tuple[AttemptId, Outcome]] = {}
    graded: set[AttemptId] = set()
    for record in records:
        match record.event:
            case AttemptStarted(attempt, task):
                if task in scored:
                    yield f"{task} was scored and ran again"
                earlier = started.setdefault(task, [])
                yield from _started_alone(attempt, earlier, ended)
                earlier.append(attempt)
            case AttemptEnded(attempt, outcome):
                if attempt in ended:
                    yield f"{attempt} ended twice"
                ended.add(attempt)
                if isinstance(outcome, Scored):
                    task = state.attempts[attempt].task
                    if scored.setdefault(task, (attempt, outcome)) != (attempt, outcome):
                        yield f"{task} was scored twice"
            case AttemptGraded(attempt, grade):
                yield from _graded_once(attempt, ended, graded, state)
                if isinstance(grade, Scored):
                    task = state.attempts[attempt].task
                    if scored.setdefault(task, (attempt, grade)) != (attempt, grade):
                        yield f"{task} was scored twice"
            case _:
                pass
    yield from _scores_kept(state, scored)


def _started_alone(
    attempt: AttemptId, earlier: Sequence[AttemptId], ended: Collection[AttemptId]
) -> Iterator[str]:
    """An attempt is never raced by another one at its task: whichever ended first would bias the scores."""
    if attempt in earlier:
        yield f"{attempt} was started twice in the journal"
    for other in earlier:
        if other not in ended:
            yield f"{attempt} was started while {other} ran"


def _graded_once(
    attempt: AttemptId, ended: set[AttemptId], graded: set[AttemptId], state: RunState
) -> Iterator[str]:
    if attempt in graded:
        yield f"{attempt} was graded twice, and nobody asked for it"
    if attempt not in ended or not isinstance(state.attempts[attempt].outcome, Answered):
        yield f"{attempt} was graded, but had not answered"
    graded.add(attempt)


def _scores_kept(state: RunState, scored: dict[TaskId, tuple[AttemptId, Outcome]]) -> Iterator[str]:
    for task, known in state.tasks.items():
        if (known.status == "scored") != (task in scored):
            yield f"{task} is {known.status} against the journal"
        elif (first := scored.get(task)) and (known.decided_by, known.outcome) != first:
            yield f"the score of {task} was overwritten"


def was_ungradable(state: RunState, known: TaskState) -> bool:
    """Is the task broken because its answer could not be graded?"""
    grades = state.attempts[known.decided_by].grades if known.decided_by else ()
    return bool(grades) and grades[0] == known.outcome


def may_stay_ungraded(state: RunState, known: TaskState) -> Iterator[str]:
    """An answer is left without a grade only if the grader failed, or somebody cancelled the run."""
    cancelled = state.stop is not None and state.stop.reason == "user" and not state.stop.drain
    if not state.grading_problem and not cancelled:
        yield f"{known.task.id} was answered and never graded"
    attempt = state.attempts[known.decided_by] if known.decided_by else None
    if attempt is None or attempt.collected is None or attempt.collected.problem:
        yield f"{known.task.id} is answered, but the answer is not here"


def one_writer_at_a_time(records: Sequence[Record]) -> Iterator[str]:
    """5: epochs never go back, and neither does time."""
    for before, record in pairwise(records):
        if record.epoch < before.epoch or record.at < before.at:
            yield f"event {record.seq} goes back in epoch or time"


def nothing_under_way(state: RunState) -> Iterator[str]:
    """An ended run needs nothing."""
    if wanted := effects(state):
        yield f"the run ended with effects under way: {wanted}"


def fewest_attempts(state: RunState) -> int:
    """How many a task had to have before it was given up, at the time when that was fewest."""
    steered = (event for _, event in state.steered if isinstance(event, RunSteered))
    changed = [event.attempts for event in steered if event.attempts is not None]
    return min([state.limits.attempts, state.plan.limits.attempts, *changed])


def causes_are_told(state: RunState) -> Iterator[str]:
    """A broken attempt says why. One is cancelled only if the run let go of its machine, or somebody has
    ended the attempt or replaced the machine."""
    for attempt in state.attempts.values():
        if attempt.metered is not None and attempt.metered.refused:
            continue  # it was cancelled because its allowance was used up
        if isinstance(attempt.outcome, Broken) and attempt.outcome.cause is Cause.CANCELLED:
            machine = state.machines[attempt.machine]
            if machine.condemned_at is None and attempt.ending is None and machine.steered is None:
                yield f"{attempt.id} was cancelled on a machine that was kept"


def artefacts_come_home(
    records: Sequence[Record], state: RunState, liars: Collection[MachineId] = ()
) -> Iterator[str]:
    """Those of attempts that did not break, unless the machine was given up, or long silent when let go."""
    for record in records:
        if not isinstance(record.event, AttemptCollected) or not record.event.collected.problem:
            continue
        attempt = state.attempts[record.event.attempt]
        machine = state.machines[attempt.machine]
        if machine.id in liars:
            continue
        since = machine.silent_since or machine.condemned_at
        waited = since is not None and record.at >= after(since, machine.offer.life.lost_s)
        if not isinstance(attempt.outcome, Broken) and machine.cause is None and not waited:
            yield f"the artefacts of {attempt.id} were lost: {record.event.collected.problem}"


def nothing_waits_for_repairs(records: Sequence[Record]) -> Iterator[str]:
    """Attempts on a machine that is mended end with the decision, and none begins before it is ready."""
    running: dict[AttemptId, MachineId] = {}
    mending: dict[MachineId, Micros] = {}
    for record in records:
        match record.event:
            case AttemptStarted(attempt, _, machine):
                running[attempt] = machine
                if machine in mending:
                    yield f"{attempt} was started on {machine} while that was mended"
            case AttemptEnded(attempt):
                machine = running.pop(attempt, MachineId(""))
                if record.at > mending.get(machine, record.at):
                    yield f"{attempt} was held back by {machine}, which was mended"
            case MachineMending(machine):
                mending[machine] = record.at
            case MachineReady(machine) | MachineCondemned(machine):
                if machine in mending and machine in running.values():
                    yield f"{machine} was mended with an attempt on it"
                mending.pop(machine, None)
            case _:
                pass
