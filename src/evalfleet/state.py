"""The state of a run: a fold over its events. `apply` is the only way it changes.

State is mutable and indexed, so that no step costs time proportional to the number of tasks or
machines: every question that policy asks has its answer kept current here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from . import events as ev
from .cost import billed_usd
from .model import (
    FREE_CAUSES,
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Collected,
    Limits,
    MachineId,
    Micros,
    Offer,
    Outcome,
    Plan,
    RunStatus,
    Scored,
    Task,
    TaskId,
    after,
)

TaskStatus = Literal["waiting", "running", "scored", "broken", "held"]
MachinePhase = Literal["requested", "up", "ready", "condemned", "deleted"]
QueueEntry = tuple[float, int, TaskId]


@dataclass(slots=True, eq=False)
class TaskState:
    """One task: `index` is its place in the file, `used` and `tries` count since it was (re)opened."""

    task: Task
    index: int
    lane: int
    status: TaskStatus = "waiting"
    attempts: list[AttemptId] = field(default_factory=list[AttemptId])
    used: int = 0
    tries: int = 0
    broken_on: list[MachineId] = field(default_factory=list[MachineId])
    not_before: Micros = 0
    retrying: bool = False
    outcome: Outcome | None = None
    decided_by: AttemptId | None = None

    @property
    def entry(self) -> QueueEntry:
        """Longest expected first, then file order."""
        return (-(self.task.weight_s or 0.0), self.index, self.task.id)


@dataclass(slots=True, eq=False)
class AttemptState:
    id: AttemptId
    task: TaskId
    machine: MachineId
    started_at: Micros
    ended_at: Micros | None = None
    outcome: Outcome | None = None
    seconds: float = 0.0
    node: str = ""
    collected: Collected | None = None
    superseded: Outcome | None = None


@dataclass(slots=True, eq=False)
class MachineState:
    id: MachineId
    name: str
    lane: int
    offer: Offer
    requested_at: Micros
    expires_at: Micros
    lease_set: Micros
    renew_at: Micros
    phase: MachinePhase = "requested"
    address: str = ""
    node: str = ""
    up_at: Micros | None = None
    ready_at: Micros | None = None
    condemned_at: Micros | None = None
    gone_at: Micros | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    open: dict[AttemptId, None] = field(default_factory=dict[AttemptId, None])
    uncollected: dict[AttemptId, None] = field(default_factory=dict[AttemptId, None])
    attempts: int = 0
    scored: int = 0
    streak: int = 0
    streak_mark: int = 0
    silent_since: Micros | None = None
    cause: Cause | None = None
    detail: str = ""


@dataclass(slots=True)
class Deadline:
    """When a machine's life must be looked at again. Stale ones are dropped when they surface."""

    at: Micros
    machine: MachineId

    def __lt__(self, other: Deadline) -> bool:
        return (self.at, self.machine) < (other.at, other.machine)


@dataclass(slots=True)
class Block:
    """An offer that refused us: until when, how often in a row, and what it said."""

    until: Micros
    failures: int
    permanent: bool
    detail: str


@dataclass(slots=True, eq=False)
class RunState:
    plan: Plan = field(default_factory=lambda: Plan(run="", benchmark=""))
    limits: Limits = field(default_factory=Limits)
    total: int = 0
    planned_at: Micros = 0
    started_at: Micros = 0
    last_at: Micros = 0
    events: int = 0
    controllers: int = 0
    stop: ev.StopRequested | None = None
    status: RunStatus = "running"
    ended_at: Micros | None = None

    tasks: dict[TaskId, TaskState] = field(default_factory=dict[TaskId, TaskState])
    attempts: dict[AttemptId, AttemptState] = field(default_factory=dict[AttemptId, AttemptState])
    machines: dict[MachineId, MachineState] = field(default_factory=dict[MachineId, MachineState])

    # what waits: fresh tasks by lane (one lane unless the schedule is static), and retries by time
    fresh: list[list[QueueEntry]] = field(default_factory=list[list[QueueEntry]])
    retries: list[tuple[Micros, int, TaskId]] = field(default_factory=list[tuple[Micros, int, TaskId]])
    counts: Counter[str] = field(default_factory=Counter[str])

    # machines by what policy asks of them; dicts, because sets have no order to reproduce
    coming: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    ready: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    idle: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    busy: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    silent: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    suspects: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    heard_at: Micros = 0  # when a machine last gave proof that we reach machines
    stirred_at: Micros = 0  # when the silence of the whole fleet was last in doubt
    orphans: dict[AttemptId, None] = field(default_factory=dict[AttemptId, None])
    undeleted: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    free_lanes: list[int] = field(default_factory=list[int])
    deadlines: list[Deadline] = field(default_factory=list[Deadline])
    live_by_offer: Counter[str] = field(default_factory=Counter[str])
    blocks: dict[str, Block] = field(default_factory=dict[str, Block])

    # money: what deleted machines cost, and the most that the others can cost by their expiry
    closed_usd: float = 0.0
    reserved_usd: float = 0.0
    models_usd: float = 0.0

    # what reports and the stop rules count
    succeeded: int = 0
    scored_seconds: float = 0.0
    causes: Counter[str] = field(default_factory=Counter[str])
    first_broken: Counter[str] = field(default_factory=Counter[str])
    same_failures: Counter[str] = field(default_factory=Counter[str])
    last_failure: str = ""
    uncollected: int = 0

    touched_machines: dict[MachineId, None] = field(default_factory=dict[MachineId, None])
    touched_attempts: dict[AttemptId, None] = field(default_factory=dict[AttemptId, None])

    @property
    def scored(self) -> int:
        return self.counts["scored"]

    @property
    def broken(self) -> int:
        return self.counts["broken"]

    @property
    def waiting(self) -> int:
        return self.counts["waiting"]

    @property
    def running(self) -> int:
        return self.counts["running"]

    @property
    def live(self) -> int:
        """Machines that take or will take work."""
        return len(self.coming) + len(self.ready)


# -- the fold ------------------------------------------------------------------------------


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


# -- tasks ---------------------------------------------------------------------------------


def _planned(state: RunState, at: Micros, event: ev.RunPlanned) -> None:
    state.plan, state.total = event.plan, event.total
    state.planned_at = state.started_at = at
    _set_limits(state, event.plan.limits)
    lanes = 1 if event.plan.schedule == "dynamic" else max(1, event.plan.limits.workers)
    state.fresh = [[] for _ in range(lanes)]


def _set_limits(state: RunState, limits: Limits) -> None:
    state.limits = limits
    taken = {state.machines[m].lane for m in (*state.coming, *state.ready)}
    state.free_lanes = [lane for lane in range(limits.workers) if lane not in taken]


def _tasks_planned(state: RunState, at: Micros, event: ev.TasksPlanned) -> None:
    for task in event.tasks:
        index = len(state.tasks)
        known = TaskState(task, index, lane_of(state.plan.schedule, index, state.total, len(state.fresh)))
        state.tasks[task.id] = known
        state.counts["waiting"] += 1
        heapq.heappush(state.fresh[known.lane], known.entry)


def lane_of(schedule: str, index: int, total: int, lanes: int) -> int:
    """Which worker a static schedule gives the task to: dealt out in turn, or contiguous slices."""
    match schedule:
        case "round-robin":
            return index % lanes
        case "slices":
            return index * lanes // max(1, total)
        case _:
            return 0


def _set_status(state: RunState, known: TaskState, status: TaskStatus) -> None:
    state.counts[known.status] -= 1
    state.counts[status] += 1
    known.status = status


def _enqueue(state: RunState, known: TaskState, not_before: Micros) -> None:
    """Back into the queue. Whatever has been tried goes to the retries, which are served first."""
    _set_status(state, known, "waiting")
    known.not_before = not_before
    known.retrying = bool(known.attempts)
    if known.retrying:
        insort(state.retries, (not_before, known.index, known.task.id))
    else:
        heapq.heappush(state.fresh[known.lane], known.entry)


def _dequeue(state: RunState, known: TaskState) -> None:
    if known.retrying:
        entry = (known.not_before, known.index, known.task.id)
        del state.retries[bisect_left(state.retries, entry)]
        known.retrying = False
    else:
        _trim_fresh(state, state.fresh[known.lane])


def _trim_fresh(state: RunState, heap: list[QueueEntry]) -> None:
    while heap and (state.tasks[heap[0][2]].status != "waiting" or state.tasks[heap[0][2]].retrying):
        heapq.heappop(heap)


# -- attempts ------------------------------------------------------------------------------


def _attempt_started(state: RunState, at: Micros, event: ev.AttemptStarted) -> None:
    known, machine = state.tasks[event.task], state.machines[event.machine]
    state.attempts[event.attempt] = AttemptState(event.attempt, event.task, event.machine, at)
    known.attempts.append(event.attempt)
    _set_status(state, known, "running")
    _dequeue(state, known)
    _stir(state, at)
    machine.open[event.attempt] = None
    machine.attempts += 1
    _refresh_idle(state, machine)
    state.touched_attempts[event.attempt] = None


def _attempt_ended(state: RunState, at: Micros, event: ev.AttemptEnded) -> None:
    attempt = state.attempts[event.attempt]
    attempt.ended_at, attempt.outcome = at, event.outcome
    attempt.seconds, attempt.node = event.seconds, event.node
    machine, known = state.machines[attempt.machine], state.tasks[attempt.task]
    machine.open.pop(event.attempt, None)
    if machine.phase == "ready" and machine.silent_since is None:
        state.heard_at = at
    machine.uncollected[event.attempt] = None
    state.uncollected += 1
    state.orphans.pop(event.attempt, None)
    if isinstance(event.outcome, Scored):
        _scored(state, attempt, machine, known, event.outcome)
    else:
        _broke(state, at, attempt, machine, known, event.outcome)
    _refresh_idle(state, machine)
    state.touched_attempts[event.attempt] = None
    state.touched_machines[attempt.machine] = None


def _scored(
    state: RunState, attempt: AttemptState, machine: MachineState, known: TaskState, outcome: Scored
) -> None:
    machine.scored += 1
    machine.streak = 0
    state.suspects.pop(machine.id, None)
    state.models_usd += outcome.cost_usd or 0.0
    known.outcome, known.decided_by = outcome, attempt.id
    _set_status(state, known, "scored")
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
    if len(known.attempts) == 1 and cause not in FREE_CAUSES:
        state.first_broken[cause] += 1
    if cause is Cause.CANCELLED:
        _enqueue(state, known, at)
        return
    _suspect(state, machine, cause)
    known.tries += 1
    known.used += cause not in FREE_CAUSES
    if machine.id not in known.broken_on:
        known.broken_on.append(machine.id)
    if known.used >= state.limits.attempts or known.tries >= state.limits.attempts_ceiling:
        known.outcome, known.decided_by = outcome, attempt.id
        _set_status(state, known, "broken")
    else:
        _enqueue(state, known, after(at, retry_delay_s(state.limits, known.tries)))


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


def _attempt_collected(state: RunState, at: Micros, event: ev.AttemptCollected) -> None:
    attempt = state.attempts[event.attempt]
    attempt.collected, attempt.superseded = event.collected, event.superseded
    state.uncollected -= 1
    state.machines[attempt.machine].uncollected.pop(event.attempt, None)
    state.touched_attempts[event.attempt] = None
    state.touched_machines[attempt.machine] = None


# -- machines ------------------------------------------------------------------------------


def _machine_requested(state: RunState, at: Micros, event: ev.MachineRequested) -> None:
    machine = MachineState(
        event.machine, event.name, event.lane, event.offer, at, event.expires_at, event.expires_at, 0
    )
    state.machines[event.machine] = machine
    state.coming[event.machine] = None
    state.undeleted[event.machine] = None
    _take_lane(state, event.lane)
    state.live_by_offer[event.offer.key] += 1
    state.reserved_usd += _reservation(machine)
    _set_renewal(state, machine, at)
    state.touched_machines[event.machine] = None


def _take_lane(state: RunState, lane: int) -> None:
    if state.free_lanes and state.free_lanes[0] == lane:
        heapq.heappop(state.free_lanes)
    elif lane in state.free_lanes:  # static schedules only: they may need another lane than the lowest
        state.free_lanes.remove(lane)
        heapq.heapify(state.free_lanes)


def _reservation(machine: MachineState) -> float:
    return billed_usd(machine.offer, machine.requested_at, machine.expires_at)


RENEWAL_LEAD_S = 900.0


def _set_renewal(state: RunState, machine: MachineState, at: Micros) -> None:
    """When to look at the machine's life again: some time before it must be deleted to be gone in time.

    A machine that cannot be extended is looked at again and again, each time a quarter of what is left
    ahead, so that it is used to the end.
    """
    last_call = after(machine.expires_at, -machine.offer.teardown_s)
    lead = min((last_call - at) // 4, round(RENEWAL_LEAD_S * SECOND))
    machine.renew_at = max(at, last_call - lead)
    heapq.heappush(state.deadlines, Deadline(machine.renew_at, machine.id))


def _machine_up(state: RunState, at: Micros, event: ev.MachineUp) -> None:
    machine = state.machines[event.machine]
    machine.phase, machine.up_at = "up", at
    machine.address, machine.node = event.address, event.node
    state.blocks.pop(machine.offer.key, None)
    state.touched_machines[event.machine] = None


def _machine_ready(state: RunState, at: Micros, event: ev.MachineReady) -> None:
    machine = state.machines[event.machine]
    machine.phase, machine.ready_at = "ready", at
    machine.timings = dict(event.timings)
    state.coming.pop(event.machine, None)
    state.ready[event.machine] = None
    state.heard_at = at
    state.same_failures.clear()
    _refresh_idle(state, machine)
    state.touched_machines[event.machine] = None


def _refresh_idle(state: RunState, machine: MachineState) -> None:
    free = len(machine.open) < state.plan.slots
    if machine.phase == "ready" and free and machine.silent_since is None:
        state.idle[machine.id] = None
    else:
        state.idle.pop(machine.id, None)
    if machine.phase == "ready" and machine.open:
        state.busy[machine.id] = None
    else:
        state.busy.pop(machine.id, None)


def _stir(state: RunState, at: Micros) -> None:
    """A fleet of which nothing was heard may be about to answer: give all of it time to do so."""
    if state.silent and len(state.silent) >= len(state.busy):
        state.stirred_at = at


def _machine_silent(state: RunState, at: Micros, event: ev.MachineSilent) -> None:
    machine = state.machines[event.machine]
    machine.silent_since = event.since
    state.silent[event.machine] = None
    _refresh_idle(state, machine)


def _machine_heard(state: RunState, at: Micros, event: ev.MachineHeard) -> None:
    machine = state.machines[event.machine]
    _stir(state, at)
    state.heard_at = at
    machine.silent_since = None
    state.silent.pop(event.machine, None)
    _refresh_idle(state, machine)


def _machine_extended(state: RunState, at: Micros, event: ev.MachineExtended) -> None:
    machine = state.machines[event.machine]
    state.reserved_usd -= _reservation(machine)
    machine.expires_at = event.expires_at
    state.reserved_usd += _reservation(machine)
    _set_renewal(state, machine, at)
    _trim_deadlines(state)
    state.touched_machines[event.machine] = None


def _machine_lease_set(state: RunState, at: Micros, event: ev.MachineLeaseSet) -> None:
    state.machines[event.machine].lease_set = event.expires_at
    state.touched_machines[event.machine] = None


def _machine_condemned(state: RunState, at: Micros, event: ev.MachineCondemned) -> None:
    machine = state.machines[event.machine]
    was_ready = machine.phase == "ready"
    machine.phase, machine.condemned_at = "condemned", at
    machine.cause, machine.detail = event.cause, event.detail
    for index in (state.coming, state.ready, state.idle, state.busy, state.silent, state.suspects):
        index.pop(event.machine, None)
    if machine.lane < state.limits.workers:
        heapq.heappush(state.free_lanes, machine.lane)
    state.live_by_offer[machine.offer.key] -= 1
    for attempt in machine.open:
        state.orphans[attempt] = None
        state.touched_attempts[attempt] = None
    if event.cause is not None and not was_ready:
        _never_ready(state, at, machine, event)
    _trim_deadlines(state)
    state.touched_machines[event.machine] = None


FREE_OF_BLAME = frozenset({Cause.EVICTED, Cause.MACHINE_LOST, Cause.CONNECTION})
"""What says nothing about the next machine, when it keeps one from becoming ready."""


def _never_ready(state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned) -> None:
    """Count what keeps machines from becoming ready, and block offers that refuse us."""
    if event.cause in FREE_OF_BLAME:
        return
    if event.cause is not Cause.PROVISIONING:
        state.same_failures[f"{event.cause}:{event.step}"] += 1
        state.last_failure = event.detail
        return
    key = {
        "place": f"{machine.offer.place}/",
        "region": f"{machine.offer.place}/{machine.offer.region}/",
    }.get(event.scope, machine.offer.key)
    failures = state.blocks[key].failures + 1 if key in state.blocks else 1
    until = after(at, min(600.0, 15.0 * 2.0 ** (failures - 1)))
    state.blocks[key] = Block(until, failures, event.permanent, event.detail)


def _machine_deleted(state: RunState, at: Micros, event: ev.MachineDeleted) -> None:
    machine = state.machines[event.machine]
    # whoever looks late, its place ended the billing at its expiry
    machine.phase, machine.gone_at = "deleted", min(event.gone_at, at, machine.expires_at)
    state.undeleted.pop(event.machine, None)
    state.reserved_usd -= _reservation(machine)
    state.closed_usd += billed_usd(machine.offer, machine.requested_at, machine.gone_at)
    if not state.undeleted:
        state.reserved_usd = 0.0  # sums of floats drift; nothing reserved is exactly nothing
    state.touched_machines[event.machine] = None


def _trim_deadlines(state: RunState) -> None:
    heap = state.deadlines
    while heap and not _holds(state, heap[0]):
        heapq.heappop(heap)


def _holds(state: RunState, deadline: Deadline) -> bool:
    machine = state.machines[deadline.machine]
    return machine.phase in ("requested", "up", "ready") and machine.renew_at == deadline.at


# -- the run -------------------------------------------------------------------------------


def _controller_started(state: RunState, at: Micros, event: ev.ControllerStarted) -> None:
    state.controllers += 1


def _tasks_reopened(state: RunState, at: Micros, event: ev.TasksReopened) -> None:
    for task in event.tasks:
        known = state.tasks[task]
        if known.status != "broken":
            continue  # a score stays, whatever is asked; what waits or runs is open already
        known.used = known.tries = 0
        known.broken_on = []
        known.outcome, known.decided_by = None, None
        _enqueue(state, known, at)


def _run_resumed(state: RunState, at: Micros, event: ev.RunResumed) -> None:
    state.stop, state.ended_at, state.status = None, None, "running"
    state.started_at = at
    state.blocks.clear()
    state.same_failures.clear()
    state.first_broken.clear()
    _set_limits(state, event.limits or state.limits)
    only = None if event.only is None else set(event.only)
    for known in state.tasks.values():
        _hold_or_release(state, at, known, only)
    for heap in state.fresh:
        _trim_fresh(state, heap)


def _hold_or_release(state: RunState, at: Micros, known: TaskState, only: set[TaskId] | None) -> None:
    wanted = only is None or known.task.id in only
    if wanted and known.status == "held":
        _enqueue(state, known, at)
    elif not wanted and known.status == "waiting":
        _set_status(state, known, "held")
        if known.retrying:
            _dequeue(state, known)


def _stop_requested(state: RunState, at: Micros, event: ev.StopRequested) -> None:
    state.stop = event


def _run_ended(state: RunState, at: Micros, event: ev.RunEnded) -> None:
    state.status, state.ended_at = event.status, at


_APPLY: dict[type, Callable[[RunState, Micros, Any], None]] = {
    ev.RunPlanned: _planned,
    ev.TasksPlanned: _tasks_planned,
    ev.ControllerStarted: _controller_started,
    ev.MachineRequested: _machine_requested,
    ev.MachineUp: _machine_up,
    ev.MachineReady: _machine_ready,
    ev.MachineSilent: _machine_silent,
    ev.MachineHeard: _machine_heard,
    ev.MachineExtended: _machine_extended,
    ev.MachineLeaseSet: _machine_lease_set,
    ev.MachineCondemned: _machine_condemned,
    ev.MachineDeleted: _machine_deleted,
    ev.AttemptStarted: _attempt_started,
    ev.AttemptEnded: _attempt_ended,
    ev.AttemptCollected: _attempt_collected,
    ev.TasksReopened: _tasks_reopened,
    ev.RunResumed: _run_resumed,
    ev.StopRequested: _stop_requested,
    ev.RunEnded: _run_ended,
}
