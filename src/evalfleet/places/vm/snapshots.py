"""Snapshots of all that exists in a cloud, shared by all who ask, and taken no faster than a cloud bears."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from evalfleet.single_flight import SingleFlight

SPACING_S = 0.1
BURST, REFILL_S = 30.0, 1.0
"""Thirty snapshots may follow one another closely; in the long run there is one a second."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, SHARE = 0.1, 3.0, 0.1

S = TypeVar("S")


class SnapshotPace:
    """An allowance of snapshots that refills with time. It has no clock of its own: `now` is given."""

    def __init__(self) -> None:
        self._left, self._at = BURST, 0.0

    def wait_s(self, now: float) -> float:
        """Take one snapshot from the allowance, and tell how long to wait before it."""
        self._left = min(BURST, self._left + (now - self._at) / REFILL_S)
        self._at = now
        self._left -= 1.0
        return SPACING_S if self._left >= 0.0 else -self._left * REFILL_S


class Snapshots(Generic[S]):
    """The snapshots of one cloud, one at a time and paced: as many for a hundred machines as for one."""

    def __init__(self, take: Callable[[], Awaitable[S]]) -> None:
        pace = SnapshotPace()
        self._flight = SingleFlight(take, lambda: pace.wait_s(time.monotonic()))

    async def fresh(self) -> S:
        """One that is never older than the question. Raises what taking it raises."""
        return await self._flight.fresh()

    async def watch(self) -> AsyncGenerator[S]:
        """A fresh one, and then every later one, whoever asked for it. Raises what taking it raises.

        Who has waited for long can wait a little longer: that costs a small share of the whole time, and the
        most impatient of all that wait decides.
        """
        begun = time.monotonic()
        snapshot = await self.fresh()
        while True:
            yield snapshot
            waited_s = time.monotonic() - begun
            snapshot = await self._flight.soon(min(max(FIRST_PAUSE_S, waited_s * SHARE), LONGEST_PAUSE_S))
