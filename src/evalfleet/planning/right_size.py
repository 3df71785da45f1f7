"""Machines of the size that the tasks of each domain used in earlier runs. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from evalfleet.model import Needs, Plan, Task
from evalfleet.ports import HasGuest
from evalfleet.schedules import is_static

from .past import FEW_ATTEMPTS, DomainLoad
from .plan_parts import benchmark_of

MARGIN = 1.25
"""Machines are asked for so many times the most that was used."""


def right_sized(
    plan: Plan, tasks: Sequence[Task], loads: Mapping[str, DomainLoad]
) -> tuple[Needs | None, tuple[Task, ...]]:
    """Return what all machines must have, and the tasks with what some need beyond that.

    None if earlier runs used what the benchmark asks for, or too little is known of them. Under a static
    schedule all machines do for all tasks.
    """
    benchmark = benchmark_of(plan)
    guest = benchmark.guest if isinstance(benchmark, HasGuest) else None
    least = guest.least_needs if guest is not None else benchmark.needs
    sized = [needs_of_domain(benchmark.needs, least, loads.get(task.domain)) for task in tasks]
    if all(needs == benchmark.needs for needs in sized):
        return None, tuple(tasks)
    common = functools.reduce(Needs.joined if is_static(plan.schedule) else Needs.shared, sized)
    return common, tuple(_needing(task, needs, common) for task, needs in zip(tasks, sized, strict=True))


def _needing(task: Task, sized: Needs, common: Needs) -> Task:
    if common.covers(sized):
        return task
    return structs.replace(task, needs=sized if task.needs is None else task.needs.joined(sized))


def needs_of_domain(asked: Needs, least: Needs, load: DomainLoad | None) -> Needs:
    """Return what machines for tasks with this load must have, never less than `least`."""
    if load is None or load.attempts < FEW_ATTEMPTS:
        return asked
    return structs.replace(
        asked,
        cpus=max(least.cpus, _sold(load.cpus * MARGIN)),
        memory_gb=float(max(least.memory_gb, _sold(load.memory_gb * MARGIN))),
    )


def _sold(wanted: float) -> int:
    """Return the least that is sold and suffices: processors and gigabytes come in powers of two."""
    return 1 << max(0, math.ceil(math.log2(max(wanted, 1e-9))))
