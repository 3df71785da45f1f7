"""The live display in a real terminal (tmux), and the files that other tools read meanwhile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, task, tasks
from tests.waiting import PATIENCE_S, until


class Screen:
    """A terminal of 100 by 30 in which a shell runs, on a tmux server of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._tmux = ["tmux", "-S", str(fleet.folder / "s"), "-f", "/dev/null"]
        environ = {**fleet.environ, "PS1": "$ "}
        start = ["new-session", "-d", "-x", "100", "-y", "30", "bash --norc --noprofile"]
        subprocess.run([*self._tmux, *start], cwd=fleet.folder, env=environ, check=True, timeout=PATIENCE_S)

    def keys(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True, timeout=PATIENCE_S)

    def text(self, *, colours: bool = False) -> str:
        show = [*self._tmux, "capture-pane", "-p", *(["-e"] if colours else ["-S", "-50"])]
        return subprocess.run(show, check=True, timeout=PATIENCE_S, capture_output=True, text=True).stdout

    def shows(self, *words: str) -> str:
        """Wait until all words are on the screen."""
        return until(
            lambda: text if all(word in (text := self.text()) for word in words) else None, str(words)
        )

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, timeout=PATIENCE_S, capture_output=True)


@pytest.fixture
def screen(fleet: Fleet) -> Iterator[Screen]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    made = Screen(fleet)
    yield made
    made.close()
    ours = ("evalfleet run", "tmux", "bash --norc")
    until(lambda: not [argv for argv in fleet.alive().values() if any(word in argv for word in ours)])


def run_line(*flags: str) -> str:
    return f"{sys.executable} -m evalfleet run ./b.toml --name r --workers 3 {' '.join(flags)}; echo code=$?"


def test_the_picture(fleet: Fleet, screen: Screen) -> None:
    fleet.bench(tasks(6, "gate go; score 1"))
    screen.keys(run_line(), "Enter")
    fleet.started("a_1.0", "a_2.0", "a_3.0")
    text = screen.shows("worker-1", "worker-2", "worker-3", "a_1")
    assert "0/6" in text
    fleet.open_gate("go")
    end = screen.shows("code=0", "6 scored")
    assert "\x1b" not in end
    after = end[end.index("6 scored") :]
    assert "worker-1" not in after  # the picture has made room for the summary
    screen.keys("echo back-$((40+2))", "Enter")
    screen.shows("back-42")


def test_pass_fail_and_broken_have_colours_where_somebody_sees_them(fleet: Fleet, screen: Screen) -> None:
    work = [task("good_1", "score 1"), task("poor_1", "score 0"), task("gone_1", "exit 3")]
    fleet.bench([*work, task("last_1", "gate go; score 1")])
    screen.keys(run_line("--attempts", "1"), "Enter")
    screen.shows("1 pass  1 fail  1 broken")
    bar = next(line for line in screen.text(colours=True).splitlines() if "3/4" in line)
    assert re.search(r"\x1b\[32m█+\x1b\[31m▓+\x1b\[33m▚+\x1b\[36m▒+", bar)
    fleet.open_gate("go")
    screen.shows("code=1")
    assert re.search(r"\x1b\[31m *exit code 1 ", screen.text(colours=True))
    screen.keys(
        f"clear; {sys.executable} -m evalfleet show; {sys.executable} -m evalfleet ls; echo end", "Enter"
    )
    screen.shows("end\n", "gone_1", "66.7%")
    seen = screen.text(colours=True)
    for colour, cell in ((32, "pass"), (31, "fail"), (33, "broken: result"), (32, "done"), (33, "1")):
        assert re.search(rf"\x1b\[{colour}m{cell}", seen), (cell, seen)
    screen.keys(f"clear; NO_COLOR=1 {sys.executable} -m evalfleet show; echo end", "Enter")
    screen.shows("end\n", "poor_1")
    assert "\x1b[3" not in screen.text(colours=True)


def test_ctrl_c_twice_from_the_keyboard(fleet: Fleet, screen: Screen) -> None:
    fleet.bench(tasks(4, "gate go; score 1"))
    screen.keys(run_line(), "Enter")
    fleet.started("a_1.0", "a_2.0", "a_3.0")
    screen.keys("C-c")
    until(lambda: fleet.state().stop)
    assert not re.search(r"code=\d", screen.text())  # the command itself may be on two lines
    screen.keys("C-c")
    screen.shows("code=130", "evalfleet resume r")
    screen.keys("stty -a | grep -c ' echo '", "Enter")  # the terminal is as it was
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0", "a_4.0"]


def test_closing_the_terminal_leaves_the_run_resumable(fleet: Fleet, screen: Screen) -> None:
    fleet.bench(tasks(4, "gate go; score 1"))
    screen.keys(run_line(), "Enter")
    fleet.started("a_1.0", "a_2.0", "a_3.0")
    screen.close()
    until(lambda: not [argv for argv in fleet.alive().values() if "evalfleet run" in argv])
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert fleet.results()["scored"] == 4


def test_a_detached_run_survives_its_terminal(fleet: Fleet, screen: Screen) -> None:
    fleet.bench(tasks(4, "gate go; score 1"))
    screen.keys(run_line("--detach"), "Enter")
    fleet.started("a_1.0", "a_2.0", "a_3.0")
    screen.shows("code=0")
    screen.close()
    fleet.open_gate("go")
    assert fleet("watch", "r").code == 0
    assert fleet.results()["scored"] == 4
    until(lambda: not fleet.alive())


def read(path: Path) -> dict[str, object] | None:
    try:
        found: dict[str, object] = json.loads(path.read_bytes())  # whole at every read
    except FileNotFoundError:
        return None
    return found


def test_live_files(fleet: Fleet) -> None:
    fleet.bench(tasks(6, "sleep 0.2; score 1") + tasks(1, "gate go; score 1", "z"))
    run = fleet.start_run("--workers", "2")
    path = fleet.home / "parallel_live.json"
    until(lambda: read(path))
    stamps: set[int] = set()
    while len(stamps) < 4:  # written anew though nothing happens
        assert read(path)
        stamps.add(path.stat().st_mtime_ns)
    document = read(path)
    assert document is not None
    assert document.keys() >= {
        *("status", "pool_id", "run", "started_at", "total_tasks", "completed_tasks", "failed_tasks"),
        *("workers", "infrastructure", "performance", "cost"),
    }
    assert (document["status"], document["run"], document["total_tasks"]) == ("running", "r", 7)
    assert (fleet.home / "latest").resolve().name == "r"
    fleet.open_gate("go")
    assert run.wait().code == 0
    last = read(path)
    assert last is not None
    assert (last["status"], last["completed_tasks"]) == ("done", 7)
