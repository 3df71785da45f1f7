"""A desk with a benchmark whose tasks do what a test tells them, on machines that are processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tests.desk import Desk, Done, Process
from tests.waiting import PATIENCE_S, until

# A gate waits by a `read` that nobody answers: a `sleep` would be one more process each time.
SCRIPT = """
touch "{folder}/marks/$EVALFLEET_TASK_ID.$EVALFLEET_ATTEMPT.$$"
score() {{ printf '{{"score": %s}}' "$1" > "$EVALFLEET_OUT/result.json"; }}
result() {{ printf '%s' "$1" > "$EVALFLEET_OUT/result.json"; }}
gate() {{ exec 9<> <(:); until [ -e "{folder}/gates/$1" ]; do read -r -t 0.03 -u 9; done; exec 9>&-; }}
note() {{ cat > "{folder}/notes/$EVALFLEET_TASK_ID"; }}
eval "$1"
"""

Task = dict[str, Any]


def task(id: str, do: str = "score 1", **keys: Any) -> Task:
    return {"id": id, "params": {"do": do}, **keys}


def tasks(count: int, do: str = "score 1", prefix: str = "a") -> list[Task]:
    return [task(f"{prefix}_{n}", do) for n in range(1, count + 1)]


class Fleet(Desk):
    """One folder with a benchmark `b.toml`, and one home on this computer."""

    @classmethod
    def at(cls, folder: Path) -> Fleet:
        for name in ("marks", "gates", "notes"):
            (folder / name).mkdir(parents=True)
        return cls(folder)

    # -- files -----------------------------------------------------------------------------------

    def bench(self, tasks: Sequence[Task], **keys: Any) -> Path:
        """Write `b.toml`, its tasks and its script. Keys are TOML's."""
        given: dict[str, Any] = {
            "name": "b",
            "tasks": "tasks.jsonl",
            "command": ["bash", "run.sh", "{params.do}"],
        }
        given |= {"files": ["run.sh"], "timeout_s": PATIENCE_S, **keys}
        lines = (f"{key} = {toml(value)}" for key, value in given.items())
        (self.folder / "b.toml").write_text("\n".join(lines), "utf-8")
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tasks), "utf-8")
        (self.folder / "run.sh").write_text(SCRIPT.format(folder=self.folder), "utf-8")
        return self.folder / "b.toml"

    def open_gate(self, *names: str) -> None:
        for name in names:
            (self.folder / "gates" / name).touch()

    def note(self, task: str) -> str:
        return (self.folder / "notes" / task).read_text("utf-8")

    def starts(self) -> list[str]:
        """`task.attempt` of every start of a command, a second start of the same one included."""
        return sorted(mark.name.rpartition(".")[0] for mark in (self.folder / "marks").iterdir())

    def started(self, *names: str) -> None:
        """Wait until all of these have been started."""
        until(lambda: set(names) <= set(self.starts()), f"start of {names}")

    # -- runs ------------------------------------------------------------------------------------

    def run(self, *words: str, **options: Any) -> Done:
        """Run the benchmark, as run `r` unless another name is given."""
        name = () if "--name" in words else ("--name", "r")
        return self("run", "./b.toml", *name, *words, **options)

    def start_run(self, *words: str, **options: Any) -> Process:
        return self.start("run", "./b.toml", "--name", "r", *words, **options)

    # -- what is left ----------------------------------------------------------------------------

    def supervisors(self) -> dict[str, int]:
        """Machine directory -> pid of the process that looks after it."""
        pids = (path for path in (self.home / ".machines").glob("*/supervisor.pid"))
        return {path.parent.name: int(path.read_text().split()[0]) for path in pids}

    def alive(self) -> dict[int, str]:
        """Every process that works on this home: pid -> command line."""
        marks = [
            os.fsencode(f"\0EVALFLEET_HOME={self.home}\0"),
            os.fsencode(f"\0EVALFLEET_MACHINE={self.home.resolve()}/"),
        ]
        own = {process.pid for process in self.processes if process.lives}  # /proc may show others' variables
        found = [
            pid for pid, environ in environments() if pid in own or any(mark in environ for mark in marks)
        ]
        return {pid: words for pid in found if (words := argv(pid)) is not None}

    def settled(self) -> None:
        """Nothing runs and no machine is left."""
        until(lambda: not self.alive(), lambda: f"the end of {self.alive()}")
        machines = self.home / ".machines"
        assert not machines.exists() or not list(machines.iterdir()), list(machines.rglob("*"))

    def sweep(self) -> None:
        """End all that was started here, also machines that a failed test left."""
        super().sweep()
        for _ in range(100):
            pids = self.alive()
            for pid in pids:
                _kill(pid)
            if not pids:
                return
            time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def processes() -> Iterator[tuple[int, str, str]]:
    """(pid, command line, environment) of all that we may look at; zombies have neither."""
    for pid, environ in environments():
        if (words := argv(pid)) is not None:
            yield pid, words, environ.decode("utf-8", "surrogateescape")


def environments() -> Iterator[tuple[int, bytes]]:
    """Of all processes that we may look at, a zero byte before each variable. Each test looks many times."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        environ = _read(f"/proc/{name}/environ")
        if environ is not None:
            yield int(name), b"\0" + environ


def argv(pid: int) -> str | None:
    """The words of a process that has not gone, with spaces between them."""
    words = _read(f"/proc/{pid}/cmdline")
    return None if words is None else words.replace(b"\0", b" ").decode("utf-8", "replace")


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def toml(value: Any) -> str:
    """A value as TOML writes it; but for tables JSON is close enough to it."""
    if not isinstance(value, dict):
        return json.dumps(value)
    table = cast("dict[str, Any]", value)
    return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in table.items()) + "}"


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)
