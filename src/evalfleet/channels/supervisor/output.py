"""The output of a job: its log, which is held near its cap, and whether the job still writes anything."""

from __future__ import annotations

import os
import stat

from .files import file_size
from .host import NEVER
from .processes import checked, libc

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CALLS = "calls.jsonl"
"""The list of a job's model calls, which the machine's meter writes to the job's folder `meter`."""
BEAT_S = 5.0
DETAIL_BYTES = 2048
LINE_CHARS = 200
BLOCK = 4096
"""A hole begins and ends with a block of the file system: parts of one would only be filled with zeros."""


class Log:
    """A job's log: appended to by the job itself, held near its cap by us.

    Above the cap, what is between its first half and its last is given back to the disk: the file gets a
    hole, and whoever writes is not concerned. Where files cannot have holes, the first half is set aside once
    (log.head), and the last half again and again (log.tail) while the live file is cut to nothing: its
    writers append, so they go on at its start. What they write in the instant before the cut is lost.
    """

    def __init__(self, folder: str, cap: int) -> None:
        self.path = folder + "/log"
        self.half = max(cap // 2, 1)
        self.hole_end = 0
        self.dropped = 0
        self.capped = os.path.exists(self.path + ".head")
        """Its head and tail are files of their own."""
        self.seen = 0
        self.interval = 0.1
        self.joined: tuple[int, int, int] | None = None
        """Of a log that was cut and is one file again: where its gap begins and ends, and where it ends."""

    def size(self) -> int:
        live = self._length("")
        if not live or not self.capped:
            return live
        return live + self.dropped + self._length(".head") + self._length(".tail")

    def check(self) -> float:
        """Cut the log if it is too long. Returns the seconds until the next look: less if it grows fast."""
        live = grown = 0
        try:
            live = os.stat(self.path).st_size
            grown = max(live - self.seen, 0)
            if live > self._limit() and not self._clear_middle(live):
                self._rotate(live)
                live = 0
        except OSError:
            live = 0  # a full disk: look again later
        rate = grown / self.interval
        self.seen = live
        room = self._limit() - live
        self.interval = max(0.05, min(BEAT_S, self.interval * 2, room / rate / 2 if rate else BEAT_S))
        return self.interval

    def _limit(self) -> int:
        """Return how long the live file may become before something of it must go."""
        return self.half if self.capped else self.hole_end + 2 * self.half

    def finish(self) -> None:
        """Make the log one file again: head, a line that counts what is missing, tail. Repeatable."""
        if os.path.exists(self.path + ".new"):
            return self._replace()
        live = os.stat(self.path).st_size
        if not self.capped and live <= 2 * self.half:
            return None
        if not self.capped or live > self.half:
            self._rotate(live)
            live = 0
        head, tail = self._length(".head"), self._length(".tail")
        skip = max(tail + live - self.half, 0)
        total = head + self.dropped + tail + live
        self.joined = (head, total - (tail + live - skip), total)
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
                file.seek(max(size - min(DETAIL_BYTES, self.half), 0))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def read(self, offset: int, most: int) -> tuple[int, bytes]:
        """Return what was written from an offset on, and its offset, which is later if the log was cut.

        Offsets count everything that was ever written.
        """
        if self.joined is not None:
            gap, resumes, total = self.joined
            if offset < gap:
                return self._read("", offset, offset, min(most, gap - offset))
            offset = max(offset, resumes)
            left = max(total - offset, 0)
            return self._read("", offset, max(self._length("") - left, 0), min(most, left))
        live = self._length("")
        base = self.size() - live if self.capped else 0
        head, tail = (self._length(".head"), self._length(".tail")) if self.capped else (0, 0)
        if offset < head:
            return self._read(".head", offset, offset, min(most, head - offset))
        if offset < base:
            offset = max(offset, base - tail)
            return self._read(".tail", offset, offset - (base - tail), min(most, base - offset))
        return self._read("", offset, offset - base, most)

    def _read(self, suffix: str, offset: int, start: int, most: int) -> tuple[int, bytes]:
        """Return what a file of the log has from a position on, and its offset in it. Holes are skipped."""
        try:
            fd = os.open(self.path + suffix, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return offset, b""
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return offset, b""
            begin = os.lseek(fd, start, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            return offset + begin - start, os.pread(fd, min(most, end - begin), begin)
        except OSError:
            return offset, b""  # there is no more
        finally:
            os.close(fd)

    def _clear_middle(self, live: int) -> bool:
        """Make a hole between the first half and the last. False where files cannot have any."""
        begin = -(-self.half // BLOCK) * BLOCK
        end = (live - self.half) // BLOCK * BLOCK
        if self.capped or begin >= end:
            return not self.capped
        fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            punch_hole(fd, begin, end - begin)
        except (OSError, AttributeError):
            return False
        finally:
            os.close(fd)
        self.hole_end = end
        return True

    def last_line(self) -> str:
        """Return the last line, as a terminal would show it."""
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
        """Keep what was appended while we copied: often it is the job's last word."""
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
        return file_size(self.path + suffix)

    def _replace(self) -> None:
        # the parts go before the whole takes their place: a crash between must not assemble twice
        for suffix in (".head", ".tail"):
            if os.path.exists(self.path + suffix):
                os.unlink(self.path + suffix)
        os.replace(self.path + ".new", self.path)


def punch_hole(fd: int, begin: int, count: int) -> None:
    """Raises OSError or AttributeError where that cannot be done."""
    import ctypes  # only here: it is slow to load

    call = getattr(libc(), "fallocate64", None) or libc().fallocate
    mode = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    checked(call(fd, mode, ctypes.c_int64(begin), ctypes.c_int64(count)), "fallocate")


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
        self._calls = f"{folder}/meter/{CALLS}"
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
            self._log_seen = self._written()

    def stuck(self, now: float) -> bool:
        """Return True if nothing was written for longer than the patience. To be asked when it is due."""
        if now - self._looked > 2 * self._interval + 1.0:
            self._since += now - self._looked  # we stood still, and so may the job have done
        self._looked = now
        log = self._written()
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

    def _written(self) -> int:
        """Return a number that changes when the log or the list of model calls does."""
        return hash((stamp(self._log), stamp(self._calls)))

    def _rest(self, now: float, pause: float) -> None:
        self.due = min(now + pause, max(self._since + self._patience, now + PAUSE_S))

    def _swept(self, now: float) -> bool:
        """Look at some more of the artefacts. Returns True once through."""
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
    """Return the times of everything in a folder, itself included. Links are not followed."""
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
