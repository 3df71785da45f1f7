"""The clock of everything that is not simulated."""

from __future__ import annotations

import time

from .model import Micros


class WallClock:
    """The time of day, as journals have it."""

    def now(self) -> Micros:
        return time.time_ns() // 1000
