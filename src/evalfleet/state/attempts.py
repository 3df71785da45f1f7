"""What the events of attempts change in the state."""

from __future__ import annotations

from evalfleet import events as ev
from evalfleet.model import (
    NO_LIMIT,
    Answered,
    Broken,
    Cause,
    Limits,
    MachineId,
    Metered,
    Micros,
    Scored,
    after,
)

from .circuits import attempt_broke, attempt_worked, gave_up, refresh_idle
from .machines import heard
from .nouns import AttemptState, MachineState, RunState, TaskState, is_ungradable
from .run import dequeue, enqueue, set_status


def attempt_started(state: RunState, at: Micros, event: ev.AttemptStarted) -> None:
    known, machine = state.tasks[event.task], state.machines[event.machine]
    # with the ids that are there already: a run may have very many attempts
    id, task = event.attempt, known.task
    attempt = AttemptState(id, task.id, machine.id, at, allowance=event.allowance)
    state.attempts[id] = attempt
    if event.allowance is not NO_LIMIT:
        _reserve(state, attempt, 1)
    known.attempts.append(id)
    set_status(state, known, "running")
    if not known.retrying:
        machine.lane = known.lane
    dequeue(state, known)
    machine.open[id] = None
    machine.attempts += 1
    if task.set_up:
        machine.set_up[task.set_up] = None
    refresh_idle(state, machine)
    state.touched_attempts[id] = None


def _reserve(state: RunState, attempt: AttemptState, sign: int) -> None:
    if attempt.allowance is NO_LIMIT:
        return
    state.spend.models.reserved += sign * (attempt.allowance.usd or 0.0)
    state.spend.tokens.reserved += sign * (attempt.allowance.tokens or 0)


def budget_passed(state: RunState, at: Micros, event: ev.BudgetPassed) -> None:
    state.spend.percent_reported = event.percent


def _used(state: RunState, attempt: AttemptState, metered: Metered) -> None:
    """Count what its model calls used, and free the rest of its allowance."""
    attempt.metered = metered
    _reserve(state, attempt, -1)
    spend = state.spend
    spend.models.spent += metered.used_usd
    spend.tokens.spent += metered.used_tokens
    spend.attempts += 1
    spend.calls += metered.calls
    spend.seconds += attempt.seconds


def _never_told(state: RunState, attempt: AttemptState) -> None:
    """Count its whole allowance as lost: its machine is gone, and its use will stay unknown."""
    if attempt.allowance is NO_LIMIT:
        return
    _reserve(state, attempt, -1)
    state.spend.models.lost += attempt.allowance.usd or 0.0
    state.spend.tokens.lost += attempt.allowance.tokens or 0


def attempt_ended(state: RunState, at: Micros, event: ev.AttemptEnded) -> None:
    id, outcome = event.attempt, event.outcome
    attempt = state.attempts[id]
    attempt.ended_at, attempt.outcome = at, outcome
    attempt.seconds, attempt.node = event.seconds, event.node
    if event.metered is not None:
        _used(state, attempt, event.metered)
    machine, known = state.machines[attempt.machine], state.tasks[attempt.task]
    machine.open.pop(id, None)
    if machine.phase == "ready" and machine.silent_since is None:
        heard(state, at, machine)
    machine.uncollected[id] = None
    state.uncollected += 1
    if state.orphans:
        state.orphans.pop(id, None)
    if isinstance(outcome, Broken):
        _broke(state, at, attempt, machine, known, outcome)
    else:
        _worked(state, attempt, machine)
        if isinstance(outcome, Scored):
            _scored(state, attempt, known, outcome)
        else:
            known.decided_by = id
            set_status(state, known, "answered")
    refresh_idle(state, machine)
    state.touched_attempts[id] = None
    state.touched_machines[attempt.machine] = None


def _worked(state: RunState, attempt: AttemptState, machine: MachineState) -> None:
    machine.streak = 0
    if state.suspects:
        state.suspects.pop(machine.id, None)
    attempt_worked(state, machine)
    state.proofs += 1
    state.proof_seconds += attempt.seconds


def _scored(state: RunState, attempt: AttemptState, known: TaskState, outcome: Scored) -> None:
    state.machines[attempt.machine].scored += 1
    known.outcome, known.decided_by = outcome, attempt.id
    set_status(state, known, "scored")
    state.succeeded += outcome.success


def _broke(
    state: RunState,
    at: Micros,
    attempt: AttemptState,
    machine: MachineState,
    known: TaskState,
    outcome: Broken,
) -> None:
    cause = outcome.cause
    state.causes[cause] += 1
    free = _is_forgiven(known, outcome)
    by_people = attempt.ending is not None  # that says nothing of its machine, nor of the run
    if len(known.attempts) == 1 and not free and not by_people:
        state.first_broken[cause] += 1
    if not free and not by_people and state.proofs < state.limits.canary:
        state.canary_breaks.append(f"{cause}: {outcome.detail}"[:300])
    if cause is Cause.CANCELLED and free:
        enqueue(state, known, at)
        return
    if not by_people:
        _suspect(state, machine, cause)
        attempt_broke(state, at, machine, outcome)
    if machine.id not in known.broken_on:
        known.broken_on = (*known.broken_on, machine.id)
    known.used += not free
    _retry_or_give_up(state, at, attempt, known, outcome)


def _retry_or_give_up(
    state: RunState, at: Micros, attempt: AttemptState, known: TaskState, outcome: Broken
) -> None:
    known.tries += 1
    if known.used >= state.limits.attempts or known.tries >= state.limits.attempts_ceiling:
        known.outcome, known.decided_by = outcome, attempt.id
        set_status(state, known, "broken")
        gave_up(state, known)
    else:
        enqueue(state, known, after(at, retry_delay_s(state.limits, known.tries)))


def _is_forgiven(known: TaskState, outcome: Broken) -> bool:
    """Does the task keep its attempt? Once, a machine that is gone is the machine's trouble; twice, it may be
    the task that switches it off."""
    if outcome.cause is not Cause.MACHINE_LOST or not outcome.is_free:
        return outcome.is_free
    first, known.lost = not known.lost, True
    return first


def retry_delay_s(limits: Limits, tries: int) -> float:
    """How long a retry waits: the first, which goes elsewhere, not at all, the next ones twice as long each
    time."""
    if tries <= 1:
        return 0.0
    return min(limits.retry_cap_s, limits.retry_base_s * 2.0 ** (tries - 2))


def _suspect(state: RunState, machine: MachineState, cause: Cause) -> None:
    """Count failures in a row on one machine; the model's failures say nothing about it."""
    if cause is Cause.MODEL:
        return
    if machine.streak == 0:
        machine.streak_mark = state.proofs
    machine.streak += 1
    if machine.streak >= state.limits.machine_streak and machine.phase == "ready":
        state.suspects[machine.id] = None


def attempt_collected(state: RunState, at: Micros, event: ev.AttemptCollected) -> None:
    attempt = state.attempts[event.attempt]
    attempt.collected, attempt.superseded = event.collected, event.superseded
    if attempt.metered is None and event.metered is not None:
        _used(state, attempt, event.metered)
    elif attempt.metered is None:
        _never_told(state, attempt)
    state.uncollected -= 1
    machine = state.machines[attempt.machine]
    machine.uncollected.pop(event.attempt, None)
    state.touched_attempts[event.attempt] = None
    state.touched_machines[attempt.machine] = None
    if isinstance(attempt.outcome, Answered) and event.collected.problem:
        _answer_lost(state, at, attempt, machine, event.collected.problem)


def _answer_lost(
    state: RunState, at: Micros, attempt: AttemptState, machine: MachineState, problem: str
) -> None:
    """What the attempt left did not come home: there is nothing to grade, so the task is tried again."""
    known = state.tasks[attempt.task]
    cause = machine.cause or Cause.CONNECTION
    state.causes[cause] += 1
    known.decided_by = None
    # unless its place has taken the machine away, the task may have seen to it
    counts = cause not in (Cause.EVICTED, Cause.MACHINE_LOST)
    lost = Broken(cause, f"its answer did not come home: {problem}", counts=counts)
    attempt.grades = (*attempt.grades, lost)
    known.used += not _is_forgiven(known, lost)
    _retry_or_give_up(state, at, attempt, known, lost)


def attempt_graded(state: RunState, at: Micros, event: ev.AttemptGraded) -> None:
    """The first grade settles the task, unless it says that the grader failed. Later ones change nothing."""
    attempt = state.attempts[event.attempt]
    attempt.grades = (*attempt.grades, event.grade)
    state.regrading.pop(event.attempt, None)
    known = state.tasks[attempt.task]
    failed_before = is_ungradable(known)
    if not (known.status == "answered" or failed_before) or known.decided_by != attempt.id:
        return
    if isinstance(event.grade, Scored):
        _scored(state, attempt, known, event.grade)
    else:
        state.causes[event.grade.cause] += not failed_before
        known.outcome = event.grade
        set_status(state, known, "broken")


# -- very many at once -----------------------------------------------------------------------------

Stirred = dict[MachineId, MachineState]
"""Machines of which it is to be looked whether they are idle now.

The functions below do what the events' own do, in one go, for the ordinary ways of an attempt, but for two
things that only who acts on the state asks for: what was touched is not noted, and whether a machine is idle
is left to the caller. False: it is not that ordinary, and nothing was done.
"""


def ordinarily_started(state: RunState, at: Micros, event: ev.AttemptStarted, stirred: Stirred) -> bool:
    """The first attempt at a task, whose model calls nobody limits."""
    known, machine = state.tasks[event.task], state.machines[event.machine]
    task = known.task
    if known.status != "waiting" or known.retrying or task.set_up or event.allowance is not NO_LIMIT:
        return False
    if state.fresh[known.lane]:
        return False
    id, counts = event.attempt, state.counts
    state.attempts[id] = AttemptState(id, task.id, machine.id, at)
    known.attempts = [*known.attempts, id]  # with room for no more: there may be very many
    known.status = "running"
    counts["waiting"] -= 1
    counts["running"] += 1
    machine.open[id] = None
    machine.attempts += 1
    machine.lane = known.lane
    stirred[machine.id] = machine
    return True


def ordinarily_ended(state: RunState, at: Micros, event: ev.AttemptEnded, stirred: Stirred) -> bool:
    """It is scored, while its task waits for nothing else and all machines are heard."""
    id, outcome = event.attempt, event.outcome
    if type(outcome) is not Scored or event.metered is not None:
        return False
    if state.orphans or state.silent:
        return False
    attempt = state.attempts[id]
    known, machine = state.tasks[attempt.task], state.machines[attempt.machine]
    offer = machine.offer
    if known.status != "running" or offer.life.queues or offer.place in state.shaky:
        return False
    attempt.ended_at, attempt.outcome = at, outcome
    attempt.seconds = seconds = event.seconds
    if event.node:
        attempt.node = event.node
    machine.open.pop(id, None)
    if machine.phase == "ready" and machine.silent_since is None:
        state.heard_at = at
    machine.uncollected[id] = None
    machine.streak = 0
    if state.suspects:
        state.suspects.pop(machine.id, None)
    machine.scored += 1
    attempt_worked(state, machine)
    known.outcome, known.decided_by, known.status = outcome, id, "scored"
    counts = state.counts
    counts["running"] -= 1
    counts["scored"] += 1
    state.unsettled[state.kind(known.task)] -= 1
    state.uncollected += 1
    state.proofs += 1
    state.proof_seconds += seconds
    state.succeeded += outcome.success
    stirred[machine.id] = machine
    return True


def ordinarily_collected(state: RunState, at: Micros, event: ev.AttemptCollected, stirred: Stirred) -> bool:
    """All that it left is home, and nobody counted its model calls."""
    attempt = state.attempts[event.attempt]
    if event.metered is not None or attempt.metered is not None or attempt.allowance is not NO_LIMIT:
        return False
    if isinstance(attempt.outcome, Answered):
        return False
    attempt.collected = event.collected
    if event.superseded is not None:
        attempt.superseded = event.superseded
    state.uncollected -= 1
    state.machines[attempt.machine].uncollected.pop(event.attempt, None)
    return True
