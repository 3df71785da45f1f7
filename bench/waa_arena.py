"""Lab hosts with a container that stands for the arena's, whose tasks take a given time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.waa.arena import Arena

from .waa_durations import Named

STEPS = 5


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
