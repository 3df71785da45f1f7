"""A job's log, held near its cap while the job appends to it."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

BEAT_S = 5.0
DETAIL_BYTES = 2048
LINE_CHARS = 200


class Log:
    """A job's log: appended to by the job itself, held near its cap by us.

    Above the cap the first half is set aside once (log.head), and the last half again and again
    (log.tail) while the live file is cut to nothing: its writers append, so they go on at its start.
    """

    def __init__(self, folder: str, cap: int) -> None:
        self.path = folder + "/log"
        self.half = max(cap // 2, 1)
        self.dropped = 0
        self.capped = False
        self.seen = 0
        self.interval = 0.1

    def size(self) -> int:
        try:
            live = os.stat(self.path).st_size
        except OSError:
            return 0
        return (
            live if not self.capped else live + self.dropped + self._length(".head") + self._length(".tail")
        )

    def check(self) -> float:
        """Cut the log if it is too long. How long to wait before the next look: less if it grows fast."""
        live = grown = 0
        try:
            live = os.stat(self.path).st_size
            grown = max(live - self.seen, 0)
            if live > (self.half if self.capped else 2 * self.half):
                self._rotate(live)
                live = 0
        except OSError:
            live = 0  # a full disk: look again later
        rate = grown / self.interval
        self.seen = live
        room = (self.half if self.capped else 2 * self.half) - live
        self.interval = max(0.05, min(BEAT_S, self.interval * 2, room / rate / 2 if rate else BEAT_S))
        return self.interval

    def finish(self) -> None:
        """One file again: head, a line that tells how much is missing, tail. May be repeated."""
        if os.path.exists(self.path + ".new"):
            return self._replace()
        self.capped = self.capped or os.path.exists(self.path + ".head")
        live = os.stat(self.path).st_size
        if not self.capped and live <= 2 * self.half:
            return None
        if not self.capped or live > self.half:
            self._rotate(live)
            live = 0
        tail = self._length(".tail")
        skip = max(tail + live - self.half, 0)
        with open(self.path + ".part", "wb") as out:
            self._copy(".head", 0, out)
            if self.dropped + skip:
                out.write(f"\n[... {self.dropped + skip} bytes left out ...]\n".encode())
            self._copy(".tail", skip, out)
            self._copy("", max(skip - tail, 0), out)
        os.replace(self.path + ".part", self.path + ".new")
        return self._replace()

    def tail(self) -> str:
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - DETAIL_BYTES, 0))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def last_line(self) -> str:
        """What it said last, as a terminal would show it."""
        lines = [line.strip() for line in self.tail().replace("\r", "\n").split("\n")]
        return next((line[-LINE_CHARS:] for line in reversed(lines) if line), "")

    def _rotate(self, live: int) -> None:
        start = 0
        if not self.capped:
            self._save(".head", 0, self.half)
            self.capped = True
            start = self.half
        keep_from = max(live - self.half, start)
        self.dropped += self._length(".tail") + keep_from - start
        self._save(".tail", keep_from, live - keep_from)
        self._catch_up(live)
        os.truncate(self.path, 0)

    def _catch_up(self, copied: int) -> None:
        """What was appended while we copied must not be cut away: often it is the job's last word."""
        for _ in range(3):  # each time there is less; one who never stops writing is not waited for
            size = os.stat(self.path).st_size
            if size <= copied:
                return
            with open(self.path + ".tail", "ab") as out:
                self._copy("", copied, out, size - copied)
            copied = size

    def _save(self, suffix: str, start: int, count: int) -> None:
        with open(self.path + suffix, "wb") as out:
            self._copy("", start, out, count)

    def _copy(self, suffix: str, start: int, out: Any, count: int = 1 << 62) -> None:
        try:
            with open(self.path + suffix, "rb") as file:
                file.seek(start)
                while count > 0:
                    chunk = file.read(min(count, 1 << 20))
                    if not chunk:
                        return
                    out.write(chunk)
                    count -= len(chunk)
        except FileNotFoundError:
            return

    def _length(self, suffix: str) -> int:
        try:
            return os.stat(self.path + suffix).st_size
        except OSError:
            return 0

    def _replace(self) -> None:
        # the parts go before the whole takes their place: a crash between must not assemble twice
        for suffix in (".head", ".tail"):
            if os.path.exists(self.path + suffix):
                os.unlink(self.path + suffix)
        os.replace(self.path + ".new", self.path)
