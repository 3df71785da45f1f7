"""Files of jobs that controllers follow: what is added to them is sent, piece by piece, while they grow."""

from __future__ import annotations

import os
import stat
from binascii import b2a_base64

from .clients import Client, Clients
from .host import NEVER
from .job import HostJob

LOOK_S = 0.2
BUSY_S = 0.05
PIECE = 128 << 10
MOST = 64
"""Files that one connection may follow at once."""


class FileFollower:
    """A follower that sends what a file of a job holds from an offset on to one client, until the job has
    ended."""

    def __init__(self, client: Client, number: int, job: HostJob, path: str, offset: int) -> None:
        self.client = client
        self.number = number
        self.job = job
        self.path = path
        self.offset = offset
        self.spoken = self.over = False

    def read(self) -> tuple[int, bytes]:
        """The next piece and where it begins, which is further on where a log was cut meanwhile."""
        if self.path == "log":
            return self.job.log.read(self.offset, PIECE)
        try:
            fd = open_below(self.job.path, self.path)
        except OSError:
            return self.offset, b""  # it is not there yet, or was taken away
        try:
            if os.fstat(fd).st_size < self.offset:
                self.offset = 0  # another file has taken its place
            return self.offset, os.pread(fd, PIECE, self.offset)
        finally:
            os.close(fd)


class Followers:
    """The files that are followed. `tick` is to be called when it is `due`. It takes a moment."""

    def __init__(self, clients: Clients) -> None:
        self.due = NEVER
        self._clients = clients
        self._all: dict[tuple[Client, int], FileFollower] = {}

    def add(self, follower: FileFollower) -> None:
        mine = sum(client is follower.client for client, _ in self._all)
        if mine >= MOST:
            raise ValueError(f"more than {MOST} files at once cannot be followed")
        if any(part in ("", ".", "..") for part in follower.path.split("/")) or "\0" in follower.path:
            raise ValueError("the path leads out of the job's folder")
        self._all[follower.client, follower.number] = follower
        self.due = 0.0

    def remove(self, client: Client, number: int) -> None:
        self._all.pop((client, number), None)

    def tick(self, now: float) -> None:
        busy = False
        for key, follower in list(self._all.items()):
            if follower.client not in self._clients.all or follower.over:
                del self._all[key]
            elif not follower.client.outbox:  # who is slow to listen gets no more meanwhile
                busy = self._send(follower) or busy
        self.due = now + (BUSY_S if busy else LOOK_S) if self._all else NEVER

    def _send(self, follower: FileFollower) -> bool:
        """Send the next piece. Returns True if there is likely to be more."""
        ended = follower.job.reason is not None  # before it is read: what comes after that is nobody's
        offset, data = follower.read()
        full = len(data) == PIECE
        follower.over = ended and not full
        if data or follower.over or not follower.spoken:
            follower.spoken = True
            follower.offset = offset + len(data)
            piece = {"push": "piece", "follower": follower.number, "offset": offset, "at_end": not full}
            coded = b2a_base64(data, newline=False).decode()
            self._clients.answer(follower.client, {**piece, "data": coded, "over": follower.over})
        return full


def open_below(folder: str, path: str) -> int:
    """A regular file below a folder, to read. No link on the way is followed: a job may have made it."""
    *folders, last = path.split("/")
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            there = os.open(name, flags, dir_fd=here)
            os.close(here)
            here = there
        fd = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd
