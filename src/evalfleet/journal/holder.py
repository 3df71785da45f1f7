"""Who holds a stream, and how a controller that is gone is told from one that is busy.

On one computer the kernel knows: a controller holds a lock on a file as long as it lives. From another
computer only its lease in the store tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct

from evalfleet.model import SECOND, Micros

LEASE_S = 30.0
RENEW_S = 10.0


class Holder(Struct, frozen=True):
    """A controller: the process, and an identity of the computer that changes when it is rebooted."""

    pid: int
    host: str
    computer: str
    since: Micros

    @classmethod
    def here(cls, now: Micros) -> Holder:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), this_computer(), now)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {local_time(self.since)}"


def local_time(at: Micros) -> str:
    """For people: the time here, with its offset."""
    return datetime.fromtimestamp(at // SECOND, UTC).astimezone().isoformat(" ")


def this_computer() -> str:
    """An identity that no other computer has now; the host's name where the system offers nothing better.

    The boot is part of it: images of virtual machines are cloned with their machine id.
    """
    parts = [_line("/etc/machine-id"), _line("/proc/sys/kernel/random/boot_id")]
    return ".".join(part for part in parts if part) or socket.gethostname()


def _line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class StreamLock:
    """The file that the holder of `stream` under `epoch` keeps locked while it lives."""

    def __init__(self, home: Path, stream: str, epoch: int) -> None:
        self._folder = home / ".locks"
        self._stem = quote(stream, safe="")
        self._epoch = epoch
        self._path = self._folder / f"{self._stem}.{epoch}.lock"
        self._fd: int | None = None

    def take(self) -> None:
        """Lock it. Raises OSError (BlockingIOError if another holds it)."""
        self._folder.mkdir(exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def free(self) -> bool:
        """Does nobody on this computer hold it? Raises OSError when that cannot be told."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            # Shared, so that two who look at the same time do not take each other for the holder.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def drop(self) -> None:
        """Let go of it without a trace on disk: what the end of the process does, too."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Let go, and remove the file. Only once the store no longer names this epoch's holder."""
        with contextlib.suppress(OSError):  # a file that stays does no harm
            self._path.unlink()
        self.drop()

    def remove_older(self) -> None:
        """Remove the files of earlier epochs: nobody asks for those again."""
        for path in self._folder.glob(f"{self._stem}.*.lock"):
            epoch = path.name[len(self._stem) + 1 : -len(".lock")]
            if epoch.isdecimal() and int(epoch) < self._epoch:
                with contextlib.suppress(OSError):  # another user's: it does no harm
                    path.unlink()


def is_gone(holder: Holder, lock: StreamLock, lease_until: Micros, now: Micros) -> bool:
    """Has this controller ended, as far as can be told from here?"""
    if holder.computer == this_computer():
        try:
            return lock.free()
        except OSError:  # another user's file: its lease still tells
            pass
    return lease_until <= now
