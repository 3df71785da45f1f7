"""A home, a benchmark in a folder, and real evalfleet processes on them. Waits for facts, never for time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import evalfleet
from evalfleet.errors import FleetError
from evalfleet.events import Event
from evalfleet.journal import Store
from evalfleet.state import RunState, fold
from tests.waiting import PATIENCE_S, suspend, until

SRC = Path(evalfleet.__file__).parents[1]
T = TypeVar("T")

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


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line (or the whole) as JSON."""
        return json.loads(self.out.strip().splitlines()[-1])

    def refused(self, *words: str) -> None:
        """Exit 2, and one line on standard error that has the words."""
        self.failed(2, *words)

    def failed(self, code: int, *words: str) -> None:
        lines = self.err.strip().splitlines()
        assert self.code == code, self
        assert len(lines) == 1, self
        assert lines[0].startswith("evalfleet: "), self
        assert all(word in lines[0] for word in words), self


class Process:
    """An evalfleet process that runs, its output in files."""

    def __init__(self, popen: subprocess.Popen[Any], out: Path, err: Path) -> None:
        self.popen = popen
        self.pid = popen.pid
        self._out, self._err = out, err

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8")

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8")

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def suspend(self) -> None:
        suspend(self.pid)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def wait(self, timeout_s: float = PATIENCE_S) -> Done:
        code = self.popen.wait(timeout_s)
        return checked(Done(code, self.out, self.err))


def checked(done: Done) -> Done:
    """A traceback is a bug, whatever else happened."""
    assert "Traceback" not in done.out + done.err, done
    return done


@dataclass
class Fleet:
    """One folder with a benchmark `b.toml`, one home, and every process that was started there."""

    folder: Path
    home: Path
    environ: dict[str, str] = field(default_factory=dict[str, str])
    processes: list[Process] = field(default_factory=list[Process])
    _count: int = 0

    @classmethod
    def at(cls, folder: Path) -> Fleet:
        for name in ("marks", "gates", "notes", "out"):
            (folder / name).mkdir(parents=True)
        home = folder / "home"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("EVALFLEET_")}
        return cls(
            folder, home, {**kept, "PYTHONPATH": str(SRC), "EVALFLEET_HOME": str(home), "TERM": "dumb"}
        )

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

    def config(self, text: str) -> None:
        (self.folder / "evalfleet.toml").write_text(text, "utf-8")

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

    # -- processes -------------------------------------------------------------------------------

    def start(self, *words: str, **options: Any) -> Process:
        self._count += 1
        out, err = (self.folder / "out" / f"{self._count}.{name}" for name in ("out", "err"))
        environ = {**self.environ, **options.pop("env", {})}
        argv = [sys.executable, "-m", "evalfleet", *words]
        options = {"cwd": self.folder, "stdin": subprocess.DEVNULL, "env": environ, **options}
        with out.open("wb") as out_file, err.open("wb") as err_file:
            popen = subprocess.Popen(argv, stdout=out_file, stderr=err_file, **options)
        process = Process(popen, out, err)
        self.processes.append(process)
        return process

    def __call__(self, *words: str, timeout_s: float = PATIENCE_S, **options: Any) -> Done:
        """Run to the end."""
        return self.start(*words, **options).wait(timeout_s)

    def run(self, *words: str, **options: Any) -> Done:
        return self("run", "./b.toml", "--name", "r", *words, **options)

    def start_run(self, *words: str, **options: Any) -> Process:
        return self.start("run", "./b.toml", "--name", "r", *words, **options)

    # -- what is recorded ------------------------------------------------------------------------

    def events(self, run: str = "r") -> list[Event]:
        try:
            store = Store.open(self.home, create=False, read_only=True)
            return [record.event for record in store.read(run)]
        except FleetError:
            return []

    def state(self, run: str = "r") -> RunState:
        return fold(Store.open(self.home, create=False, read_only=True).read(run))

    def recorded(self, kind: type[T], count: int = 1, run: str = "r") -> list[T]:
        """Wait until so many events of a kind are in the journal."""

        def found() -> list[T] | None:
            events: list[T] = [event for event in self.events(run) if isinstance(event, kind)]
            return events if len(events) >= count else None

        return until(found, f"{count} {kind.__name__}")

    def results(self, run: str = "r") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / run / "results.json").read_bytes())
        return found

    def task(self, id: str, run: str = "r") -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.results(run)["tasks"] if each["task_id"] == id)
        return found

    # -- what is left ----------------------------------------------------------------------------

    def supervisors(self) -> dict[str, int]:
        """Machine directory -> pid of the process that looks after it."""
        pids = (path for path in (self.home / ".machines").glob("*/supervisor.pid"))
        return {path.parent.name: int(path.read_text().split()[0]) for path in pids}

    def alive(self) -> dict[int, str]:
        """Every process that works on this home: pid -> command line."""
        marks = (f"\0EVALFLEET_HOME={self.home}\0", f"\0EVALFLEET_MACHINE={self.home.resolve()}/")
        return {pid: argv for pid, argv, environ in processes() if any(mark in environ for mark in marks)}

    def settled(self) -> None:
        """Nothing runs and no machine is left."""
        until(lambda: not self.alive(), lambda: f"the end of {self.alive()}")
        machines = self.home / ".machines"
        assert not machines.exists() or not list(machines.iterdir())

    def sweep(self) -> None:
        """End all that was started here, also what a failed test left."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.kill()
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


def env_of(fleet: Fleet, changes: Mapping[str, str]) -> dict[str, str]:
    return {**fleet.environ, **changes}
