"""The statements of a stream's one writer, and the connection they run on."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from evalfleet.errors import JournalForeign, LeaseLost
from evalfleet.events import SCHEMA, decode
from evalfleet.model import Micros, after
from evalfleet.ports import Request

from .checksums import checksum, seed
from .database import transaction
from .holder import LEASE_S, Holder, local_time

_log = logging.getLogger(__name__)


class Tail(Struct):
    """Where the next event of a stream goes, and the checksum that it follows on (none: it is the first)."""

    stream: str
    epoch: int
    seq: int
    at: Micros
    checksum: bytes | None


class Append(Struct):
    """An order to append: encoded events, (kind, body) each, and who waits for them."""

    future: asyncio.Future[None]
    at: Micros
    events: list[tuple[str, str]]
    answered: Sequence[int]


EventRow = tuple[str, int, int, int, Micros, str, str, bytes]


def following(tail: Tail, kind: str, body: str) -> EventRow:
    """The row of the stream's next event. It is the tail from now on."""
    tail.seq += 1
    before = seed(tail.stream) if tail.checksum is None else tail.checksum
    encoded = kind.encode(), body.encode()
    tail.checksum = checksum(before, tail.seq, tail.epoch, SCHEMA, tail.at, *encoded)
    return tail.stream, tail.seq, tail.epoch, SCHEMA, tail.at, kind, body, tail.checksum


def insert(conn: sqlite3.Connection, tail: Tail, rows: Sequence[EventRow]) -> bool:
    """Write the rows, and that `tail` is the newest. False: the stream is under another epoch."""
    statement = "UPDATE stream SET seq = ?, checksum = ? WHERE name = ? AND epoch = ?"
    if conn.execute(statement, (tail.seq, tail.checksum, tail.stream, tail.epoch)).rowcount != 1:
        return False
    conn.executemany(INSERT, rows)
    return True


class Writer:
    """The statements, and the connection they run on. Used by one thread."""

    def __init__(self, conn: sqlite3.Connection, tail: Tail, clock: Callable[[], Micros]) -> None:
        self._conn = conn
        self.tail = tail
        self._clock = clock
        self._unreadable: set[int] = set()

    def commit(self, appends: Sequence[Append]) -> None:
        """All of it, or nothing. Raises LeaseLost when the stream is under another epoch."""
        rows: list[EventRow] = []
        answered: list[tuple[int, str]] = []
        for append in appends:
            self.tail.at = max(self.tail.at, append.at)
            rows += [following(self.tail, kind, body) for kind, body in append.events]
            answered += [(request, self.tail.stream) for request in append.answered]
        with transaction(self._conn):
            if not insert(self._conn, self.tail, rows):
                self.lost()
            if answered:
                self._conn.executemany(
                    "UPDATE request SET answered = 1 WHERE id = ? AND stream = ?", answered
                )

    def _check_epoch(self) -> None:
        now = self._conn.execute("SELECT epoch FROM stream WHERE name = ?", (self.tail.stream,)).fetchone()
        if now != (self.tail.epoch,):
            self.lost()

    def requests(self) -> list[Request]:
        """What is unanswered. An idle controller asks, too, so here it learns that it was replaced."""
        self._check_epoch()
        rows = self._conn.execute(_REQUESTS, (self.tail.stream,)).fetchall()
        return [request for row in rows if (request := self._request(*row))]

    def _request(self, number: int, schema: int, body: str) -> Request | None:
        try:
            return Request(number, decode(body.encode(), schema))
        except JournalForeign as err:
            # A wish that cannot be understood must not end a run.
            if number not in self._unreadable:
                self._unreadable.add(number)
                _log.warning("request %d to %r is ignored: %s", number, self.tail.stream, err)
            return None

    def renew(self) -> None:
        """Raises LeaseLost when the stream is another's."""
        if not self._update("lease_until = ?", after(self._clock(), LEASE_S)):
            self.lost()

    def release(self) -> None:
        """Let go of the stream, if it is still ours, and close."""
        try:
            self._update("holder = NULL, lease_until = ?", 0)
        finally:
            self._conn.close()

    def _update(self, what: str, value: int) -> bool:
        statement = f"UPDATE stream SET {what} WHERE name = ? AND epoch = ?"
        return self._conn.execute(statement, (value, self.tail.stream, self.tail.epoch)).rowcount == 1

    def lost(self) -> None:
        """Raises LeaseLost, with who has the stream now."""
        name = self.tail.stream
        row = self._conn.execute("SELECT holder FROM stream WHERE name = ?", (name,)).fetchone()
        who = "another controller, which has let it go since,"
        if row and row[0]:
            holder = msgspec.json.decode(row[0], type=Holder)
            who = f"pid {holder.pid} on {holder.host}, at {local_time(holder.since)},"
        raise LeaseLost(f"{who} took over {name!r}: this controller records and does nothing more")


_REQUESTS = "SELECT id, v, body FROM request WHERE stream = ? AND answered = 0 ORDER BY id"
INSERT = "INSERT INTO event (stream, seq, epoch, v, at, kind, body, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
