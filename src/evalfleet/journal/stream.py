"""A stream open for writing: appends are asynchronous and share commits.

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

from msgspec import Struct

from evalfleet.errors import JournalError, LeaseLost
from evalfleet.events import Event, Record, encode, kind_of
from evalfleet.model import Micros
from evalfleet.ports import Request

from .database import explain
from .holder import StreamLock
from .writer import Append, Writer

_log = logging.getLogger(__name__)


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
