"""A place to measure in: a temporary folder with a home of its own, and every process that is started.

The CPU of processes that others started is known, too: a subreaper inherits orphans, and so sees their ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
PR_SET_CHILD_SUBREAPER = 36
EVALFLEET = (sys.executable, "-m", "evalfleet")


def console_script() -> tuple[str, ...]:
    """`evalfleet` beside this Python; `python -m evalfleet` when it is not installed there."""
    script = Path(sys.executable).with_name("evalfleet")
    return (str(script),) if script.exists() else EVALFLEET


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would change a run; paths absolute, because children run elsewhere."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EVALFLEET_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or a fresh tree compiles its source at every start
    if paths := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return {**environ, **more}


class Workspace:
    """Leaves nothing behind: on the way out, processes are ended, then machines, then files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="evalfleet-bench-"))
        self.home = self.folder / "home"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for process in self._started:
                end(process)
            self._remove_machines()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_machines(self) -> None:
        """What a killed controller left: the place's own removal ends all processes of a machine."""
        from evalfleet.channels.supervisor.machine import remove_machine

        for machine in self.machines():
            with suppress(OSError):
                remove_machine(machine)

    def machines(self) -> list[Path]:
        return sorted((self.home / ".machines").glob("*"))

    def left_behind(self) -> list[str]:
        """Machines that exist and processes that run on one, now that there should be none."""
        from evalfleet.channels.supervisor.processes import environ_of

        mark = b"\0EVALFLEET_MACHINE=" + os.fsencode(self.home)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
        lost = [f"process {pid}" for pid in pids if mark in environ_of(pid)]
        return [*(f"machine {path.name}" for path in self.machines()), *lost]

    # -- running evalfleet ---------------------------------------------------------------------

    def benchmark(
        self, command: Sequence[str], tasks: Sequence[Mapping[str, Any]], isolation: str = ""
    ) -> Path:
        """Write a benchmark whose tasks score by exit code. `isolation`: "" is the place's own."""
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (self.folder / "tasks.jsonl").write_text(lines)
        path = self.folder / "bench.toml"
        path.write_text(
            'name = "bench"\ntasks = "tasks.jsonl"\nscore_from = "exit_code"\ntimeout_s = 600\n'
            f"command = {json.dumps(list(command))}\n"
            + (f"isolation = {json.dumps(isolation)}\n" if isolation else "")
        )
        return path

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, so that Ctrl-C reaches us alone; output to a file."""
        with open(self.folder / "output", "ab") as output:
            process = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=environment(EVALFLEET_HOME=str(self.home)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.adopt(process)

    def adopt(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Should anything fail, this process is ended, too."""
        self._started.append(process)
        return process

    def start_run(self, benchmark: Path, workers: int, name: str = "run") -> subprocess.Popen[bytes]:
        return self.start(*EVALFLEET, "run", str(benchmark), "--workers", str(workers), "--name", name)

    def finish(self, process: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> None:
        """Wait for a command that must succeed."""
        if code := process.wait(limit_s):
            raise RuntimeError(f"{process.args!r} ended with {code}:\n{self.output()}")

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-3000:]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def wait_until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.02) -> None:
    """Raises TimeoutError when the condition has not come true."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s:g} s in vain")
        time.sleep(every_s)


# -- CPU and memory of processes ---------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """A process that ended: CPU seconds of its own, and of the children that it waited for."""

    pid: int
    own_s: float
    children_s: float


@contextmanager
def heir() -> Iterator[bool]:
    """Inherit what our descendants leave orphaned. False: this system cannot."""
    possible = sys.platform.startswith("linux")
    if possible:
        _prctl(1)
    try:
        yield possible
    finally:
        if possible:
            _prctl(0)


def _prctl(on: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, on, 0, 0, 0)


def await_end(process: subprocess.Popen[bytes], limit_s: float) -> Spent:
    """Wait for a child and read what it spent while it is a zombie, when its figures are final."""
    until = time.monotonic() + limit_s
    while (spent := _ended(process.pid)) is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        time.sleep(0.005)
    process.wait()
    return spent


def inherited(limit_s: float) -> list[Spent]:
    """Wait for all other children, which are orphans that came to us."""
    until = time.monotonic() + limit_s
    found: list[Spent] = []
    while time.monotonic() < until:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return found
        if seen is None:
            time.sleep(0.005)
            continue
        found.append(_read(seen.si_pid))
        os.waitpid(seen.si_pid, 0)
    raise TimeoutError(f"an orphan still runs after {limit_s:g} s")


def _ended(pid: int) -> Spent | None:
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    return None if seen is None else _read(pid)


def _read(pid: int) -> Spent:
    own, system, kids, kids_system = _times(pid)
    return Spent(pid, own + system, kids + kids_system)


def cpu_s(pid: int) -> float:
    """What a process has used by now, without its children. Raises OSError once it is gone."""
    own, system, _, _ = _times(pid)
    return own + system


def _times(pid: int) -> tuple[float, ...]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return tuple(int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])


def memory_mb(pid: int, which: str = "VmRSS") -> float:
    """Return the memory that a process has (VmRSS), or the most that it had (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{which}:")).split()[1]) / 1024
