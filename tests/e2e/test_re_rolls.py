"""An agent that breaks its own attempt gets no other one for nothing."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Fleet, task

SABOTAGE = {
    "its wrapper killed": "kill -9 $PPID; sleep 60",
    "the pid in its folder killed": 'kill -9 $(cut -d" " -f1 "${EVALFLEET_OUT%/out}/pid"); sleep 60',
    "an eviction made up": 'printf evicted > "${EVALFLEET_OUT%/out}/why"; kill -9 $PPID; sleep 60',
    "a stop made up": 'printf stopped > "${EVALFLEET_OUT%/out}/why"; kill -9 $PPID; sleep 60',
    "broken, it says: setup": 'result "{\\"broken\\": \\"setup\\"}"',
    "broken, it says: evicted": 'result "{\\"broken\\": \\"evicted\\"}"',
    "broken, it says: cancelled": 'result "{\\"broken\\": \\"cancelled\\"}"',
}


@pytest.mark.parametrize("way", SABOTAGE)
def test_an_agent_that_breaks_its_attempt_has_had_it(fleet: Fleet, way: str) -> None:
    fleet.bench([task("a", SABOTAGE[way]), task("b", "score 1")])
    done = fleet.run("--attempts", "1", "--json")
    assert done.code == 1
    (sabotaged,) = [each for each in fleet.results()["tasks"] if each["task_id"] == "a"]
    assert (sabotaged["status"], sabotaged["attempts"]) == ("broken", 1)


EVICT = """
import json, os, socket
folder = os.environ["EVALFLEET_MACHINE"]
os.chdir(folder)  # the address of a socket holds 108 bytes
line = socket.socket(socket.AF_UNIX)
line.connect("supervisor.sock")
key = open(folder + "/key").read().strip()
line.sendall(json.dumps({"op": "evict", "n": 1, "key": key}).encode() + b"\\n")
line.recv(100)
"""


def test_an_eviction_that_the_place_knows_nothing_of_holds_nothing_up(fleet: Fleet) -> None:
    """The key is in reach of what is not isolated. A place that evicts no machines is not waited for."""
    (fleet.folder / "evict.py").write_text(EVICT)
    fleet.bench([task("a", "python3 evict.py; sleep 60"), task("b")], files=["run.sh", "evict.py"])
    done = fleet.run("--attempts", "1", "--json")
    assert done.code == 1, done
    found = {each["task_id"]: (each["status"], each["attempts"]) for each in fleet.results()["tasks"]}
    assert found == {"a": ("broken", 1), "b": ("scored", 1)}


REMOVALS = {
    "the machine's folder": 'rm -rf "$EVALFLEET_MACHINE"',
    "what jobs are in": 'rm -rf "$EVALFLEET_MACHINE/jobs"',
    "the benchmark's files": 'rm -rf "$EVALFLEET_MACHINE/bundles"',
}


@pytest.mark.parametrize("way", REMOVALS)
def test_an_agent_that_removes_what_its_machine_needs_breaks_no_other_task(fleet: Fleet, way: str) -> None:
    fleet.bench([task("evil_1", REMOVALS[way]), *(task(f"good_{n}") for n in range(1, 6))])
    done = fleet.run("--workers", "1", "--attempts", "1", "--schedule", "fifo", "--canary", "0", "--json")
    assert done.code == 1, done
    broken = {each["task_id"] for each in fleet.results()["tasks"] if each["status"] != "scored"}
    assert broken == {"evil_1"}
    fleet.settled()


def test_strictly_a_broken_task_is_a_failed_one(fleet: Fleet) -> None:
    fleet.bench([task("a", "exit 3"), task("b", "score 1")])
    done = fleet.run("--attempts", "1", "--strict", "--json")
    found = fleet.results()
    assert (done.code, found["success_rate"], found["failed"], found["broken"]) == (0, 0.5, 1, 1)
    assert "broken ones counted as failed" in fleet("report", "r").out
    assert fleet.run("--name", "r2", "--attempts", "1", "--strict", "--fail-under", "0.6").code == 1


def test_a_score_tells_what_broke_before_it(fleet: Fleet) -> None:
    fleet.bench([task("a", 'case "$EVALFLEET_OUT" in *a.0/out) exit 3;; esac; score 1')])
    assert fleet.run().code == 0
    (only,) = fleet.results()["tasks"]
    assert only["broken_attempts"] == {"result": 1}
    assert "pass after result 1" in fleet("show", "r").out
    assert "Scores after broken attempts" in fleet("report", "r").out
