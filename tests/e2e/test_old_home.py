"""A home that the version before made: it opens, shows the same results, and its runs are taken up."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import SCHEMA
from tests.e2e.harness import Fleet

DATA = Path(__file__).parents[1] / "data"
EXAMPLE = Path(__file__).parents[2] / "examples" / "mybench"


@pytest.fixture
def old(fleet: Fleet) -> Fleet:
    for path in EXAMPLE.iterdir():
        shutil.copy(path, fleet.folder)
    fleet.home.mkdir()
    script = (DATA / "home_v2.sql").read_text("utf-8").replace("@FOLDER@", str(fleet.folder))
    with closing(sqlite3.connect(fleet.home / "fleet.db")) as database:
        database.executescript(script)
    return fleet


def versions(fleet: Fleet, run: str) -> set[int]:
    with closing(sqlite3.connect(fleet.home / "fleet.db")) as database:
        return {version for (version,) in database.execute("SELECT v FROM event WHERE stream = ?", (run,))}


def known(now: Any, then: Any) -> Any:
    """What is now of what was then: documents may have got more keys since."""
    if isinstance(then, dict):
        return {key: known(now[key], value) for key, value in then.items()}
    if isinstance(then, list):
        assert len(now) == len(then)
        return [known(*pair) for pair in zip(now, then, strict=True)]
    return now


def test_it_shows_the_same_results(old: Fleet) -> None:
    text = (DATA / "home_v2_results.json").read_text("utf-8").replace("@FOLDER@", str(old.folder))
    then: dict[str, Any] = json.loads(text)
    now: dict[str, Any] = old("show", "first", "--json").json
    assert known(now, then) == then
    listed = old("ls").out.splitlines()
    assert [line.split()[:7] for line in listed[1:]] == [
        ["second", "mybench", "stopped", "6", "3", "0", "3"],
        ["first", "mybench", "done", "6", "6", "0", "0"],
    ]


def test_a_run_is_taken_up_and_each_task_has_one_score(old: Fleet) -> None:
    assert versions(old, "second") == {1} != {SCHEMA}
    done = old("resume", "second", "--json", "--max-duration", "1h")
    assert done.code == 0, done
    results = done.json
    assert (results["status"], results["scored"], results["unrun"]) == ("done", 6, 0)
    assert [task["attempts"] for task in results["tasks"]].count(1) >= 3, "what was scored stays as it was"
    assert versions(old, "second") == {1, SCHEMA}
    checked = {each["name"]: each for each in old("ls", "--verify", "--json").json}
    assert [each["problem"] for each in checked.values()] == [None, None]
    assert checked["first"]["not_covered"] == checked["first"]["events"]
    assert 0 < checked["second"]["not_covered"] < checked["second"]["events"]
    assert "are not covered: they are older than the checksums" in old("ls", "--verify", "second").out
