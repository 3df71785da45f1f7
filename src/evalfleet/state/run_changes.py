"""What people change of a run while it goes on: which changes are possible, and what they do to the state."""

from __future__ import annotations

from msgspec import structs

from evalfleet import events as ev
from evalfleet.model import Limits, Micros

from .circuits import refresh_idle
from .nouns import MachineState, RunState


def objection(state: RunState, event: ev.RunSteered | ev.StopRequested) -> str:
    """Why this cannot be done now, in words that follow a name of the run; empty if it can."""
    if state.ended_at is not None:
        return "is over"
    if isinstance(event, ev.StopRequested):
        return "" if state.stop is None or (state.stop.drain and not event.drain) else "is stopping already"
    if state.stop is not None and event.verb != "end":
        return "is stopping already"
    match event.verb:
        case "pause":
            return "is paused already" if state.paused is not None else ""
        case "unpause":
            return "" if state.paused is not None else "is not paused"
        case "set":
            return _objection_to_limits(state, event)
        case "end":
            return _objection_to_end(state, event)
        case "drain" | "undrain" | "replace":
            return _objection_about_machine(state, event)
        case "restart":
            return "restarts no machine: drain it"


def _objection_to_limits(state: RunState, event: ev.RunSteered) -> str:
    pauses = event.workers == 0
    if limits_with(state, event) == state.limits:
        if pauses and state.paused is not None and event.release == state.paused.release:
            return "is paused already"
        if not pauses and (event.workers is None or state.paused is None):
            return "has these limits already"
    taken_usd = state.spend.taken_usd
    if event.budget_usd is not None and event.budget_usd < taken_usd:
        taken = f"has spent or reserved ${taken_usd:.2f} already"
        return f"{taken}: let machines go first (set --workers), or cancel it"
    return ""


def _objection_to_end(state: RunState, event: ev.RunSteered) -> str:
    attempt = state.attempts.get(event.attempt) if event.attempt is not None else None
    if attempt is None:
        return f"has no attempt {event.attempt}"
    if attempt.outcome is not None:
        return f"has ended its attempt {attempt.id} already"
    return f"is ending its attempt {attempt.id} already" if attempt.ending is not None else ""


def _objection_about_machine(state: RunState, event: ev.RunSteered) -> str:
    machine = state.machines.get(event.machine) if event.machine is not None else None
    if machine is None:
        return f"has no machine {event.machine}"
    known = f"has a machine {machine.name} that"
    kept_out = (machine.offer.place, machine.name) in state.kept_out
    if event.verb == "undrain":
        return "" if kept_out or _drained_by_user(state, machine) else f"{known} is not drained"
    if event.verb == "drain" and is_known_host(machine):
        return f"{known} is drained already" if kept_out else ""
    if machine.id in (state.draining if event.verb == "drain" else state.replacing):
        return f"{known} is {'draining' if event.verb == 'drain' else 'being replaced'} already"
    at_work = machine.id in state.coming or machine.id in state.ready or machine.id in state.mending
    return "" if at_work else f"{known} is leaving already"


def limits_with(state: RunState, event: ev.RunSteered) -> Limits:
    """Return the limits after the change. A pause leaves the number of workers as it was."""
    names = ("workers", "budget_usd", "attempts")
    changes = {name: value for name in names if (value := getattr(event, name))}
    return structs.replace(state.limits, **changes)


def run_steered(state: RunState, at: Micros, event: ev.RunSteered) -> None:
    state.steered.append((at, event))
    match event.verb:
        case "pause":
            state.paused = event
        case "unpause":
            state.paused = None
        case "set":
            if event.workers is not None:
                state.paused = event if event.workers == 0 else None
            if event.release:
                _drain_all(state, event)
            if event.budget_usd is not None:
                state.spend.percent_reported = 0
            state.limits = limits_with(state, event)
        case "end" if event.attempt is not None:
            state.attempts[event.attempt].ending = event
            state.touched_attempts[event.attempt] = None
        case "undrain" if event.machine is not None:
            _undrain(state, state.machines[event.machine])
        case "drain" | "replace" if event.machine is not None:
            machine = state.machines[event.machine]
            if event.verb == "drain" and is_known_host(machine):
                state.kept_out[machine.offer.place, machine.name] = event
                if machine.id not in state.coming and machine.id not in state.ready:
                    return
            machine.steered = event
            (state.draining if event.verb == "drain" else state.replacing)[event.machine] = None
            refresh_idle(state, machine)
        case _:
            pass


def _drain_all(state: RunState, event: ev.RunSteered) -> None:
    for id in (*state.coming, *state.ready, *state.mending):
        machine = state.machines[id]
        machine.steered = structs.replace(event, verb="drain", machine=id)
        state.draining[id] = None
        refresh_idle(state, machine)


def _undrain(state: RunState, machine: MachineState) -> None:
    state.kept_out.pop((machine.offer.place, machine.name), None)
    if _drained_by_user(state, machine):
        machine.steered = None
        if state.circuits[machine.offer.place].phase != "open":
            state.draining.pop(machine.id)
        refresh_idle(state, machine)


def _drained_by_user(state: RunState, machine: MachineState) -> bool:
    steered = machine.steered
    return machine.id in state.draining and steered is not None and steered.verb == "drain"


def is_known_host(machine: MachineState) -> bool:
    """Return True if the machine is a lent computer and its place has told which one."""
    return machine.offer.lent and machine.up_at is not None


def kept_out(state: RunState, place: str) -> tuple[str, ...]:
    """Return the names of the place's lent machines that were drained and given up."""
    return tuple(
        name
        for (where, name), event in state.kept_out.items()
        if where == place and event.machine not in state.coming and event.machine not in state.ready
    )


def steered_by(event: ev.RunSteered) -> str:
    """Who, and why if it was said: to follow what was done."""
    return f"by {event.by or 'somebody'}" + (f": {event.why}" if event.why else "")
