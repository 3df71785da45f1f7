"""Results of WAA's client, of whatever shape, become a run: one score a task, nothing made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from evalfleet.api.home import list_runs
from evalfleet.api.imports import Keep, import_results
from evalfleet.api.run import Run
from evalfleet.benchmarks.loaded import SettledTask
from evalfleet.benchmarks.waa.past_results import WaaResultWriter, find_tasks
from evalfleet.channels.artefacts import Caps
from evalfleet.cli import main
from evalfleet.errors import RequestError
from evalfleet.planning.workspace import Workspace
from evalfleet.views.show import show_run
from sim import ledger
from tests.unit.test_waa_task_folder import TRACEBACKS

START = datetime(2024, 11, 2, 10, 0, 0, tzinfo=UTC)
CONFIG = "pyautogui/som/gpt-4o"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("EVALFLEET_HOME", str(folder))
    return folder


def leave(
    root: Path,
    task: str,
    result: str | None = "1.0",
    *,
    domain: str = "notepad",
    config: str = CONFIG,
    trial: str = "0",
    began_s: float = 0,
    took_s: float = 60,
    error: str = "",
    worker: int | None = None,
) -> Path:
    """What the client leaves of one task."""
    folder = root / config / trial / domain / task
    (folder / "logs").mkdir(parents=True)
    if worker is not None:
        (folder / "logs" / f"task-{worker}-20241102@100000.log").write_text("log\n")
    stamps = [START + timedelta(seconds=began_s + share * took_s) for share in (0, 0.5, 1)]
    lines = [
        json.dumps({"step_num": n, "action_timestamp": f"{stamp:%Y%m%d@%H%M%S}", "action": "click()"})
        for n, stamp in enumerate(stamps)
    ]
    if error:
        words = {"Error": f"Exception in {domain}/{task}", "Exception": "", "Traceback": TRACEBACKS[error][1]}
        lines.append(json.dumps(words))
    (folder / "traj.jsonl").write_text("\n".join(lines) + "\n")
    (folder / f"screenshot-step_reset_{stamps[0]:%Y%m%d@%H%M%S}.png").write_bytes(b"\x89PNG")
    if result is not None:
        (folder / "result.txt").write_text(f"{result}\n")
    return folder


def imported(
    *roots: Path, name: str | None = None, trial: str | None = None, keep: Keep | None = None
) -> Run:
    """The run, whose journal keeps what every journal must."""
    run = import_results(Workspace.here(), "waa", roots, name=name, trial=trial, keep=keep)
    records, state = list(run.records()), run.state()
    wrong = [
        *ledger.started_and_scored_once(records, state),
        *ledger.one_writer_at_a_time(records),
        *ledger.nothing_under_way(state),
        *ledger.causes_are_told(state),
        *ledger.artefacts_come_home(records, state),
    ]
    assert not wrong
    found = run.results()
    assert found["status"] == "done"
    assert found["scored"] + found["broken"] == found["total_tasks"]
    return run


def test_each_kind_of_ending(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "good")
    leave(tmp_path, "bad", "0.0", domain="vlc", began_s=100)
    leave(tmp_path, "partly", "0.4", began_s=200)
    leave(tmp_path, "cut", None, began_s=300)
    leave(tmp_path, "keyless", None, error="a key that is refused", began_s=400)
    leave(tmp_path, "clumsy", None, error="the agent's code", began_s=500)
    leave(tmp_path, "unset", None, error="set-up", began_s=600)
    found = imported(tmp_path, name="old").results()
    by_id = {task["task_id"]: task for task in found["tasks"]}
    assert {name: (task["score"], task["cause"]) for name, task in by_id.items()} == {
        "good": (1.0, None),
        "bad": (0.0, None),
        "partly": (0.4, None),
        "cut": (None, "result"),
        "keyless": (None, "model"),
        "clumsy": (0.0, None),
        "unset": (None, "readiness"),
    }
    assert found["success_rate"] == 0.25
    assert by_id["bad"]["domain"] == "vlc"
    assert by_id["clumsy"]["error"] == "the agent failed: ValueError: min() arg is an empty sequence"
    assert (found["model"], found["benchmark"], found["run"]) == ("gpt-4o", "waa", "old")
    assert found["cost"]["models_usd"] is None
    good = by_id["good"]
    assert (good["num_steps"], good["duration_seconds"]) == (2, 60)
    assert good["screenshots"] == ["screenshot-step_reset_20241102@100000.png"]
    copied = home / str(good["artifacts"])
    assert (copied / "result.txt").read_text() == "1.0\n"
    assert (copied / good["screenshots"][0]).exists()
    assert found["started_at"] == "2024-11-02T10:00:00Z"
    assert json.loads((home / "old/results.json").read_text())["tasks"] == found["tasks"]


def test_workers_beside_one_another(tmp_path: Path, home: Path) -> None:
    for n in range(3):
        for k in range(4):
            leave(tmp_path / f"worker_{n}/results", f"t{n}{k}", began_s=100 * k)
    found = imported(tmp_path).results()
    assert [machine["name"] for machine in found["machines"]] == [f"worker_{n}/results" for n in range(3)]
    assert found["workers"] == 3
    assert found["duration_seconds"] == 360


def test_workers_in_one_folder_are_told_apart_by_their_logs(tmp_path: Path, home: Path) -> None:
    for n in range(6):
        leave(tmp_path, f"t{n}", worker=n % 2, began_s=100 * (n // 2))
    found = imported(tmp_path).results()
    assert [machine["name"] for machine in found["machines"]] == ["worker-0", "worker-1"]
    assert found["duration_seconds"] == 260


def test_several_folders(tmp_path: Path, home: Path) -> None:
    leave(tmp_path / "a", "one")
    leave(tmp_path / "b", "two")
    found = imported(tmp_path / "a", tmp_path / "b").results()
    assert {task["task_id"]: task["machine"] for task in found["tasks"]} == {"one": "a", "two": "b"}


def test_what_overlaps_was_on_several_machines(tmp_path: Path, home: Path) -> None:
    for n in range(3):
        leave(tmp_path, f"t{n}", began_s=20 * n)
    assert len(imported(tmp_path).results()["machines"]) == 3


@pytest.mark.parametrize("part", ["", "pyautogui", "pyautogui/som", CONFIG, f"{CONFIG}/0"])
def test_any_folder_of_a_tree_will_do(tmp_path: Path, home: Path, part: str) -> None:
    leave(tmp_path / "results", "one")
    found = imported(tmp_path / "results" / part).results()
    assert (found["model"], found["tasks"][0]["domain"]) == ("gpt-4o", "notepad")


def test_a_tree_that_was_moved_out_of_its_folders(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one")
    moved = tmp_path / "mine"
    (tmp_path / CONFIG / "0").rename(moved)
    found = imported(moved).results()
    assert (found["model"], found["tasks"][0]["domain"], found["scored"]) == (None, "notepad", 1)


def test_a_model_whose_name_has_slashes(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", config="pyautogui/a11y_tree/meta/llama-3")
    assert imported(tmp_path).results()["model"] == "meta/llama-3"


def test_a_task_that_left_nothing(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one")
    (tmp_path / CONFIG / "0/notepad/empty").mkdir()
    (tmp_path / CONFIG / "0/notepad/onboard").mkdir()
    found = imported(tmp_path).results()
    assert {task["task_id"]: task["cause"] for task in found["tasks"]} == {"empty": "result", "one": None}


def test_trials_that_were_retries_are_attempts(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", None, error="set-up", trial="0")
    leave(tmp_path, "one", None, trial="1", began_s=100)
    leave(tmp_path, "one", "1.0", trial="2", began_s=200)
    leave(tmp_path, "two", None, trial="0", began_s=300)
    run = imported(tmp_path)
    assert [attempt["outcome"] for attempt in run.task("one")["attempts"]] == ["broken", "broken", "scored"]
    assert run.task("one")["decided_by"] == "one.2"
    assert [attempt["attempt"] for attempt in run.task("one")["attempts"]] == ["one.0", "one.1", "one.2"]
    assert run.task("two")["cause"] == "result"


def test_a_failed_try_after_the_score_changes_nothing(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", "1.0", trial="0")
    leave(tmp_path, "one", None, error="memory", trial="1", began_s=500)
    found = imported(tmp_path).task("one")
    assert (found["score"], found["decided_by"]) == (1.0, "one.0")


def test_more_than_one_score_is_the_users_to_settle(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", "1.0", trial="0")
    leave(tmp_path, "one", "0.0", trial="10", began_s=500)
    with pytest.raises(RequestError, match=r"1 of 1 tasks have more than one score \(one has in trials"):
        imported(tmp_path)
    assert list_runs(Workspace.here()) == []
    assert imported(tmp_path, trial="10").task("one")["score"] == 0.0
    assert imported(tmp_path, name="first", keep="first").task("one")["score"] == 1.0
    assert imported(tmp_path, name="newest", keep="newest").task("one")["score"] == 0.0
    with pytest.raises(RequestError, match="there is no trial '2' in these results: there is 0, 10"):
        imported(tmp_path, trial="2")


def test_the_same_task_by_two_workers(tmp_path: Path, home: Path) -> None:
    leave(tmp_path / "a", "one", "1.0")
    leave(tmp_path / "b", "one", "0.0")
    with pytest.raises(RequestError, match="from several workers"):
        imported(tmp_path)
    assert imported(tmp_path / "a", name="a").task("one")["decided_by"] == "one.0"


def test_trials_by_name_are_counted(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", None, trial="monday")
    leave(tmp_path, "one", trial="tuesday", began_s=500)
    assert imported(tmp_path).task("one")["decided_by"] == "one.1"


def test_the_same_id_in_two_domains(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", domain="vlc")
    leave(tmp_path, "one", domain="clock", began_s=100)
    assert sorted(task["task_id"] for task in imported(tmp_path).tasks()) == ["clock/one", "vlc/one"]


def test_two_configurations_are_no_run(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one")
    leave(tmp_path, "one", config="pyautogui/som/gpt-5")
    with pytest.raises(RequestError, match=r"2 configurations .*gpt-4o, .*gpt-5\).*name the folder of one"):
        imported(tmp_path)
    assert imported(tmp_path / "pyautogui/som/gpt-5").results()["model"] == "gpt-5"


def test_two_experiments_on_azure_are_no_run(tmp_path: Path, home: Path) -> None:
    """Each worker writes one file beside its experiment's results, and nothing else tells them apart."""
    for n, experiment in enumerate(("exp0", "exp1")):
        leave(tmp_path / experiment, "one", "1.0", began_s=1000 * n)
        for worker in range(2):
            (tmp_path / experiment / f"output_{experiment}_worker_{worker}.txt").touch()
    with pytest.raises(RequestError, match=r"2 configurations \(exp0/pyautogui/som/gpt-4o, exp1/pyautogui"):
        imported(tmp_path, keep="newest")
    found = imported(tmp_path / "exp1").results()
    assert (found["scored"], found["provenance"]["settings"].get("experiment")) == (1, "exp1")


def test_a_name_is_taken_once(tmp_path: Path, home: Path) -> None:
    leave(tmp_path / "r", "one")
    imported(tmp_path / "r", name="mine")
    before = sorted(home.glob("[!f]*/**/*"))
    with pytest.raises(RequestError, match="the name 'mine' is taken; choose another with --name"):
        imported(tmp_path / "r", name="mine")
    assert sorted(home.glob("[!f]*/**/*")) == before
    (home / "somebodys").mkdir()
    with pytest.raises(RequestError, match="somebodys exists and is no run's"):
        imported(tmp_path / "r", name="somebodys")
    with pytest.raises(RequestError, match="cannot be used"):
        imported(tmp_path / "r", name="../x")


def test_artefacts_have_caps_and_links_stay_behind(tmp_path: Path, home: Path) -> None:
    folder = leave(tmp_path / "r", "one")
    (folder / "secret").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "zz").write_bytes(b"x" * 5000)
    run = import_results(Workspace.here(), "waa", [tmp_path / "r"], name="capped", caps=Caps(bytes=4000))
    copied = home / str(run.tasks()[0]["artifacts"])
    assert (copied / "result.txt").exists()
    left_out = {drop["name"]: drop["reason"] for drop in json.loads((copied / "left_out.json").read_text())}
    assert left_out == {"pipe": "not a file", "secret": "not a file", "zz": "too many bytes"}
    assert run.task("one")["attempts"][0]["files"] == 3


def test_names_that_are_no_text_are_written_as_well_as_can_be(tmp_path: Path, home: Path) -> None:
    folder = leave(tmp_path, "one")
    os.rename(folder, os.fsencode(folder.parent) + b"/caf\xe9")
    found = imported(tmp_path).results()
    assert [task["task_id"] for task in found["tasks"]] == ["caf\N{REPLACEMENT CHARACTER}"]
    assert found["scored"] == 1


def test_clocks_of_the_future_do_not_matter(tmp_path: Path, home: Path) -> None:
    leave(tmp_path, "one", began_s=3e9)
    leave(tmp_path, "two", began_s=0)
    assert imported(tmp_path).results()["scored"] == 2


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "is not there: name a results folder of WAA"),
        (lambda path: path.write_text("x"), "is no folder: name a results folder of WAA"),
        (lambda path: (path / "a/b").mkdir(parents=True), "holds no results of WAA; looked for .../<action"),
    ],
)
def test_garbage_is_one_line(
    tmp_path: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], object],
    complaint: str,
) -> None:
    make(tmp_path / "r")
    assert main(["import", "waa", str(tmp_path / "r")]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
    assert not home.exists()


def test_on_the_command_line(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "r", "one")
    leave(tmp_path / "r", "two", None)
    assert main(["import", "waa", str(tmp_path / "r"), "--name", "old", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["scored"], document["broken"]) == (1, 1)
    assert "resume" not in show_run(document)
    for argv in (["ls"], ["show"], ["show", "old", "two"], ["report", "old"], ["logs", "old"], ["machines"]):
        assert main(argv) == 0, argv
        assert capsys.readouterr().err == ""


def test_an_imported_run_cannot_be_taken_up(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path / "r", "two", None)
    main(["import", "waa", str(tmp_path / "r"), "--name", "old"])
    capsys.readouterr()
    assert main(["resume", "old", "--only", "broken"]) == 2
    said = "evalfleet: run 'old' was imported, and cannot be taken up: start a run of its tasks\n"
    assert capsys.readouterr().err == said


def test_folders_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        leave(tmp_path, name)
    assert [folder.task for folder in find_tasks([tmp_path])] == ["a", "b", "c"]


def test_results_of_a_benchmark_that_reads_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"results of command cannot be imported; .* whose can: hal, waa"):
        import_results(Workspace.here(), "command", [tmp_path])


# -- written for WAA's own scripts -----------------------------------------------------------------

CHECKOUT = os.environ.get("WAA_CHECKOUT", "")


@pytest.fixture
def scores(tmp_path: Path, home: Path) -> Run:
    """Of all kinds that WAA's evaluators write."""
    root = tmp_path / "theirs"
    for number, (task, text) in enumerate(
        {"full": "1", "partly": "0.25", "none": "0.0", "no": "False", "yes": "True", "unlike": "-0.5"}.items()
    ):
        leave(root, task, text, domain="libreoffice_calc" if number % 2 else "chrome", began_s=100 * number)
    leave(root, "crashed", None, error="the agent's code", domain="chrome", began_s=700)
    leave(root, "broken", None, error="set-up", domain="chrome", began_s=800)
    return imported(root, name="old")


def test_waas_own_rate_is_told_beside_ours_and_so_is_the_difference(scores: Run, tmp_path: Path) -> None:
    assert scores.results()["mean_score"] == round((1 + 0.25 + 0 + 0 + 1 + 0 + 0) / 7, 6)
    told = scores.export("waa", tmp_path / "tree")
    assert told[0] == (
        "WAA's own rate: 39.29%, the mean of 7 scores; tasks with the full score: 28.57%; "
        "1 tasks without a score are left out of both"
    )
    assert told[1:3] == [
        "1 of them: '-0.5' counts as -0.5 there and as 0 here",
        "1 of them: 'False' counts as 1 there and as 0 here",
    ]
    folder = tmp_path / "tree/pyautogui/som/gpt-4o/0"
    assert (folder / "chrome/crashed/result.txt").read_text() == "0.0\n"
    assert not (folder / "chrome/broken/result.txt").exists()
    assert (folder / "chrome/full/traj.jsonl").exists()
    assert not (folder / "chrome/full/result.json").exists()


def test_a_folder_that_holds_something_and_an_unknown_format_are_refused(scores: Run, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/mine").touch()
    with pytest.raises(RequestError, match="is not empty"):
        scores.export("waa", tmp_path / "tree")
    with pytest.raises(
        RequestError,
        match="'waaa' is unknown for this run; write one of md, json, csv, junit, github, html, site, waa",
    ):
        scores.export("waaa", tmp_path / "other")


def test_repeats_are_trials_of_which_waas_script_reads_one_at_a_time(scores: Run, tmp_path: Path) -> None:
    settled = [
        SettledTask(name, "vlc", score, tmp_path / "gone")
        for name, score in (("a", 1.0), ("b", 0.0), ("a~2", 1.0), ("b~2", 1.0))
    ]
    told = list(WaaResultWriter().write(scores.state().plan, settled, tmp_path / "tree", {}))
    assert told[0].startswith("WAA's own rate: 75.00%, the mean of 4 scores")
    assert [line for line in told if line.endswith("%:")] == [
        "that script reads one repeat at a time; of this one it says 50.00%:",
        "that script reads one repeat at a time; of this one it says 100.00%:",
    ]
    assert (tmp_path / "tree/pyautogui/som/gpt-4o/1/vlc/b/result.txt").read_text() == "1.0\n"
    assert "that script reads trial 0 alone: other repeats are no part of its rates" in told


def test_the_run_is_an_experiment_where_show_azure_looks_for_it(scores: Run, tmp_path: Path) -> None:
    told = scores.export("waa", tmp_path / "tree")
    azure = tmp_path / "tree/azure"
    (experiment,) = json.loads((azure / "experiments.json").read_text()).items()
    assert experiment == ("old", {"exp_name": "old", "model_name": "gpt-4o"})
    assert (azure / "old/pyautogui/a11y_tree/gpt-4o/0/chrome/full/result.txt").read_text() == "1\n"
    assert f"python show_azure.py --result_dir {azure} --json_config {azure}/experiments.json" in told
    assert "2 of them, no numbers, are errors for that script, and no part of its rates" in told
    again = imported(tmp_path / "tree", name="again")  # no result is there twice
    assert again.results()["total_tasks"] == scores.results()["total_tasks"]


needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="NOT RUN: WAA_CHECKOUT names no checkout, so its scripts were not run"
)


def run_script(script: str, *words: str, modules: Path | None = None) -> str:
    """What a script of WAA's prints."""
    environ = {**os.environ, "PYTHONPATH": str(modules or "")}
    argv = [sys.executable, str(Path(CHECKOUT) / script), *words]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@needs_checkout
def test_waas_own_script_says_the_same_number(scores: Run, tmp_path: Path) -> None:
    told = scores.export("waa", tmp_path / "tree")
    command = next(line for line in told if line.startswith("python show_result.py ")).split()
    said = run_script("src/win-arena-container/client/show_result.py", *command[2:])
    (line,) = [line for line in said.splitlines() if "Current Success Rate" in line]
    assert line.startswith("Tasks executed: 7 Current Success Rate: 39.2857")


@needs_checkout
def test_waas_own_script_for_azure_finds_the_run(scores: Run, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "pandas.py").touch()  # it is loaded there, and never used
    (modules / "tqdm.py").write_text("def tqdm(items, desc):\n    return items\n")
    (modules / "numpy.py").write_text("from math import isnan, nan\n")
    told = scores.export("waa", tmp_path / "tree")
    command = next(line for line in told if line.startswith("python show_azure.py ")).split()
    table = tmp_path / "table.md"
    run_script("scripts/show_azure.py", *command[2:], "--output_file", str(table), modules=modules)
    heads, _, row = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text().splitlines()
    )
    cells = dict(zip(heads, row, strict=True))
    assert (cells["exp_name"], cells["model"]) == ("old", "gpt-4o")
    assert float(cells["chrome"]) == pytest.approx(100 * (1 + 0 + 0) / 3)  # full, none, crashed; not 'True'
    assert float(cells["libreoffice_calc"]) == pytest.approx(100 * (0.25 - 0.5) / 2)  # not 'False'
    assert cells["*errors*"] == "3"  # 'True', 'False' and what is broken
