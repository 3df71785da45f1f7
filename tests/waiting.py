"""How tests wait: for facts, never for time. They share one patience: a busy computer is slow everywhere."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from evalfleet.testing import Harness

PATIENCE_S = 240.0
"""After so long a fact will not come true any more. Two such waits fit into pytest's own limit."""
LOOK_S = 0.02
STOLEN_OVER_TICKS = 1000
"""Five seconds on two processors."""
MOST_STOLEN = 0.6
T = TypeVar("T")


def slowness() -> float:
    """How many times longer things take here, now, than on an idle computer.

    It is for limits that a test gives to evalfleet itself, such as the silence after which a host is lost. It
    is measured for each test anew: the tests themselves make a computer busy that was idle when they began.
    The average over a minute is late by as much, so those that want to run at this moment count, too. So does
    the time that the host of a virtual machine gives to others: all tests once took twice as long for it.
    """
    minute, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    wanting = max(float(minute), int(tasks.partition("/")[0]) - 1)
    return min(max(wanting / (os.cpu_count() or 1), 1.0), 4.0) / (1.0 - min(_stolen(), MOST_STOLEN))


def _stolen() -> float:
    """The share of processor time that the host of this virtual machine gave to others, of late."""
    total, stolen = _processor_time()
    if total - _looks[-1][0] >= STOLEN_OVER_TICKS:
        _looks.append((total, stolen))
    total_then, stolen_then = _looks[0]
    return (stolen - stolen_then) / max(total - total_then, 1)


def _processor_time() -> tuple[int, int]:
    """All and the stolen ticks since the computer was started."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(each) for each in first.split()[1:9]]  # those of guests, which follow, are among them
    return sum(ticks), ticks[7]


_looks = deque([_processor_time()], maxlen=2)
"""What was counted at the last two looks."""


def allow_for_load(harness: Harness) -> None:
    """Give the jobs and machines of a contract's test as much more time as things take here, now."""
    slow = slowness()
    harness.unit_s *= slow
    harness.silent_s *= slow
    harness.boot_s *= slow


def until(
    found: Callable[[], T | None],
    what: str | Callable[[], str] = "",
    timeout_s: float = PATIENCE_S,
    look_s: float = LOOK_S,
) -> T:
    """What `found` returns once that is true. `what` is told if it never is."""
    end = time.monotonic() + timeout_s
    while not (it := found()):
        assert time.monotonic() < end, _in_vain(what, found)
        time.sleep(look_s)
    return it


async def until_async(
    found: Callable[[], Awaitable[T | None]],
    what: str | Callable[[], str] = "",
    timeout_s: float = PATIENCE_S,
    look_s: float = LOOK_S,
) -> T:
    """As `until`, for what must be awaited."""
    end = time.monotonic() + timeout_s
    while not (it := await found()):
        assert time.monotonic() < end, _in_vain(what, found)
        await asyncio.sleep(look_s)
    return it


async def until_seen(found: Callable[[], T | None], what: str = "", look_s: float = LOOK_S) -> T:
    """As `until`, while the loop goes on."""

    async def look() -> T | None:
        return found()

    return await until_async(look, what, look_s=look_s)


def _in_vain(what: str | Callable[[], str], found: object) -> str:
    return f"it never came true: {(what() if callable(what) else what) or found}"


def suspend(pid: int) -> None:
    """Stop a process, and return once all its threads stand still: they go on for a moment after."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: states(pid) <= set("TtZX"), lambda: f"{pid} to stand still: {states(pid)}")


def states(pid: int) -> set[str]:
    """The states of a process's threads, a letter each, as `ps` shows them; empty once it is gone."""
    found: set[str] = set()
    for stat in glob.glob(f"/proc/{pid}/task/*/stat"):
        try:
            found.add(Path(stat).read_text().rpartition(") ")[2][0])
        except OSError:  # the thread has ended
            continue
    return found
