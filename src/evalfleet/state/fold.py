"""The fold: `apply` is the only way that a state changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evalfleet import events as ev
from evalfleet.errors import JournalForeign
from evalfleet.model import Micros

from .attempts import (
    Stirred,
    attempt_collected,
    attempt_ended,
    attempt_graded,
    attempt_started,
    budget_passed,
    ordinarily_collected,
    ordinarily_ended,
    ordinarily_started,
)
from .circuits import circuit_changed, refresh_idle
from .machines import (
    controller_started,
    machine_allocated,
    machine_answered,
    machine_condemned,
    machine_delete_refused,
    machine_deleted,
    machine_extended,
    machine_heard,
    machine_lease_set,
    machine_mending,
    machine_prepared,
    machine_queued,
    machine_ready,
    machine_requested,
    machine_silent,
    machine_starting,
    machine_step,
    machine_stopped,
    machine_stopping,
    machine_unreachable,
    machine_up,
)
from .nouns import MachinePhase, RunState, is_ungraded
from .run import (
    grading_failed,
    grading_requested,
    pool_planned,
    pool_resized,
    run_ended,
    run_planned,
    run_resumed,
    stop_requested,
    tasks_planned,
    tasks_reopened,
)
from .run_changes import objection, run_steered


def apply(state: RunState, at: Micros, event: ev.Event) -> None:
    """Make `event`, written at `at`, part of the state."""
    state.last_at = at
    state.events += 1
    _APPLY[type(event)](state, at, event)


def fold(records: Iterable[ev.Record]) -> RunState:
    """The state that the records lead to. Raises JournalForeign when one of them does not fit."""
    state = RunState()
    for record in records:
        apply_record(state, record)
    return state


def apply_record(state: RunState, record: ev.Record) -> None:
    """`apply` for what was read: what speaks of things that nobody recorded is damage, not news."""
    try:
        apply(state, record.at, record.event)
    except LookupError as err:
        raise _damaged(state, record.seq, record.event, err) from err


def apply_all(state: RunState, ats: Sequence[Micros], events: Sequence[ev.Event]) -> None:
    """`apply_record` for very many events that follow the state's, written at `ats`: it takes half the time.

    What they touched is not noted: it is for who looks at the state, and does not act on it.
    """
    stirred: Stirred = {}
    before = state.events
    for seq, (at, event) in enumerate(zip(ats, events, strict=True), before + 1):
        kind = type(event)
        ordinarily = _ORDINARILY.get(kind)
        try:
            if ordinarily is None or not ordinarily(state, at, event, stirred):
                _refresh(state, stirred)
                state.last_at, state.events = at, seq
                _APPLY[kind](state, at, event)
        except LookupError as err:
            _refresh(state, stirred)
            state.events = seq - 1  # those before it are part of the state
            raise _damaged(state, seq, event, err) from err
    if ats:
        state.last_at, state.events = ats[-1], before + len(ats)
    _refresh(state, stirred)
    state.touched_machines.clear()
    state.touched_attempts.clear()


def _refresh(state: RunState, stirred: Stirred) -> None:
    for machine in stirred.values():
        refresh_idle(state, machine)
    stirred.clear()


def _damaged(state: RunState, seq: int, event: ev.Event, err: LookupError) -> JournalForeign:
    what = f"event {seq} ({ev.kind_of(event)}) does not fit those before it ({err!r})"
    return JournalForeign(f"the journal of {state.plan.run!r} is damaged: {what}: restore it from a copy")


def accepts(state: RunState, event: ev.Event) -> bool:
    """Is this news still news? Effects report late; what a decision has overtaken is dropped."""
    match event:
        case ev.AttemptEnded() | ev.AttemptCollected() | ev.AttemptGraded():
            return _is_news_of(state, event)
        case ev.RunSteered() | ev.StopRequested():
            return not objection(state, event)
        case ev.MachineAnswered(machine):
            return machine in state.audible and bool(state.silent)
        case ev.MachineSilent(machine):
            return machine in state.audible
        case ev.MachineHeard(machine):
            return machine in state.silent
        case ev.MachineDeleteRefused(machine, detail):
            return state.machines[machine].phase == "condemned" and (
                state.machines[machine].delete_refused != detail
            )
        case ev.MachineAllocated(machine):
            known = state.machines[machine]
            return known.unstarted and known.phase in ("requested", "queued", "condemned")
        case (
            ev.MachineQueued()
            | ev.MachineUp()
            | ev.MachineStep()
            | ev.MachineReady()
            | ev.MachineUnreachable()
            | ev.MachineLeaseSet()
            | ev.MachineStopping()
            | ev.MachineStopped()
            | ev.MachineCondemned()
            | ev.MachineDeleted()
        ):
            return state.machines[event.machine].phase in _NEWS_IN[type(event)]
        case _:
            return True


AttemptNews = ev.AttemptEnded | ev.AttemptCollected | ev.AttemptGraded


def _is_news_of(state: RunState, event: AttemptNews) -> bool:
    attempt = state.attempts[event.attempt]
    match event:
        case ev.AttemptEnded():
            return attempt.outcome is None
        case ev.AttemptCollected():
            return attempt.collected is None
        case ev.AttemptGraded():
            return attempt.id in state.regrading or is_ungraded(state, attempt)


_LIVE: tuple[MachinePhase, ...] = ("requested", "queued", "allocated", "up", "ready")
_NEWS_IN: dict[type, tuple[MachinePhase, ...]] = {
    ev.MachineQueued: ("requested", "queued"),
    ev.MachineUp: ("requested", "allocated"),
    ev.MachineStep: ("allocated", "up", "mending"),
    ev.MachineReady: ("up", "mending"),
    ev.MachineUnreachable: ("requested", "allocated", "up", "mending"),
    ev.MachineLeaseSet: (*_LIVE, "mending"),
    ev.MachineStopping: (*_LIVE, "mending"),
    ev.MachineStopped: ("stopping",),
    ev.MachineCondemned: (*_LIVE, "mending", "stopping", "stopped"),
    ev.MachineDeleted: ("condemned",),
}
"""In which phases of its machine an event is news."""


_APPLY: dict[type, Callable[[RunState, Micros, Any], None]] = {
    ev.RunPlanned: run_planned,
    ev.TasksPlanned: tasks_planned,
    ev.PoolPlanned: pool_planned,
    ev.PoolResized: pool_resized,
    ev.ControllerStarted: controller_started,
    ev.MachineRequested: machine_requested,
    ev.MachineQueued: machine_queued,
    ev.MachineAllocated: machine_allocated,
    ev.MachineUp: machine_up,
    ev.MachineReady: machine_ready,
    ev.MachineStep: machine_step,
    ev.MachinePrepared: machine_prepared,
    ev.MachineStopping: machine_stopping,
    ev.MachineStopped: machine_stopped,
    ev.MachineStarting: machine_starting,
    ev.MachineSilent: machine_silent,
    ev.MachineHeard: machine_heard,
    ev.MachineAnswered: machine_answered,
    ev.MachineUnreachable: machine_unreachable,
    ev.MachineMending: machine_mending,
    ev.MachineExtended: machine_extended,
    ev.MachineLeaseSet: machine_lease_set,
    ev.MachineCondemned: machine_condemned,
    ev.MachineDeleteRefused: machine_delete_refused,
    ev.MachineDeleted: machine_deleted,
    ev.AttemptStarted: attempt_started,
    ev.BudgetPassed: budget_passed,
    ev.AttemptEnded: attempt_ended,
    ev.AttemptCollected: attempt_collected,
    ev.AttemptGraded: attempt_graded,
    ev.GradingFailed: grading_failed,
    ev.GradingRequested: grading_requested,
    ev.TasksReopened: tasks_reopened,
    ev.CircuitChanged: circuit_changed,
    ev.RunResumed: run_resumed,
    ev.StopRequested: stop_requested,
    ev.RunSteered: run_steered,
    ev.RunEnded: run_ended,
    ev.Ignored: lambda state, at, event: None,
}

_ORDINARILY: dict[type, Callable[[RunState, Micros, Any, Stirred], bool]] = {
    ev.AttemptStarted: ordinarily_started,
    ev.AttemptEnded: ordinarily_ended,
    ev.AttemptCollected: ordinarily_collected,
}
