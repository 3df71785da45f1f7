"""What outcomes at a place change in its circuit: how it has done of late, and which of its machines take
work."""

from __future__ import annotations

from evalfleet import events as ev
from evalfleet.model import Broken, Cause, Micros, seconds_between

from .nouns import RECENT, Circuit, MachinePhase, MachineState, RunState, TaskState

SHAKY = 3
"""With so many failures among its newest outcomes a place is looked at."""
PROBATION = 2
"""A place that was left and is trusted again begins with so many failures."""
SPARE_MACHINES = 10
"""A place may lose so many machines, twice as many as there are workers, and as many as tasks were scored."""
_SAYS_NOTHING = frozenset({Cause.CANCELLED, Cause.MODEL, Cause.GRADING, Cause.EVICTED})
"""Causes of broken attempts that say nothing about their place. An evicted machine is counted itself."""


def replaceable(state: RunState, circuit: Circuit) -> int:
    """How many machines of a place may fail before no more are replaced."""
    return SPARE_MACHINES + 2 * state.limits.workers + circuit.proofs


def refresh_idle(state: RunState, machine: MachineState) -> None:
    id = machine.id
    heard_and_ready = machine.phase == "ready" and machine.silent_since is None
    if heard_and_ready and len(machine.open) < state.plan.slots and id not in state.draining:
        state.idle[id] = None
    else:
        state.idle.pop(id, None)


def circuit_changed(state: RunState, at: Micros, event: ev.CircuitChanged) -> None:
    circuit = state.circuits.setdefault(event.place, Circuit())
    circuit.phase, circuit.detail, circuit.until = event.phase, event.detail, event.until
    circuit.permanent = event.permanent
    circuit.history.append((at, event))
    circuit.probe, circuit.probe_failed, circuit.probe_worked = None, "", 0
    match event.phase:
        case "open":
            circuit.opened += 1
            circuit.owed = 0 if event.permanent else circuit.most
            for machine in circuit.machines:
                _drain(state, state.machines[machine])
            # what was counted there says nothing about the places that come next
            state.same_failures.clear()
            state.canary_breaks.clear()
            state.first_broken.clear()
        case "closed":
            circuit.recent = [True] * PROBATION if circuit.opened else []
            circuit.opened = 0
            circuit.never_ready, circuit.wasted_s = 0, 0.0
            for machine in circuit.machines:
                _release(state, state.machines[machine])
        case "draining":
            pass
    _look(state, event.place, circuit)


def close_all(state: RunState) -> None:
    """Begin anew: somebody has taken the run up again, and may have mended what was wrong."""
    for place, circuit in state.circuits.items():
        fresh = Circuit(machines=circuit.machines, most=len(circuit.machines), history=circuit.history)
        state.circuits[place] = fresh
        for machine in fresh.machines:
            _release(state, state.machines[machine])
    state.shaky.clear()


def _drain(state: RunState, machine: MachineState) -> None:
    state.draining[machine.id] = None
    refresh_idle(state, machine)


def _release(state: RunState, machine: MachineState) -> None:
    if machine.steered is None or machine.steered.verb != "drain":
        state.draining.pop(machine.id, None)
        refresh_idle(state, machine)


def machine_joined(state: RunState, machine: MachineState) -> None:
    """It was asked for. Of a place whose circuit is open it is the one by which that is tried."""
    circuit = state.circuits.setdefault(machine.offer.place, Circuit())
    circuit.machines[machine.id] = None
    circuit.most = max(circuit.most, len(circuit.machines))
    if circuit.phase == "open":
        circuit.probe = machine.id
    elif circuit.owed:
        circuit.owed -= 1
        _look(state, machine.offer.place, circuit)


def machine_works(state: RunState, machine: MachineState) -> None:
    """It is ready. One that was mended meanwhile takes no work at a place that was left."""
    circuit = state.circuits[machine.offer.place]
    circuit.never_ready, circuit.wasted_s = 0, 0.0
    if circuit.phase == "open" and circuit.probe != machine.id:
        state.draining[machine.id] = None


def machine_left(state: RunState, machine: MachineState) -> None:
    circuit = state.circuits[machine.offer.place]
    circuit.machines.pop(machine.id, None)
    if circuit.probe == machine.id:
        circuit.probe = None


def machine_failed(
    state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned, was: MachinePhase
) -> None:
    """Count it, unless it did nothing wrong, or its place is only short of such machines: blocks are for
    that."""
    circuit = state.circuits[machine.offer.place]
    if event.cause is None or event.cause is Cause.CANCELLED:
        return
    if event.cause is Cause.EVICTED and machine.offer.spot:
        return
    if event.cause is Cause.PROVISIONING:
        if event.scope == "place" and event.permanent:
            circuit.refused = event.detail
        elif event.scope not in ("place", "machine"):
            if circuit.probe == machine.id:
                circuit.probe_failed = event.detail
            return
    circuit.failed_machines += event.cause is not Cause.PROVISIONING  # then there was none
    if was != "ready":
        circuit.never_ready += 1
        circuit.wasted_s += seconds_between(machine.billed_at, at)
    _failed(state, at, machine, circuit, f"{event.cause}: {event.detail}")


def attempt_broke(state: RunState, at: Micros, machine: MachineState, outcome: Broken) -> None:
    """Count it, unless its machine was given up: that is one failure, and was counted."""
    if outcome.cause in _SAYS_NOTHING or machine.phase != "ready":
        return
    circuit = state.circuits[machine.offer.place]
    _failed(state, at, machine, circuit, f"{outcome.cause}: {outcome.detail}")
    if circuit.phase == "draining":
        _drain(state, machine)


def attempt_worked(state: RunState, machine: MachineState) -> None:
    place = machine.offer.place
    circuit = state.circuits[place]
    circuit.proofs += 1
    circuit.outcomes += 1
    recent = circuit.recent
    if len(recent) >= RECENT:
        del recent[0]
    recent.append(False)
    if circuit.probe == machine.id:
        circuit.probe_worked += 1
    if place in state.shaky:
        _look(state, place, circuit)


def _failed(state: RunState, at: Micros, machine: MachineState, circuit: Circuit, why: str) -> None:
    if not any(circuit.recent):
        circuit.failing_since = at
    circuit.outcomes += 1
    circuit.failures += 1
    if len(circuit.recent) >= RECENT:
        del circuit.recent[0]
    circuit.recent.append(True)
    circuit.last_failure = why[:300]
    if circuit.probe == machine.id:
        circuit.probe_failed = circuit.last_failure
    _look(state, machine.offer.place, circuit)


def gave_up(state: RunState, known: TaskState) -> None:
    """Remember a task that broke for good, if it broke at one place only: that may be to blame.

    Who allows a single attempt means it, wherever it is made: a task could break itself for another try.
    """
    places = {state.machines[machine].offer.place for machine in known.broken_on}
    if len(places) == 1 and len(state.plan.places) > 1 and state.limits.attempts > 1:
        place = places.pop()
        state.circuits[place].gave_up[known.task.id] = None
        _look(state, place, state.circuits[place])


def _look(state: RunState, place: str, circuit: Circuit) -> None:
    """Keep the place among those about which something may be to decide, as long as that is so."""
    several = len(state.plan.places) > 1
    failing = sum(circuit.recent) >= SHAKY or circuit.phase != "closed" or circuit.gave_up or circuit.wasted_s
    used_up = circuit.failed_machines > replaceable(state, circuit)
    if used_up or (several and (failing or circuit.owed or circuit.refused)):
        state.shaky[place] = None
    else:
        state.shaky.pop(place, None)
