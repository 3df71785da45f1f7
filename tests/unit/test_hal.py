"""HAL asked in HAL's Python: what is refused beforehand, and every shape of its graders' results."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import http.server
import json
import os
import platform
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from evalfleet.benchmarks.hal.benchmark import HalBenchmark
from evalfleet.benchmarks.hal.checkout import listing, parsed_args
from evalfleet.benchmarks.hal.contents import task_files
from evalfleet.benchmarks.hal.costs import ModelPrice, traced_costs
from evalfleet.benchmarks.hal.grader import HalGrader
from evalfleet.benchmarks.hal.host import attempt
from evalfleet.benchmarks.hal.settings import HalSettings, resolved
from evalfleet.benchmarks.hal.tree import HalResultReader, HalResultWriter, read_run
from evalfleet.benchmarks.loaded import SettledTask
from evalfleet.errors import FleetError, RequestError
from evalfleet.events import AttemptEnded
from evalfleet.model import (
    AttemptId,
    Broken,
    Cause,
    Grade,
    Metered,
    ModelUse,
    Needs,
    Plan,
    Scored,
    Task,
    TaskId,
)
from evalfleet.ports import Answer
from evalfleet.views.model_costs import task_tokens
from standins.hal import copy_to

from .runs import Run

PARTLY = {
    "corebench_easy": 0.5,
    "usaco": 0.5,
    "scicode": 0.5,
    "colbench_backend_programming": 0.25,
    "replicatorbench": 0.75,
}
"""What a wrong answer is worth there."""


class Hal:
    """A checkout, and answers to be graded there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repo = copy_to(folder / "hal-harness")

    def settings(self, **keys: Any) -> HalSettings:
        given = {"benchmark": "gaia", "agent_dir": "agents/quiz", "grade_on": "here", **keys}
        return HalSettings(**{"hal_repo": str(self.repo), "hal_python": sys.executable, **given})

    def resolved(self, **keys: Any) -> HalSettings:
        return resolved(self.settings(**keys), self.folder, "hal")

    def answer(self, task: str, told: Any, *, wanted: bool = True, number: int = 0, **more: Any) -> Answer:
        folder = self.folder / "answers" / f"{task}.{number}"
        folder.mkdir(parents=True)
        (folder / "submission.json").write_text(json.dumps({task: told, **more}), "utf-8")
        return Answer(Task(TaskId(task), timeout_s=60.0), AttemptId(f"{task}.{number}"), folder, wanted)

    def grade(self, answers: list[Answer], **keys: Any) -> dict[str, Grade]:
        grader = HalGrader(self.resolved(**keys), {})

        async def all_of_them() -> dict[str, Grade]:
            graded = grader.grade(answers, self.folder / "scratch", {})
            return {attempt: grade async for attempt, grade in graded}

        return asyncio.run(all_of_them())

    def batches(self) -> list[list[str]]:
        lines = (self.repo / "graded.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def hal(tmp_path: Path) -> Hal:
    return Hal(tmp_path)


@pytest.mark.parametrize(
    "benchmark",
    ["gaia", "swebench_verified_mini", "scienceagentbench", "assistantbench", *PARTLY],
)
def test_every_shape_of_results_becomes_a_score(hal: Hal, benchmark: str) -> None:
    answers = [hal.answer("wrong", "5"), hal.answer("right", "5"), hal.answer("crash", "ERROR: it fell")]
    graded = hal.grade(answers, benchmark=benchmark)
    half = PARTLY.get(benchmark, 0.0)
    assert graded == {
        "right.0": Scored(1.0, success=True),
        "wrong.0": Scored(half),
        "crash.0": Scored(half, error="ERROR: it fell"),
    }
    assert hal.batches() == [["crash", "right", "wrong"]]


def test_scores_that_the_agents_own_process_reported_are_marked(hal: Hal) -> None:
    told = hal.grade(
        [
            hal.answer("right", {"reward": 1.0}),
            hal.answer("wrong", {"reward": 0.0}),
            hal.answer("crash", "ERROR"),
        ],
        benchmark="taubench_airline",
    )
    assert [told[name].score for name in ("right.0", "wrong.0", "crash.0")] == [1.0, 0.0, 0.0]  # type: ignore[union-attr]
    evaluation = {"individual": {"more": {"success": True}}}
    told |= hal.grade(
        [hal.answer("more", "Completed", evaluation=evaluation)], benchmark="appworld_test_normal"
    )
    assert told["more.0"].score == 1.0  # type: ignore[union-attr]
    assert all(
        grade.measured and grade.measured.metadata == {"score_from": "agent"} for grade in told.values()
    )


def test_a_batch_is_halved_until_the_answers_are_known_that_cannot_be_graded(hal: Hal) -> None:
    tasks = ["right", "wrong", "measured", "more"]
    answers = [hal.answer(task, "poison" if task in ("wrong", "more") else "5") for task in tasks]
    graded = hal.grade(answers)
    culprits = {task for task, grade in graded.items() if isinstance(grade, Broken)}
    assert culprits == {"wrong.0", "more.0"}
    for name in culprits:
        grade = graded[name]
        assert isinstance(grade, Broken)
        assert grade.cause is Cause.GRADING
        assert "the grader did not expect that" in grade.detail
    assert graded["right.0"] == Scored(1.0, success=True)
    assert len(graded) == len(tasks)
    assert hal.batches()[0] == sorted(tasks)


def test_only_what_is_wanted_is_told_but_the_grader_sees_all_answers(hal: Hal) -> None:
    graded = hal.grade([hal.answer("right", "5", wanted=False), hal.answer("wrong", "5")])
    assert list(graded) == ["wrong.0"]
    assert hal.batches() == [["right", "wrong"]]


def test_repeats_of_a_task_are_graded_one_after_another(hal: Hal) -> None:
    answers = [hal.answer("right", "5"), hal.answer("right", "6", number=1), hal.answer("wrong", "4")]
    assert hal.grade(answers) == {
        "right.0": Scored(1.0, success=True),
        "right.1": Scored(0.0),
        "wrong.0": Scored(1.0, success=True),
    }
    assert hal.batches() == [["right", "wrong"], ["right"]]


def test_a_grader_that_works_for_nothing_is_given_up_and_no_answer_is_broken(hal: Hal) -> None:
    (hal.repo / "no_docker").touch()
    tasks = list(json.loads((hal.repo / "data/quiz.json").read_text("utf-8")))
    with pytest.raises(FleetError, match=r"docker is not there; see .*log"):
        hal.grade([hal.answer(task, "5") for task in tasks])
    assert len(hal.batches()) == 12
    (hal.repo / "data/quiz.json").unlink()
    with pytest.raises(FleetError, match="HAL cannot grade gaia"):
        hal.grade([hal.answer("again", "5")])


def test_an_answer_that_did_not_come_home_is_an_error_for_the_grader(hal: Hal) -> None:
    late, hidden = hal.answer("slow", ""), hal.answer("more", "")
    for answer in (late, hidden):
        (answer.folder / "submission.json").unlink()
    (hidden.folder / "left_out.json").write_text("[]", "utf-8")
    assert hal.grade([late, hidden]) == {
        "slow.0": Scored(0.0, error="ERROR: Task timed out after 60 seconds", limit_s=60.0),
        "more.0": Scored(0.0, error="ERROR: the answer was left out, as left_out.json says"),
    }


def test_arguments_are_read_as_hal_reads_them(hal: Hal) -> None:
    read = {
        "gpt-4o": "gpt-4o",
        "true": True,
        "off": False,
        "3": 3,
        "1e5": 100000.0,
        "a,b": ["a", "b"],
        "[1, b]": [1, "b"],
        "none": None,
        "{broken": "{broken",
        "a=b": "a=b",
    }
    given = {f"key-{n}": text for n, text in enumerate(read)}
    assert list(parsed_args(hal.resolved(), given).items()) == [
        (f"key_{n}", value) for n, value in enumerate(read.values())
    ]


def test_a_task_goes_to_machines_without_the_paths_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "secret_answer_5").mkdir()
    (tmp_path / "secret_answer_5/a.txt").write_text("a", "utf-8")
    task = {
        "prompt": "p",
        "files": {"/root/environment/a": str(tmp_path / "secret_answer_5/a.txt"), "b": "secret_answer_5"},
    }
    sent = task_files("t", task, tmp_path)
    assert sorted(sent) == ["files/b/a.txt", "files/environment/a", "input.json"]
    given = sent["input.json"]
    assert isinstance(given, bytes)
    shown = {"/root/environment/a": "a.txt", "b": "secret_answer_5"}
    assert json.loads(given)["t"]["files"] == shown
    with pytest.raises(RequestError, match="outside its work directory"):
        task_files("t", {"files": {"../../a": "secret_answer_5"}}, tmp_path)
    with pytest.raises(RequestError, match="which is not there"):
        task_files("t", {"files": {"a": "gone"}}, tmp_path)


def test_what_hal_cannot_do_is_refused_in_one_line(hal: Hal) -> None:
    def refused(words: str, **keys: Any) -> None:
        listing.cache_clear()
        with pytest.raises(RequestError) as told:
            HalBenchmark.load("hal", hal.settings(**keys), hal.folder, hal.folder / "home")
        assert words in str(told.value)
        assert "\n" not in str(told.value)

    refused("is no checkout of HAL", hal_repo="elsewhere")
    refused("there is no Python at", hal_python="no/python")
    refused("/bin/true cannot import HAL (it ended without a word)", hal_python="/bin/true")
    refused("cannot be run (Permission denied)", hal_python=str(hal.repo / "data/quiz.json"))
    refused("HAL has no benchmark 'gaja'; did you mean 'gaia'?", benchmark="gaja")
    refused("the checkout of HAL lacks 'hal.benchmarks.mlagentbench', unless git", benchmark="mlagentbench")
    refused("executes what agents have written; add --set grade_on=PLACE", benchmark="usaco", grade_on="")
    refused("agent_dir: there is no folder", agent_dir="agents/none")
    refused("has no 'go'", agent_function="main.go")
    refused("the agent has no file", agent_function="go.run")
    refused("write FILE.FUNCTION", agent_function="run")
    refused("names of variables, never values", secrets=("sk-secret-1",))
    (hal.repo / "hal/benchmarks/mlagentbench.py").write_text("import absent_harness\n", "utf-8")
    refused("lacks 'absent_harness', which mlagentbench needs and no extra", benchmark="mlagentbench")
    extras = "[project.optional-dependencies]\nmlagentbench = []\n"
    (hal.repo / "pyproject.toml").write_text(extras, "utf-8")
    refused(f"-m pip install -e '{hal.repo}[mlagentbench]'", benchmark="mlagentbench")
    (hal.repo / "data/quiz.json").rename(hal.repo / "data/quiz.json.gpg")
    refused("HAL cannot list the tasks of gaia: Have you decrypted quiz.json.gpg? Use the following")
    (hal.repo / "hal/__init__.py").write_text("import weave.trace_server_that_is_gone\n", "utf-8")
    (hal.repo / "weave").mkdir()
    refused("pip install 'weave<0.54'")
    (hal.repo / "hal/__init__.py").write_text("import yaml_that_is_not_there\n", "utf-8")
    refused("lacks 'yaml_that_is_not_there': install HAL there with")
    (hal.repo / "hal/__init__.py").write_text(
        "import sys\nraise RuntimeError('Python 3.11 is needed')\n", "utf-8"
    )
    refused("cannot import HAL (Python 3.11 is needed): name the Python it is installed in")


def test_tasks_that_ask_for_a_gpu_need_a_machine_with_one_unless_told_otherwise(hal: Hal) -> None:
    quiz = json.loads((hal.repo / "data/quiz.json").read_text("utf-8"))
    quiz["right"]["gpu"] = True
    (hal.repo / "data/quiz.json").write_text(json.dumps(quiz), "utf-8")
    listing.cache_clear()
    loaded = HalBenchmark.load("hal", hal.settings(), hal.folder, hal.folder / "home")
    assert [task.needs for task in loaded.settled(loaded.tasks)][:2] == [Needs(gpus=1), None]
    loaded = HalBenchmark.load("hal", hal.settings(gpu_tasks="refuse"), hal.folder, hal.folder / "home")
    with pytest.raises(RequestError, match=r"1 of the chosen tasks need a GPU \(right\)"):
        loaded.settled(loaded.tasks)
    assert len(loaded.settled(loaded.tasks[1:])) == len(loaded.tasks) - 1
    loaded = HalBenchmark.load("hal", hal.settings(gpu_tasks="run"), hal.folder, hal.folder / "home")
    assert [task.needs for task in loaded.settled(loaded.tasks)] == [None] * len(loaded.tasks)


@pytest.mark.slow
def test_requirements_that_cannot_be_installed_fail_with_pips_words(tmp_path: Path) -> None:
    program = Path(attempt.__file__)
    (tmp_path / "agent").mkdir()
    (tmp_path / "attempt.py").write_bytes(program.read_bytes())
    words = [sys.executable, str(tmp_path / "attempt.py"), "prepare"]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 0  # it has none
    (tmp_path / "agent/requirements.txt").write_text("# none\nos-none @ file:///no/such/folder\n", "utf-8")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "/no/such/folder" in done.stderr


def test_output_that_cannot_be_used_is_an_error_of_the_agents(tmp_path: Path) -> None:
    order = {"task": "t", "timeout_s": 60.0}
    path = tmp_path / "output.json"

    def told(content: bytes, code: int | None = 0) -> str:
        path.write_bytes(content)
        answer, error = attempt.read_output(str(tmp_path), order, code)
        assert not (answer and error)
        return error

    assert told(b'{"t": null, "more": 1}') == ""
    assert told(b"").startswith("ERROR: output.json cannot be read: ")
    assert told(b'{"t": ').startswith("ERROR: output.json cannot be read: ")
    assert told(b"\xff\xfe").startswith("ERROR: output.json cannot be read: ")
    assert told(b"[" * 100_000).startswith("ERROR: output.json cannot be read: ")
    assert told(b'["t"]') == "ERROR: the agent's output has no answer for t"
    assert told(b'{"t": 1}', -9) == "ERROR: the agent ended with signal 9"
    assert told(b'{"t": 1}', 3) == "ERROR: the agent ended with exit code 3"
    assert told(b'{"t": 1}', None) == "ERROR: Task timed out after 60 seconds"
    os.truncate(path, attempt.LONGEST_OUTPUT + 1)
    assert attempt.read_output(str(tmp_path), order, 0)[1].startswith("ERROR: output.json is longer than")
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert attempt.read_output(str(tmp_path), order, 0)[1] == "ERROR: No output file generated"


UV = """#!/bin/sh
echo "$@" >> "$UV_PYTHON_INSTALL_DIR.words"
[ "$1" != venv ] || mkdir -p "$4/bin"
"""


class Index:
    """A package index that has one wheel of uv, which notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        name = f"uv-{attempt.UV}-py3-none-musllinux_1_1_{platform.machine()}.whl"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            wheel.writestr(f"uv-{attempt.UV}.data/scripts/uv", UV)
        self._page = folder / "uv/index.html"
        self._page.parent.mkdir()
        self._link = f'<a href="../{name}#sha256={{}}">{name}</a>'
        self.digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        self.tell(self.digest)

    def tell(self, digest: str) -> None:
        self._page.write_text(self._link.format(digest), "utf-8")


def test_uv_is_fetched_where_a_machine_has_neither_it_nor_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "machine/agent").mkdir(parents=True)
    (tmp_path / "machine/attempt.py").write_bytes(Path(attempt.__file__).read_bytes())
    (tmp_path / "machine/agent/requirements.txt").write_text("some-package\n", "utf-8")
    (tmp_path / "served").mkdir()
    index = Index(tmp_path / "served")
    served = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {
            "PATH": "/usr/bin:/bin",
            "UV_DEFAULT_INDEX": f"http://127.0.0.1:{server.server_address[1]}",
        }

        def prepare(*words: str) -> subprocess.CompletedProcess[str]:
            program = [sys.executable, "attempt.py", "prepare", *words]
            folder = tmp_path / "machine"
            return subprocess.run(
                program, cwd=folder, env=environ, capture_output=True, text=True, check=False
            )

        done = prepare("--python", "3.12", "weave<0.54")
        assert done.returncode == 0, done.stderr
        words = (tmp_path / "machine/hal_pythons.words").read_text("utf-8").splitlines()
        assert words[0] == "venv --python 3.12 hal_env"
        assert words[1].startswith("pip install --python hal_env/bin/python -r ")
        assert words[1].endswith("/agent/requirements.txt weave<0.54")
        index.tell("0" * 64)
        done = prepare("--python", "3.12")
        assert done.returncode == 1
        assert "uv is not on this machine, and cannot be fetched" in done.stderr
        assert "is not what" in done.stderr
        server.shutdown()


def test_traces_that_do_not_add_up_tell_no_cost_of_a_task() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
    wandb: dict[str, Any] = {
        "raw_logging_results": {"t": {"model": "m", "call_metadata": [{"usage": usage}] * 2}},
        "total_usage": {"m": {"prompt_tokens": 20, "completion_tokens": 4}},
    }
    prices = {"m": ModelPrice(1.0, 10.0, 0.5)}
    assert traced_costs(wandb, prices) == {"t": 10 + 5 + 40}
    assert traced_costs(wandb, {}) == {}
    wandb["total_usage"]["other"] = {"prompt_tokens": 1, "completion_tokens": 1}  # a second model was asked
    assert traced_costs(wandb, prices) == {}
    assert traced_costs({"problem": "no key"}, prices) == {}


def test_a_tree_with_damaged_files_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = tmp_path / "results/corebench_easy/c_1"
    run.mkdir(parents=True)
    lines = [
        '{"a": {"q": 1}}',
        "no json",
        '{"b": "ERROR: it fell\\nand broke"}',
        '{"c": 1}',
        '{"a": {"q": 2}}',
        "[]",
    ]
    (run / "c_1_RAW_SUBMISSIONS.jsonl").write_text("\n".join(lines), "utf-8")
    (run / "c_1_WALL_CLOCK_TIMES.jsonl").write_text('{"task_id": "a", "wall_clock_time": 2.5}\n{', "utf-8")
    reader = HalResultReader()
    found = reader.find([tmp_path])
    assert [(each.task, each.domain, each.trial) for each in found] == [
        (task, "corebench_easy", "c_1") for task in "abc"
    ]
    ungraded = reader.read(run / "a").outcome
    assert isinstance(ungraded, Broken)
    assert ungraded.cause is Cause.GRADING
    read_run.cache_clear()
    grades = {"a": {"correct_x": 1, "total_x": 2}, "b": {"correct_x": 0, "total_x": 2}}
    (run / "c_1.json").write_text(json.dumps(grades), "utf-8")
    assert reader.read(run / "a") == (Scored(0.5), None, 2.5)
    assert reader.read(run / "b").outcome == Scored(0.0, error="ERROR: it fell")
    assert isinstance(reader.read(run / "c").outcome, Broken)
    with pytest.raises(RequestError, match="holds no results of HAL"):
        reader.find([run / "a"])


def test_metered_tokens_and_the_checkout_are_in_hals_own_file(tmp_path: Path) -> None:
    repo, run = tmp_path / "hal", tmp_path / "r"
    repo.mkdir()
    url = "https://me:a-token@github.com/princeton-pli/hal-harness.git"
    for words in (
        ("init", "-q", "-b", "main"),
        ("config", "remote.origin.url", url),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"),
    ):
        subprocess.run(("git", "-C", str(repo), *words), check=True)
    attempt, call = run / "t0/t0.0", run / ".grading/hal/0/1"
    for folder in (attempt, call):
        folder.mkdir(parents=True)
    (attempt / "submission.json").write_text('{"t0": "x"}')
    (call / "answer.json").write_text('{"results": {}, "metrics": {}}')
    (call / "order.json").write_text('{"submissions": {"t0": "x"}}')
    used = ModelUse(calls=2, tokens={"in": 20, "cached": 5, "out": 4, "reasoning": 1})
    metered = Run(1, workers=1)
    metered.turn()
    metered.ready()
    broken, scored = (AttemptId(f"t0.{number}") for number in (0, 1))
    metered.tell(AttemptEnded(broken, Broken(Cause.RESULT), metered=Metered(models={"m": used})))
    metered.tell(AttemptEnded(scored, Scored(1.0, True), metered=Metered(models={"m": used})))
    tokens = task_tokens(metered.state, TaskId("t0"))
    spec = {"spec": {"settings": {"hal_repo": str(repo), "benchmark": "gaia"}}}
    settled = [SettledTask("t0", "", 1.0, attempt, 0.1, tokens)]
    HalResultWriter().write(Plan("r", "hal", ("local",), benchmark_spec=spec), settled, tmp_path / "out", {})
    upload = json.loads((tmp_path / "out/gaia/r/r_UPLOAD.json").read_text())
    counted = {"prompt_tokens": 40, "completion_tokens": 8, "cache_read_input_tokens": 10}
    assert upload["total_usage"] == {"m": counted}
    assert upload["git_info"]["branch"] == "main"
    assert upload["git_info"]["repository_url"] == "https://github.com/princeton-pli/hal-harness.git"
    assert len(upload["git_info"]["commit"]) == 40
