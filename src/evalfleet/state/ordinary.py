"""The ordinary ways of an attempt, in one go each: for whoever folds very many events at once.

Each function does what the event's own does in `attempts`, but for two things that only who acts on the state
asks for: what was touched is not noted, and whether a machine is idle is left to the caller, who is given the
machines in `stirred`. False: it is not that ordinary, and nothing was done.
"""

from __future__ import annotations

from evalfleet import events as ev
from evalfleet.model import NO_LIMIT, Answered, MachineId, Micros, Scored

from .nouns import RECENT, AttemptState, MachineState, RunState

Stirred = dict[MachineId, MachineState]


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
    stirred[machine.id] = machine
    return True


def ordinarily_ended(state: RunState, at: Micros, event: ev.AttemptEnded, stirred: Stirred) -> bool:
    """It is scored, while its task waits for nothing else and all machines are heard."""
    id, outcome = event.attempt, event.outcome
    if type(outcome) is not Scored or event.metered is not None:
        return False
    if state.wanting or state.orphans or state.silent:
        return False
    attempt = state.attempts[id]
    known, machine = state.tasks[attempt.task], state.machines[attempt.machine]
    offer = machine.offer
    place = offer.place
    circuit = state.circuits[place]
    if known.status != "running" or attempt.untold or circuit.probe is not None or offer.queues:
        return False
    if place in state.shaky:
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
    circuit.proofs += 1
    circuit.outcomes += 1
    recent = circuit.recent
    if len(recent) >= RECENT:
        del recent[0]
    recent.append(False)
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
