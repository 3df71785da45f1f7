"""A stream open for writing: the statements of its one writer, and appends, asynchronous and sharing commits.

A thread owns the connection. What is queued while it commits goes into its next transaction, so the
price of a disk flush is shared, and each side is woken once a transaction rather than once an append.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.errors import JournalError, JournalForeign, LeaseLost
from evalfleet.events import SCHEMA, Event, Record, decode, encode, kind_of
from evalfleet.model import Micros, after, decodable
from evalfleet.ports import Request

from .checksums import checksum, seed
from .database import explain, transaction
from .holder import LEASE_S, Holder, StreamLock, local_time

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
            holder = msgspec.json.decode(row[0], type=decodable(Holder))
            who = f"pid {holder.pid} on {holder.host}, at {local_time(holder.since)},"
        raise LeaseLost(f"{who} took over {name!r}: this controller records and does nothing more")


_REQUESTS = "SELECT id, v, body FROM request WHERE stream = ? AND answered = 0 ORDER BY id"
INSERT = "INSERT INTO event (stream, seq, epoch, v, at, kind, body, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


# -- the stream ---------------------------------------------------------------------------------------------


class _Look(Struct):
    """An order to look for what was asked from outside."""

    future: asyncio.Future[list[Request]]


class _Close(Struct):
    future: asyncio.Future[None]


_Item = Append | _Look | _Close
_Reply = tuple["asyncio.Future[Any]", Any]


class SqliteJournal:
    """A stream that this controller alone may write: ports.Journal. `Store.acquire` makes it.

    The first failed transaction breaks it for good, and every later call fails the same way: the
    caller's state has run ahead of the record, so it must start anew from what is recorded.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Iterable[Record]],
        writer: Writer,
        lock: StreamLock,
        renew_s: float,
    ) -> None:
        self._path = path
        self._read = read
        self._epoch = writer.tail.epoch
        self._stream = writer.tail.stream
        self._lock = lock
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._failure: JournalError | None = None
        self._closing = False
        self._writer = writer
        self._renew_s = renew_s
        self._thread = threading.Thread(target=self._run, name=f"journal {self._stream}", daemon=True)
        _watch_forks()
        _live.add(self)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._epoch

    def read(self) -> Iterable[Record]:
        """All that is durable of the stream."""
        return self._read()

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        """See ports.Journal. Events of calls made in an order are recorded in that order.

        A caller that is cancelled while it waits does not take its events back.
        """
        # Encoded here, so that an event that cannot be is this caller's trouble and nobody else's.
        bodies = [(kind_of(event), encode(event).decode()) for event in events]
        item = Append(_future(), at, bodies, answered)
        self._send(item)
        await item.future
        return True

    async def requests(self) -> Sequence[Request]:
        """See ports.Journal. Raises LeaseLost once the stream is known to be another's."""
        look = _Look(_future())
        self._send(look)
        return await look.future

    async def close(self) -> None:
        """Write what is queued, let go of the stream and its lock. May be repeated; never raises."""
        self._closing = True
        if self._thread.is_alive():
            item = _Close(_future())
            self._queue.put(item)
            # A thread that ended meanwhile answers nobody.
            while not item.future.done() and self._thread.is_alive():
                await asyncio.wait((item.future,), timeout=0.1)

    def _send(self, item: Append | _Look) -> None:
        if self._failure:
            raise _again(self._failure)
        if self._closing:  # whatever followed the end of the queue would wait for ever
            raise JournalError(f"the journal of {self._stream!r} is closed")
        self._queue.put(item)

    def disown(self) -> None:
        """In a forked child: the journal stays the parent's."""
        self._lock.drop()  # else the lock would live as long as the child
        self._failure = JournalError(f"the journal of {self._stream!r} belongs to the parent process")

    # From here on: in the writer's thread.

    def _run(self) -> None:
        renew_at = time.monotonic() + self._renew_s
        while True:
            batch = self._take(renew_at - time.monotonic())
            replies = self._serve(batch)
            if time.monotonic() >= renew_at:
                self._renew()
                renew_at = time.monotonic() + self._renew_s
            closing = any(isinstance(item, _Close) for item in batch)
            if closing:
                self._let_go()
            _answer(replies)
            if closing:
                return

    def _take(self, wait_s: float) -> list[_Item]:
        """All that is queued; if nothing is, what comes first within the time."""
        batch: list[_Item] = []
        try:
            batch.append(self._queue.get(timeout=max(wait_s, 0.0)))
            while True:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            return batch

    def _serve(self, batch: list[_Item]) -> list[_Reply]:
        """What to tell each waiter. Whoever waits is told something, whatever happens."""
        appends = [item for item in batch if isinstance(item, Append)]
        written = self._failure
        if appends and not written:
            # Any failure, for good: later events would follow on some that are not there.
            self._failure = written = self._failure_of(lambda: self._writer.commit(appends))
        asked: list[Request] = []
        read = self._failure
        if not read and any(isinstance(item, _Look) for item in batch):
            read = self._failure_of(lambda: asked.extend(self._writer.requests()))
            self._note_loss(read)
        replies: list[_Reply] = []
        for item in batch:
            failure = written if isinstance(item, Append) else read if isinstance(item, _Look) else None
            fine = asked if isinstance(item, _Look) else None
            replies.append((item.future, _again(failure) if failure else fine))
        return replies

    def _failure_of(self, work: Callable[[], None]) -> JournalError | None:
        """Does the work. What went wrong with it, if anything did."""
        try:
            work()
        except JournalError as err:
            return err
        except sqlite3.Error as err:
            failure = explain(err, self._path)
            failure.__cause__ = err
            return failure
        except Exception as err:  # a defect of ours: without this, all waiters would wait for ever
            failure = JournalError(f"the journal's writer failed ({err!r}): please report this")
            failure.__cause__ = err
            return failure
        return None

    def _note_loss(self, failure: JournalError | None) -> None:
        if isinstance(failure, LeaseLost):
            self._failure = failure

    def _renew(self) -> None:
        if self._failure:
            return
        failure = self._failure_of(self._writer.renew)
        self._note_loss(failure)
        if failure and not self._failure:
            # Nothing was promised to anybody, and the epoch still fences: try again next time.
            _log.warning("the lease of %r was not renewed: %s", self._stream, failure)

    def _let_go(self) -> None:
        failure = self._failure_of(self._writer.release)
        if failure:
            # The lock, or else the end of the lease, tells the others.
            _log.warning("the lease of %r was not released: %s", self._stream, failure)
            self._lock.drop()
        else:
            self._lock.remove()


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _again(failure: JournalError) -> JournalError:
    """A copy to raise: one exception raised in many places collects all their tracebacks."""
    copy = type(failure)(*failure.args)
    copy.__cause__ = failure.__cause__
    return copy


def _answer(replies: list[_Reply]) -> None:
    """Resolve the futures, in order, with one wake-up of each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Reply]] = {}
    for reply in replies:
        by_loop.setdefault(reply[0].get_loop(), []).append(reply)
    for loop, its in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, its)
        except RuntimeError:  # the loop was closed: nobody waits any more
            _log.debug("a journal's caller did not wait for %d answers", len(its))


def _resolve(replies: list[_Reply]) -> None:
    for future, reply in replies:
        if future.done():  # its caller was cancelled
            continue
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)


_live: weakref.WeakSet[SqliteJournal] = weakref.WeakSet()
_leaked: list[SqliteJournal] = []


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    _leaked.extend(_live)  # never closed here: SQLite forbids a child to, and so to collect them
    for journal in _leaked:
        journal.disown()
