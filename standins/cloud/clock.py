"""The stand-in's time: real by default; tests may let it run faster or jump ahead."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime

SETTLE = 50  # turns of the loop in which what woke can do what it has to do


class Clock:
    """`now` never goes back. All is the server thread's, but `now` and `stamp`."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.time()
        self._monotonic = time.monotonic()
        self._offset = 0.0
        self._sleepers: dict[asyncio.Future[None], float] = {}
        self._held = 0

    def now(self) -> float:
        """Seconds since 1970."""
        return self._start + (time.monotonic() - self._monotonic) * self._speed + self._offset

    def stamp(self, at: float | None = None) -> str:
        moment = datetime.fromtimestamp(self.now() if at is None else at, UTC)
        return moment.isoformat().replace("+00:00", "Z")

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self.now() + seconds)

    async def sleep_until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            woken = asyncio.get_running_loop().create_future()
            self._sleepers[woken] = moment
            try:
                async with asyncio.timeout(min(left / self._speed, 3600.0)):
                    await woken
            except TimeoutError:
                continue
            finally:
                del self._sleepers[woken]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """No jump meanwhile: something real is being done that belongs to this moment."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    async def jump(self, seconds: float) -> None:
        """Let time pass at once. What is due meanwhile happens at its own moment, and in order."""
        target = self.now() + seconds
        await self._settle()  # what is between two sleeps at this moment has not said yet when it is due
        while due := [moment for moment in self._sleepers.values() if moment <= target]:
            self._go_to(min(due))
            await self._settle()
        self._go_to(target)
        await self._settle()

    def _go_to(self, moment: float) -> None:
        self._offset += max(0.0, moment - self.now())
        for woken, until in self._sleepers.items():
            if until <= self.now() and not woken.done():
                woken.set_result(None)

    async def _settle(self) -> None:
        for _ in range(SETTLE):
            await asyncio.sleep(0)
        while self._held:
            await asyncio.sleep(0.001)
