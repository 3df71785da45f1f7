"""One machine loses power after some tasks: whose results are kept?"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalfleet.errors import RequestError
from evalfleet.events import AttemptEnded, AttemptStarted, Event, MachineUp
from evalfleet.model import Scored
from lab import NamespaceHost
from tests.waa.arena import Arena

from .result import Figures
from .waa_durations import Named, durations, tasks
from .workspace import wait_until

RUN = "lost"
STEPS = 5
FIRST_S = 120.0
LIMIT_S = 240.0


@dataclass(frozen=True)
class Lost:
    """`after` so many results on one machine, it is gone."""

    tasks: int
    machines: int
    scale: float
    after: int = 3

    @property
    def named(self) -> tuple[Named, ...]:
        return tasks()[: self.tasks]

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(each * self.scale for each in durations(0, self.named))


def kept(lost: Lost) -> Figures:
    with arena_of(lost.named, lost.seconds, lost.machines) as arena:
        process = arena.start_run(RUN)
        wait_until(lambda: _struck(arena, lost.after) is not None, FIRST_S, 0.1)
        host = _struck(arena, lost.after)
        assert host is not None
        host.power_off()
        wait_until(lambda: _kept(arena)["kept"] == lost.tasks or not process.lives, LIMIT_S, 0.2)
        host.power_on()  # or the run would wait a while to clean up there
        done = process.wait(LIMIT_S)
        if done.code not in (0, 1):
            raise RuntimeError(f"the run ended with {done.code}:\n{done.said[-2000:]}")
        return _kept(arena)


def _struck(arena: Arena, after: int) -> NamespaceHost | None:
    """The first host that has so many results."""
    address: dict[str, str] = {}
    machine_of: dict[str, str] = {}
    ended: Counter[str] = Counter()
    for event in _events(arena):
        match event:
            case MachineUp(machine, at):
                address[machine] = at
            case AttemptStarted(attempt, _, machine):
                machine_of[attempt] = machine
            case AttemptEnded(attempt, Scored()):
                ended[machine_of[attempt]] += 1
            case _:
                pass
    full = [address[machine] for machine, results in ended.items() if results >= after]
    return next((host for host in arena.lab.hosts if host.address in full), None)


def _events(arena: Arena) -> list[Event]:
    """None before the run has begun."""
    try:
        return arena.events(RUN)
    except RequestError:
        return []


def _kept(arena: Arena) -> Figures:
    events = _events(arena)
    task_of = {each.attempt: each.task for each in events if isinstance(each, AttemptStarted)}
    ended = [each for each in events if isinstance(each, AttemptEnded)]
    scored = Counter(task_of[each.attempt] for each in ended if isinstance(each.outcome, Scored))
    return {
        "kept": len(scored),
        "scored_twice": sum(times > 1 for times in scored.values()),
        "attempts": len(task_of),
    }


@contextmanager
def arena_of(named: Sequence[Named], seconds: Sequence[float], machines: int) -> Iterator[Arena]:
    """Gone afterwards, with its folder."""
    listed: dict[str, list[str]] = {}
    for task in named:
        listed.setdefault(task.domain, []).append(task.id)
    wishes = {task.id: {"seconds": takes, "steps": STEPS} for task, takes in zip(named, seconds, strict=True)}
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        arena = Arena(Path(folder), machines, tasks=listed, plan={"tasks": wishes})
        try:
            yield arena
        finally:
            arena.destroy()
