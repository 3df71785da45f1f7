"""The verbs that read: ls, show, logs, report, watch, places, benchmarks; and the help."""

from __future__ import annotations

import csv
import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.cli import VERBS
from tests.e2e.harness import Fleet, task, tasks
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run `r` with a success, a failure and a broken task."""
    fleet = Fleet.at(tmp_path_factory.mktemp("finished") / "f")
    fleet.bench(
        [task("n_1", "echo hello; echo oops >&2; score 1"), task("n_2", "score 0"), task("m_1", "exit 5")]
    )
    assert fleet.run("--workers", "2", "--attempts", "2").code == 1
    yield fleet
    fleet.sweep()


def in_bash(fleet: Fleet, words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", words],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_ls(finished: Fleet) -> None:
    assert "r " in finished("ls").out
    (row,) = finished("ls", "--json").json
    assert (row["run"], row["status"], row["scored"], row["broken"]) == ("r", "done", 2, 1)


def test_ls_in_an_empty_folder(fleet: Fleet) -> None:
    done = fleet("ls")
    assert (done.code, done.err) == (0, "")
    assert fleet("ls", "--json").json == []
    assert not fleet.home.exists()
    for verb in ("show", "logs", "report", "watch", "resume"):
        fleet(verb).refused()
    assert not fleet.home.exists()


def test_show(finished: Fleet) -> None:
    shown = finished("show", "r")
    assert shown.code == 0
    assert all(word in shown.out for word in ("n_1", "n_2", "m_1", "worker-1", "exit code 5"))
    assert finished("show").out == shown.out  # the latest
    for words in (["latest"], ["-"]):
        assert finished("show", *words).out == shown.out, words
    assert finished("show", "n_1").out == finished("show", "r", "n_1").out, "a task of the latest run"
    one = finished("show", "r", "m_1")
    assert "m_1.1" in one.out
    detail = finished("show", "r", "m_1", "--json").json
    assert [each["attempt"] for each in detail["attempts"]] == ["m_1.0", "m_1.1"]
    finished("show", "r", "n_9").refused("n_9")
    finished("show", "q").refused("'q'")


def test_logs(finished: Fleet) -> None:
    events = finished("logs", "r").out
    assert "RunEnded" in events or "the run is over" in events
    assert set(finished("logs", "r", "n_1").out.splitlines()) == {"hello", "oops"}
    assert finished("logs", "r", "n_1.0").out == finished("logs", "r", "n_1").out
    assert "worker-1" in finished("logs", "r", "worker-1").out or finished("logs", "r", "worker-1").out
    assert finished("logs", "r", "n_1", "-f").code == 0
    assert finished("logs", "r", "-f").code == 0
    finished("logs", "r", "n_9").refused("n_9")
    finished("logs", "q").refused("'q'")


def test_watch_task(finished: Fleet) -> None:
    assert "hello" in finished("watch", "r", "n_1").out
    finished("watch", "r", "n_9").refused("n_9")


def test_logs_follow_a_running_task(fleet: Fleet) -> None:
    fleet.bench([task("a", "echo before; gate go; echo after; score 1")])
    run = fleet.start_run()
    fleet.started("a.0")
    logs = fleet.start("logs", "r", "a", "-f")
    until(lambda: "before" in logs.out)
    assert "after" not in logs.out
    fleet.open_gate("go")
    assert run.wait().code == 0
    assert logs.wait().out.split() == ["before", "after"]


def test_report(finished: Fleet) -> None:
    text = finished("report", "r").out
    assert text.startswith("#")
    assert "m_1" in text
    assert json.loads(finished("report", "r", "--format", "json").out)["run"] == "r"
    rows = list(csv.DictReader(io.StringIO(finished("report", "r", "--format", "csv").out)))
    assert [row["task_id"] for row in rows] == ["n_1", "n_2", "m_1"]
    finished("report", "r", "--format", "pdf").refused("pdf")
    path = finished.folder / "report.md"
    assert finished("report", "r", "-o", str(path)).code == 0
    assert path.read_text().strip() == text.strip()
    finished("report", "r", "-o", str(finished.folder / "no" / "such.md")).refused("such.md")
    finished("report", "r", "-o", str(finished.folder)).refused()


def test_plugins(finished: Fleet) -> None:
    assert "local" in finished("places").out
    assert any(each["name"] == "local" for each in finished("places", "--json").json)
    benchmarks = finished("benchmarks").out
    assert "command" in benchmarks
    assert "one of uia|win32, default" in benchmarks
    assert "Literal" not in benchmarks
    assert any(each["name"] == "command" for each in finished("benchmarks", "--json").json)


def test_watch_of_a_finished_run(finished: Fleet) -> None:
    done = finished("watch", "r", "--json")
    assert done.code == 1
    assert done.json["scored"] == 2


def test_help(fleet: Fleet) -> None:
    overview = fleet("--help")
    assert overview.code == 0
    assert all(f"  {verb} " in overview.out for verb in VERBS)
    assert fleet("help").out == overview.out
    assert fleet().code == 2
    assert fleet("--version").out.startswith("evalfleet ")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_of_every_verb(fleet: Fleet, verb: str) -> None:
    done = fleet(verb, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: evalfleet {verb}")
    needed = {
        "run": ["x"],
        "plan": ["x"],
        "cancel": ["x"],
        "pool": ["ls"],
        "import": ["waa", "x"],
    }
    needed |= {"gc": ["--older", "30d"], "end": ["x", "y"]}
    needed["cost"] = ["reconcile", "--export", "x"]
    asked = ("agent_name", "agent_function", "agent_dir", "benchmark")
    needed["hal-eval"] = [word for name in asked for word in (f"--{name}", "x")]
    needed |= {each: ["x"] for each in ("set", "drain", "compare")}
    fleet(verb, *needed.get(verb, []), "--no-such-flag").refused("--no-such-flag")


def test_unknown_verbs(fleet: Fleet) -> None:
    fleet("rnu").refused("'rnu';", "run")
    fleet("--nope").refused("--nope")
    fleet("").refused()


def test_a_reader_that_goes(finished: Fleet) -> None:
    """`| head` ends neither in a traceback nor in a failure."""
    words = f"{sys.executable} -m evalfleet logs r | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words],
        cwd=finished.folder,
        env=finished.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_a_run_whose_reader_goes_ends_all_the_same(fleet: Fleet) -> None:
    fleet.bench(tasks(4, "sleep 0.1; score 1"))
    words = f"{sys.executable} -m evalfleet run ./b.toml --name r | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = in_bash(fleet, words, 30)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"
    assert fleet.results()["scored"] == 4


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(fleet: Fleet, closed: str) -> None:
    fleet.bench(tasks(2, "score 1"))
    words = f"exec {sys.executable} -m evalfleet run ./b.toml --name r {closed}"
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done
    assert fleet.results()["scored"] == 2


def test_a_folder_that_is_gone(fleet: Fleet) -> None:
    gone = fleet.folder / "gone"
    gone.mkdir()
    words = f"rmdir {gone}; exec {sys.executable} -m evalfleet ls"
    environ = {key: value for key, value in fleet.environ.items() if key != "EVALFLEET_HOME"}
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=gone,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_spaces_and_unicode_in_paths(tmp_path: Path) -> None:
    fleet = Fleet.at(tmp_path / "mit Leer zeichen" / "日本é")
    fleet.bench(tasks(2))
    try:
        assert fleet.run("--workers", "2").code == 0
        assert fleet.results()["scored"] == 2
        fleet.settled()
    finally:
        fleet.sweep()


def test_the_home_is_beside_the_configuration(fleet: Fleet) -> None:
    fleet.config("")
    fleet.bench(tasks(1))
    (fleet.folder / "sub").mkdir()
    fleet.environ["EVALFLEET_HOME"] = ""
    assert fleet("run", "../b.toml", "--name", "r", cwd=fleet.folder / "sub").code == 0
    assert (fleet.folder / "benchmark_results" / "r" / "results.json").exists()
    assert fleet("show", "r", cwd=fleet.folder / "marks").code == 0


def test_two_runs_at_once_in_one_home(fleet: Fleet) -> None:
    """Also with made-up names, which are the same when made in the same second."""
    fleet.bench(tasks(3, "sleep 0.1; score 1"))
    runs = [fleet.start("run", "./b.toml", "--workers", "2") for _ in range(3)]
    assert [run.wait().code for run in runs] == [0, 0, 0]
    rows = fleet("ls", "--json").json
    assert [row["scored"] for row in rows] == [3, 3, 3]
    fleet.settled()


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o777])
def test_umask(fleet: Fleet, mask: int) -> None:
    fleet.bench(tasks(1))
    done = fleet.run(umask=mask)
    assert done.code == 0, done
    fleet.settled()


def test_few_open_files(fleet: Fleet) -> None:
    fleet.bench(tasks(12, "score 1"))
    words = f"ulimit -n 64; exec {sys.executable} -m evalfleet run ./b.toml --name r --workers 12"
    done = in_bash(fleet, words, 60)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done
    fleet.settled()


def test_json_lines_are_the_whole_journal(fleet: Fleet) -> None:
    """While following, and for who comes later."""
    fleet.bench(tasks(2))
    run = [json.loads(line) for line in fleet.run("--json").out.splitlines()]
    watched = fleet("watch", "r", "--json", "--content").out
    watch = [json.loads(line) for line in watched.splitlines()]
    assert [line["seq"] for line in run[:-1]] == list(range(1, len(fleet.events()) + 1))
    assert run == watch


# -- lines ---------------------------------------------------------------------------------------


def writes(fleet: Fleet, *words: str) -> list[bytes]:
    """Everything a command writes to either stream, write by write: of such a socket each is a packet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-m", "evalfleet", *words]
    env = {**fleet.environ, "PYTHONUNBUFFERED": "1"}
    with ours, theirs:
        process = subprocess.Popen(
            argv, stdout=theirs.fileno(), stderr=theirs.fileno(), cwd=fleet.folder, env=env
        )
        theirs.close()
        packets = list(iter(lambda: ours.recv(1 << 20), b""))
        process.wait()
    return packets


def test_lines_are_written_whole_also_without_buffers(fleet: Fleet) -> None:
    fleet.bench(tasks(4))
    for words in (("run", "./b.toml", "--name", "r", "--workers", "2"), ("show", "r", "nothing"), ("huh",)):
        packets = writes(fleet, *words)
        assert packets
        assert [packet for packet in packets if not packet.endswith(b"\n")] == []
