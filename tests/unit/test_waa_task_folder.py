"""What WAA's files of one task mean."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from evalfleet.benchmarks.waa import task_folder
from evalfleet.benchmarks.waa.task_folder import Reading, read_task
from evalfleet.benchmarks.waa.tracebacks import part_of
from tests.pythons import python_3_8

OLD_PYTHON = python_3_8()

RUN = (
    'Traceback (most recent call last):\n  File "/client/run.py", line 250, in test\n'
    "    lib_run_single.run_single_example(agent, env, example)\n"
    '  File "/client/lib_run_single.py", line {line}, in run_single_example\n    {code}\n'
)
PREDICT = RUN.format(line=40, code="response, actions, logs, computer_update_args = agent.predict(") + (
    '  File "/client/mm_agents/navi/agent.py", line 387, in predict\n'
    "    plan_result = self.gpt4v_planner.plan(image_prompts, user_question)\n"
)
ASKING = (
    "Traceback (most recent call last):\n"
    '  File "/usr/local/lib/python3.9/site-packages/tenacity/__init__.py", line 470, in __call__\n'
    "    result = fn(*args, **kwargs)\n"
    '  File "/client/mm_agents/navi/gpt/gpt4v_oai.py", line 75, in process_images\n'
    "    response = self.client.chat.completions.create(\n"
)
RETRIED = "\nThe above exception was the direct cause of the following exception:\n\n" + PREDICT
RETRY_LINE = "tenacity.RetryError: RetryError[<Future at 0x7f state=finished raised {name}>]\n"
SETUP = '  File "/client/desktop_env/controllers/setup.py", line 96, in _download_setup\n    raise requests\n'
RESET = (
    '  File "/client/desktop_env/envs/desktop_env.py", line 240, in reset\n'
    "    self.setup_controller.setup()\n"
)
GUEST_GONE = (
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='20.20.20.21', port=5000): refused\n"
)


def asked(line: str, name: str) -> str:
    return ASKING + line + "\n" + RETRIED + RETRY_LINE.format(name=name)


TRACEBACKS = {
    "a key that is refused": (
        "model",
        asked(
            "openai.AuthenticationError: Error code: 401 - {'error': 'invalid_api_key'}",
            "AuthenticationError",
        ),
    ),
    "throttled": ("model", asked("openai.RateLimitError: Error code: 429", "RateLimitError")),
    "retried, and only the end was kept": ("model", PREDICT + RETRY_LINE.format(name="RateLimitError")),
    "out of quota": ("model", PREDICT + "openai.RateLimitError: Error code: 429 - insufficient_quota\n"),
    "no network to the model": (
        "model",
        asked("openai.APIConnectionError: Connection error.", "APIConnectionError"),
    ),
    "another vendor": ("model", PREDICT + "anthropic.APIStatusError: Error code: 529 - overloaded\n"),
    "an agent's own client": (
        "model",
        PREDICT
        + '  File "/client/mm_agents/navi/gpt/gpt4v_azure.py", line 90, in ask\n    r.raise_for_status()\n'
        + "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests\n",
    ),
    "too long a question": (
        "agent",
        asked("openai.BadRequestError: Error code: 400 - 'context_length_exceeded'", "BadRequestError"),
    ),
    "an agent of one's own, no network": (
        "model",
        PREDICT + "httpx.ConnectTimeout: timed out\n",
    ),
    "the same, and it was the guest that was silent": (
        "controller",
        PREDICT + "requests.exceptions.ConnectionError: HTTPConnectionPool(host='20.20.20.21', port=5000)\n",
    ),
    "the agent's code": ("agent", PREDICT + "ValueError: min() arg is an empty sequence\n"),
    "the agent's code, inside a retried call": (
        "agent",
        asked("AttributeError: 'NoneType' object has no attribute 'mode'", "AttributeError"),
    ),
    "the agent's code, many lines": ("agent", PREDICT + "KeyError: 'a'\nmore: of it\n"),
    "the agent looks at a guest that is gone": (
        "controller",
        PREDICT + "playwright._impl._errors.Error: connect ECONNREFUSED 20.20.20.21:9222\n",
    ),
    "no screenshot to look at": (
        "controller",
        PREDICT + "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object>\n",
    ),
    "memory": ("machine", PREDICT + "MemoryError\n"),
    "disk": ("machine", RUN.format(line=9, code="x") + "OSError: [Errno 28] No space left on device\n"),
    "set-up": (
        "set-up",
        RUN.format(line=21, code="env.reset()") + RESET + SETUP + "requests.RequestException: no\n",
    ),
    "a guest that is gone, at reset": (
        "set-up",
        RUN.format(line=21, code="env.reset()") + RESET + GUEST_GONE,
    ),
    "a guest that is gone, at a step": (
        "controller",
        RUN.format(line=45, code="env.controller.update_computer()")
        + '  File "/client/desktop_env/controllers/python.py", line 60, in update_computer\n    post()\n'
        + GUEST_GONE,
    ),
    "evaluator": (
        "evaluator",
        RUN.format(line=80, code="result = env.evaluate()")
        + '  File "/client/desktop_env/envs/desktop_env.py", line 330, in evaluate\n    self.metric()\n'
        + '  File "/client/desktop_env/evaluators/metrics/table.py", line 7, in compare\n    x\n'
        + "KeyError: 'Sheet1'\n",
    ),
    "recorder": (
        "client",
        RUN.format(line=30, code="recorder.record_init()")
        + '  File "/client/trajectory_recorder.py", line 16, in save_dict\n    x\n'
        + "AttributeError: 'NoneType' object has no attribute 'keys'\n",
    ),
    "nothing that tells": ("unknown", "Time limit exceeded in notepad/a"),
}


@pytest.mark.parametrize("name", TRACEBACKS)
def test_a_traceback_says_whose_fault_it_was(name: str) -> None:
    part, traceback = TRACEBACKS[name]
    assert part_of(traceback) == part


def step(number: int, second: int) -> dict[str, object]:
    return {"step_num": number, "action_timestamp": f"20241102@1000{second:02}", "action": "click()"}


def error(traceback: str) -> dict[str, object]:
    last = traceback.strip().splitlines()[-1].partition(": ")[2]
    return {"Error": "Exception in notepad/a", "Exception": last, "Traceback": traceback}


def made(path: Path, *lines: dict[str, object], result: str | None = None, page: str = "") -> Reading:
    if result is not None:
        (path / "result.txt").write_text(result)
    if lines:
        (path / "traj.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if page:
        (path / "traj.html").write_text(page)
    return read_task(str(path))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1.0\n", 1.0),
        ("0\n", 0.0),
        ("0.4", 0.4),
        ("True\n", 1.0),
        ("False\n", 0.0),
        ("-0.0", 0.0),
        ("-0.02", 0.0),
    ],
)
def test_a_result_is_the_score(tmp_path: Path, text: str, score: float) -> None:
    found = made(tmp_path, step(0, 0), step(1, 5), result=text)
    assert (found.score, found.cause, found.error) == (score, "", "")


@pytest.mark.parametrize("text", ["", "\n", "nan", "inf", "1.5", "-1.5", "None", "1.0 1.0", "\x00"])
def test_what_is_no_score_is_broken(tmp_path: Path, text: str) -> None:
    found = made(tmp_path, result=text)
    assert (found.score, found.cause) == (None, "result")
    assert found.error.startswith("result.txt ")


def test_the_agents_own_failure_scores_zero_and_keeps_the_reason(tmp_path: Path) -> None:
    found = made(tmp_path, step(0, 0), error(TRACEBACKS["the agent's code"][1]))
    assert (found.score, found.cause, found.part) == (0.0, "", "agent")
    assert found.error == "the agent failed: ValueError: min() arg is an empty sequence"


def test_the_models_failure_is_broken_and_names_what_was_refused(tmp_path: Path) -> None:
    found = made(tmp_path, step(0, 0), error(TRACEBACKS["a key that is refused"][1]))
    assert (found.score, found.cause) == (None, "model")
    assert found.error.startswith("the model's API failed: openai.AuthenticationError: Error code: 401")


@pytest.mark.parametrize(
    ("name", "cause"),
    [("set-up", "readiness"), ("evaluator", "internal"), ("recorder", "internal"), ("memory", "setup")],
)
def test_the_environments_failure_is_broken(tmp_path: Path, name: str, cause: str) -> None:
    found = made(tmp_path, error(TRACEBACKS[name][1]))
    assert (found.score, found.cause) == (None, cause)


def test_a_score_stands_though_the_client_failed_afterwards(tmp_path: Path) -> None:
    found = made(tmp_path, step(0, 0), error(TRACEBACKS["disk"][1]), result="1.0")
    assert found.score == 1.0
    assert "No space left" in found.error


def test_neither_a_result_nor_an_error(tmp_path: Path) -> None:
    found = made(tmp_path, step(0, 0), step(1, 4))
    assert (found.score, found.cause, found.names_fault) == (None, "result", False)
    assert found.error == "no result.txt and no Error line in traj.jsonl"


def test_an_error_of_an_earlier_try_is_forgotten(tmp_path: Path) -> None:
    found = made(tmp_path, step(0, 0), step(7, 1), error(TRACEBACKS["set-up"][1]), step(0, 9), step(2, 30))
    assert (found.part, found.steps, found.cause) == (None, 2, "result")


def test_a_second_try_that_fails_before_its_first_line(tmp_path: Path) -> None:
    found = made(
        tmp_path, step(0, 0), step(3, 1), error(TRACEBACKS["memory"][1]), error(TRACEBACKS["set-up"][1])
    )
    assert found.part == "set-up"


def test_steps_are_counted_not_actions(tmp_path: Path) -> None:
    assert made(tmp_path, step(0, 0), step(1, 1), step(1, 2), step(2, 3), result="1").steps == 2


def test_no_trajectory_no_steps(tmp_path: Path) -> None:
    assert made(tmp_path, result="1").steps is None


def test_screenshots_in_the_order_they_were_taken(tmp_path: Path) -> None:
    names = [
        "screenshot-step_reset_20241102@100000.png",
        "screenshot-step_0_20241102@100009.png",
        "screenshot-step_2_20241102@100020.png",
        "screenshot-step_10_20241102@100100.png",
    ]
    for name in [*reversed(names), "foreground_window-step_0_20241102@100009.png", "a.png"]:
        (tmp_path / name).write_bytes(b"png")
    assert made(tmp_path, result="1").screenshots == tuple(names)


def test_the_clients_own_measure_of_time_counts(tmp_path: Path) -> None:
    page = "<h1>Elapsed Time: 0:09:00.0</h1><h1>Elapsed Time: 1:02:03.500000</h1>"
    found = made(tmp_path, step(0, 0), step(1, 10), result="1", page=page)
    assert found.seconds == 3723.5
    assert found.started is not None
    assert found.ended == found.started + 3723.5


def test_without_it_the_files_times_count_if_they_are_the_clients(tmp_path: Path) -> None:
    made(tmp_path, step(0, 0), step(1, 10), result="1")
    began = 1730541600  # 2024-11-02 10:00:00 UTC
    os.utime(tmp_path / "traj.jsonl", (began + 7200, began + 7200))
    os.utime(tmp_path / "result.txt", (began + 7290, began + 7290))
    found = read_task(str(tmp_path))
    assert (found.started, found.seconds) == (began, 90.0)


def test_times_of_a_copy_do_not_count(tmp_path: Path) -> None:
    assert made(tmp_path, step(0, 0), step(1, 10), result="1").seconds == 10.0


def test_garbage_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "traj.jsonl").write_bytes(
        b'\xff\xfe{"Error": 3}\n[1]\n{"step_num": "x"}\n{"Error"' + b"[" * 100_000
    )
    (tmp_path / "result.txt").mkdir()
    (tmp_path / "screenshot-step_0_20241102@100009.png").symlink_to("/etc/passwd")
    assert read_task(str(tmp_path)).cause == "result"
    assert read_task(str(tmp_path / "absent")).cause == "result"


def test_an_error_line_with_nothing_in_it(tmp_path: Path) -> None:
    found = made(tmp_path, {"Error": "Time limit exceeded in notepad/a"})
    assert (found.cause, found.error) == (
        "internal",
        "the client noted an error: Time limit exceeded in notepad/a",
    )


@pytest.mark.parametrize("text", ["0_1", "\uff11", "1.0 1.0", "1.0\n0.0", "0x1", "1.0\0"])
def test_what_only_python_takes_for_a_number_is_no_score(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.txt").write_text(text)
    assert read_task(str(tmp_path)).cause == "result"


def test_a_long_traceback_of_empty_lines_takes_no_time() -> None:
    assert part_of("\n" * 1_000_000) == "unknown"


def test_times_and_steps_that_cannot_be_are_unknown(tmp_path: Path) -> None:
    lines = [
        {"step_num": n, "action_timestamp": t} for n, t in ((0, "00010101@000000"), (10**30, "99991231@0"))
    ]
    (tmp_path / "traj.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "traj.html").write_text("Elapsed Time: 99999999 days, 0:00:00")
    (tmp_path / "result.txt").write_text("1")
    found = read_task(str(tmp_path))
    assert (found.score, found.steps, found.seconds) == (1.0, 0, None)


def test_the_end_of_a_huge_trajectory_counts(tmp_path: Path) -> None:
    error = {"Error": "x", "Traceback": TRACEBACKS["throttled"][1]}
    pad = "x" * 100_000
    with (tmp_path / "traj.jsonl").open("w") as file:
        file.writelines(f'{{"step_num": {n}, "pad": "{pad}"}}\n' for n in range(700))
        file.write(json.dumps(error) + "\n")
    found = read_task(str(tmp_path))
    assert (found.cause, found.steps) == ("model", 699)


def test_links_are_not_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("1.0")
    task = tmp_path / "task"
    task.mkdir()
    (task / "result.txt").symlink_to(elsewhere)
    assert read_task(str(task)).score is None


@pytest.mark.skipif(OLD_PYTHON is None, reason="NOT RUN: there is no Python 3.8 here")
def test_it_runs_on_machines_with_an_old_python_and_nothing_of_ours(tmp_path: Path) -> None:
    package = tmp_path / "waa"
    package.mkdir()
    for name in ("task_folder.py", "task_log.py", "tracebacks.py"):
        shutil.copy(Path(task_folder.__file__).with_name(name), package / name)
    (package / "__init__.py").touch()
    made(tmp_path, step(0, 0), error(TRACEBACKS["throttled"][1]))
    assert OLD_PYTHON is not None
    ask = f"from waa.task_folder import read_task; print(read_task({str(tmp_path)!r}).cause)"
    done = subprocess.run([OLD_PYTHON, "-c", ask], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("model\n", "")
