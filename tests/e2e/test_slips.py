"""Small mistakes and broken pipes: each gives one clear line, or none, and never a traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys

from tests.e2e.harness import Fleet, flat, task, tasks
from tests.waiting import PATIENCE_S, until


def piped(fleet: Fleet, words: str, reader: str) -> tuple[str, str]:
    """What the reader printed, and what evalfleet said on standard error."""
    line = f"{sys.executable} -m evalfleet {words} | {reader}"
    options = {"cwd": fleet.folder, "env": fleet.environ, "timeout": PATIENCE_S, "check": True}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return done.stdout, done.stderr


def test_help_is_silent_when_nobody_reads_it(fleet: Fleet) -> None:
    for words in ("--help", "run --help", "pool create --help", "--version", "places"):
        assert piped(fleet, words, "true") == ("", ""), words


def test_watch_ends_with_its_reader(fleet: Fleet) -> None:
    fleet.bench(tasks(2, "gate go; score 1"))
    run = fleet.start_run()
    fleet.started("a_1.0")
    out, err = piped(fleet, "watch r --json", "head -1")
    assert json.loads(out)["kind"] == "RunPlanned"
    assert err == ""
    assert run.popen.poll() is None, "the run goes on"
    fleet.open_gate("go")
    assert run.wait().code == 0


def test_words_that_are_nearly_right(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet("run", "b.tml").refused("benchmark 'b.tml' is unknown; did you mean 'b.toml'?")
    fleet.run("--wrokers", "2").refused("unknown argument '--wrokers'; did you mean '--workers'")
    fleet("pool", "create", "p", "--wrokers=2").refused("unknown argument '--wrokers=2'; did you mean")
    fleet("pool", "statsu", "p").refused("VERB is 'statsu'; did you mean 'status'")
    fleet("metrics", "--port", "abc").refused("--port is 'abc'; write a whole number")
    for words in (("help", "run"), ("run", "help")):
        assert fleet(*words).out.startswith("usage: evalfleet run "), words
    assert fleet.run("--name", "q").code == 0
    fleet("gc", "nix").refused("there is no run or pool 'nix'")
    fleet("report", "q", "--format", "pdf").refused("md, json, csv, junit, github, html, site")
    assert fleet("report", "q", "-o", "-").out == fleet("report", "q").out
    assert not (fleet.folder / "-").exists()


def test_what_the_terminal_cannot_print_is_escaped(fleet: Fleet) -> None:
    fleet.bench([task("a_\N{SNOWMAN}")])
    assert fleet.run().code == 0
    shown = fleet("show", "r", env={"PYTHONIOENCODING": "latin-1"})
    assert "a_\\u2603" in shown.out
    assert "Traceback" not in shown.err


def test_tables_fit_a_terminal_of_80_columns(fleet: Fleet) -> None:
    fleet.bench([task("a" * 50), task("b", "echo " + "x" * 90 + "; exit 1")], name="of_a_long_name")
    fleet.run("--name", "r" * 20, "--attempts", "1")
    for words in ("ls", "show"):
        command = (sys.executable, "-m", "evalfleet", words)
        environ = {**fleet.environ, "COLUMNS": "80"}
        master, slave = pty.openpty()
        subprocess.run(command, cwd=fleet.folder, env=environ, stdout=slave, timeout=PATIENCE_S, check=True)
        os.close(slave)
        lines = os.read(master, 1 << 16).decode().replace("\r", "").splitlines()
        os.close(master)
        start = next(n for n, line in enumerate(lines) if line.startswith(("run ", "task ")))
        assert len(lines) > start + 1
        lines = [re.sub(r"\x1b\[\d*m", "", line) for line in lines]
        assert max(map(len, lines[start:])) <= 80, lines


def test_a_flag_given_twice_is_refused(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run("--workers", "2", "--workers=3").refused("--workers is given twice")
    fleet("pool", "create", "p", "--on", "local", "--on", "local").refused("--on is given twice")
    assert fleet.run("-A", "x=1", "-A", "y=2").code == 0


def test_a_setting_that_neither_place_nor_benchmark_has_is_refused(fleet: Fleet) -> None:
    fleet.bench(tasks(1), settings={"split": "test", "max_machines": 7})
    fleet.run("--set", "max_machine=3").refused("'max_machine'", "did you mean 'max_machines'?")
    fleet.run("--set", "local.colour=red").refused("place 'local' has no setting 'colour'")
    fleet.run("--set", "colour=red").refused("'colour'", "no setting", "settings = {colour = ...}")
    fleet.run("--set", "spilt=dev").refused("did you mean 'split'?")
    fleet.config('[benchmarks.mine]\npath = "b.toml"\nset = {colour = "red"}\n')
    said = ("--set", "colour=blue", "--set", "max_machines=0", "--set", "local.max_machines=1")
    assert fleet("run", "mine", "--name", "m", *said).code == 0
    settings = fleet.results("m")["provenance"]["settings"]
    assert settings == {"split": "test", "max_machines": "0", "colour": "blue"}


def test_the_summary_says_why_a_run_that_is_done_fails(fleet: Fleet) -> None:
    fleet.bench([task("a", "score 1"), task("b", "score 0"), task("c", "exit 3")])
    under = fleet.run("--fail-under", "0.75", "--allow-broken", "1", "--attempts", "1")
    assert under.code == 1
    assert "exit code 1 a pass rate of 0.5 is below --fail-under 0.75" in flat(under.out)
    assert fleet.results()["shortfall"] == "a pass rate of 0.5 is below --fail-under 0.75"
    broken = fleet("run", "./b.toml", "--name", "s", "--attempts", "1")
    assert (broken.code, "exit code 1 1 task broken" in flat(broken.out)) == (1, True)
    good = fleet("run", "./b.toml", "--name", "t", "--task", "a", "--fail-under", "1")
    assert (good.code, "exit code" in good.out) == (0, False)
    assert fleet.results("t")["shortfall"] is None


def test_the_log_of_a_folder_that_was_deleted_says_so(fleet: Fleet) -> None:
    fleet.bench(tasks(1, "echo said; score 1"))
    assert fleet.run().code == 0
    assert "said" in fleet("logs", "r", "a_1").out
    shutil.rmtree(fleet.home / "r" / "a_1" / "a_1.0")
    fleet("logs", "r", "a_1").failed(1, "the log of a_1.0 is gone", "a_1/a_1.0 was deleted")


def test_the_log_of_a_run_shows_times_and_no_inner_clocks(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    assert fleet.run().code == 0
    until(lambda: not fleet.alive())
    log = fleet("logs", "r").out
    requested = next(line for line in log.splitlines() if " MachineRequested " in line)
    assert "expires_at=20" in requested
    started = next(line for line in log.splitlines() if " ControllerStarted " in line)
    assert "pid=" in started
    assert "zero=" not in started
    assert "boot=" not in started


def test_runs_and_tasks_are_found_by_little(fleet: Fleet) -> None:
    assert f"no runs in {fleet.home}" in fleet("ls").out
    fleet.bench([task("a_1", "echo said; score 1"), task("a_2", "score 0")])
    assert fleet.run().code == 0
    assert fleet("run", "./b.toml", "--name", "second-run").code == 0
    for word in ("latest", "-", "second", "second-run"):
        assert fleet("show", word, "--json").json["run"] == "second-run", word
    assert fleet("show", "a_1", "--json").json["task_id"] == "a_1"
    assert "said" in fleet("logs", "-", "a_1").out
    assert "said" in fleet("logs", "a_1").out
    assert fleet("run", "./b.toml", "--name", "second-try").code == 0
    fleet("show", "second").refused("'second' may be", "second-run", "second-try")
    fleet("show", "nix").refused("there is no run or pool 'nix'")


def test_the_home_is_searched_upwards(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    del fleet.environ["EVALFLEET_HOME"]
    assert fleet.run(cwd=fleet.folder).code == 0
    inner = fleet.folder / "some" / "where"
    inner.mkdir(parents=True)
    assert fleet("show", "--json", cwd=inner).json["run"] == "r"
    assert not (inner / "benchmark_results").exists()


def test_times_and_tags_in_text_and_in_json(fleet: Fleet) -> None:
    quick = {"tags": ["quick", "new"], "metadata": {"author": "Ada"}}
    fleet.bench([task("a_1", "score 1") | quick, task("a_2", "score 0"), task("a_3", "score 1")])
    assert fleet.run("--tag", "quick", "--tag", "new", "--name", "one").code == 0
    assert fleet.run().code == 0
    assert fleet.results("one")["total_tasks"] == 1
    assert fleet.results("one")["provenance"]["selection"] == {"tag": ["quick", "new"]}
    assert fleet.task("a_1")["tags"] == ["quick", "new"]
    assert fleet.task("a_1")["task_metadata"] == {"author": "Ada"}
    there = {"TZ": "IST-5:30"}
    said = {verb: fleet(*verb.split(), env=there).out for verb in ("ls", "show r a_1", "logs r", "report r")}
    for verb, text in said.items():
        assert re.search(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?\+05:30\b", text), (verb, text)
        assert not re.search(r"\d\d:\d\d:\d\d(\.\d+)?Z", text), (verb, text)
    for verb in ("ls --json", "show r a_1 --json"):
        assert "+05:30" not in fleet(*verb.split(), env=there).out
    assert not re.search(r"\b(boot|zero)=", said["logs r"]), "what only a controller's clock needs"
    shown = flat(said["show r a_1"])
    assert "tags quick, new" in shown
    assert 'metadata {"author": "Ada"}' in shown
    assert fleet("show", "on").out.startswith("one: done"), "the beginning of a run's name"
    chosen = fleet("show", "r", "--tag", "new").out
    assert ("a_1" in chosen, "a_2" in chosen) == (True, False)
    fleet("show", "r", "--tag", "old").refused("has no tag 'old'", "new, quick")
