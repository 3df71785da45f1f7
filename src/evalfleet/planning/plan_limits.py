"""What bounds a run, as its flags and its places say: workers, attempts, money and time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import (
    Limits,
    Plan,
    Task,
    Verdict,
)
from evalfleet.schedules import is_static

from .request import (
    Flags,
)
from .sources import (
    PlaceSource,
)
from .values import AUTO


def limits_of(
    flags: Flags, places: Sequence[PlaceSource], canary: int, tasks: Sequence[Task], setup_s: float
) -> Limits:
    longest = max((task.timeout_s + task.ready_s for task in tasks), default=0.0)
    return Limits(
        workers=_workers(flags, places, len(tasks)),
        auto=flags.workers == AUTO,
        attempts=flags.attempts,
        attempts_ceiling=max(Limits().attempts_ceiling, flags.attempts),
        canary=canary,
        budget_usd=flags.budget,
        task_budget_usd=flags.task_budget,
        max_tokens=flags.max_tokens,
        max_duration_s=flags.max_duration,
        deadline_s=flags.deadline,
        boot_timeout_s=Limits().boot_timeout_s + setup_s,
        # A laptop may sleep through a task: the host must not give it up before the task's own limit.
        lease_s=max(Limits().lease_s, 2 * longest + 600),
    )


AUTO_MOST = 100
"""With `--workers auto` there are no more machines than this at once."""


def _workers(flags: Flags, places: Sequence[PlaceSource], tasks: int) -> int:
    """How many machines there may be at once. Raises RequestError."""
    listed = sum(place.listed for place in places)
    if flags.workers != AUTO:
        return flags.workers or listed or 1
    if flags.deadline is None and flags.budget is None:
        raise RequestError("--workers auto needs something to choose by: a --deadline, a --budget or both")
    if is_static(flags.schedule):
        raise RequestError(
            f"--workers auto: --schedule {flags.schedule} must know how many workers there are"
        )
    return max(1, min(tasks, listed or AUTO_MOST))


def canary_of(flags: Flags, places: Sequence[PlaceSource]) -> int:
    """Return how many attempts must score before more machines are made, or taken from a pool."""
    if flags.canary is not None:
        return flags.canary
    return max(place.default_canary for place in places)


def verdict_of(flags: Flags) -> Verdict:
    return msgspec.structs.replace(flags.allow_broken, fail_under=flags.fail_under, strict=flags.strict)


def limit_doubts(plan: Plan, tasks: Sequence[Task], *, workers_asked: bool) -> list[str]:
    doubts: list[str] = []
    longest = max(task.timeout_s for task in tasks)
    limit, useful = plan.limits.max_duration_s, math.ceil(len(tasks) / plan.slots)
    if limit is not None and limit < longest:
        doubts.append(f"--max-duration of {limit:g} s is shorter than a task's time limit of {longest:g} s")
    if workers_asked and plan.limits.workers > useful and not plan.pool:  # a pool is as large as it is
        many = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
        doubts.append(f"--workers {plan.limits.workers} is more than {many} can use; {useful} will do")
    return doubts
