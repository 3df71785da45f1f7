"""The store: all streams of a home, in one SQLite file.

Every call opens a connection of its own and closes it, so a Store may be used from any thread and after
a fork. Only the journal that `acquire` returns keeps one open.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar, cast

import msgspec
from msgspec import Struct

from evalfleet.errors import JournalForeign, RequestError, RunHeld
from evalfleet.events import SCHEMA, Event, Record, decode, encode, kind_of
from evalfleet.model import Micros, after, decodable

from . import checksums, database
from .database import BUSY_S, FILE, explained, transaction
from .holder import LEASE_S, RENEW_S, Holder, StreamLock, is_gone
from .stream import INSERT, EventRow, SqliteJournal, Tail, Writer, following, insert

StreamKind = Literal["run", "pool"]
T = TypeVar("T")


def wall_clock() -> Micros:
    return time.time_ns() // 1000


class StreamInfo(Struct, frozen=True):
    """A stream as the store has it now. No holder: nobody writes to it, or its writer let it go."""

    name: str
    kind: StreamKind
    created_at: Micros
    epoch: int
    holder: Holder | None
    lease_until: Micros


class Store(Struct, frozen=True):
    """The database `HOME/fleet.db`. Make one with `Store.open`; there is nothing to close."""

    home: Path
    home_id: str
    read_only: bool = False
    busy_s: float = BUSY_S

    @classmethod
    def open(
        cls, home: Path, *, create: bool = True, read_only: bool = False, busy_s: float = BUSY_S
    ) -> Self:
        """The store of `home`, made if there is none and `create` says so (never when `read_only`).

        Raises RequestError when there is none, JournalForeign when the file is damaged, not ours or
        newer than this evalfleet, JournalError when it cannot be read (or written, unless `read_only`).
        """
        path = home / FILE
        with explained(path):
            database.refuse_file(home)
            if create and not read_only:
                database.ensure(home)
            if not path.exists():
                raise RequestError(f"{home} holds no journal ({FILE}): nothing was run with this home yet")
            database.check_header(path)
            if not read_only:
                database.leave_wal_if_shared(path)
            conn = _connection(path, read_only, busy_s)
            with contextlib.closing(conn):
                database.check_layout(conn, path)
                if not read_only:
                    database.check_writable(conn)
                    database.bring_up_to_date(conn)
                home_id = database.home_id(conn, path)
        return cls(home=home, home_id=home_id, read_only=read_only, busy_s=busy_s)

    @property
    def path(self) -> Path:
        return self.home / FILE

    def streams(self) -> list[StreamInfo]:
        """All streams, oldest first."""
        with self.connected() as conn:
            return [_info(row) for row in conn.execute(f"{_STREAMS} ORDER BY created_at, name")]

    def stream(self, name: str) -> StreamInfo:
        """Raises RequestError when there is none of this name."""
        with self.connected() as conn:
            return self._info(conn, name)

    def held(self, info: StreamInfo, now: Micros) -> Holder | None:
        """The controller at work on the stream: None if it let go, or is gone."""
        if info.holder is None:
            return None
        lock = StreamLock(self.home, info.name, info.epoch)
        return None if is_gone(info.holder, lock, info.lease_until, now) else info.holder

    def read(self, stream: str, after: int = 0) -> Iterator[Record]:
        """The events that follow number `after`, up to the newest, as a stream.

        No lock is held between two records, so a slow reader keeps no writer waiting. Each event is compared
        with its checksum.
        Raises RequestError when there is no such stream, JournalForeign when its record is damaged.
        """
        for records in self.read_pages(stream, after):
            yield from records

    def read_pages(self, stream: str, after: int = 0) -> Iterator[list[Record]]:
        """What `read` gives, many at a time."""
        empty = True
        with self.connected() as conn:
            for page in checksums.pages(conn, self.path, stream, after):
                empty, records = False, list[Record]()
                try:
                    for seq, epoch, schema, at, _, body, _ in page:
                        records.append(Record(seq, epoch, at, decode(body, schema)))
                except JournalForeign as err:
                    yield records
                    seq = page[len(records)][0]
                    raise JournalForeign(f"{self.path}: event {seq} of {stream!r}: {err}") from err
                yield records
            if empty:
                conn.text_factory = str
                self._info(conn, stream)

    def first(self, stream: str) -> Event | None:
        """Its first event, not compared with its checksum; None if there is no such stream."""
        with self.connected() as conn:
            conn.text_factory = bytes
            row = conn.execute("SELECT body, v FROM event WHERE stream = ? AND seq = 1", (stream,)).fetchone()
        return None if row is None else decode(*row)

    def length(self, stream: str) -> int:
        """How many events it has; 0 if there is no such stream."""
        with self.connected() as conn:
            found = conn.execute("SELECT max(seq) FROM event WHERE stream = ?", (stream,)).fetchone()
        return found[0] or 0

    def verify(self, stream: str) -> None:
        """Compare all events of the stream with their checksums. Raises JournalForeign: one is damaged."""
        with self.connected() as conn:
            for _ in checksums.pages(conn, self.path, stream, 0):
                pass

    def rows(self, stream: str, after: int = 0, limit: int | None = None) -> list[checksums.Row]:
        """The events that follow number `after`, as they are stored, each compared with its checksum.

        Raises JournalForeign when the record is damaged.
        """
        with self.connected() as conn:
            return list(itertools.islice(checksums.rows(conn, self.path, stream, after), limit))

    def head(self, stream: str) -> tuple[int, bytes]:
        """The number and the checksum of the stream's newest event. Raises RequestError if there is none."""
        with self.connected() as conn:
            self._info(conn, stream)
            seq, checksum = checksums.head(conn, stream) or (0, None)
        return seq, checksums.seed(stream) if checksum is None else checksum

    def adopt(
        self, stream: str, created_at: Micros, keep: int, rows: Sequence[checksums.Row], now: Micros
    ) -> None:
        """Make a run's events equal to what another home has written: `rows` replace all after `keep`.

        A run that is not here yet is made. Raises RunHeld while a controller of this home is at work on it.
        """
        with self.connected() as conn, transaction(conn):
            if conn.execute("SELECT 1 FROM stream WHERE name = ?", (stream,)).fetchone() is None:
                _create(conn, stream, "run", created_at, ())
            self._refuse_if_held(self._info(conn, stream), now)
            conn.execute("DELETE FROM event WHERE stream = ? AND seq > ?", (stream, keep))
            conn.executemany(INSERT, [_values(stream, row) for row in rows])
            newest = "SELECT seq, checksum FROM event WHERE stream = ? ORDER BY seq DESC LIMIT 1"
            head = conn.execute(newest, (stream,)).fetchone() or (0, None)
            conn.execute("UPDATE stream SET seq = ?, checksum = ? WHERE name = ?", (*head, stream))
            conn.execute("DELETE FROM summary WHERE stream = ?", (stream,))

    def raise_epoch(self, stream: str, epoch: int) -> None:
        """The stream's next controller has an epoch that is higher than this one."""
        with self.connected() as conn:
            conn.execute("UPDATE stream SET epoch = max(epoch, ?) WHERE name = ?", (epoch, stream))

    def uncovered(self, stream: str) -> int:
        """How many of the stream's events have no checksum, because an earlier version wrote them."""
        with self.connected() as conn:
            return sum(row.checksum is None for row in checksums.rows(conn, self.path, stream, 0))

    def newest(self) -> str | None:
        """The run or pool that was made last."""
        with self.connected() as conn:
            row = conn.execute(
                "SELECT name FROM stream ORDER BY created_at DESC, name DESC LIMIT 1"
            ).fetchone()
        return None if row is None else str(row[0])

    def keeps_summaries(self) -> bool:
        """Can they be kept here? Not in an older home that was opened for reading only."""
        with self.connected() as conn:
            return bool(conn.execute("PRAGMA user_version").fetchone() >= (checksums.CHECKSUMS_SINCE,))

    def summaries(self, version: int) -> list[tuple[StreamInfo, str | None]]:
        """All streams, oldest first, each with its summary of this version, if that is of all its events."""
        if not self.keeps_summaries():
            return [(info, None) for info in self.streams()]
        with self.connected() as conn:
            rows = conn.execute(_SUMMARIES, (version,))
            return [(_info(row[:6]), row[6]) for row in rows]

    def keep_summaries(self, version: int, summaries: Sequence[tuple[str, int, str]]) -> None:
        """Keep summaries: stream, number of its newest event, text. Events that follow make it void."""
        statement = "INSERT OR REPLACE INTO summary (stream, seq, v, body) VALUES (?, ?, ?, ?)"
        rows = [(stream, seq, version, body) for stream, seq, body in summaries]
        with self.connected() as conn, transaction(conn):
            conn.executemany(statement, rows)

    def create_stream(self, name: str, kind: StreamKind, at: Micros, events: Sequence[Event]) -> None:
        """A new stream with its first events, all in one transaction. Raises RequestError: name taken."""
        self.create_streams(at, [(name, kind, events)])

    def create_streams(self, at: Micros, streams: Sequence[tuple[str, StreamKind, Sequence[Event]]]) -> None:
        """All of them, or none. Raises RequestError: a name is taken."""
        with self.connected() as conn, transaction(conn):
            for name, kind, events in streams:
                _create(conn, name, kind, at, [(at, event) for event in events])

    def create_past(self, name: str, at: Micros, events: Sequence[tuple[Micros, Event]]) -> None:
        """A run that is over already, made at `at` of what happened earlier. Raises RequestError: name taken.

        Each event has its own time, and none is earlier than the one before it.
        """
        with self.connected() as conn, transaction(conn):
            _create(conn, name, "run", at, events)

    def delete_stream(self, name: str, now: Micros) -> None:
        """Forget the stream and all its events. Raises RequestError: there is none; RunHeld: it is in use."""
        with self.connected() as conn, transaction(conn):
            info = self._info(conn, name)
            self._refuse_if_held(info, now)
            for table in ("event", "request", "summary"):
                conn.execute(f"DELETE FROM {table} WHERE stream = ?", (name,))
            conn.execute("DELETE FROM stream WHERE name = ?", (name,))

    def journal_bytes(self) -> dict[str, int]:
        """About how much of the database each stream takes."""
        with self.connected() as conn:
            return dict(conn.execute("SELECT stream, sum(length(body) + 60) FROM event GROUP BY stream"))

    def compact(self) -> None:
        """Give the room of what was deleted back to the disk. Raises JournalError while others read."""
        with self.connected() as conn:
            conn.execute("VACUUM")

    def ask(self, stream: str, event: Event, at: Micros) -> int:
        """Ask the stream's controller, from any process, to record `event`. The request's id."""
        with self.connected() as conn, transaction(conn):
            self._info(conn, stream)
            row = (stream, at, SCHEMA, encode(event).decode())
            done = conn.execute("INSERT INTO request (stream, at, v, body) VALUES (?, ?, ?, ?)", row)
            return cast(int, done.lastrowid)

    def is_answered(self, request: int) -> bool:
        """Has the stream's controller dealt with what was asked?"""
        with self.connected() as conn:
            row = conn.execute("SELECT answered FROM request WHERE id = ?", (request,)).fetchone()
        return row is not None and bool(row[0])

    def acquire(
        self,
        stream: str,
        holder: Holder,
        now: Micros,
        take_over: bool = False,
        *,
        renew_s: float = RENEW_S,
        clock: Callable[[], Micros] = wall_clock,
    ) -> SqliteJournal:
        """The stream, open for writing by `holder` alone, under the next epoch.

        Raises RunHeld while another controller is at work, unless `take_over`: then that one's next
        write raises LeaseLost. `clock` is read for the renewal of the lease only.
        """
        with explained(self.path):
            conn = _connection(self.path, self.read_only, self.busy_s)
            lock: StreamLock | None = None
            try:
                with transaction(conn):
                    info = self._info(conn, stream)
                    if not take_over:
                        self._refuse_if_held(info, now)
                    lock = self._lock(stream, info.epoch + 1)
                    tail = self._become(conn, info, holder, now)
            except BaseException:
                # Not removed: whoever comes next under this epoch may already have opened it.
                if lock:
                    lock.drop()
                conn.close()
                raise
            lock.remove_older()
        read = functools.partial(self.read, stream)
        return SqliteJournal(self.path, read, Writer(conn, tail, clock), lock, renew_s)

    def _become(self, conn: sqlite3.Connection, info: StreamInfo, holder: Holder, now: Micros) -> Tail:
        """Write down that `holder` holds the stream, under the next epoch, and where it goes on from."""
        conn.execute(
            "UPDATE stream SET epoch = epoch + 1, holder = ?, lease_until = ? WHERE name = ?",
            (msgspec.json.encode(holder).decode(), after(now, LEASE_S), info.name),
        )
        newest = "SELECT seq, at, checksum FROM event WHERE stream = ? ORDER BY seq DESC LIMIT 1"
        seq, at, checksum = conn.execute(newest, (info.name,)).fetchone() or (0, 0, None)
        if (last := checksums.head(conn, info.name)) is not None and last != (seq, checksum):
            raise checksums.damaged(
                self.path, info.name, last[0], "is missing or is not the one that was written last"
            )
        return Tail(stream=info.name, epoch=info.epoch + 1, seq=seq, at=at, checksum=checksum)

    def _refuse_if_held(self, info: StreamInfo, now: Micros) -> None:
        if other := self.held(info, now):
            advice = "wait until it ends"
            if info.kind == "run":
                watch = f"follow it with `evalfleet watch {info.name}`"
                advice += f", {watch}, or take it from there with --take-over"
            raise RunHeld(f"{info.kind} {info.name!r} is held by {other}: {advice}")

    def _lock(self, stream: str, epoch: int) -> StreamLock:
        lock = StreamLock(self.home, stream, epoch)
        try:
            lock.take()
        except BlockingIOError as err:
            # Not even --take-over may have two controllers of one epoch.
            raise RunHeld(
                f"{stream!r} is held by a controller that {self.path} does not know (was the file restored "
                "from a copy?): end that controller first"
            ) from err
        return lock

    def _info(self, conn: sqlite3.Connection, name: str) -> StreamInfo:
        row = conn.execute(f"{_STREAMS} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise RequestError(f"there is no run or pool {name!r} in {self.home}: `evalfleet ls` shows all")
        return _info(row)

    @contextlib.contextmanager
    def connected(self) -> Generator[sqlite3.Connection]:
        """A connection for one use, whose errors are explained."""
        with (
            explained(self.path),
            contextlib.closing(_connection(self.path, self.read_only, self.busy_s)) as conn,
        ):
            yield conn


_STREAMS = "SELECT name, kind, created_at, epoch, holder, lease_until FROM stream"
_SUMMARIES = (
    "SELECT name, kind, created_at, epoch, holder, lease_until, summary.body FROM stream "
    "LEFT JOIN summary ON summary.stream = name AND summary.seq = stream.seq AND summary.v = ? "
    "ORDER BY created_at, name"
)


def _connection(path: Path, read_only: bool, busy_s: float) -> sqlite3.Connection:
    return (database.connect_reader if read_only else database.connect)(path, busy_s=busy_s)


def _info(row: tuple[str, StreamKind, Micros, int, str | None, Micros]) -> StreamInfo:
    name, kind, created_at, epoch, holder, lease_until = row
    who = None if holder is None else msgspec.json.decode(holder, type=decodable(Holder))
    return StreamInfo(name, kind, created_at, epoch, who, lease_until)


def _values(stream: str, row: checksums.Row) -> tuple[object, ...]:
    kind, body = row.kind.decode(), row.body.decode()
    return stream, row.seq, row.epoch, row.schema, row.at, kind, body, row.checksum


def _create(
    conn: sqlite3.Connection,
    name: str,
    kind: StreamKind,
    created_at: Micros,
    events: Sequence[tuple[Micros, Event]],
) -> None:
    taken = conn.execute("SELECT kind FROM stream WHERE name = ?", (name,)).fetchone()
    if taken is not None:
        hint = "choose another with --name" if kind == "run" else f"by a {taken[0]}; choose another"
        raise RequestError(f"the name {name!r} is taken{';' if kind == 'run' else ''} {hint}")
    conn.execute(
        "INSERT INTO stream (name, kind, epoch, lease_until, created_at) VALUES (?, ?, 0, 0, ?)",
        (name, kind, created_at),
    )
    tail = Tail(stream=name, epoch=0, seq=0, at=0, checksum=None)
    rows: list[EventRow] = []
    for tail.at, event in events:
        rows.append(following(tail, kind_of(event), encode(event).decode()))
    insert(conn, tail, rows)
