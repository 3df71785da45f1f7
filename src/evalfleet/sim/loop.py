"""An event loop in virtual time: waiting costs nothing, and the same seed gives the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator, Mapping
from typing import Any

from evalfleet.model import SECOND, Micros, after

EPOCH: Micros = 1_800_000_000 * SECOND
"""Where simulated time begins. Any instant will do, as long as it is the same one every time."""


LONGEST_S = 90 * 86400.0


class _JumpSelector(selectors.BaseSelector):
    """A selector that never waits: a wait of n seconds moves the virtual clock by n. It watches no real
    files."""

    def __init__(self) -> None:
        self.now = 0.0
        self._limit = LONGEST_S
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("simulation deadlock: nothing is left to happen")
        self.now += max(0.0, timeout)
        if self.now > self._limit:
            self._limit = float("inf")  # once is enough: what is left must be able to end
            raise RuntimeError(f"simulation without end: {LONGEST_S / 86400:.0f} virtual days have passed")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fd]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: `time()` is virtual, and `now()` is the same as an instant."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def now(self) -> Micros:
        return EPOCH + round(self._jump.now * SECOND)


class SimComputer:
    """The clocks of one computer: the controllers', or a machine. Anybody sets its wall clock, and the steady
    one counts since its boot."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._boots = 1
        self._booted_at = loop.now()
        self.ahead_s = 0.0  # by how much its wall clock is wrong
        self.strobe: tuple[float, float] | None = None  # (every, by): also by so much in every second period
        self._fate: Iterator[tuple[float, float]] = iter(())
        self._next: tuple[float, float] | None = None

    @property
    def boot(self) -> str:
        return f"boot {self._boots}"

    def reboot(self) -> None:
        self._boots += 1
        self._booted_at = self._loop.now()

    def set_by(self, fate: Iterator[tuple[float, float]]) -> None:
        """From now on the wall clock is set at these moments, each to so far from the truth.

        It takes no timer, each of which would change the rounding of all other times in the world.
        """
        self._fate = fate
        self._next = next(fate, None)

    def wall(self) -> Micros:
        while self._next is not None and self._next[0] <= self._loop.time():
            self.ahead_s = self._next[1]
            self._next = next(self._fate, None)
        ahead_s = self.ahead_s
        if self.strobe is not None and self._loop.time() // self.strobe[0] % 2:
            ahead_s += self.strobe[1]
        return after(self._loop.now(), ahead_s)

    def steady(self) -> Micros:
        return self._loop.now() - self._booted_at
