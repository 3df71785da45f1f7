"""The 154 tasks of Windows Agent Arena on 10 lab machines, a minute in a second, and its client's faults.

First, how near each schedule comes to max(sum / machines, longest), all on the same durations (a sixtieth of
those of waa_durations). A task is a `sleep`: the figure is the scheduler's, not that of two cores which play
ten machines. Then, in a container that stands for the arena's: what is left of 40 results when one of four
machines is lost. With WAA_CHECKOUT, a checkout of WindowsAgentArena, the faults of `waa_faults` follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evalfleet.model import ScheduleName, seconds_between

from . import waa_faults
from .hosts import cannot, first_start_and_last_end, lab_of, pool_of, records, start_pool_run
from .makespan import bound, list_schedule
from .result import Aim, Figures, Result, at_most, rounded
from .waa_durations import Named, are_real, durations, tasks
from .waa_lost import Lost, kept
from .workspace import Workspace

SCALE = 1 / 60
MACHINES = 10
LOST = Lost(tasks=40, machines=4, scale=1 / 180)
KINDS: dict[str, ScheduleName] = {
    "dynamic": "dynamic",
    "dynamic_known": "dynamic",
    "slices": "slices",
    "round_robin": "round-robin",
}
SEED = 0
LIMIT_S = 240.0
AIM_KNOWN = 1.10
COUNTED = (
    "over_bound: from the first start to the last end, over max(sum / machines, longest), on warm hosts; "
    "tasks sleep; kept: results that exist when all that still runs has ended"
)


@dataclass(frozen=True)
class Size:
    """Of the runs that are compared."""

    named: tuple[Named, ...]
    seconds: tuple[float, ...]
    machines: int

    @property
    def bound_s(self) -> float:
        return bound(self.seconds, self.machines)

    def told(self, makespan_s: float) -> Figures:
        return {"makespan_s": rounded(makespan_s), "over_bound": rounded(makespan_s / self.bound_s)}


def run(quick: bool) -> Result:
    if (error := cannot("waa")) is not None:
        return Result("waa", dict(error), {})
    size = _size(8, 2, SCALE / 15) if quick else _size(154, MACHINES, SCALE)
    lost = Lost(tasks=6, machines=2, scale=LOST.scale / 5, after=1) if quick else LOST
    figures: Figures = {
        "tasks": len(size.named),
        "real_ids": are_real(),
        "machines": size.machines,
        "bound_s": rounded(size.bound_s),
        "ideal_over_bound": rounded(list_schedule(size.seconds, size.machines) / size.bound_s),
        **_schedules(size),
        "machine_lost": {"of": lost.tasks, **kept(lost)},
        "counted": COUNTED,
    }
    aims = _aims(figures, lost)
    figures["client_faults"], own = waa_faults.measure(quick)
    return Result("waa", figures, aims | own)


def _aims(figures: Figures, lost: Lost) -> dict[str, Aim]:
    return {
        "known_over_bound": at_most(figures["dynamic_known"]["over_bound"], AIM_KNOWN),
        "tasks_lost": at_most(lost.tasks - figures["machine_lost"]["kept"], 0),
        "tasks_scored_twice": at_most(figures["machine_lost"]["scored_twice"], 0),
    }


def _size(count: int, machines: int, scale: float) -> Size:
    named = tasks()[:count]
    return Size(named, tuple(round(each * scale, 3) for each in durations(SEED, named)), machines)


# -- schedules -------------------------------------------------------------------------------------


def _schedules(size: Size) -> Figures:
    """One after the other, in one home: the second run knows from the first how long each task takes."""
    told: Figures = {}
    with lab_of(size.machines) as lab, Workspace() as space, pool_of(space, lab) as pool:
        path = _benchmark(space, size)
        for name, schedule in KINDS.items():
            words = ("--schedule", schedule)
            space.finish(start_pool_run(space, lab, path, pool, *words, name=name), LIMIT_S)
            told[name] = _told(space, size, name)
    return told


def _benchmark(space: Workspace, size: Size) -> Path:
    lines = [
        {"id": task.id, "domain": task.domain, "params": {"s": seconds}}
        for task, seconds in zip(size.named, size.seconds, strict=True)
    ]
    return space.benchmark(["sleep", "{params.s}"], lines)


def _told(space: Workspace, size: Size, name: str) -> Figures:
    first, last = first_start_and_last_end(records(space, name), len(size.named))
    return size.told(seconds_between(first, last))
