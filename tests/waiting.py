"""How tests wait: for facts, never for time. They share one patience: a busy computer is slow everywhere."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from evalfleet.testing import Harness

PATIENCE_S = 240.0
"""After so long a fact will not come true any more. Two such waits fit into pytest's own limit."""
LOOK_S = 0.02
STOLEN_OVER_S = 5.0
MOST_STOLEN = 0.6
T = TypeVar("T")


def slowness() -> float:
    """How many times longer things take here, now, than on an idle computer.

    It is for limits that a test gives to evalfleet itself, such as the silence after which a host is lost. It
    is measured for each test anew: the tests themselves make a computer busy that was idle when they began.
    The average over a minute is late by as much, so those that want to run at this moment count, too. So does
    what a virtual computer's neighbours take: half of the processors stolen made a whole run twice as long.
    """
    minute, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    wanting = max(float(minute), int(tasks.partition("/")[0]) - 1)
    return min(max(wanting / (os.cpu_count() or 1), 1.0), 4.0) / (1.0 - min(_stolen.share(), MOST_STOLEN))


class StolenTime:
    """The share of this computer's processor time that the one it runs on gave to others, of late."""

    def __init__(self, counted: Callable[[], tuple[int, int]]) -> None:
        self._counted = counted
        self._before = self._latest = (-math.inf, *counted())

    def share(self) -> float:
        """Over the last `STOLEN_OVER_S`, or since the question before that."""
        now, (total, stolen) = time.monotonic(), self._counted()
        if now - self._latest[0] >= STOLEN_OVER_S:
            self._before, self._latest = self._latest, (now, total, stolen)
        passed = total - self._before[1]
        return (stolen - self._before[2]) / passed if passed > 0 else 0.0


def _processor_time() -> tuple[int, int]:
    """All and the stolen ticks since the computer was started."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(each) for each in first.split()[1:9]]  # those of guests, which follow, are among them
    return sum(ticks), ticks[7]


_stolen = StolenTime(_processor_time)


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
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(stat.read_text().rpartition(") ")[2][0])
        except OSError:  # the thread has ended
            continue
    return found
