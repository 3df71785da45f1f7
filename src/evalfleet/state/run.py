"""What changes a run as a whole, and the queue that its tasks wait in."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from msgspec import structs

from evalfleet import events as ev
from evalfleet.model import Micros, Task, TaskId
from evalfleet.schedules import SCHEDULES, is_static

from .circuits import close_all
from .nouns import QueueEntry, RunState, TaskState, TaskStatus

UNSETTLED = ("waiting", "running")


def set_status(state: RunState, known: TaskState, status: TaskStatus) -> None:
    before, known.status = known.status, status
    counts = state.counts
    counts[before] -= 1
    counts[status] += 1
    is_open, was_open = status in UNSETTLED, before in UNSETTLED
    if is_open is not was_open:
        state.unsettled[state.kind(known.task)] += is_open - was_open


def enqueue(state: RunState, known: TaskState, not_before: Micros) -> None:
    """Put a task back into the queue. One that has been tried goes to the retries, which are served first."""
    set_status(state, known, "waiting")
    known.not_before = not_before
    known.retrying = bool(known.attempts)
    if known.retrying:
        insort(state.retries, (not_before, known.index, known.task.id))
    else:
        _enqueue_fresh(state, known)


def _enqueue_fresh(state: RunState, known: TaskState) -> None:
    if state.queues:
        heapq.heappush(state.fresh[known.lane], known.entry)


def dequeue(state: RunState, known: TaskState) -> None:
    if known.retrying:
        entry = (known.not_before, known.index, known.task.id)
        del state.retries[bisect_left(state.retries, entry)]
        known.retrying = False
    elif heap := state.fresh[known.lane]:
        trim_fresh(state, heap)


def trim_fresh(state: RunState, heap: list[QueueEntry]) -> None:
    while heap and (state.tasks[heap[0][2]].status != "waiting" or state.tasks[heap[0][2]].retrying):
        heapq.heappop(heap)


def run_planned(state: RunState, at: Micros, event: ev.RunPlanned) -> None:
    state.plan, state.total = event.plan, event.total
    state.planned_at = state.started_at = at
    lanes = max(1, event.plan.limits.workers) if is_static(event.plan.schedule) else 1
    state.fresh = [[] for _ in range(lanes)]
    state.limits = event.plan.limits


def pool_planned(state: RunState, at: Micros, event: ev.PoolPlanned) -> None:
    """A pool that was deleted and is made anew begins so, too: its machines keep their numbers."""
    state.stop, state.ended_at, state.status = None, None, "running"
    _ask_anew(state)
    run_planned(state, at, ev.RunPlanned(event.plan, 0))


def pool_resized(state: RunState, at: Micros, event: ev.PoolResized) -> None:
    _ask_anew(state)
    state.limits = structs.replace(state.limits, workers=event.workers)


def _ask_anew(state: RunState) -> None:
    """Forget refusals and failures: what was refused before may be granted now."""
    state.blocks.clear()
    close_all(state)
    state.evictions.clear()
    state.refusals.clear()
    state.same_failures.clear()
    state.forged.clear()
    state.first_broken.clear()
    state.canary_breaks.clear()


def tasks_planned(state: RunState, at: Micros, event: ev.TasksPlanned) -> None:
    rank, tasks, queues = SCHEDULES[state.plan.schedule].rank, state.tasks, state.queues
    state.counts["waiting"] += len(event.tasks)
    longest_s, last = state.longest_s, 0.0
    for index, task in enumerate(event.tasks, len(tasks)):
        if (own := rank(task)) != last:  # nearly all have the same: one number is kept, not very many
            last = own
        known = TaskState(task, index, _lane(state, task, index), last)
        tasks[task.id] = known
        if (limit_s := task.limit_s) > longest_s:
            longest_s = limit_s
        if task.weight_s is not None:
            state.weighed += 1
            state.weights_s += task.weight_s
        state.unsettled[state.kind(task)] += 1
        if queues:
            _enqueue_fresh(state, known)
    state.longest_s = longest_s


def _lane(state: RunState, task: Task, index: int) -> int:
    lane = SCHEDULES[state.plan.schedule].lane
    if lane is not None:
        return lane(index, state.total, len(state.fresh))
    if task.needs not in state.kinds:
        state.kinds[task.needs] = len(state.fresh)
        state.fresh.append([])
    return state.kinds[task.needs]


def tasks_reopened(state: RunState, at: Micros, event: ev.TasksReopened) -> None:
    for task in event.tasks:
        known = state.tasks[task]
        if known.status != "broken":
            continue  # a score stays, whatever is asked; what waits or runs is open already
        for machine in known.broken_on:
            state.circuits[state.machines[machine].offer.place].gave_up.pop(task, None)
        known.used = known.tries = 0
        known.broken_on, known.lost = (), False
        known.outcome, known.decided_by = None, None
        enqueue(state, known, at)


def run_resumed(state: RunState, at: Micros, event: ev.RunResumed) -> None:
    state.stop, state.ended_at, state.status = None, None, "running"
    state.paused = None
    state.started_at = at
    state.grading_problem = ""
    _ask_anew(state)
    if event.new_files is not None:
        _take_new_files(state, event.new_files)
    if event.limits is not None and event.limits.budget_usd != state.limits.budget_usd:
        state.spend.percent_reported = 0
    state.limits = event.limits or state.limits
    only = None if event.only is None else set(event.only)
    for known in state.tasks.values():
        _hold_or_release(state, at, known, only)
    for heap in state.fresh:
        trim_fresh(state, heap)


def _take_new_files(state: RunState, new: ev.NewFiles) -> None:
    state.plan = new.renewed(state.plan)
    for task in new.tasks:
        known = state.tasks[task.id]
        if known.task.needs != task.needs:
            _move(state, known, task)
        known.task = task
        state.longest_s = max(state.longest_s, task.limit_s)


def _move(state: RunState, known: TaskState, task: Task) -> None:
    """It needs another kind of machine than before, and waits with others that do."""
    before, known.lane = known.lane, _lane(state, task, known.index)
    if known.status in UNSETTLED:
        state.unsettled[state.kind(known.task)] -= 1
        state.unsettled[state.kind(task)] += 1
    if known.lane == before:
        return
    if known.entry in state.fresh[before]:
        state.fresh[before].remove(known.entry)
        heapq.heapify(state.fresh[before])
    if known.status == "waiting" and not known.retrying:
        _enqueue_fresh(state, known)


def _hold_or_release(state: RunState, at: Micros, known: TaskState, only: set[TaskId] | None) -> None:
    wanted = only is None or known.task.id in only
    if wanted and known.status == "held":
        enqueue(state, known, at)
    elif not wanted and known.status == "waiting":
        set_status(state, known, "held")
        if known.retrying:
            dequeue(state, known)


def stop_requested(state: RunState, at: Micros, event: ev.StopRequested) -> None:
    state.stop = event
    if event.by:
        state.steered.append((at, event))


def run_ended(state: RunState, at: Micros, event: ev.RunEnded) -> None:
    state.status, state.ended_at = event.status, at


def grading_failed(state: RunState, at: Micros, event: ev.GradingFailed) -> None:
    state.grading_problem = event.detail
    state.regrading.clear()


def grading_requested(state: RunState, at: Micros, event: ev.GradingRequested) -> None:
    state.regrading = dict.fromkeys(event.attempts)
