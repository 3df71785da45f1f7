"""Schedules: the order in which machines take a run's tasks. Pure functions.

A schedule ranks the tasks. A static one also gives each task to one machine before any has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .model import ScheduleName, Task


class Schedule(NamedTuple):
    """One way to hand out tasks."""

    rank: Callable[[Task], float]
    """A task of a lower rank goes first; of equal ones, that which comes first in the benchmark."""
    lane: Callable[[int, int, int], int] | None = None
    """A task's index, the number of tasks and that of machines -> the machine that takes it. None: whoever is
    free takes the next task."""


def longest_first(task: Task) -> float:
    """Rank tasks by their duration, so that no long one is left for the end, when all others wait for it.

    Tasks of unknown duration come after the others.
    """
    return -(task.weight_s or 0.0)


def in_order(task: Task) -> float:
    """Keep the benchmark's order, whatever is known of the tasks."""
    return 0.0


def in_turn(index: int, total: int, machines: int) -> int:
    """Give tasks to the machines in turn."""
    return index % machines


def in_slices(index: int, total: int, machines: int) -> int:
    """Give each machine a contiguous slice of the tasks, of the same size but for one."""
    size, extra = divmod(total, machines)  # the first machines have one more
    return index // (size + 1) if index < extra * (size + 1) else (index - extra) // size


SCHEDULES: Mapping[ScheduleName, Schedule] = {
    "dynamic": Schedule(longest_first),
    "longest-first": Schedule(longest_first),
    "fifo": Schedule(in_order),
    "round-robin": Schedule(longest_first, in_turn),
    "slices": Schedule(longest_first, in_slices),
}
"""By name. `dynamic` is the default, and is called so in journals of all versions."""


def is_static(schedule: ScheduleName) -> bool:
    """Return True if each machine has its own tasks from the start."""
    return SCHEDULES[schedule].lane is not None


def orders(schedule: ScheduleName, tasks: Sequence[Task], machines: int) -> list[list[int]]:
    """Return the order in which each machine takes the tasks, as indices; a single one that all share, if
    whoever is free takes the next task."""
    rank, lane = SCHEDULES[schedule]
    lanes: list[list[int]] = [[] for _ in range(1 if lane is None else max(1, machines))]
    for index in sorted(range(len(tasks)), key=lambda index: rank(tasks[index])):
        lanes[0 if lane is None else lane(index, len(tasks), len(lanes))].append(index)
    return lanes
