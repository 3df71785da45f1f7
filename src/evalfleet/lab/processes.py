"""Finding and signalling the processes of a loopback host, which nothing but their origin sets apart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .errors import LabError

MARK = "EVALFLEET_LAB_HOST"
GONE_S = 10.0


def argv(pid: int) -> tuple[str, ...]:
    """Empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return ()
    return tuple(map(os.fsdecode, words.split(b"\0"))) if words else ()


def of_host(own: Iterable[int], mark: str) -> list[int]:
    """These, the marked ones, and all that descend from either. Dead ones do not count."""
    alive = {pid: parent for pid, parent, status in _table() if status not in "ZX"}
    found = {pid for pid in own if pid in alive}
    found |= {pid for pid in alive if mark and _is_marked(pid, mark)}
    children: dict[int, list[int]] = {}
    for pid, parent in alive.items():
        children.setdefault(parent, []).append(pid)
    waiting = list(found)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(new)
        waiting += new
    return sorted(found - {os.getpid()})


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill(find: Callable[[], list[int]]) -> None:
    """Until none is found: some may start others meanwhile."""
    until = time.monotonic() + GONE_S
    while pids := find():
        if time.monotonic() > until:
            raise LabError(f"processes {pids} cannot be killed")
        # a parent that is killed first leaves its children to nobody: stop them all before
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        time.sleep(0.002)


def stop(pids: Iterable[int]) -> bool:
    """True once all of them stand still."""
    wanted = set(pids)
    send(wanted, signal.SIGSTOP)
    return all(status in "TtZX" for pid, _, status in _table() if pid in wanted)


def _table() -> list[tuple[int, int, str]]:
    """Pid, parent and status of every process."""
    rows: list[tuple[int, int, str]] = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text(errors="replace")
                status, parent = text[text.rindex(")") + 2 :].split(" ", 2)[:2]
                rows.append((int(name), int(parent), status))
    return rows


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
