"""CPU time of processes that others started: a subreaper inherits orphans, and so sees their ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PR_SET_CHILD_SUBREAPER = 36


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
