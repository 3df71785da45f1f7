"""Does a job still write anything: to its log, or anywhere among its artefacts?"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER = float("inf")
LOOK_S = 5.0
STEP = 500
PAUSE_S = 0.05


class Growth:
    """When a job last wrote something, as far as we have seen. Times are of the monotonic clock.

    Artefacts are looked at only while the log is quiet, some hundred at a time: a supervisor has other jobs,
    and there may be millions of files. They are compared, never their times with ours: clocks jump.
    """

    def __init__(self, folder: str, patience: float) -> None:
        self.due = NEVER
        self._log = folder + "/log"
        self._out = folder + "/out"
        self._patience = patience
        self._interval = max(0.05, min(patience / 8, LOOK_S))
        self._since = self._looked = self._began = 0.0
        self._out_seen = self._sum = 0
        self._log_seen: int = 0
        self._sweep: Iterator[int] | None = None

    def begin(self, now: float) -> None:
        self._since = self._looked = now
        if self._patience < NEVER:
            self.due = now + self._interval
            self._log_seen = stamp(self._log)

    def stuck(self, now: float) -> bool:
        """Was nothing written for longer than the patience? To be asked when it is due."""
        if now - self._looked > 2 * self._interval + 1.0:
            self._since += now - self._looked  # we stood still, and so may the job have done
        self._looked = now
        log = stamp(self._log)
        if log != self._log_seen:
            self._log_seen, self._since, self._sweep = log, now, None
            self._rest(now, self._interval)
        elif not self._swept(now):
            self.due = now + PAUSE_S
        elif self._began - self._since >= self._patience:
            return True
        else:
            self._rest(now, max(self._interval, now - self._began))
        return False

    def _rest(self, now: float, pause: float) -> None:
        self.due = min(now + pause, max(self._since + self._patience, now + PAUSE_S))

    def _swept(self, now: float) -> bool:
        """Look at some more of the artefacts; True once through. What differs was written since last time."""
        if self._sweep is None:
            self._sweep, self._began, self._sum = stamps(self._out), now, 0
        for count, each in enumerate(self._sweep):
            self._sum += each
            if count >= STEP:
                return False
        self._sweep = None
        if self._sum != self._out_seen:
            self._out_seen, self._since = self._sum, now
        return True


def stamp(path: str) -> int:
    try:
        return _stamp(os.lstat(path))
    except OSError:
        return 0


def _stamp(about: os.stat_result) -> int:
    return hash((about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))


def stamps(top: str) -> Iterator[int]:
    """Of everything in a folder, itself included. Links are not followed."""
    folders = [top]
    yield stamp(top)
    while folders:
        folder = folders.pop()
        try:
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                continue  # the job put it there: it may lead anywhere
            with os.scandir(folder) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(entry.path)
                    yield _stamp(about)
        except OSError:
            continue
