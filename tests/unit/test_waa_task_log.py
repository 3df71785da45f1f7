"""Whether a zero is the agent's, by what WAA's client logs. The messages are its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalfleet.benchmarks.waa.task_folder import Reading, read_task

LINE = (
    "\x1b[1;33m[2026-11-16 09:00:00,123 \x1b[31m{} \x1b[32m{}/99-MainProcess\x1b[1;33m] \x1b[0m{}\n"  # run.py
)
REFUSED = "HTTPConnectionPool(host='20.20.20.21', port=5000): Max retries exceeded with url: /file"
CHROME_CLOSED = "BrowserType.connect_over_cdp: connect ECONNREFUSED 20.20.20.21:9222"
LAUNCHED = ("INFO", "setup", "Command executed successfully: ['vlc'] launched successfully")
NOT_LAUNCHED = ("ERROR", "setup", "Failed to launch application. Status code: {'status': 'error'}")
NO_WINDOW = (
    "ERROR",
    "setup",
    "Failed to activate window VLC. Status code: Window VLC not found (empty results)",
)
NO_TREE = ("ERROR", "python", "Failed to get accessibility tree. Status code: 500")

Line = tuple[str, str, str]


def ended(step: str) -> Line:
    return ("INFO", "setup", f"SETUP: _{step}_setup({{}})")


def write_log(folder: Path, *, setup: list[Line], steps: list[Line], evaluator: list[Line]) -> None:
    lines: list[Line] = [
        ("INFO", "desktop_env", "Resetting environment..."),
        ("ERROR", "desktop_env", "Not implemented! Reverting to snapshot is not supported for remote VMs!"),
        ("INFO", "setup", "Command executed successfully: All windows closed successfully."),
        ("ERROR", "python", "Failed to get a successful response from the VM."),
        ("INFO", "desktop_env", "Setting up environment..."),
        *setup,
        ("INFO", "desktop_env", "Environment setup complete."),
        *steps,
        ("INFO", "lib_run_single", "Running evaluator(s)..."),
        *evaluator,
        ("INFO", "lib_run_single", "Result: 0.00"),
    ]
    (folder / "logs").mkdir()
    text = "".join(LINE.format(*line) for line in lines)
    (folder / "logs" / "task-0-20261116@090000.log").write_text(text)


def reading(
    folder: Path,
    *,
    score: str = "0",
    setup: list[Line] | None = None,
    steps: list[Line] | None = None,
    evaluator: list[Line] | None = None,
    marks_from_tree: bool = False,
) -> Reading:
    thinking: Line = ("INFO", "lib_run_single", "Agent: Thinking...")
    write_log(folder, setup=setup or [], steps=steps or [thinking], evaluator=evaluator or [])
    (folder / "result.txt").write_text(score)
    return read_task(str(folder), marks_from_tree)


BROKEN_SETUP = {
    "a program was not launched": [NOT_LAUNCHED, ended("launch")],
    "the first of two": [NOT_LAUNCHED, ended("launch"), LAUNCHED, ended("launch")],
    "nobody answered": [
        ("ERROR", "setup", f"An error occurred while trying to send the request: {REFUSED}"),
        ended("download"),
    ],
    "a file was not there to be opened": [
        ("ERROR", "setup", "Failed to open file. Status code: File not found: C:\\a.xlsx"),
        ended("open"),
    ],
    "repeated in vain": [NOT_LAUNCHED, NOT_LAUNCHED, ended("execute")],
}


@pytest.mark.parametrize("what", BROKEN_SETUP)
def test_a_zero_of_a_task_that_was_not_set_up_is_broken(what: str, tmp_path: Path) -> None:
    found = reading(tmp_path, setup=BROKEN_SETUP[what])
    assert (found.score, found.cause) == (None, "readiness")
    assert found.error.startswith("the task could not be set up in the guest: ")
    assert BROKEN_SETUP[what][0][2][:30] in found.error


def test_when_all_that_tidies_up_fails_and_nothing_else_is_asked_the_guest_is_broken(tmp_path: Path) -> None:
    write_log(tmp_path, setup=[], steps=[], evaluator=[])
    log = next((tmp_path / "logs").iterdir())
    failed = log.read_text().replace("Command executed successfully: All", "Failed to close all windows: no")
    log.write_text(failed.replace("31mINFO \x1b[32msetup", "31mERROR \x1b[32msetup"))
    (tmp_path / "result.txt").write_text("0")
    assert read_task(str(tmp_path)).cause == "readiness"


def test_a_failed_download_says_why_and_not_what_the_client_stumbled_over(tmp_path: Path) -> None:
    """WAA's set-up raises for a variable that it has lost: `Error: {e}`."""
    attempts = [
        (
            "ERROR",
            "setup",
            f"Failed to download https://x/a.docx caused by 404 Not Found. Retrying... ({n} left)",
        )
        for n in (2, 1, 0)
    ]
    write_log(tmp_path, setup=attempts, steps=[], evaluator=[])
    log = next((tmp_path / "logs").iterdir())
    log.write_text(log.read_text().partition("Environment setup complete.")[0])
    traceback = (
        'Traceback (most recent call last):\n  File "/client/desktop_env/controllers/setup.py", line 132, in '
        "_download_setup\n    raise\nUnboundLocalError: local variable 'e' referenced before assignment\n"
    )
    error = {"Error": "Exception in a/b", "Exception": "local variable 'e'", "Traceback": traceback}
    (tmp_path / "traj.jsonl").write_text(json.dumps(error) + "\n")
    found = read_task(str(tmp_path))
    why = "Failed to download https://x/a.docx caused by 404 Not Found"
    assert (found.cause, found.error) == ("readiness", f"the task could not be set up in the guest: {why}")


UNSEEN = ("ERROR", "lib_run_single", "Observation is None. Waiting a little to do next step.")
NO_OBSERVATION = (
    "ERROR",
    "python",
    "Failed to get the observations for the agent from the server. Status code: 500",
)
ACTED = ("INFO", "lib_run_single", "Step 1: computer.click()")
NOT_UPDATED = ("ERROR", "python", "Failed to update computer. Status code: 500")


@pytest.mark.parametrize(
    "steps", [[NO_OBSERVATION, UNSEEN, UNSEEN], [ACTED, NOT_UPDATED, ACTED, NOT_UPDATED]]
)
def test_a_zero_of_an_agent_that_saw_nothing_is_broken(steps: list[Line], tmp_path: Path) -> None:
    found = reading(tmp_path, steps=steps)
    assert (found.score, found.cause) == (None, "readiness")
    assert found.error.startswith("the guest failed: Failed to ")


THINKING = ("INFO", "lib_run_single", "Agent: Thinking...")
NO_TREE_IN_TIME = ("ERROR", "python", "Request timed out while trying to get accessibility tree.")


@pytest.mark.parametrize(
    ("steps", "always"),
    [
        ([NO_TREE, THINKING, ACTED, NO_TREE_IN_TIME, THINKING, ACTED], True),
        ([NO_TREE, THINKING, ACTED, THINKING, ACTED, NO_TREE, THINKING], False),
        ([THINKING, ACTED, NO_TREE, THINKING], False),
    ],
)
def test_a_zero_without_a_single_mark_is_broken_where_marks_come_from_the_tree_alone(
    steps: list[Line], always: bool, tmp_path: Path
) -> None:
    for marks_from_tree in (True, False):
        folder = tmp_path / str(marks_from_tree)
        folder.mkdir()
        found = reading(folder, steps=steps, marks_from_tree=marks_from_tree)
        if always and marks_from_tree:
            assert (found.score, found.cause) == (None, "readiness")
            assert "accessibility tree" in found.error
        else:
            assert found.score == 0.0


BROKEN_EVALUATION: dict[str, list[Line]] = {
    "the guest failed": [("ERROR", "python", "Failed to get file. Status code: 500")],
    "the guest is gone": [("ERROR", "desktop_env", f"An unexpected error occurred: {REFUSED}")],
    "cut off": [("ERROR", "desktop_env", "An unexpected error occurred: ('Connection aborted.', ...)")],
    "no time": [
        ("ERROR", "python", "An error occurred while trying to execute the command: Read timed out.")
    ],
    "an endpoint that tells no code": [
        ("ERROR", "python", "World clock does not exist in Clock app. Status text: <h1>Server Error</h1>")
    ],
    "what goes before it": [NOT_LAUNCHED, ended("execute")],
    "the internet": [
        ("ERROR", "desktop_env", "An unexpected error occurred: HTTPSConnectionPool(host='x', port=443): no")
    ],
}


@pytest.mark.parametrize("what", BROKEN_EVALUATION)
def test_a_zero_that_nobody_measured_is_broken(what: str, tmp_path: Path) -> None:
    found = reading(tmp_path, evaluator=BROKEN_EVALUATION[what])
    assert (found.score, found.cause) == (None, "internal")
    assert found.error.startswith("the evaluator failed: ")


HARMLESS: dict[str, dict[str, list[Line]]] = {
    "nothing": {},
    "a step that was repeated": {"setup": [NOT_LAUNCHED, LAUNCHED, ended("execute")]},
    "a download that was repeated": {
        "setup": [
            ("ERROR", "setup", "Failed to download https://x caused by 503. Retrying... (2 attempts left)"),
            ("INFO", "setup", "Command executed successfully: File Uploaded"),
            ended("download"),
        ]
    },
    "a browser that was slow": {
        "setup": [
            ("ERROR", "setup", f"Attempt 1: Failed to connect, retrying. Error: {CHROME_CLOSED}"),
            ended("chrome_open_tabs"),
        ]
    },
    "a window that did not come to the front": {
        "setup": [LAUNCHED, ended("launch"), NO_WINDOW, ended("activate_window")]
    },
    "an observation that was had at last": {"steps": [NO_TREE, ACTED]},
    "what the agent's own code came to": {
        "steps": [ACTED, ("ERROR", "python", "Failed to execute command. Status code: 500")]
    },
    "one update that failed": {
        "steps": [NOT_UPDATED, ACTED, ("INFO", "python", "Updated computer successfully")]
    },
    "a plan without code": {"steps": [("ERROR", "agent", "Plan not found")]},
    "a file that the agent never made": {
        "evaluator": [
            ("ERROR", "python", "Failed to get file. Status code: 404"),
            ("ERROR", "desktop_env", "An unexpected error occurred: a bytes-like object is required"),
        ]
    },
    "a file that is not what it should be": {
        "evaluator": [("ERROR", "desktop_env", "An unexpected error occurred: not a 7z file")]
    },
    "a browser that the agent closed": {
        "evaluator": [("ERROR", "desktop_env", f"An unexpected error occurred: {CHROME_CLOSED}")]
    },
    "a guest that says no": {
        "evaluator": [
            ("ERROR", "python", 'Timer is not start. Status text: {"message":"Timer does not exist"}'),
            (
                "ERROR",
                "python",
                "Files are not sorted by modified time. Status text: C: files are not sorted",
            ),
            ("ERROR", "python", "File explorer is not set to details view. Status code: 400"),
        ]
    },
    "a window that the agent closed, before the evaluation": {
        "evaluator": [NO_WINDOW, ended("activate_window")]
    },
    "a website that had a backup": {
        "evaluator": [
            ("ERROR", "chrome", "[ERROR]: failed to obtain information from the website: x. Use backup")
        ]
    },
}


@pytest.mark.parametrize("what", HARMLESS)
def test_errors_that_do_not_matter_leave_a_zero_the_agents(what: str, tmp_path: Path) -> None:
    found = reading(tmp_path, **HARMLESS[what])  # type: ignore[arg-type]
    assert (found.score, found.error) == (0.0, "")


def test_a_score_above_zero_stands_whatever_the_log_says(tmp_path: Path) -> None:
    setup, evaluator = BROKEN_SETUP["nobody answered"], BROKEN_EVALUATION["the guest failed"]
    assert reading(tmp_path, score="0.25", setup=setup, evaluator=evaluator).score == 0.25


def test_an_agent_that_stumbles_over_what_it_was_not_shown_is_not_to_blame(tmp_path: Path) -> None:
    write_log(tmp_path, setup=[], steps=[ACTED, NO_TREE], evaluator=[])
    trace = 'Traceback (most recent call last):\n  File "/client/mm_agents/navi/a11y_demo.py", line 1, in f\n'
    told = (trace + "TypeError: expected string").replace("\n", "\\n").replace('"', '\\"')
    (tmp_path / "traj.jsonl").write_text(f'{{"Error": "x", "Exception": "e", "Traceback": "{told}"}}\n')
    found = read_task(str(tmp_path))
    assert (found.score, found.cause) == (None, "readiness")
    assert found.error == "the guest failed: Failed to get accessibility tree. Status code: 500"


@pytest.mark.parametrize(
    ("evaluator", "score"),
    [
        ([("ERROR", "python", "Failed to get file. Status code: 404")], 0.0),
        ([("ERROR", "python", "Failed to get file. Status code: 500")], None),
        ([], None),
    ],
)
def test_an_evaluator_that_stumbles_over_what_the_agent_left_undone_scores_zero(
    evaluator: list[Line], score: float | None, tmp_path: Path
) -> None:
    write_log(tmp_path, setup=[], steps=[], evaluator=evaluator)
    frame = 'File \\"/client/desktop_env/evaluators/metrics/chrome.py\\", line 1, in is_expected_bookmarks'
    told = f"Traceback (most recent call last):\\n  {frame}\\nTypeError: 'NoneType' object is not iterable"
    (tmp_path / "traj.jsonl").write_text(f'{{"Error": "x", "Exception": "e", "Traceback": "{told}"}}\n')
    found = read_task(str(tmp_path))
    assert (found.score, found.part) == (score, "evaluator")
    assert found.error == "the evaluator failed: TypeError: 'NoneType' object is not iterable"


def test_an_agent_cannot_forge_a_failed_set_up(tmp_path: Path) -> None:
    forged = (
        "Step 1: x\n" + LINE.format(*NOT_LAUNCHED) + LINE.format("INFO", "setup", "SETUP: _launch_setup(")
    )
    found = reading(tmp_path, steps=[("INFO", "lib_run_single", forged)])
    assert found.score == 0.0
