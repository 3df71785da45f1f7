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

SCRIPT = """
touch "{folder}/marks/$EVALFLEET_TASK_ID.$EVALFLEET_ATTEMPT.$$"
score() {{ printf '{{"score": %s}}' "$1" > "$EVALFLEET_OUT/result.json"; }}
result() {{ printf '%s' "$1" > "$EVALFLEET_OUT/result.json"; }}
gate() {{ until [ -e "{folder}/gates/$1" ]; do sleep 0.03; done; }}
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
        marks = (f"\0EVALFLEET_HOME={self.home}\0", f"\0EVALFLEET_MACHINE={self.home.resolve()}/")
        own = {process.pid for process in self.processes if process.lives}  # /proc may show others' variables
        return {
            pid: argv
            for pid, argv, environ in processes()
            if pid in own or any(mark in environ for mark in marks)
        }

    def settled(self) -> None:
        """Nothing runs and no machine is left."""
        until(lambda: not self.alive(), lambda: f"the end of {self.alive()}")
        machines = self.home / ".machines"
        assert not machines.exists() or not list(machines.iterdir())

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
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            argv = Path(f"/proc/{name}/cmdline").read_bytes()
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        text = argv.replace(b"\0", b" ").decode("utf-8", "replace")
        yield int(name), text, f"\0{environ.decode('utf-8', 'surrogateescape')}"


def toml(value: Any) -> str:
    """A value as TOML writes it; but for tables JSON is close enough to it."""
    if not isinstance(value, dict):
        return json.dumps(value)
    table = cast("dict[str, Any]", value)
    return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in table.items()) + "}"


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)
