"""`evalfleet run waa` and its list of tasks: from a checkout, as kept in the home, or from nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalfleet.benchmarks.waa.tasks import keep_list
from tests.desk import Desk, Done

ASKED = (
    "run",
    "waa",
    "--model",
    "m",
    "--dry-run",
    "--set",
    "base_url=http://127.0.0.1:9/v1",
    "--set",
    "golden=/g",
)
TASKS = '{"notepad": ["n1", "n2"], "vlc": ["v1"]}'
IMAGE = "windowsarena/winarena:latest"
DIGEST = "sha256:" + "a" * 64


def evalfleet(folder: Path, *words: str) -> Done:
    return Desk(folder, environ={"OPENAI_API_KEY": "k"}, forks=True)(*ASKED, *words)


def told(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_without_a_list_the_error_says_both_ways_to_one(tmp_path: Path) -> None:
    done = evalfleet(tmp_path)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "`git clone --depth 1 https://github.com/microsoft/WindowsAgentArena`" in done.err
    assert "`evalfleet pool prepare POOL waa`" in done.err
    assert not (tmp_path / "home").exists()


def test_a_checkout_beside_us_is_found(tmp_path: Path) -> None:
    inside = tmp_path / "WindowsAgentArena/src/win-arena-container/client/evaluation_examples_windows"
    inside.mkdir(parents=True)
    (inside / "test_all.json").write_text(TASKS)
    assert told(evalfleet(tmp_path, "--json"))["tasks"] == ["n1", "n2", "v1"]


def test_what_a_machine_told_lists_tasks_and_knows_wrong_ones(tmp_path: Path) -> None:
    listed = {"name": IMAGE, "digest": DIGEST, "texts": {"test_all.json": TASKS}, "defined": []}
    keep_list(tmp_path / "home", IMAGE, json.dumps(listed).encode())
    done = evalfleet(tmp_path, "--json")
    assert told(done)["tasks"] == ["n1", "n2", "v1"]
    note = f"tasks: from {IMAGE}@{DIGEST}"
    assert f"evalfleet: note: {note}\n" in done.err
    assert note in told(done)["warnings"]
    assert told(evalfleet(tmp_path, "--json", "--domain", "vlc"))["tasks"] == ["v1"]
    wrong = evalfleet(tmp_path, "--task", "n3")
    assert wrong.code == 2
    assert "--task 'n3' is not a task of the benchmark; there are n1, n2, v1" in wrong.err
