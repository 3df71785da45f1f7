"""The longest task first, as far as durations are known: so that no long one is left for the end, when all
others wait for it. Tasks of which nothing is known come after those, in the benchmark's order."""

from __future__ import annotations

from evalfleet.model import Task


def rank(task: Task) -> float:
    return -(task.weight_s or 0.0)
