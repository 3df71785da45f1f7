"""How the tests are run: what fails is tried once more, and said; each part has a name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "run-tests"
STEADY = "def test_steady(): pass\n"
UNSTEADY = """
import pathlib, pytest

@pytest.mark.parametrize("n", ["a b", "c"])
def test_unsteady(n):
    mark = pathlib.Path(f"tried {n}")
    tried = mark.exists()
    mark.touch()
    assert tried

@pytest.fixture
def leaky():
    yield
    mark = pathlib.Path("torn down")
    tried = mark.exists()
    mark.touch()
    assert tried

def test_leaky(leaky): pass
"""
BROKEN = "def test_broken(): assert False\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_broken(n): assert False\n"


@pytest.mark.parametrize(
    ("tests", "workers", "code", "words", "absent"),
    [
        (STEADY, 0, 0, ["1 passed"], ["!!!!!!!!"]),
        (STEADY + UNSTEADY, 1, 0, ["UNSTEADY", "test_t.py::test_unsteady[a b]", "3 passed"], []),
        (STEADY + UNSTEADY + BROKEN, 0, 1, ["FAILED TWICE"], ["UNSTEADY"]),
        (STEADY + MANY, 0, 1, ["11 TESTS FAILED"], ["once more"]),
        ("import nothing_of_that_name\n", 1, 2, ["FAILED TWICE"], ["UNSTEADY"]),
    ],
    ids=["steady", "unsteady", "broken", "many", "not loaded"],
)
def test_failures_are_tried_once_more(
    tmp_path: Path, tests: str, workers: int, code: int, words: list[str], absent: list[str]
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / "test_t.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # only what is needed: others take long to load
    argv = [str(TOOL), sys.executable, "-m", "pytest", "-p", "xdist"]
    argv += ["-n", str(workers), "--dist", "worksteal"]  # a worker takes as long to start as all else
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stdout
    assert [word for word in words if word not in done.stdout] == []
    assert [word for word in absent if word in done.stdout] == []
    assert (tmp_path / ".venv/tests.log").read_text() == done.stdout


def test_every_folder_of_tests_is_in_one_part() -> None:
    parts = re.findall(
        r"^(?:CORE|PAGES|PLACES|GEAR) +:= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    folders = {path.parent for path in ROOT.glob("tests/*/**/test_*.py")}
    tops = {"/".join(folder.relative_to(ROOT).parts[:2]) for folder in folders}
    assert sorted(" ".join(parts).split()) == sorted({*tops, "standins/tests"})
