"""Which task goes to which machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from evalfleet.events import AttemptStarted, Event, MachineCondemned
from evalfleet.model import MachineId, Micros, Offer, TaskId
from evalfleet.names import attempt_id
from evalfleet.state import MachineState, RunState, TaskState

from .allowances import at_once, first_allowance
from .limits import outlives

LOOK_AHEAD = 16
"""How many idle machines and due retries are weighed against each other at once.

More than the attempts a task may have, so that not all of them can be machines it broke on.
"""


def hand_out(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give one waiting task to one idle machine."""
    if not state.idle or not state.waiting or state.stop is not None or state.paused is not None:
        return []
    most = at_once(state)
    allowance = first_allowance(state)
    if allowance is None or (most is not None and state.running >= most):
        return []
    static, spare = len(state.fresh) > 1, surplus(state)
    idle = (machine for machine in state.idle if machine not in spare)
    for machine in islice(idle, None if static else LOOK_AHEAD):
        task = _pick(state, now, machine)
        if task is not None:
            n = len(state.tasks[task].attempts)
            return [AttemptStarted(attempt_id(task, n), task, machine, allowance)]
    return []


def surplus(state: RunState) -> list[MachineId]:
    """Machines beyond the workers that somebody wants now: they end what they run, and go."""
    if state.live <= state.limits.workers:
        return []
    return list(state.ready)[max(0, state.limits.workers - len(state.coming)) :]


def _pick(state: RunState, now: Micros, machine: MachineId) -> TaskId | None:
    """The task to hand out: a retry that is due, else the next fresh task of the machine's lane."""
    known = state.machines[machine]
    for not_before, _, task in islice(state.retries, LOOK_AHEAD):
        if not_before > now:
            break
        if _may_retry_on(state, state.tasks[task], machine) and _fits(state, now, task, known):
            return task
    return next((task for task in _fresh(state, known) if _fits(state, now, task, known)), None)


def _fresh(state: RunState, machine: MachineState) -> Iterator[TaskId]:
    """The next tasks of the machine's lane: the first is the one to take, if there is time for it."""
    lane = machine.lane if len(state.fresh) > 1 else 0
    if lane < len(state.fresh):
        for _, _, task in islice(state.fresh[lane], LOOK_AHEAD):
            known = state.tasks[task]
            if known.status == "waiting" and not known.retrying:
                yield task


def _fits(state: RunState, now: Micros, task: TaskId, machine: MachineState) -> bool:
    return not outlives(state, now, state.tasks[task].task, machine)


def let_go_short_lived(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that has no time left for anything that waits makes room for another one."""
    if not state.idle or not state.waiting or state.stop is not None or state.paused is not None:
        return []
    for machine in islice(state.idle, LOOK_AHEAD):
        known = state.machines[machine]
        if known.open or not known.offer.bounded:
            continue
        retries = (task for _, _, task in islice(state.retries, LOOK_AHEAD))
        waiting = [*retries, *_fresh(state, known)]
        if waiting and not any(_fits(state, now, task, known) for task in waiting):
            return [MachineCondemned(machine, "it has no time left for another task")]
    return []


def _may_retry_on(state: RunState, known: TaskState, machine: MachineId) -> bool:
    """A task goes to a machine that it broke on only when there is no other."""
    if machine not in known.broken_on:
        return True
    return sum(m in state.ready for m in known.broken_on) >= len(state.ready)
