"""A run of HAL's agents on this computer, from a checkout with HAL's interface to HAL's own grades."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptGraded, AttemptStarted, MachineDeleted
from standins.hal import copy_to
from tests.desk import Done
from tests.e2e.harness import Fleet

GIVEN = ("hal_repo=hal-harness", "agent_dir=agents/quiz", "benchmark=gaia")


RIGHT = ("right", "measured", "more", "usage")
"""Tasks of the quiz that its agent solves, but for one that prints much."""


class Hal:
    """A fleet with a checkout of HAL in its folder."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.repo = copy_to(fleet.folder / "hal-harness")

    def words(self, *more: str, **settings: str) -> list[str]:
        given: dict[str, str] = dict(tuple(each.split("=", 1)) for each in GIVEN)  # type: ignore[misc]
        given |= {"hal_python": sys.executable, "agent_python": sys.executable, **settings}
        return ["run", "hal", "--name", "r", *(f"--set={key}={value}" for key, value in given.items()), *more]

    def out(self, task: str, attempt: int = 0) -> Path:
        return self.fleet.home / "r" / task / f"{task}.{attempt}"

    def read(self, task: str, name: str) -> Any:
        return json.loads((self.out(task) / name).read_text("utf-8"))


@pytest.fixture
def hal(fleet: Fleet) -> Hal:
    return Hal(fleet)


def test_every_way_an_agent_can_end_has_its_outcome(fleet: Fleet, hal: Hal) -> None:
    args = ("-A", "model_name=gpt-4o", "-A", "some-list=a,b", "--task-timeout", "5", "--exclude", "model")
    done = fleet(*hal.words("--workers", "3", *args), "--json")
    assert done.code == 0, done
    results = done.json
    tasks = {task["task_id"]: task for task in results["tasks"]}
    scores = {name: task["score"] for name, task in tasks.items()}
    assert scores == dict.fromkeys(scores, 0.0) | dict.fromkeys((*RIGHT, "flood"), 1.0)
    assert results["attempts"] == len(tasks)
    assert (tasks["measured"]["num_steps"], tasks["measured"]["cost_usd"]) == (7, 0.25)
    # what the agent left tells its tokens, each answer once, and HAL's table what they cost
    assert tasks["usage"]["tokens"] == {"in": 2000, "cached": 400, "out": 110}
    usd = (600 * 1.1 + 400 * 0.55 + 100 * 4.4 + 1000 * 2.5 + 10 * 10) / 1e6
    assert tasks["usage"]["cost_usd"] == pytest.approx(usd)
    assert tasks["right"]["cost_usd"] is None
    assert results["cost"]["models_usd"] == pytest.approx(0.25 + usd)
    errors = {name: task["error"] for name, task in tasks.items() if task["error"]}
    assert errors == {
        "crash": "ERROR: the agent's own fault",
        "exit": "ERROR: No output file generated",
        "nothing": "ERROR: the agent's output has no answer for nothing",
        "other": "ERROR: the agent's output has no answer for other",
        "stdin": "ERROR: EOF when reading a line",
        "slow": "ERROR: Task timed out after 5 seconds",
    }
    # as HAL's own runner: what the agent finds, and what it leaves
    assert hal.read("right", "task/agent_args.json") == {
        "model_name": "gpt-4o",
        "some_list": ["a", "b"],
        "benchmark_name": "gaia",
    }
    assert hal.read("right", "task/input.json") == {
        "right": {
            "prompt": "What is 2 + 3?",
            "do": "answer 5",
            "files": {"/root/environment/note.txt": "note.txt"},
        }
    }
    seen = (hal.out("right") / "task/seen.txt").read_text("utf-8").split()
    assert {"./environment/note.txt", "./input.json", "./agent_args.json", "./helper.py"} <= set(seen)
    left = {path.name for path in (hal.out("right") / "task").iterdir()}
    assert left == {"agent_args.json", "input.json", "output.json", "seen.txt"}
    assert (hal.out("crash") / "task/error.log").read_text("utf-8").startswith("ERROR: the agent's own fault")
    assert hal.read("more", "submission.json") == {"notes": "kept", "more": "6"}
    # it printed 60 MB and left a process that goes on: both end with the attempt
    assert (hal.out("flood") / "evalfleet.log").stat().st_size < 52 << 20
    # no machine has the answers, nor where they are
    kept = [path for path in (fleet.home / "r/.files").rglob("*") if path.is_file()]
    assert kept
    assert not any(
        b"truth" in path.read_bytes() or str(hal.repo).encode() in path.read_bytes() for path in kept
    )
    # graded at once, after the last machine was gone
    assert (hal.repo / "graded.jsonl").read_text("utf-8").count("\n") == 1
    events = [record.event for record in fleet.records("r")]
    kinds = [type(event) for event in events]
    assert kinds.index(AttemptGraded) > max(n for n, kind in enumerate(kinds) if kind is MachineDeleted)
    fleet.settled()
    check_tree(fleet, scores)


def check_tree(fleet: Fleet, scores: dict[str, float]) -> None:
    """What HAL's tools read is written, and read again as the same run."""
    told = fleet("report", "r", "--format", "hal", "-o", "results")
    assert "12 submissions in results/gaia/r; HAL's accuracy: " in told.out
    run = fleet.folder / "results/gaia/r"
    lines = [json.loads(line) for line in (run / "r_RAW_SUBMISSIONS.jsonl").read_text("utf-8").splitlines()]
    assert [next(iter(line)) for line in lines] == list(scores)
    assert {"more": "6", "notes": "kept"} in lines
    timed = (run / "r_WALL_CLOCK_TIMES.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["task_id"] for line in timed] == list(scores)
    upload = json.loads((run / "r_UPLOAD.json").read_text("utf-8"))
    assert upload["raw_eval_results"] == json.loads((run / "r.json").read_text("utf-8"))
    assert upload["results"]["successful_tasks"] == [*RIGHT, "flood"]
    assert upload["total_usage"]["gpt-4o"]["completion_tokens"] == 10
    assert upload["total_cost"] is None  # two tasks tell their cost, ten do not
    assert upload["task_step_counts"] == {"measured": 7}
    assert len(upload["agent_hash"]) == 64
    line = "hal-eval --benchmark gaia --agent_name r --agent_function main.run --agent_dir agents/quiz"
    assert (
        upload["config"]["run_command"]
        == f'{line} --run_id r -A model_name=gpt-4o -A \'some_list=["a", "b"]\''
    )
    assert (run / "r.log").is_file()
    assert sorted(path.name for path in (run / "right").iterdir()) == [
        "agent_args.json",
        "input.json",
        "output.json",
        "seen.txt",
    ]
    fleet("report", "r", "--format", "hal", "-o", "results").refused("is not empty")
    again = fleet("import", "hal", "results", "--name", "again", "--json")
    assert again.code == 0, again
    assert {task["task_id"]: task["score"] for task in again.json["tasks"]} == scores
    assert (fleet.home / "again/right/right.0/output.json").is_file()


def test_what_the_grader_failed_on_is_graded_again_and_no_agent_runs_again(fleet: Fleet, hal: Hal) -> None:
    quiz = json.loads((hal.repo / "data/quiz.json").read_text("utf-8"))
    quiz["wrong"]["do"] = "answer poison"
    (hal.repo / "data/quiz.json").write_text(json.dumps(quiz), "utf-8")
    chosen = ("--task", "right", "--task", "wrong", "--task", "model", "--attempts", "2", "--workers", "2")
    done = fleet(*hal.words(*chosen), "--json")
    assert done.code == 1, done
    causes = {task["task_id"]: (task["status"], task["cause"]) for task in done.json["tasks"]}
    assert causes == {"right": ("scored", None), "wrong": ("broken", "grading"), "model": ("broken", "model")}
    model = done.json["tasks"][-1]
    assert (model["attempts"], model["broken_attempts"]) == (2, {"model": 2})
    assert "APIConnectionError" in model["error"]
    again = fleet("resume", "r", "--only", "ungraded", "--json")
    assert again.code == 1, again
    assert again.json["causes"] == {"grading": 1, "model": 2}
    (hal.repo / "antidote").touch()
    mended = fleet("resume", "r", "--json")
    assert mended.code == 1, mended
    assert {task["task_id"]: task["score"] for task in mended.json["tasks"]} == {
        "right": 1.0,
        "wrong": 0.0,
        "model": None,
    }
    started = [record.event for record in fleet.records("r") if isinstance(record.event, AttemptStarted)]
    assert len(started) == 4
    fleet("resume", "r").refused("no unrun tasks")
    fleet("resume", "r", "--only", "ungraded").refused("no answers to grade")
    fleet.settled()


@pytest.mark.nightly
def test_requirements_that_cannot_be_installed_end_the_run_after_the_canary(fleet: Fleet, hal: Hal) -> None:
    (hal.repo / "agents/quiz/requirements.txt").write_text("none @ file:///no/such/folder\n", "utf-8")
    done = fleet(*hal.words("--workers", "3", "--canary", "1", agent_python=""))
    assert done.code == 4, done
    assert "/no/such/folder" in done.said  # pip's own words
    assert not any(isinstance(record.event, AttemptStarted) for record in fleet.records("r"))
    fleet.settled()


def test_bad_input_is_told_in_one_line_before_anything_is_made(fleet: Fleet, hal: Hal) -> None:
    fleet(*hal.words("--task", "unheard")).refused("unheard")
    fleet(*hal.words("-A", "model_name")).refused("-A must be followed by KEY=VALUE")
    fleet.environ["OPENAI_API_KEY"] = "sk-a-secret-of-somebody"
    fleet.forks = True
    shown = fleet(*hal.words("-A", "key=sk-a-secret-of-somebody", secrets="OPENAI_API_KEY"))
    shown.refused("OPENAI_API_KEY")
    assert "sk-a-secret" not in shown.said
    quiz = json.loads((hal.repo / "data/quiz.json").read_text("utf-8"))
    quiz["right"]["gpu"] = True
    (hal.repo / "data/quiz.json").write_text(json.dumps(quiz), "utf-8")
    without_gpu = fleet(*hal.words("--first", "2", "--dry-run"))
    assert without_gpu.code == 4
    assert "no machine that is offered has the 1 GPU that task right needs" in without_gpu.err
    assert "--set gpu_tasks=run runs it anywhere" in without_gpu.err
    assert not fleet.home.exists() or not list(fleet.home.glob("r*"))


def test_a_grader_that_executes_agents_code_runs_on_a_machine_of_its_own(
    fleet: Fleet, hal: Hal, say: Callable[..., str]
) -> None:
    (hal.repo / ".gitignore").write_text("data\n", "utf-8")  # what was downloaded is needed there, too
    words = hal.words("--task", "right", "--task", "wrong", "--workers", "2", benchmark="usaco")
    told = say(*words, "--set=grade_on=loacl", code=2)
    assert "grade_on=loacl: place 'loacl' is unknown; did you mean 'local'?" in told
    assert "--set grade_on=PLACE for a fresh machine" in say(*words, code=2)
    done = fleet(*words, "--set=grade_on=local", f"--set=grade_python={sys.executable}", "--json")
    assert done.code == 0, done
    assert {task["task_id"]: task["score"] for task in done.json["tasks"]} == {"right": 1.0, "wrong": 0.5}
    assert not (hal.repo / "graded.jsonl").exists()  # it was not graded here
    (grading,) = fleet.home.glob("r-grading-*")
    assert (grading / "grading/grading.0/answer.json").is_file()
    assert fleet.task("grading", grading.name)["success"] is True
    events = [record.event for record in fleet.records(grading.name)]
    assert any(isinstance(event, MachineDeleted) for event in events)
    fleet.settled()


class HalEval:
    """HAL's own command line, typed in a checkout."""

    def __init__(self, fleet: Fleet) -> None:
        copy_to(fleet.folder / "hal-harness")
        for path in (fleet.folder / "hal-harness").iterdir():
            path.rename(fleet.folder / path.name)
        (fleet.folder / "agents/quiz/requirements.txt").unlink()
        self.fleet = fleet

    def words(self, *more: str, benchmark: str = "gaia") -> list[str]:
        agent = ("--agent_dir", "agents/quiz", "--agent_function", "main.run")
        named = ("--agent_name", "Quiz (GPT-4o)", "--benchmark", benchmark)
        return ["hal-eval", *named, *agent, f"--set=hal_python={sys.executable}", *more]

    def __call__(self, *more: str) -> Done:
        return self.fleet(*self.words(*more))

    def tree(self, run_id: str, end: str) -> Any:
        text = (self.fleet.folder / f"results/gaia/{run_id}/{run_id}{end}").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()] if end.endswith("l") else json.loads(text)


@pytest.fixture
def hal_eval(fleet: Fleet) -> HalEval:
    return HalEval(fleet)


def test_hals_own_command_line_runs_and_leaves_hals_tree(fleet: Fleet, hal_eval: HalEval) -> None:
    fleet.environ["OPENAI_API_KEY"] = "sk-a-secret-of-somebody"
    fleet.forks = True
    chosen = ("--run_id", "r", "--task_ids", "crash, right,measured", "--max_concurrent", "2")
    done = hal_eval(*chosen, "-A", "some-list=a,b", "--json")
    assert done.code == 0, done
    assert {task["task_id"]: task["score"] for task in done.json["tasks"]} == {
        "right": 1.0,
        "measured": 1.0,
        "crash": 0.0,
    }
    spec = fleet.state("r").plan.benchmark_spec["spec"]["settings"]
    assert spec["secrets"] == ["OPENAI_API_KEY"]  # as HAL, which gives agents all there is
    upload = hal_eval.tree("r", "_UPLOAD.json")
    assert upload["config"]["agent_name"] == "Quiz (GPT-4o)"
    assert upload["config"]["agent_args"] == {"some_list": ["a", "b"], "benchmark_name": "gaia"}
    assert upload["evalfleet"]["cost"]["models_usd"] == 0.25
    hal_eval("--run_id", "r").refused("continue it with --continue_run")
    assert len(hal_eval.tree("r", "_RAW_SUBMISSIONS.jsonl")) == 3
    hal_eval("--run_id", "r", "--continue_run").refused("no unrun tasks")
    fleet.settled()


def test_an_evaluation_whose_controller_was_killed_is_gone_on_with(fleet: Fleet, hal_eval: HalEval) -> None:
    gate = fleet.folder / "open"
    quiz = fleet.folder / "agents/quiz/main.py"
    wait = f"    while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n    do = "
    quiz.write_text(quiz.read_text("utf-8").replace("    do = ", wait))
    words = hal_eval.words("--run_id", "r", "--task_ids", "right,wrong")
    process = fleet.start(*words)
    fleet.recorded(AttemptStarted)
    process.kill()
    gate.touch()
    done = fleet(*words, "--continue_run", "--json")
    assert done.code == 0, done
    assert "the tasks are those that the run was planned with" in done.err
    assert sorted(map(list, hal_eval.tree("r", "_RAW_SUBMISSIONS.jsonl"))) == [["right"], ["wrong"]]
    assert len([r for r in fleet.records("r") if isinstance(r.event, AttemptStarted)]) == 2
    fleet.settled()


def test_what_hal_eval_cannot_do_is_refused_in_one_line(
    fleet: Fleet, hal_eval: HalEval, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = {
        "--vm": "`evalfleet hal-eval --vm` was removed; use --on PLACE",
        "-B x=1": "HAL ignores it",
        "--continue_run": "name it with --run_id ID",
        "--docker": "--set image=IMAGE",
        "--conda_env_name mine": "use `--set agent_python=PATH`",
        "--google-cloud --on local": "say where machines come from once",
        "--max_concurrent none": "--max_concurrent",
        "--task_ids rihgt": "'rihgt' is no task of it; did you mean 'right'",
        "-A model_name": "-A must be followed by KEY=VALUE",
        "--run_id .a": "--run_id '.a' cannot be used",
        "--set hal_repo=elsewhere": "is no checkout of HAL",
    }
    for words, told in refusals.items():
        assert told in say(*hal_eval.words(*words.split()), code=2), words
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-secret-of-somebody")
    shown = say(*hal_eval.words("-A", "key=sk-a-secret-of-somebody"), code=2)
    assert "OPENAI_API_KEY" in shown
    assert "sk-a-secret" not in shown
    assert "HAL has no benchmark 'gaja'" in say(*hal_eval.words(benchmark="gaja"), code=2)
    plan = json.loads(say(*hal_eval.words("--dry-run", "--max_tasks", "3", "--json")))["plan"]
    assert re.fullmatch(r"gaia_quiz_gpt4o_\d{10}", plan["run"])
    assert not (fleet.folder / "results").exists()
    assert not list(fleet.home.glob("*"))


def test_the_variables_of_hals_google_cloud_are_understood(fleet: Fleet, hal_eval: HalEval) -> None:
    registry = "us-east1-docker.pkg.dev/ours/agents"
    fleet.environ |= {
        "GCP_PROJECT_ID": "ours",
        "GCP_REGION": "us-east1",
        "GCP_ZONE": "us-east1-b",
        "ARTIFACT_REGISTRY": registry,
        "BUCKET_NAME": "our-results",
        "SSH_PUBLIC_KEY_PATH": "key.pub",
    }
    fleet.forks = True
    on_google = ("--google-cloud", "--set=ssh_from=203.0.113.7/32", "--dry-run", "--json")
    done = hal_eval(*on_google)
    plan = done.json["plan"]
    place = plan["place_specs"]["gce"]["settings"]
    assert (place["project"], place["zones"]) == ("ours", ["us-east1-b"])
    assert plan["store"] == "gs://our-results/gaia"
    assert f"--set image=NAME takes one from {registry}" in done.err
    assert "SSH_PUBLIC_KEY_PATH is not needed" in done.err
    plan = hal_eval(*on_google, "--set=image=quiz", "--store=elsewhere").json["plan"]
    assert plan["benchmark_spec"]["spec"]["settings"]["image"] == f"{registry}/quiz"
    assert plan["store"].endswith("/elsewhere")


def test_tasks_and_answers_from_a_file_need_no_checkout(
    fleet: Fleet, hal: Hal, say: Callable[..., str]
) -> None:
    tasks = {
        "one": {"do": "answer 5", "answer": 5, "files": {"note.txt": "note.txt"}},
        "two": {"do": "measured 7", "answer": "8"},
    }
    (fleet.folder / "note.txt").write_text("a note", "utf-8")
    (fleet.folder / "mine.json").write_text(json.dumps(tasks), "utf-8")
    agent = ("--set=agent_dir=hal-harness/agents/quiz", f"--set=agent_python={sys.executable}")
    words = ["run", "hal", "--name", "r", "--set=tasks_file=mine.json", *agent]
    done = fleet(*words, "-A", "n=3", "-A", "words=a,b", "--workers", "2", "--json")
    assert done.code == 0, done
    assert {task["task_id"]: task["score"] for task in done.json["tasks"]} == {"one": 1.0, "two": 0.0}
    assert done.json["benchmark"] == "hal-mine"
    assert hal.read("one", "task/agent_args.json") == {"n": 3, "words": ["a", "b"], "benchmark_name": "mine"}
    assert "answer" not in hal.read("one", "task/input.json")["one"]  # that is the right one
    assert "note.txt" in (hal.out("one") / "task/seen.txt").read_text("utf-8")
    (fleet.folder / "mine.json").write_text('{"one": {}}', "utf-8")
    again = [word.replace("=r", "=s") for word in words]
    assert "task 'one' has no 'answer'" in say(*again, code=2)
    (fleet.folder / "mine.json").write_text("[1]", "utf-8")
    assert "mine.json is no JSON object of tasks" in say(*again, code=2)
    assert "cannot be read" in say(*again, "--set=tasks_file=none.json", code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="a fork bomb is set off in a control group only: needs root")
def test_a_fork_bomb_and_a_gigabyte_of_output_end_with_their_attempts(fleet: Fleet, hal: Hal) -> None:
    tasks = {name: {"do": name, "answer": "8"} for name in ("bomb", "gigabyte")}
    (fleet.folder / "mine.json").write_text(json.dumps(tasks), "utf-8")
    settings = ("tasks_file=mine.json", "agent_dir=hal-harness/agents/quiz", "isolation=user")
    done = fleet("run", "hal", "--name", "r", *(f"--set={each}" for each in settings), "--json")
    assert done.code == 0, done
    assert {task["task_id"]: task["score"] for task in done.json["tasks"]} == {"bomb": 1.0, "gigabyte": 1.0}
    assert (hal.out("gigabyte") / "evalfleet.log").stat().st_size < 52 << 20
    fleet.settled()  # and no process is left


WEAVE = """
import contextlib, os

TRACES = {path!r}

class Client:
    def tasks(self):
        return [line.split()[1] for line in open(TRACES) if line.startswith("task")]

def note(line):
    with open(TRACES, "a") as file:
        file.write(line + chr(10))

def init(project):
    note(f"init {{project}} {{os.environ['WANDB_API_KEY']}}")
    return Client()

@contextlib.contextmanager
def attributes(given):
    note(f"task {{given['weave_task_id']}}")
    yield
"""


def test_wandb_traces_agents_only_on_request_and_tells_what_they_cost(
    fleet: Fleet, hal: Hal, say: Callable[..., str]
) -> None:
    traces = fleet.folder / "traces"
    for folder in (hal.repo, hal.repo / "agents/quiz"):
        (folder / "weave.py").write_text(WEAVE.format(path=str(traces)), "utf-8")
    words = hal.words("--task", "right", "--task", "wrong")
    fleet.environ["WANDB_API_KEY"] = "a-key-of-wandb"
    fleet.forks = True
    assert fleet(*words).code == 0
    assert not traces.exists()
    asked = [*(word.replace("=r", "=s") for word in words), "--set=wandb=my-project"]
    asked[asked.index("r")] = "s"
    done = fleet(*asked, "--json")
    assert done.code == 0, done
    lines = traces.read_text("utf-8").splitlines()
    assert sorted(set(lines)) == ["init my-project a-key-of-wandb", "task right", "task wrong"]
    fleet("report", "s", "--format", "hal", "-o", "tree")
    upload = json.loads((fleet.folder / "tree/gaia/s/s_UPLOAD.json").read_text("utf-8"))
    assert upload["total_cost"] == pytest.approx(0.012)
    assert upload["total_usage"]["gpt-4o"]["prompt_tokens"] == 4000
    costs = {task["task_id"]: task["cost_usd"] for task in done.json["tasks"]}
    assert costs == dict.fromkeys(("right", "wrong"), pytest.approx((2000 * 2.5 + 100 * 10) / 1e6))
    assert done.json["cost"]["models_usd"] == pytest.approx(2 * 0.006)
    assert sorted(upload["raw_logging_results"]) == ["right", "wrong"]
    assert "write the name of a project" in say(*words, "--set=wandb=-x", code=2)
