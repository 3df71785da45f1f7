"""Machines of the size that tasks needed in earlier runs: by domain, by what machines told of their load.

A benchmark says what machines must have before anybody has run it. Samples of memory and processors tell what
its tasks did use. A smaller machine does for those that use less, and those that use more get a larger one.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from evalfleet.channels.samples import Sample, read_series
from evalfleet.errors import RequestError
from evalfleet.model import Answered, Needs, Scored, Task
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import benchmark_of
from evalfleet.planning.workspace import Workspace
from evalfleet.schedules import is_dealt
from evalfleet.state import AttemptState, RunState

from .experience import earlier_states

MARGIN = 1.25
"""So many times what was used at most is asked for."""
FEW = 5
"""Fewer attempts than this tell nothing of their domain."""
OFTEN = 0.95
"""Of processors, what this part of the samples did not pass: a moment of full load is no need of more."""


@dataclass(frozen=True)
class DomainLoad:
    """What attempts at the tasks of one domain used of their machines."""

    attempts: int
    memory_gb: float
    """At most."""
    cpus: float
    """Nearly always at most."""


def right_sized(workspace: Workspace, resolved: Resolved) -> Resolved:
    """The run on machines of the size that earlier runs needed, with a warning if they do not tell.

    Where domains differ, tasks that need more than the others say so, and machines of both sizes are asked
    for; under a static schedule all machines do for all tasks.
    """
    if resolved.borrowed:
        raise RequestError("--right-size: the machines of a pool have the size they have: leave it out")
    plan, benchmark = resolved.plan, benchmark_of(resolved.plan)
    least = benchmark.guest.least_needs if benchmark.guest is not None else benchmark.needs
    loads = domain_loads(workspace.home, earlier_states(workspace, plan.benchmark))
    sized = [needs_of_domain(benchmark.needs, least, loads.get(task.domain)) for task in resolved.tasks]
    if all(each == benchmark.needs for each in sized):
        told = "earlier runs tell nothing else" if loads else "no earlier run here told what its tasks used"
        warning = f"--right-size: machines are as {plan.benchmark} says, {told}"
        return replace(resolved, warnings=(*resolved.warnings, warning))
    meet = Needs.joined if is_dealt(plan.schedule) else Needs.shared
    common = functools.reduce(meet, sized)
    tasks = tuple(_needing(task, each, common) for task, each in zip(resolved.tasks, sized, strict=True))
    return replace(resolved, plan=structs.replace(plan, needs=common), tasks=tasks)


def _needing(task: Task, sized: Needs, common: Needs) -> Task:
    if common.covers(sized):
        return task
    return structs.replace(task, needs=sized if task.needs is None else task.needs.joined(sized))


def needs_of_domain(asked: Needs, least: Needs, load: DomainLoad | None) -> Needs:
    """What machines for tasks of a domain must have, that used so much; never less than `least`."""
    if load is None or load.attempts < FEW:
        return asked
    return structs.replace(
        asked,
        cpus=max(least.cpus, _sold(load.cpus * MARGIN)),
        memory_gb=float(max(least.memory_gb, _sold(load.memory_gb * MARGIN))),
    )


def _sold(wanted: float) -> int:
    """The least that is sold and suffices: processors and gigabytes come in powers of two."""
    return 1 << max(0, math.ceil(math.log2(max(wanted, 1e-9))))


def domain_loads(home: Path, states: Iterable[RunState]) -> Mapping[str, DomainLoad]:
    """What attempts with a score or an answer used, by the domain of their task. Machines of which nobody
    knows how large they were tell nothing."""
    found: defaultdict[str, list[DomainLoad]] = defaultdict(list)
    for state in states:
        series = functools.cache(functools.partial(read_series, home))
        for attempt in state.attempts.values():
            offer = state.machines[attempt.machine].offer
            if not offer.memory_gb or not offer.cpus or not isinstance(attempt.outcome, Scored | Answered):
                continue
            samples = _during(attempt, series(attempt.machine))
            if samples:
                memory_gb = max(each.memory for each in samples) * offer.memory_gb
                cpus = _often(sorted(each.cpu for each in samples)) * offer.cpus
                found[state.tasks[attempt.task].task.domain].append(DomainLoad(1, memory_gb, cpus))
    return {
        domain: DomainLoad(len(each), max(load.memory_gb for load in each), max(load.cpus for load in each))
        for domain, each in found.items()
    }


def _during(attempt: AttemptState, series: Sequence[Sample]) -> Sequence[Sample]:
    ended = attempt.ended_at or attempt.started_at
    return [sample for sample in series if attempt.started_at <= sample.at <= ended]


def _often(ordered: Sequence[float]) -> float:
    return ordered[int(OFTEN * (len(ordered) - 1))]
