"""A benchmark that grades at the end, in a process of its own, through crashes of whoever waits for it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptGraded, GradingFailed, MachineDeleted, MachineRequested
from evalfleet.model import Scored
from tests.e2e.harness import Fleet, task
from tests.waiting import until

PLUG_IN = '''
import asyncio, json, sys
from pathlib import Path
from msgspec import Struct
from evalfleet.benchmarks.loaded import Loaded
from evalfleet.model import Answered, Broken, Bundle, Cause, Command, Needs, Scored, Task

FOLDER = Path(__file__).parent
GRADE = """
import json, os, sys, time
sys.stdout.write(str(os.getpid()) + chr(10)); sys.stdout.flush()
for path in sys.argv[2:]:
    answer = open(path).read()
    while not os.path.exists(f"{sys.argv[1]}/gates/{answer}"):
        time.sleep(0.03)
    print(json.dumps([path, float(answer)]), flush=True)
"""

class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    answers: str = "1.0,0.0"

class Quiz:
    """Tasks write an answer; all answers are graded after the last task."""

    Settings = Settings
    name = "quiz"
    needs = Needs()
    bundle = Bundle()
    probe = None

    @classmethod
    def load(cls, name, settings, base, home):
        answers = settings.answers.split(",")
        tasks = tuple(Task(f"q_{n}", "q", {"answer": a}, 600.0) for n, a in enumerate(answers, start=1))
        return Loaded("quiz", {}, tasks, secrets=("JUDGE_KEY",))

    @classmethod
    def from_spec(cls, spec, *, model, agent, settings):
        return cls()

    @property
    def grader(self):
        return self

    def command(self, task, attempt):
        say = 'printf %s "$0" > "$EVALFLEET_OUT/answer"; echo "{}" > "$EVALFLEET_OUT/result.json"'
        return Command(("sh", "-c", say, task.params["answer"]))

    def outcome(self, task, ended, healthy):
        if ended.result is None:
            return Broken(Cause.RESULT, "no result.json")
        return Answered(num_steps=3, cost_usd=0.25)

    async def grade(self, answers, scratch, secrets):
        calls = FOLDER / "calls"
        wanted = {str(each.folder / "answer"): each for each in answers if each.wanted}
        with calls.open("a") as file:
            file.write(json.dumps(sorted(each.task.id for each in wanted.values())) + "\\n")
        if (FOLDER / "no-environment").exists():
            raise RuntimeError("the grader is not installed; its key is " + secrets["JUDGE_KEY"])
        for path, each in list(wanted.items()):
            if Path(path).read_text() == "nonsense":
                yield each.attempt, Broken(Cause.RESULT, "the answer is no number")
                del wanted[path]
        forgotten = [path for path in wanted if Path(path).read_text() == "forgotten"]
        paths = [path for path in wanted if path not in forgotten]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GRADE, str(FOLDER), *paths, stdout=asyncio.subprocess.PIPE
        )
        (FOLDER / "grader.pid").write_bytes(await process.stdout.readline())
        async for line in process.stdout:
            path, score = json.loads(line)
            yield wanted[path].attempt, Scored(score, score == 1.0)
        await process.wait()
'''


class Quiz:
    """The benchmark above in a fleet's folder."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        (fleet.folder / "quiz_plug_in.py").write_text(PLUG_IN, "utf-8")
        fleet.environ["JUDGE_KEY"] = "s3cr3t-judge"
        fleet.forks = True

    def words(self, answers: str) -> tuple[str, ...]:
        return ("run", "quiz_plug_in:Quiz", "--name", "r", "--set", f"answers={answers}", "--workers", "2")

    def calls(self) -> list[list[str]]:
        lines = (self.fleet.folder / "calls").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def end_grader(self) -> None:
        """What the grader started outlives whoever is killed with -9."""
        try:
            os.kill(int((self.fleet.folder / "grader.pid").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.fixture
def quiz(fleet: Fleet) -> Quiz:
    return Quiz(fleet)


def scores(results: dict[str, Any]) -> list[float | None]:
    return [task["score"] for task in results["tasks"]]


def test_answers_are_graded_at_the_end_and_every_task_is_settled_once(fleet: Fleet, quiz: Quiz) -> None:
    process = fleet.start(*quiz.words("1.0,0.0,nonsense,forgotten"), "--json")
    fleet.recorded(AttemptGraded)
    shown = fleet("show", "r", "--json").json
    assert (shown["status"], shown["answered"], shown["scored"]) == ("running", 3, 0)
    assert [task["status"] for task in shown["tasks"]] == ["answered"] * 2 + ["broken", "answered"]
    assert "3 answered and not graded yet" in fleet("show", "r").out
    assert "of these, 3 answered and not graded yet" in fleet("report", "r").out
    fleet.open_gate("1.0", "0.0")
    done = process.wait()
    assert done.code == 1, done
    results = done.json
    assert (results["status"], results["answered"], results["scored"]) == ("done", 0, 2)
    assert scores(results) == [1.0, 0.0, None, None]
    assert [task["cause"] for task in results["tasks"]] == [None, None, "result", "result"]
    assert [task["error"] for task in results["tasks"][2:]] == [
        "the answer is no number",
        "the grader gave no grade for it",
    ]
    assert results["tasks"][0]["num_steps"] == 3
    assert results["cost"]["models_usd"] == 1.0
    assert quiz.calls() == [["q_1", "q_2", "q_3", "q_4"]]
    fleet.settled()


@pytest.mark.parametrize("flags", [(), ("--only", "ungraded")])
def test_grading_goes_on_after_kill_9_and_keeps_what_was_graded(
    fleet: Fleet, quiz: Quiz, flags: tuple[str, ...]
) -> None:
    process = fleet.start(*quiz.words("1.0,0.0"))
    fleet.open_gate("1.0")
    fleet.recorded(AttemptGraded)
    # `--only ungraded` cleans nothing up: while machines are left it asks for a full `resume`
    made = len(fleet.recorded(MachineRequested))
    fleet.recorded(MachineDeleted, made)
    process.kill()
    quiz.end_grader()
    fleet.open_gate("0.0")
    done = fleet("resume", "r", *flags, "--json")
    assert done.code == 0, done
    assert (done.json["status"], scores(done.json)) == ("done", [1.0, 0.0])
    assert quiz.calls() == [["q_1", "q_2"], ["q_2"]], "what was graded is not graded again"
    assert len(fleet.recorded(AttemptGraded)) == 2
    fleet("resume", "r", *flags).refused("no answers to grade" if flags else "no unrun tasks")


def test_a_grader_that_fails_leaves_the_answers_to_be_graded_later(fleet: Fleet, quiz: Quiz) -> None:
    (fleet.folder / "no-environment").touch()
    done = fleet(*quiz.words("1.0,0.0"))
    assert done.code == 1, done
    assert "could not be graded: RuntimeError: the grader is not installed" in done.out + done.err
    assert "evalfleet resume r --only ungraded" in done.out
    (failed,) = fleet.recorded(GradingFailed)
    assert failed.detail.endswith("its key is ***")
    assert "s3cr3t-judge" not in (fleet.home / "fleet.db").read_bytes().decode("latin-1")
    (fleet.folder / "no-environment").unlink()
    fleet.open_gate("1.0", "0.0")
    done = fleet("resume", "r", "--only", "ungraded", "--json")
    assert (done.code, scores(done.json)) == (0, [1.0, 0.0])


def test_a_second_grading_is_kept_beside_the_first_which_stays(fleet: Fleet, quiz: Quiz) -> None:
    fleet.open_gate("1.0", "0.0", "0.5")
    assert fleet(*quiz.words("1.0,0.0")).code == 0
    fleet("resume", "r", "--only", "ungraded").refused("no answers to grade", "--regrade")
    artefacts = Path(fleet.home, fleet.task("q_1")["artifacts"])
    (artefacts / "answer").write_text("0.5")
    done = fleet("resume", "r", "--regrade", "--json")
    assert (done.code, scores(done.json)) == (0, [1.0, 0.0])
    (attempt,) = fleet("show", "r", "q_1", "--json").json["attempts"]
    assert attempt["outcome"] == "answered"
    assert [grade["score"] for grade in attempt["grades"]] == [1.0, 0.5]
    shown = fleet("show", "r", "q_1").out
    assert "grade 1" in shown
    assert "fail (0.5)" in shown


def test_a_cancelled_grading_leaves_the_answers(fleet: Fleet, quiz: Quiz) -> None:
    process = fleet.start(*quiz.words("1.0,0.0"))
    fleet.open_gate("1.0")
    fleet.recorded(AttemptGraded)
    assert fleet("cancel", "r").code == 0
    assert process.wait().code == 130
    assert (fleet.results()["answered"], fleet.results()["scored"]) == (1, 1)
    until(lambda: fleet.state().ended_at is not None, "the end of the run")
    quiz.end_grader()
    fleet.open_gate("0.0")
    done = fleet("resume", "r", "--only", "ungraded", "--json")
    assert (done.code, scores(done.json)) == (0, [1.0, 0.0])


def test_a_benchmark_without_a_grader_is_refused(fleet: Fleet) -> None:
    fleet.bench([{"id": "a", "params": {"do": "score 1"}}])
    assert fleet.run().code == 0
    fleet("resume", "r", "--regrade").refused("scores its attempts itself: it cannot grade")


def test_a_corrected_score_command_grades_once_more_and_the_first_grade_stays(fleet: Fleet) -> None:
    grader = fleet.folder / "grade.sh"
    compare = 'grep -qx "{}" "$EVALFLEET_GRADED_OUT/answer"\n'
    grader.write_text(compare.format("forty-two"))
    fleet.bench(
        [task("a_1", "echo 42 > $EVALFLEET_OUT/answer"), task("a_2", "echo 41 > $EVALFLEET_OUT/answer")],
        score=["sh", "grade.sh"],
        score_files=["grade.sh"],
        score_from="exit_code",
    )
    assert fleet.run().code == 0
    assert [fleet.task(name)["score"] for name in ("a_1", "a_2")] == [0, 0]
    grader.write_text(compare.format("42"))
    fleet("resume", "r", "--only", "ungraded").refused("`--regrade` grades once more what has a score")
    done = fleet("resume", "r", "--regrade")
    assert done.code == 0, done
    graded = fleet.recorded(AttemptGraded, 2)
    assert {event.attempt: event.grade.score for event in graded if isinstance(event.grade, Scored)} == {
        "a_1.0": 1.0,
        "a_2.0": 0.0,
    }
    assert "graded again  1 task of 2 with another score, pass rate 50.0%; the first counts" in done.out
    # what counts is what was graded first
    assert [fleet.task(name)["score"] for name in ("a_1", "a_2")] == [0, 0]
