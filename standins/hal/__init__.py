"""A stand-in for a checkout of HAL: its interface, all shapes of its graders' results, and its bad habits.

`checkout/` is written from what is known of hal-harness, and has nothing of it. Its benchmarks have HAL's
names and one small quiz, which `checkout/data/quiz.json` holds with the answers; a task's `do` tells the
agent in `agents/quiz` what to do. A grader fails on the answer "poison", whoever else is in the batch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

CHECKOUT = Path(__file__).parent / "checkout"


def copy_to(folder: Path) -> Path:
    """A checkout of one's own, to be changed at will."""
    return Path(shutil.copytree(CHECKOUT, folder, ignore=shutil.ignore_patterns("__pycache__")))
