"""One job: what was asked, its log and whether it still writes anything, how it ended."""

from __future__ import annotations

import binascii
import json
import os
import stat
import time

from .files import job_name, read_file
from .isolation import Box, checked, libc
from .meter_process import calls_bytes

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

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
        """How long the live file may become before something of it must go."""
        return self.half if self.capped else self.hole_end + 2 * self.half

    def finish(self) -> None:
        """One file again: head, a line that tells how much is missing, tail. May be repeated."""
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
        """What was written from an offset on, and where that begins: further on, if it was cut meanwhile.

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
        """What a file of it has from a position on, which is at this offset of the log. A hole is passed."""
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


def punch_hole(fd: int, begin: int, count: int) -> None:
    """Raises OSError or AttributeError where that cannot be done."""
    import ctypes  # only here: it is slow to load

    call = getattr(libc(), "fallocate64", None) or libc().fallocate
    mode = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    checked(call(fd, mode, ctypes.c_int64(begin), ctypes.c_int64(count)), "fallocate")


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
        self._calls = folder + "/meter/calls.jsonl"
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
        """Was nothing written for longer than the patience? To be asked when it is due."""
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
        """One who asks a model is not stuck, either."""
        return hash((stamp(self._log), stamp(self._calls)))

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
    """The times of everything in a folder, itself included. Links are not followed."""
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


GRACE_S = 5.0
LOG_CAP = 50_000_000
RESULT_CAP = 1 << 20
WRAPPER_FAILED = 125

# Builtins only: each fork would cost 1 ms, and `read` takes a system call a byte. Under `set -C` the
# redirection creates `pid` or fails, so of all wrappers of one id ever started, one runs the command. The
# trap lets the wrapper outlive a SIGTERM to its group and record the exit code; commands get the default
# action back.
WRAPPER = """\
cd "$1" || exit 125
set -C
{ echo $$ >pid; } 2>/dev/null || exit 125
set +C
trap : HUP INT TERM
__j=$1
cd "$2" || exit 125
shift 2
"$@"
__s=$?
echo $__s >"$__j/exit"
exit $__s
"""


class HostJob:
    """A job as its supervisor knows it: alive until `reason` is set, its wrapper until `settle_until` is."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.id = str(spec["id"])
        self.path = "jobs/" + job_name(self.id)
        self.timeout = float(spec.get("timeout_s") or NEVER)
        self.lease = float(spec.get("lease_s") or NEVER)
        self.grace = float(spec.get("grace_s", GRACE_S))
        self.bundle = str(spec.get("bundle") or "")
        self.in_bundle = bool(spec.get("in_bundle"))
        self.graded = bool(spec.get("graded"))
        self.metered = bool(spec.get("metered"))  # its model calls go through the machine's meter
        self.box = Box.restored(spec.get("box"))
        self.fetch: dict[str, Any] = spec.get("fetch") or {}
        self.log = Log(self.path, int(spec.get("log_cap_bytes") or LOG_CAP))
        self.growth = Growth(self.path, float(spec.get("stall_s") or NEVER))
        self.pid: int | None = None
        self.born = 0
        self.pidfd: int | None = None
        self.child = False
        self.started = self.seconds = 0.0
        self.deadline = self.kill_at = self.settle_until = NEVER
        self.log_due = self.due = self.doubt_until = 0.0
        self.why: str | None = None
        self.reason: str | None = None
        self.code: int | None = None
        self.detail = ""

    @property
    def settling(self) -> bool:
        """Its wrapper is gone; what the job left behind is being ended."""
        return self.settle_until < NEVER

    @property
    def in_doubt(self) -> bool:
        """Its command has ended, and whether that was an eviction may become known yet."""
        return self.settling and self.doubt_until > 0.0 and self.why is None

    def run_from(self, started: float) -> None:
        self.started = started
        self.deadline = started + self.timeout
        now = time.monotonic()
        self.log_due = now + self.log.interval
        self.growth.begin(now)
        self.due = min(self.log_due, self.deadline, self.growth.due)

    def exit_code(self) -> int | None:
        text = read_file(self.path + "/exit", 100)
        try:
            return int(text) if text and text.endswith(b"\n") else None
        except ValueError:
            return None

    def unwatched_seconds(self) -> float:
        """How long it ran, when it ended while nobody watched: by the wall clock, which may have been set."""
        try:
            seconds = os.stat(self.path + "/exit").st_mtime - os.stat(self.path + "/pid").st_mtime
        except OSError:
            return 0.0
        return min(max(seconds, 0.0), self.timeout + self.grace)

    def end(self) -> None:
        self.reason = self.why or ("lost" if self.code is None else "exited")

    def pulse(self, now: float) -> dict[str, Any]:
        """How it is going; of set-up, which may take an hour, also what it says."""
        told: dict[str, Any] = {"seconds": round(now - self.started, 1), "log_bytes": self.log.size()}
        if self.in_bundle:
            told["said"] = self.log.last_line()
        if self.metered:
            told["calls_bytes"] = calls_bytes(self.path)
        return told

    def result_bytes(self) -> int:
        """The size of a result.json, which may be too large to be told."""
        for name in ("/out/result.json", "/result.json"):
            try:
                about = os.lstat(self.path + name)
            except OSError:
                continue
            return about.st_size if stat.S_ISREG(about.st_mode) else 0
        return 0

    def how(self) -> dict[str, Any]:
        """How it ended, with its result: what a controller is told."""
        told: dict[str, Any] = {"job": self.id, "reason": self.reason, "seconds": round(self.seconds, 3)}
        if self.code is not None:
            told["exit_code"] = self.code
        # a collected job's out/ has moved; its result stays here until it is forgotten
        result = read_file(self.path + "/out/result.json", RESULT_CAP)
        if result is None:
            result = read_file(self.path + "/result.json", RESULT_CAP)
        if result is not None:
            try:
                told["result"] = result.decode()
            except UnicodeDecodeError:
                told["result64"] = binascii.b2a_base64(result, newline=False).decode()
        else:
            size = self.result_bytes()
            if size > RESULT_CAP:
                told["result_bytes"] = size
        used = read_file(self.path + "/metered.json", RESULT_CAP) if self.metered else None
        if used:
            told["metered"] = json.loads(used)
        if self.detail:
            told["detail"] = self.detail
        elif result is None or self.code != 0:
            told["detail"] = self.log.tail()
        return told
