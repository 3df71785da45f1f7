"""Runs whose agents cheat: files that are edited, scores that are forged, probes that are sabotaged."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from tests.e2e.harness import Fleet, task
from tests.e2e.pools import pool, say
from tests.waiting import slowness

ROOT = os.geteuid() == 0 and sys.platform.startswith("linux")
ISOLATIONS = ["none", *(["user"] if ROOT else [])]

SCORE = """
if [ "$(cat "$EVALFLEET_GRADED_OUT/answer")" = "$(cat expected)" ]; then score=1; else score=0; fi
touch "$EVALFLEET_GRADED_OUT/touched" 2>/dev/null
ls "$EVALFLEET_GRADED_OUT" "$EVALFLEET_GRADED_WORK"
echo "{\\"score\\": $score}" > "$EVALFLEET_OUT/result.json"
"""
ANSWER = 'cd "$EVALFLEET_OUT"; '


def grading(fleet: Fleet, tasks: list[dict[str, Any]], **more: Any) -> None:
    (fleet.folder / "score.sh").write_text(SCORE)
    (fleet.folder / "expected").write_text("42")
    keys = {"score": ["sh", "score.sh"], "score_files": ["score.sh", "expected"], **more}
    fleet.bench(tasks, **keys)


def scores(fleet: Fleet, run: str = "r") -> dict[str, float | None]:
    results = json.loads((fleet.home / run / "results.json").read_text())
    return {entry["task_id"]: entry["score"] for entry in results["tasks"]}


CHEATS = {
    "right_1": (ANSWER + "echo 42 > answer", 1.0),
    "wrong_1": (ANSWER + "echo 41 > answer", 0.0),
    "silent_1": ("exit 3", 0.0),
    "own_1": ("echo 41 > $EVALFLEET_OUT/answer; score 1", 0.0),
    # the agent does not know where the grader's files are, but can guess what it is called there
    "link_1": (ANSWER + "ln -s ../../../bundles/score-*/expected answer; ls -l answer", 0.0),
    "absolute_1": (ANSWER + 'ln -s "$EVALFLEET_MACHINE"/bundles/score-*/expected answer', 0.0),
    "folder_1": (ANSWER + 'ln -s "$EVALFLEET_MACHINE"/bundles/score-* d; ln -s d/expected answer', 0.0),
    "pipe_1": (ANSWER + "mkfifo answer", 0.0),
    "late_1": (ANSWER + "echo 41 > answer; (setsid sh -c 'sleep 1; echo 42 > answer' &)", 0.0),
    "unreadable_1": (ANSWER + "echo 42 > answer; chmod 000 answer", 1.0),
    "odd_1": (ANSWER + "mkdir -p -m 000 deep; echo 42 > answer; mkfifo pipe; ln -s /etc/passwd l", 1.0),
}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_score_command_grades_what_the_agent_left_and_believes_nothing_it_says(
    fleet: Fleet, isolation: str
) -> None:
    grading(fleet, [task(name, do) for name, (do, _) in CHEATS.items()])
    done = fleet.run("--workers", "3", "--set", f"isolation={isolation}")
    assert done.code == 0, done
    assert scores(fleet) == {name: score for name, (_, score) in CHEATS.items()}
    results = json.loads((fleet.home / "r/results.json").read_text())
    assert results["isolation"] == [isolation]
    home = fleet.home / "r/odd_1"
    log = (home / "odd_1.0.score/evalfleet.log").read_text()
    assert "answer" in log
    assert "pipe" not in log, "it is kept aside while the grader looks"
    assert (home / "odd_1.0/answer").read_text() == "42\n"
    assert (home / "odd_1.0/touched").exists() == (isolation == "none")
    fleet.settled()


@pytest.mark.skipif(not ROOT, reason="needs root on Linux")
def test_an_isolated_agent_cannot_read_what_its_grader_expects(fleet: Fleet) -> None:
    read = 'cat "$EVALFLEET_MACHINE"/bundles/*/expected > "$EVALFLEET_OUT/answer"; true'
    grading(fleet, [task("read_1", read)])
    assert fleet.run("--set", "isolation=user").code == 0
    assert scores(fleet) == {"read_1": 0.0}


def test_a_score_command_that_fails_breaks_the_attempt_and_says_why(fleet: Fleet) -> None:
    fleet.bench([task("a_1", "score 1")], score=["sh", "-c", "echo no judge >&2; exit 4"])
    done = fleet.run("--attempts", "2")
    assert done.code == 1, done
    (entry,) = json.loads((fleet.home / "r/results.json").read_text())["tasks"]
    assert (entry["status"], entry["cause"], entry["attempts"]) == ("broken", "result", 2)
    assert "the score command: exit code 4, no result.json: no judge" in entry["error"]


GRADE = 'echo \'{"score": 0}\' > "$EVALFLEET_OUT/result.json"\n'
FORGE = 'f=$(readlink -f grade.sh); echo "score 1" > "$f"; chmod 777 "$f"; . ./grade.sh; true'


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_file_that_an_agent_edits_is_as_before_for_the_next_task_and_the_next_run(
    fleet: Fleet, isolation: str
) -> None:
    (fleet.folder / "grade.sh").write_text(GRADE)
    fleet.bench([task("forge_1", FORGE), task("next_1", ". ./grade.sh")], files=["run.sh", "grade.sh"])
    pool(fleet, "create", "--workers", "1", "--set", f"isolation={isolation}")
    assert fleet.run("--pool", "p").code == 0
    assert scores(fleet)["next_1"] == 0.0
    assert (scores(fleet)["forge_1"] == 0.0) == (isolation == "user"), "where it can, it fools only itself"
    assert fleet("run", "./b.toml", "--pool", "p", "--name", "s", "--task", "forge_1").code == 0
    assert fleet("run", "./b.toml", "--pool", "p", "--name", "t", "--task", "next_1").code == 0
    assert scores(fleet, "t") == {"next_1": 0.0}, "an edit outlived its run"
    pool(fleet, "delete", "--yes")
    fleet.settled()


def test_what_set_up_makes_of_the_files_is_not_undone(fleet: Fleet) -> None:
    (fleet.folder / "list").write_text("one\n")
    fleet.bench(
        [
            task("a_1", "[ $(wc -l < list) = 2 ] && score 1 || score 0"),
            task("a_2", "[ $(wc -l < list) = 2 ] && score 1"),
        ],
        files=["run.sh", "list"],
        setup=[["sh", "-c", f"echo two >> list; echo x >> {fleet.folder}/marks/setups"]],
    )
    pool(fleet, "create", "--workers", "1")
    assert fleet.run("--pool", "p").code == 0
    assert fleet("run", "./b.toml", "--pool", "p", "--name", "s").code == 0
    assert scores(fleet) == scores(fleet, "s") == {"a_1": 1.0, "a_2": 1.0}
    assert (fleet.folder / "marks/setups").read_text() == "x\n", "it was set up twice"
    pool(fleet, "delete", "--yes")


def test_a_task_that_sabotages_its_probe_gains_no_free_attempt(fleet: Fleet) -> None:
    """The probe says that the machine is broken: that is no reason for another try that does not count."""
    flag = fleet.folder / "sabotaged"
    fleet.bench(
        [task("a_1", f"touch {flag}; sleep 1000", timeout_s=slowness())],
        probe=["sh", "-c", f"[ ! -e {flag} ] || {{ rm {flag}; exit 1; }}"],
    )
    done = fleet.run("--attempts", "2")
    assert done.code == 1, done
    (entry,) = json.loads((fleet.home / "r/results.json").read_text())["tasks"]
    assert (entry["status"], entry["cause"], entry["attempts"]) == ("broken", "stuck", 2)


def test_how_attempts_are_kept_apart_is_said_and_what_cannot_be_had_is_refused(fleet: Fleet) -> None:
    fleet.bench([task("a_1")], isolation="container")
    say(fleet, "run", "./b.toml").refused(
        "isolation = \"container\" needs an 'image', and task a_1 has none; write one"
    )
    fleet.bench([task("a_1")], isolation="jail")
    say(fleet, "run", "./b.toml").refused("key 'isolation' is 'jail'", 'write "user", "container" or "none"')
    fleet.bench([task("a_1")], isolation="none")
    assert fleet.run("--set", "isolation=user").code == 0, "what a benchmark names comes first"
    assert "could reach each other" in say(fleet, "report", "r").out
