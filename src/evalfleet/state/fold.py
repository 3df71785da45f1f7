"""The fold: `apply` is the only way that a state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from evalfleet import events as ev
from evalfleet.model import Micros

from .attempts import attempt_collected, attempt_ended, attempt_started
from .machines import (
    machine_answered,
    machine_condemned,
    machine_deleted,
    machine_extended,
    machine_heard,
    machine_lease_set,
    machine_ready,
    machine_requested,
    machine_silent,
    machine_up,
)
from .nouns import RunState
from .run import (
    controller_started,
    run_ended,
    run_planned,
    run_resumed,
    stop_requested,
    tasks_planned,
    tasks_reopened,
)


def apply(state: RunState, at: Micros, event: ev.Event) -> None:
    """Make `event`, written at `at`, part of the state."""
    state.last_at = at
    state.events += 1
    _APPLY[type(event)](state, at, event)


def fold(records: Iterable[ev.Record]) -> RunState:
    state = RunState()
    for record in records:
        apply(state, record.at, record.event)
    return state


def accepts(state: RunState, event: ev.Event) -> bool:
    """Is this news still news? Effects report late; what a decision has overtaken is dropped."""
    match event:
        case ev.AttemptEnded(attempt):
            return state.attempts[attempt].outcome is None
        case ev.AttemptCollected(attempt):
            return state.attempts[attempt].collected is None
        case ev.MachineUp(machine):
            return state.machines[machine].phase == "requested"
        case ev.MachineReady(machine):
            return state.machines[machine].phase == "up"
        case ev.MachineSilent(machine):
            known = state.machines[machine]
            return known.phase == "ready" and known.silent_since is None
        case ev.MachineHeard(machine):
            known = state.machines[machine]
            return known.phase == "ready" and known.silent_since is not None
        case ev.MachineAnswered(machine):
            return machine in state.audible and bool(state.silent)
        case ev.MachineCondemned(machine):
            return state.machines[machine].phase in ("requested", "up", "ready")
        case ev.MachineLeaseSet(machine):
            return state.machines[machine].phase in ("requested", "up", "ready")
        case ev.MachineDeleted(machine):
            return state.machines[machine].phase == "condemned"
        case ev.StopRequested(_, _, drain):
            return state.ended_at is None and (state.stop is None or (state.stop.drain and not drain))
        case _:
            return True


_APPLY: dict[type, Callable[[RunState, Micros, Any], None]] = {
    ev.RunPlanned: run_planned,
    ev.TasksPlanned: tasks_planned,
    ev.ControllerStarted: controller_started,
    ev.MachineRequested: machine_requested,
    ev.MachineUp: machine_up,
    ev.MachineReady: machine_ready,
    ev.MachineSilent: machine_silent,
    ev.MachineHeard: machine_heard,
    ev.MachineAnswered: machine_answered,
    ev.MachineExtended: machine_extended,
    ev.MachineLeaseSet: machine_lease_set,
    ev.MachineCondemned: machine_condemned,
    ev.MachineDeleted: machine_deleted,
    ev.AttemptStarted: attempt_started,
    ev.AttemptEnded: attempt_ended,
    ev.AttemptCollected: attempt_collected,
    ev.TasksReopened: tasks_reopened,
    ev.RunResumed: run_resumed,
    ev.StopRequested: stop_requested,
    ev.RunEnded: run_ended,
}
