"""The clocks of everything that is not simulated."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from .model import SECOND, Micros


class WallClock:
    """The time of day as this computer has it: anybody may set it, forwards or back."""

    def now(self) -> Micros:
        return time.time_ns() // 1000


class ComputerClocks(Protocol):
    """What one computer tells of time."""

    @property
    def boot(self) -> str:
        """Names what `steady` counts from; empty if that cannot be told."""
        ...

    def wall(self) -> Micros: ...

    def steady(self) -> Micros:
        """Counts up evenly, also while the computer is suspended, whatever happens to the wall clock."""
        ...


class SystemClocks:
    """The clocks of this computer."""

    @property
    def boot(self) -> str:
        return _boot()

    def wall(self) -> Micros:
        return time.time_ns() // 1000

    def steady(self) -> Micros:
        return time.clock_gettime_ns(_STEADY) // 1000


_STEADY: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Where there is no CLOCK_BOOTTIME (macOS), CLOCK_MONOTONIC counts suspended time, too."""


@functools.cache
def _boot() -> str:
    """A container may have a clock of its own, in a namespace of its own: that counts as another boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


class RunClock:
    """The time of one run: the wall clock's when its first controller started, then by a steady clock.

    So a wall clock that is set while a run is under way changes no duration, cost, retry or expiry. The run's
    next controller goes on by the same steady clock, if that still counts; after a reboot, or on another
    computer, it must believe the wall clock, but never that time went back.

    `zero` is what the steady clock's zero is in the run's time: with `boot`, all that a successor needs.
    """

    def __init__(
        self, clocks: ComputerClocks | None = None, *, boot: str = "", zero: Micros = 0, last_at: Micros = 0
    ) -> None:
        self._clocks = clocks or SystemClocks()
        self.boot = self._clocks.boot
        steady = self._clocks.steady()
        goes_on = bool(boot) and boot == self.boot
        self.zero = max(zero if goes_on else self._clocks.wall() - steady, last_at - steady)

    def now(self) -> Micros:
        return self._clocks.steady() + self.zero


@functools.cache
def _process_clock() -> RunClock:
    return RunClock()


def wall_seconds() -> float:
    """Seconds since 1970, as the wall clock had it when this process first asked, and steady since then.

    For whatever is compared with an earlier answer: a lease would end too soon, or a machine be told to live
    for hours more, if somebody set the wall clock in between.
    """
    return _process_clock().now() / SECOND


def pauses(first_s: float, longest_s: float, factor: float = 1.5) -> Generator[float]:
    """Seconds to pause between tries, without end: each longer than the one before, up to the longest."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * factor, longest_s)
