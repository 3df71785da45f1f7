"""Which task goes to which machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from evalfleet.events import AttemptStarted, Event
from evalfleet.model import MachineId, Micros, Offer, TaskId
from evalfleet.names import attempt_id
from evalfleet.state import RunState, TaskState

LOOK_AHEAD = 16
"""How many idle machines and due retries are weighed against each other at once.

More than the attempts a task may have, so that not all of them can be machines it broke on.
"""


def hand_out(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give one waiting task to one idle machine."""
    if not state.idle or not state.waiting or state.stop is not None:
        return []
    static = len(state.fresh) > 1
    for machine in islice(state.idle, None if static else LOOK_AHEAD):
        task = _pick(state, now, machine)
        if task is not None:
            n = len(state.tasks[task].attempts)
            return [AttemptStarted(attempt_id(task, n), task, machine)]
    return []


def _pick(state: RunState, now: Micros, machine: MachineId) -> TaskId | None:
    """A retry that is due first, then the next fresh task of the machine's lane."""
    for not_before, _, task in islice(state.retries, LOOK_AHEAD):
        if not_before > now:
            break
        if _may_retry_on(state, state.tasks[task], machine):
            return task
    lane = state.machines[machine].lane if len(state.fresh) > 1 else 0
    if lane < len(state.fresh) and state.fresh[lane]:
        return state.fresh[lane][0][2]
    return None


def _may_retry_on(state: RunState, known: TaskState, machine: MachineId) -> bool:
    """A task goes to a machine that it broke on only when there is no other."""
    if machine not in known.broken_on:
        return True
    return sum(m in state.ready for m in known.broken_on) >= len(state.ready)
