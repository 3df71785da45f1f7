"""Which task goes to which machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from evalfleet.events import AttemptStarted, Event, MachineCondemned
from evalfleet.model import MachineId, Micros, Needs, Offer, TaskId
from evalfleet.names import attempt_id
from evalfleet.schedules import is_static
from evalfleet.state import MachineState, RunState, TaskState

from .allowances import LOOK_AHEAD, allowance_for, at_once, needs_more
from .limits import outlives

NEARLY = 0.5
"""A task that takes this part of another one's time, or more, may go before it."""


def hand_out(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give one waiting task to one idle machine."""
    if not state.idle or not state.waiting or state.stop is not None or state.paused is not None:
        return []
    most = at_once(state)
    if allowance_for(state) is None or (most is not None and state.running >= most):
        return []
    unlike, spare = len(state.fresh) > 1, surplus(state)
    idle = (machine for machine in state.idle if machine not in spare)
    for machine in islice(idle, None if unlike else LOOK_AHEAD):
        task = _pick(state, now, machine)
        allowance = None if task is None else allowance_for(state, task)
        if task is not None and allowance is not None:
            n = len(state.tasks[task].attempts)
            return [AttemptStarted(attempt_id(task, n), task, machine, allowance)]
    return []


def surplus(state: RunState) -> list[MachineId]:
    """Machines beyond the workers that somebody wants now: they end what they run, and go."""
    if state.live <= state.limits.workers:
        return []
    return list(state.ready)[max(0, state.limits.workers - len(state.coming)) :]


def _pick(state: RunState, now: Micros, machine: MachineId) -> TaskId | None:
    """Return the task to hand out: a retry that is due, else the next fresh task of the machine's lane.

    A task that used up its allowance comes last: it may cost as much as many others.
    """
    known = state.machines[machine]
    dear: TaskId | None = None
    for not_before, _, task in islice(state.retries, LOOK_AHEAD):
        if not_before > now:
            break
        if not _may_retry_on(state, state.tasks[task], machine) or not _fits(state, now, task, known):
            continue
        if not needs_more(state, task):
            return task
        if dear is None and allowance_for(state, task) is not None:
            dear = task
    fresh = (task for task in _fresh(state, known) if _fits(state, now, task, known))
    return (_nearest(state, known, fresh) if known.set_up else next(fresh, None)) or dear


def _nearest(state: RunState, machine: MachineState, tasks: Iterator[TaskId]) -> TaskId | None:
    """The first of the tasks, or one after it that the machine is set up for, if it is not much shorter: the
    longest go first, or all others wait for them at the end."""
    first = next(tasks, None)
    if first is None:
        return None
    known = state.tasks[first]
    if known.task.set_up in machine.set_up or not known.task.set_up:
        return first
    others = ((task, state.tasks[task]) for task in tasks)
    near = (task for task, each in others if each.task.set_up in machine.set_up and _as_long(each, known))
    return next(near, first)


def _as_long(one: TaskState, other: TaskState) -> bool:
    return (one.task.weight_s or 0.0) >= NEARLY * (other.task.weight_s or 0.0)


def _fresh(state: RunState, machine: MachineState) -> Iterator[TaskId]:
    """The next tasks of the machine's lanes: the first is the one to take, if there is time for it."""
    for lane in _lanes(state, machine):
        for _, _, task in islice(state.fresh[lane], LOOK_AHEAD):
            known = state.tasks[task]
            if known.status == "waiting" and not known.retrying:
                yield task


def _lanes(state: RunState, machine: MachineState) -> Sequence[int]:
    """Return where the machine takes its tasks from. One that has more than others takes what needs it first.

    Under a static schedule it goes on with the lane that it has begun, and then with one that nobody has.
    """
    if has_lanes(state):
        return (machine.lane,) if has_tasks_of_its_own(state, machine) else free_lanes(state)[:1]
    return [state.kinds[kind] for kind in most_first(state) if does(machine.offer, kind)]


def has_lanes(state: RunState) -> bool:
    """Return True if the schedule is static: each lane of tasks is one machine's."""
    return len(state.fresh) > 1 and is_static(state.plan.schedule)


def has_tasks_of_its_own(state: RunState, machine: MachineState) -> bool:
    """Return True if fresh tasks are left in the lane that the machine has begun."""
    return machine.lane >= 0 and bool(state.fresh[machine.lane])


def free_lanes(state: RunState) -> list[int]:
    """Return the lanes with fresh tasks that no machine has begun, under a static schedule."""
    taken = {state.machines[machine].lane for machine in state.ready}
    return [lane for lane, tasks in enumerate(state.fresh) if tasks and lane not in taken]


def most_first(state: RunState) -> Sequence[Needs | None]:
    """The kinds of machines that tasks need, that which is hardest to have first."""
    if len(state.kinds) == 1:
        return (None,)
    return sorted(state.kinds, key=lambda kind: _rank(kind or Needs()), reverse=True)


def _rank(needs: Needs) -> tuple[float, ...]:
    return (needs.gpus, needs.nested_virtualization, needs.memory_gb, needs.cpus, needs.disk_gb)


def does(offer: Offer, kind: Needs | None) -> bool:
    """Do machines of the offer have what tasks of this kind need?"""
    return kind is None or offer.has.covers(kind)


def live_that_do(state: RunState, kind: Needs | None) -> int:
    """How many machines take, or will take, tasks of this kind."""
    if kind is None:
        return state.live
    return sum(does(state.machines[machine].offer, kind) for machine in (*state.coming, *state.ready))


def _fits(state: RunState, now: Micros, task: TaskId, machine: MachineState) -> bool:
    known = state.tasks[task].task
    return does(machine.offer, state.kind(known)) and not outlives(state, now, known, machine)


def let_go_short_lived(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that has no time left for anything that waits makes room for another one."""
    if not state.idle or not state.waiting or state.stop is not None or state.paused is not None:
        return []
    for machine in islice(state.idle, LOOK_AHEAD):
        known = state.machines[machine]
        if known.open or not known.offer.bounded:
            continue
        retries = (task for _, _, task in islice(state.retries, LOOK_AHEAD))
        does_for = (task for task in retries if does(known.offer, state.kind(state.tasks[task].task)))
        waiting = [*does_for, *_fresh(state, known)]
        if waiting and not any(_fits(state, now, task, known) for task in waiting):
            return [MachineCondemned(machine, "it has no time left for another task")]
    return []


def let_go_unfit(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that does for none of the tasks that are left goes, unless it is free and in nobody's way."""
    if len(state.kinds) == 1 or not state.idle or not state.waiting or state.stop is not None:
        return []
    left = [kind for kind in state.kinds if state.unsettled[kind] > 0]
    in_the_way = any(not live_that_do(state, kind) for kind in left)
    for machine in state.idle:
        known = state.machines[machine]
        costs = known.offer.cost.usd_per_hour > 0
        if not known.open and (costs or in_the_way) and not any(does(known.offer, kind) for kind in left):
            return [MachineCondemned(machine, "it has not what the tasks that are left need")]
    return []


def _may_retry_on(state: RunState, known: TaskState, machine: MachineId) -> bool:
    """A task goes to a machine that it broke on only when there is no other that does for it."""
    if machine not in known.broken_on:
        return True
    if len(state.kinds) == 1:
        return sum(m in state.ready for m in known.broken_on) >= len(state.ready)
    kind = state.kind(known.task)
    return all(m in known.broken_on for m in state.ready if does(state.machines[m].offer, kind))
