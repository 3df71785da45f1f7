"""What must be under way, given the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from evalfleet.model import AttemptId, MachineId, Micros
from evalfleet.state import AttemptState, MachineState, RunState

from .finish import grading_is_due


class BringUp(Struct, frozen=True):
    """Create the machine, wait until it is up, set it up, probe it."""

    machine: MachineId


class Extend(Struct, frozen=True):
    """Make the place end the machine at this time, not before."""

    machine: MachineId
    expires_at: Micros


class Listen(Struct, frozen=True):
    """The machine is silent: is it gone, or is it our own network? Ask it, and ask others."""

    machine: MachineId


class Mend(Struct, frozen=True):
    """The machine runs but cannot be reached: let its place do this to it, and set it up again."""

    machine: MachineId
    step: str


class RunAttempt(Struct, frozen=True):
    """Start the attempt, or attach to it, and wait for its end."""

    attempt: AttemptId


class EndAttempt(Struct, frozen=True):
    """Stop the attempt on its machine, because somebody asked for that."""

    attempt: AttemptId


class Collect(Struct, frozen=True):
    """Bring the attempt's artefacts home."""

    attempt: AttemptId


class Stop(Struct, frozen=True):
    """Stop the machine, and keep its disk."""

    machine: MachineId


class TearDown(Struct, frozen=True):
    """Delete the machine until it is gone for good."""

    machine: MachineId


class GradeAnswers(Struct, frozen=True):
    """Let the benchmark grade the answers of the run, all at once."""


Effect = BringUp | Extend | Listen | Mend | RunAttempt | EndAttempt | Collect | Stop | TearDown | GradeAnswers
THE_RUN: Literal["the run"] = "the run"
"""What is not about one machine or one attempt."""
Owner = MachineId | AttemptId | Literal["the run"]


def effects(state: RunState) -> dict[Owner, tuple[Effect, ...]]:
    """All that must be under way, by what it is about. Owners with nothing to do are left out."""
    wanted: dict[Owner, tuple[Effect, ...]] = {m.id: _of_machine(m) for m in state.machines.values()}
    wanted.update((a.id, _of_attempt(state, a)) for a in state.attempts.values())
    wanted[THE_RUN] = _of_run(state)
    return {owner: theirs for owner, theirs in wanted.items() if theirs}


def changed_effects(state: RunState) -> Iterator[tuple[Owner, tuple[Effect, ...]]]:
    """What must be under way for each owner that changed since the last call, also if that is nothing."""
    for machine in state.touched_machines:
        yield machine, _of_machine(state.machines[machine])
    for attempt in state.touched_attempts:
        yield attempt, _of_attempt(state, state.attempts[attempt])
    state.touched_machines.clear()
    state.touched_attempts.clear()
    yield THE_RUN, _of_run(state)


def _of_run(state: RunState) -> tuple[Effect, ...]:
    return (GradeAnswers(),) if grading_is_due(state) else ()


def _of_machine(machine: MachineState) -> tuple[Effect, ...]:
    match machine.phase:
        case "deleted" | "stopped":
            return ()
        case "stopping":
            return (Stop(machine.id),)
        case "condemned":
            # its artefacts first: nothing can be fetched from a machine that is gone
            busy = machine.open or machine.uncollected
            return () if busy else (TearDown(machine.id),)
        case "ready":
            own: tuple[Effect, ...] = () if machine.silent_since is None else (Listen(machine.id),)
        case "mending":
            own = (Mend(machine.id, machine.mends[-1]),)
        case _:
            own = (BringUp(machine.id),)
    if machine.expires_at != machine.lease_set:
        return (*own, Extend(machine.id, machine.expires_at))
    return own


def _of_attempt(state: RunState, attempt: AttemptState) -> tuple[Effect, ...]:
    if attempt.outcome is None:
        ready = state.machines[attempt.machine].phase == "ready"
        if not ready:
            return ()
        wanted: list[Effect] = [RunAttempt(attempt.id)]
        if attempt.ending is not None:
            wanted.append(EndAttempt(attempt.id))
        return tuple(wanted)
    return () if attempt.collected is not None else (Collect(attempt.id),)
