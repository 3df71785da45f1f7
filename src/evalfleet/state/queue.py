"""Which tasks wait, and in which order."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from evalfleet.model import Micros

from .nouns import QueueEntry, RunState, TaskState, TaskStatus


def lane_of(schedule: str, index: int, total: int, lanes: int) -> int:
    """Which worker a static schedule gives the task to: dealt out in turn, or contiguous slices."""
    match schedule:
        case "round-robin":
            return index % lanes
        case "slices":
            size, extra = divmod(total, lanes)  # the first workers have one more
            return index // (size + 1) if index < extra * (size + 1) else (index - extra) // size
        case _:
            return 0


def set_status(state: RunState, known: TaskState, status: TaskStatus) -> None:
    state.counts[known.status] -= 1
    state.counts[status] += 1
    known.status = status


def enqueue(state: RunState, known: TaskState, not_before: Micros) -> None:
    """Back into the queue. Whatever has been tried goes to the retries, which are served first."""
    set_status(state, known, "waiting")
    known.not_before = not_before
    known.retrying = bool(known.attempts)
    if known.retrying:
        insort(state.retries, (not_before, known.index, known.task.id))
    else:
        heapq.heappush(state.fresh[known.lane], known.entry)


def dequeue(state: RunState, known: TaskState) -> None:
    if known.retrying:
        entry = (known.not_before, known.index, known.task.id)
        del state.retries[bisect_left(state.retries, entry)]
        known.retrying = False
    else:
        trim_fresh(state, state.fresh[known.lane])


def trim_fresh(state: RunState, heap: list[QueueEntry]) -> None:
    while heap and (state.tasks[heap[0][2]].status != "waiting" or state.tasks[heap[0][2]].retrying):
        heapq.heappop(heap)
