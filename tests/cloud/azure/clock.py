"""The stand-in's time: real by default; tests may let it run faster or jump ahead."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime


class Clock:
    """`now` never goes back. All calls but `jump` are the server thread's."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.time()
        self._monotonic = time.monotonic()
        self._offset = 0.0
        self._jumped = asyncio.Event()

    def now(self) -> float:
        """Seconds since 1970."""
        return self._start + (time.monotonic() - self._monotonic) * self._speed + self._offset

    def utc(self) -> datetime:
        return datetime.fromtimestamp(self.now(), UTC)

    def stamp(self, at: float | None = None) -> str:
        moment = self.utc() if at is None else datetime.fromtimestamp(at, UTC)
        return moment.isoformat().replace("+00:00", "Z")

    def jump(self, seconds: float) -> None:
        """Time passes at once: what waits for a moment in between wakes. In the server's thread."""
        self._offset += seconds
        waiting, self._jumped = self._jumped, asyncio.Event()
        waiting.set()

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self.now() + seconds)

    async def sleep_until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            jumped = self._jumped
            try:
                async with asyncio.timeout(min(left / self._speed, 3600.0)):
                    await jumped.wait()
            except TimeoutError:
                continue
