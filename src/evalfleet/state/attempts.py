"""What attempts change."""

from __future__ import annotations

from evalfleet import events as ev
from evalfleet.model import CAUSES, Broken, Cause, Limits, Micros, Scored, after

from .machines import heard, refresh_idle
from .nouns import AttemptState, MachineState, RunState, TaskState
from .queue import dequeue, enqueue, set_status


def attempt_started(state: RunState, at: Micros, event: ev.AttemptStarted) -> None:
    known, machine = state.tasks[event.task], state.machines[event.machine]
    state.attempts[event.attempt] = AttemptState(event.attempt, event.task, event.machine, at)
    known.attempts.append(event.attempt)
    set_status(state, known, "running")
    dequeue(state, known)
    machine.open[event.attempt] = None
    machine.attempts += 1
    refresh_idle(state, machine)
    state.touched_attempts[event.attempt] = None


def attempt_ended(state: RunState, at: Micros, event: ev.AttemptEnded) -> None:
    attempt = state.attempts[event.attempt]
    attempt.ended_at, attempt.outcome = at, event.outcome
    attempt.seconds, attempt.node = event.seconds, event.node
    machine, known = state.machines[attempt.machine], state.tasks[attempt.task]
    machine.open.pop(event.attempt, None)
    if machine.phase == "ready" and machine.silent_since is None:
        heard(state, at, machine)
    machine.uncollected[event.attempt] = None
    state.uncollected += 1
    state.orphans.pop(event.attempt, None)
    if isinstance(event.outcome, Scored):
        _scored(state, attempt, machine, known, event.outcome)
    else:
        _broke(state, at, attempt, machine, known, event.outcome)
    refresh_idle(state, machine)
    state.touched_attempts[event.attempt] = None
    state.touched_machines[attempt.machine] = None


def _scored(
    state: RunState, attempt: AttemptState, machine: MachineState, known: TaskState, outcome: Scored
) -> None:
    machine.scored += 1
    machine.streak = 0
    state.suspects.pop(machine.id, None)
    known.outcome, known.decided_by = outcome, attempt.id
    set_status(state, known, "scored")
    state.succeeded += outcome.success
    state.scored_seconds += attempt.seconds


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
    if len(known.attempts) == 1 and not CAUSES[cause].free:
        state.first_broken[cause] += 1
    if cause is Cause.CANCELLED:
        enqueue(state, known, at)
        return
    _suspect(state, machine, cause)
    known.tries += 1
    known.used += not CAUSES[cause].free
    if machine.id not in known.broken_on:
        known.broken_on.append(machine.id)
    if known.used >= state.limits.attempts or known.tries >= state.limits.attempts_ceiling:
        known.outcome, known.decided_by = outcome, attempt.id
        set_status(state, known, "broken")
    else:
        enqueue(state, known, after(at, retry_delay_s(state.limits, known.tries)))


def retry_delay_s(limits: Limits, tries: int) -> float:
    """None before the first retry (it goes elsewhere), then doubling up to a cap."""
    if tries <= 1:
        return 0.0
    return min(limits.retry_cap_s, limits.retry_base_s * 2.0 ** (tries - 2))


def _suspect(state: RunState, machine: MachineState, cause: Cause) -> None:
    """Count failures in a row on one machine; the model's failures say nothing about it."""
    if cause is Cause.MODEL:
        return
    if machine.streak == 0:
        machine.streak_mark = state.scored
    machine.streak += 1
    if machine.streak >= state.limits.machine_streak and machine.phase == "ready":
        state.suspects[machine.id] = None


def attempt_collected(state: RunState, at: Micros, event: ev.AttemptCollected) -> None:
    attempt = state.attempts[event.attempt]
    attempt.collected, attempt.superseded = event.collected, event.superseded
    state.uncollected -= 1
    state.machines[attempt.machine].uncollected.pop(event.attempt, None)
    state.touched_attempts[event.attempt] = None
    state.touched_machines[attempt.machine] = None
