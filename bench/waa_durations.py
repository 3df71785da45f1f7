"""How long tasks and machines of Windows Agent Arena take, as people who ran it told: one model for all.

A task: its steps are those of a human times 1.4 to 4.3, at least 1 and at most 15 (the client's `max_steps`).
A human's spread around the mean of the domain (lognormal, sigma 0.4), which is known for five domains; Edge
counts as Chrome, the others as the mean of the four that are not spreadsheets. A step takes 10 to 32 s, the
same in all of a task; one spreadsheet task in four is hard, with 40 to 61 s. A task takes 10 s and its steps,
which is never below the floor of 10 s and 3 s a step, and ends at its limit of 900 s.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "WAA_TASKS"
"""A checkout of WindowsAgentArena, or a folder with its `test_all.json`."""
WITHIN = ("", "src/win-arena-container/client/evaluation_examples_windows", "evaluation_examples_windows")

DOMAINS: Mapping[str, int] = {
    "file_explorer": 19,
    "libreoffice_calc": 24,
    "notepad": 2,
    "chrome": 17,
    "microsoft_paint": 3,
    "libreoffice_writer": 19,
    "settings": 5,
    "vs_code": 24,
    "msedge": 13,
    "vlc": 21,
    "windows_calc": 3,
    "clock": 4,
}
"""How many tasks each has, in the order of the list."""

HUMAN_STEPS: Mapping[str, float] = {
    "libreoffice_calc": 16.1,
    "libreoffice_writer": 7.4,
    "vlc": 7.1,
    "chrome": 4.5,
    "msedge": 4.5,
    "vs_code": 3.9,
}
USUAL_HUMAN_STEPS = 5.7
AGENT_TIMES = (1.4, 4.3)
SPREAD = 0.4
STEP_S, HARD_STEP_S = (10.0, 32.0), (40.0, 61.0)
HARD_DOMAIN, HARD_SHARE = "libreoffice_calc", 0.25
TASK_S, LIMIT_S, MAX_STEPS = 10.0, 900.0, 15


@dataclass(frozen=True)
class Named:
    """A task as the list has it."""

    id: str
    domain: str


def tasks() -> tuple[Named, ...]:
    """The real list where the variable names it; otherwise made-up ids, as many a domain."""
    listed = _listed() or {domain: [f"{domain}-{n}" for n in range(many)] for domain, many in DOMAINS.items()}
    return tuple(Named(id, domain) for domain, ids in listed.items() for id in ids)


def are_real() -> bool:
    return _listed() is not None


def _listed() -> dict[str, list[str]] | None:
    if not (given := os.environ.get(VARIABLE)):
        return None
    for folder in WITHIN:
        path = Path(given, folder, "test_all.json")
        if path.exists():
            found: dict[str, list[str]] = json.loads(path.read_text())
            return found
    raise RuntimeError(f"{VARIABLE} is {given!r}, and no test_all.json is there")


def durations(seed: int, named: Iterable[Named]) -> tuple[float, ...]:
    """Seconds of each task, in the order given."""
    rng = random.Random(f"waa durations {seed}")
    return tuple(_duration(rng, task.domain) for task in named)


def _duration(rng: random.Random, domain: str) -> float:
    human = HUMAN_STEPS.get(domain, USUAL_HUMAN_STEPS) * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
    steps = max(1, min(MAX_STEPS, round(human * rng.uniform(*AGENT_TIMES))))
    hard = domain == HARD_DOMAIN and rng.random() < HARD_SHARE
    return min(LIMIT_S, TASK_S + steps * rng.uniform(*(HARD_STEP_S if hard else STEP_S)))
