"""Checksums over a stream's events, each made of the one before: what is changed or removed no longer fits.

They find damage (a bad disk, an edit by hand), not somebody who computes them anew. The stream's own row
holds the number and the checksum of its newest event, so that a missing end is noticed, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from evalfleet.errors import JournalForeign
from evalfleet.model import Micros

CHECKSUMS_SINCE = 3
"""The first layout of the database that has them."""
_PAGE = 1000
"""So many events are read at once; more where SQLite joins them, because two threads take turns then."""


def seed(stream: str) -> bytes:
    """What the first checksum of a stream is made of, in place of one before it."""
    return stream.encode()


def checksum(before: bytes, seq: int, epoch: int, schema: int, at: Micros, kind: bytes, body: bytes) -> bytes:
    """The checksum of an event that follows on the one whose checksum is `before`."""
    row = b"%b %d %d %d %d %b %b" % (before, seq, epoch, schema, at, kind, body)
    return blake2b(row, digest_size=8).digest()


class Row(Struct, frozen=True):
    """An event as it is stored."""

    seq: int
    epoch: int
    schema: int
    at: Micros
    kind: bytes
    body: bytes
    checksum: bytes | None
    """None if an earlier version wrote it."""

    def follows(self, before: bytes) -> bool:
        """Is it as it was written, after the event whose checksum is `before`?"""
        made = checksum(before, self.seq, self.epoch, self.schema, self.at, self.kind, self.body)
        return self.checksum == made


Stored = tuple[int, int, int, Micros, bytes, bytes, bytes | None]
"""The fields of a `Row`, in their order, as SQLite gives them: a run may have very many."""


def rows(conn: sqlite3.Connection, path: Path, stream: str, after: int) -> Iterator[Row]:
    """The stream's events that follow number `after`, one by one. Raises as `pages` does."""
    for page in pages(conn, path, stream, after):
        for stored in page:
            yield Row(*stored)


def pages(conn: sqlite3.Connection, path: Path, stream: str, after: int) -> Iterator[list[Stored]]:
    """The stream's events that follow number `after`, page by page, each compared with its checksum.

    Raises JournalForeign, which names the event, at the first one that is not as it was written.
    """
    conn.text_factory = bytes  # bodies go to the decoder as they are
    (layout,) = conn.execute("PRAGMA user_version").fetchone()
    # An older home, open for reading only, has no checksums yet.
    statement, newest = _EVENTS_WITHOUT, None
    if layout >= CHECKSUMS_SINCE:
        # Read before the events are: later ones only come behind it.
        statement, newest = _EVENTS, head(conn, stream)
    # The event `after` itself is read as well: the next checksum is made of its own.
    before, expected = (None, 1) if after == 0 else (b"", after)
    while page := conn.execute(statement, (stream, expected)).fetchall():
        for seq, epoch, schema, at, kind, body, stored in page:
            if seq != expected:
                raise damaged(path, stream, expected, "is missing")
            if seq > after:
                if stored is not None:
                    last = seed(stream) if before is None else before
                    if checksum(last, seq, epoch, schema, at, kind, body) != stored:
                        raise damaged(path, stream, seq, "is not as it was written: its checksum is another")
                elif before is not None:
                    raise damaged(path, stream, seq, "has lost its checksum")
            if newest is not None and seq == newest[0] and stored != newest[1]:
                raise damaged(path, stream, seq, "is not the one that was written last")
            before = stored
            expected += 1
        yield page[1:] if page[0][0] == after else page
        if len(page) < _PAGE:
            break
    if newest is not None and expected <= newest[0]:
        raise damaged(path, stream, expected, "is missing")


def head(conn: sqlite3.Connection, stream: str) -> tuple[int, bytes | None] | None:
    """The number and the checksum of the event that was written last; None if there is no such stream."""
    newest: tuple[int, bytes | None] | None = conn.execute(
        "SELECT seq, checksum FROM stream WHERE name = ?", (stream,)
    ).fetchone()
    return newest


def damaged(path: Path, stream: str, seq: int, what: str) -> JournalForeign:
    return JournalForeign(
        f"{path} is damaged: event {seq} of {stream!r} {what}: restore the file from a copy; "
        "`evalfleet ls --verify` checks all runs, and the files that attempts left are still in their folders"
    )


_EVENTS = (
    "SELECT seq, epoch, v, at, kind, body, checksum FROM event "
    f"WHERE stream = ? AND seq >= ? ORDER BY seq LIMIT {_PAGE}"
)
_EVENTS_WITHOUT = _EVENTS.replace("checksum", "NULL")
