"""Clocks, chance and ids stay out of the core: the lint refuses them there. Loops start at the edges only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evalfleet"
CORE = sorted(
    path.relative_to(ROOT)
    for name in (
        *("model.py", "errors.py", "ports.py", "names.py", "toml_tables.py", "events.py", "cost.py"),
        *("schedules.py", "state/**/*.py", "policy/**/*.py"),
        *("planning/*plan*.py", "planning/secret_values.py"),
    )
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


LOOPS = re.compile(r"\basyncio\.(run|Runner)\b|\bnew_event_loop\b|\brun_until_complete\b")
MAY_START_A_LOOP = {
    "api/live_log.py": "a file is followed by programs without a loop, too",
    "api/python.py": "what `import evalfleet` offers is called without a loop",
    "channels/meter/main.py": "a program of its own, on machines",
    "controller.py": "a run has a thread of its own",
    "testing/harness.py": "tests have no loop",
}


def test_only_the_command_line_and_whole_programs_start_an_event_loop() -> None:
    """So that a web server, a notebook and the command line can all call the same verbs."""
    starting = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if LOOPS.search(path.read_text(encoding="utf-8"))
    }
    assert {path for path in starting if not path.startswith("cli/")} == set(MAY_START_A_LOOP)


def broad_excepts(path: Path) -> list[tuple[int, str, bool]]:
    """Line, source and whether it raises again, of each handler that catches whatever there is."""
    source = path.read_text(encoding="utf-8")
    if "Exception" not in source and "except:" not in source:
        return []  # most files: to parse them all takes seconds
    lines = source.splitlines()
    return [
        (
            node.lineno,
            "\n".join(lines[node.lineno - 1 : node.end_lineno]),
            any(isinstance(part, ast.Raise) and part.exc is None for part in ast.walk(node)),
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id.endswith("Exception")))
    ]


def test_who_catches_everything_raises_it_again_or_says_why_not() -> None:
    unexplained = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line, source, again in broad_excepts(path)
        if not again and "#" not in source
    ]
    assert not unexplained
