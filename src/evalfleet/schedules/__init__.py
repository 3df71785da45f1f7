"""Schedules: which task goes first, and whether each worker has its own tasks from the start. Pure functions.

A schedule is a module with `rank`, and with `lane` if it deals tasks out beforehand. Without `lane`, whoever
is free takes the task of the lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from evalfleet.model import ScheduleName, Task

from . import fifo, longest_first, round_robin, slices


class Schedule(NamedTuple):
    """One way to hand out tasks."""

    rank: Callable[[Task], float]
    """A task of a lower rank goes first; of equal ones, that which comes first in the benchmark."""
    lane: Callable[[int, int, int], int] | None = None
    """A task's index, the number of tasks and that of workers -> the worker that it is dealt to."""


SCHEDULES: Mapping[ScheduleName, Schedule] = {
    "dynamic": Schedule(longest_first.rank),
    "longest-first": Schedule(longest_first.rank),
    "fifo": Schedule(fifo.rank),
    "round-robin": Schedule(longest_first.rank, round_robin.lane),
    "slices": Schedule(longest_first.rank, slices.lane),
}
"""By name. `dynamic` is the default, and is called so in journals of all versions."""


def is_static(schedule: ScheduleName) -> bool:
    """Has each worker its own tasks from the start?"""
    return SCHEDULES[schedule].lane is not None


def orders(schedule: ScheduleName, tasks: Sequence[Task], machines: int) -> list[list[int]]:
    """Return the order in which each machine takes the tasks, as indices; a single one that all share, if
    whoever is free takes the next task."""
    rank, lane = SCHEDULES[schedule]
    lanes: list[list[int]] = [[] for _ in range(1 if lane is None else max(1, machines))]
    for index in sorted(range(len(tasks)), key=lambda index: rank(tasks[index])):
        lanes[0 if lane is None else lane(index, len(tasks), len(lanes))].append(index)
    return lanes
