"""Somebody's folder and home, real evalfleet processes there, and what they record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import evalfleet
from evalfleet.errors import FleetError
from evalfleet.events import Event, Record
from evalfleet.journal import Store
from evalfleet.state import RunState, apply, fold
from tests.forked import Forked, Request, fork
from tests.waiting import PATIENCE_S, suspend, until

SRC = Path(evalfleet.__file__).parents[1]
ROOT = Path(__file__).parents[1]
"""The folder of `lab`, whose place processes of evalfleet import by its dotted path."""
NO_SECRETS = ("EVALFLEET_", "PATH", "HOME", "USER", "TZ", "SLURM_CONF")
"""How the names of variables begin that nobody looks for in /proc."""
T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

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
    """An evalfleet process, its output in files."""

    def __init__(self, popen: subprocess.Popen[bytes] | Forked, out: Path, err: Path) -> None:
        self.popen = popen
        self.pid = popen.pid
        self._out, self._err = out, err
        self._starter = os.getpid()

    def __del__(self) -> None:
        """What a test that failed has left running would be told as the fault of another one."""
        if isinstance(self.popen, subprocess.Popen) and os.getpid() == self._starter:
            self.kill()  # nothing, if it has ended

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8", "replace")

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8", "replace")

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def signal(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def suspend(self) -> None:
        """As if its computer slept."""
        suspend(self.pid)

    def kill(self) -> None:
        """As if its computer had lost power."""
        self.popen.kill()
        self.popen.wait()

    def wait(self, timeout_s: float = PATIENCE_S) -> Done:
        """A traceback is a bug, whatever else happened."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.said[-5000:]}") from None
        done = Done(code, self.out, self.err)
        assert "Traceback" not in done.said, done
        return done

    def finish(self, code: int = 0, timeout_s: float = PATIENCE_S) -> str:
        """All that it said, once it has ended with this exit code."""
        done = self.wait(timeout_s)
        assert done.code == code, done
        return done.said


class Desk:
    """One folder, one home, and every process that was started there.

    `prefix` goes before the command: what enters the network of machines. Variables of ours that happen to be
    set where the tests run are not passed on. A process is forked (tests/forked.py), which is cheaper, unless
    it is given variables that may be secrets. With `forks` it is forked also then, where no test looks for
    these in /proc.
    """

    def __init__(
        self,
        folder: Path,
        home: Path | None = None,
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        forks: bool = False,
    ) -> None:
        self.folder = folder
        self.home = home or folder / "home"
        self.prefix = tuple(prefix)
        self.processes: list[Process] = []
        kept = {key: value for key, value in os.environ.items() if not key.startswith("EVALFLEET_")}
        ours = {"PYTHONPATH": f"{SRC}{os.pathsep}{ROOT}", "EVALFLEET_HOME": str(self.home), "TERM": "dumb"}
        self.forks = forks
        self._network = _network(self.prefix)
        self._inherited = {**kept, **ours}
        self.environ = {**self._inherited, **(environ or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = Path(tempfile.mkdtemp(prefix=".outputs-", dir=folder))

    def use_home(self, home: Path) -> None:
        self.home = home
        self.environ["EVALFLEET_HOME"] = str(home)

    def config(self, text: str) -> None:
        (self.folder / "evalfleet.toml").write_text(text, "utf-8")

    # -- processes -------------------------------------------------------------------------------

    def start(self, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> Process:
        number = len(self.processes) + 1
        out, err = (self._outputs / f"{number}.{name}" for name in ("out", "err"))
        environ = {**self.environ, **(env or {})}
        with out.open("wb") as out_file, err.open("wb") as err_file, open(os.devnull, "rb") as nothing:
            popen: subprocess.Popen[bytes] | Forked
            options = {"stdin": nothing, **options}
            if options.keys() == {"stdin"} and self._may_fork(environ):
                request = Request(words, str(self.folder), environ, self._network)
                popen = fork(request, (options["stdin"], out_file, err_file))
            else:
                argv = [*self.prefix, sys.executable, "-m", "evalfleet", *words]
                options = {"cwd": self.folder, **options}
                popen = subprocess.Popen[bytes](
                    argv, env=environ, stdout=out_file, stderr=err_file, **options
                )
        process = Process(popen, out, err)
        self.processes.append(process)
        return process

    def _may_fork(self, environ: Mapping[str, str]) -> bool:
        own = dict(environ.items() - self._inherited.items())
        shown = self.forks or all(name.startswith(NO_SECRETS) for name in own)
        here = not self.prefix or self._network
        return bool(shown and here and hasattr(os, "pidfd_open"))  # which Linux has

    def __call__(self, *words: str, timeout_s: float = PATIENCE_S, **options: Any) -> Done:
        """Run to the end, whatever its exit code."""
        process = self.start(*words, **options)
        try:
            return process.wait(timeout_s)
        finally:
            process.kill()  # nothing, if it has ended

    def done(self, *words: str, code: int = 0, **options: Any) -> Done:
        done = self(*words, **options)
        assert done.code == code, done
        return done

    def say(self, *words: str, code: int = 0) -> str:
        """What it prints."""
        return self.done(*words, code=code).out

    def sweep(self) -> None:
        """End what a failed test left running."""
        for process in self.processes:
            if process.lives:
                process.signal(signal.SIGCONT)
                process.kill()

    # -- what is recorded ------------------------------------------------------------------------

    def records(self, run: str = "r", after: int = 0) -> list[Record]:
        """None as long as there is no such run."""
        try:
            return list(Store.open(self.home, create=False, read_only=True).read(run, after=after))
        except FleetError:
            return []

    def events(self, run: str = "r") -> list[Event]:
        return [record.event for record in self.records(run)]

    def state(self, run: str = "r") -> RunState:
        return fold(self.records(run))

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


def _network(prefix: tuple[str, ...]) -> str:
    """The network namespace that a prefix enters, if that is all it does."""
    match prefix:
        case ("nsenter", option, "--") if option.startswith("--net="):
            return option.removeprefix("--net=")
        case _:
            return ""


class FollowedRun:
    """A run at a desk, by all that is in its journal when one looks."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk = desk
        self.name = name
        self.state = RunState()
        self.records: list[Record] = []

    def look(self) -> RunState:
        for record in self.desk.records(self.name, after=len(self.records)):
            self.records.append(record)
            apply(self.state, record.at, record.event)
        return self.state

    def until(self, happened: Callable[[RunState], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the journal, or what else is looked at, shows it."""

        def has_happened() -> object:
            if happened(self.look()):
                return True
            problem = self._why_wait_no_longer()
            assert not problem or happened(self.look()), f"{problem} before {what}\n{self._said()}"
            return None

        until(has_happened, lambda: f"{what}\n{self._said()}", timeout_s, look_s=0.03)

    def _said(self) -> str:
        return self.desk.processes[-1].said[-3000:]

    def _why_wait_no_longer(self) -> str:
        if self.state.ended_at is not None:
            return "the run had ended"
        if not any(process.lives for process in self.desk.processes):
            return "no controller was at work"
        return ""
