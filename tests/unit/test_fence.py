"""Clocks, chance and ids stay out of the core: the lint refuses them in every file of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evalfleet"
CORE = sorted(
    path.relative_to(ROOT)
    for name in ("model.py", "events.py", "cost.py", "state/**/*.py", "policy/**/*.py", "planning/*plan*.py")
    for path in PACKAGE.glob(name)
)
BANNED = ("import time", "import random", "import uuid", "import secrets", "from os import urandom")


def complaints(path: Path, source: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    done = subprocess.run(
        [*ruff, "--stdin-filename", str(path), "-"],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("path", CORE, ids=str)
def test_a_clock_in_the_core_is_refused(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    said = complaints(path, "\n".join((*BANNED, source)))
    assert said.count("TID251") == len(BANNED), said


def test_elsewhere_a_clock_is_allowed() -> None:
    assert "TID251" not in complaints(Path("src/evalfleet/effects/tools.py"), "import time\n")
