"""The SQLite file: how it is made, opened and recognised, and what its errors mean to the user.

A file that is not ours is recognised from its header alone, before SQLite may touch it. A new one is
made beside its final name and moved there whole, so that a half-made journal is never seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import string
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import msgspec

from evalfleet.errors import JournalError, JournalForeign, RequestError

APPLICATION_ID = 0x45764C46  # "EvLf"
LAYOUT = 3
BUSY_S = 10.0
FILE = "fleet.db"

_LAYOUT_1 = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = 1;
CREATE TABLE meta (home_id TEXT NOT NULL) STRICT;
CREATE TABLE stream (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('run', 'pool')),
    epoch INTEGER NOT NULL,
    holder TEXT,
    lease_until INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE event (
    stream TEXT NOT NULL,
    seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    v INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (stream, seq)
) STRICT, WITHOUT ROWID;
CREATE TABLE request (
    id INTEGER PRIMARY KEY,
    stream TEXT NOT NULL,
    at INTEGER NOT NULL,
    v INTEGER NOT NULL,
    body TEXT NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX request_open ON request (stream) WHERE answered = 0;
"""
_LAYOUT_2 = """
PRAGMA user_version = 2;
CREATE TABLE hold (
    machine TEXT PRIMARY KEY,
    pool TEXT NOT NULL,
    number INTEGER NOT NULL,
    holder TEXT,
    borrower TEXT UNIQUE,
    epoch INTEGER NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""
_LAYOUT_3 = """
PRAGMA user_version = 3;
ALTER TABLE event ADD COLUMN checksum BLOB;
ALTER TABLE stream ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE stream ADD COLUMN checksum BLOB;
UPDATE stream SET seq = coalesce((SELECT max(seq) FROM event WHERE event.stream = stream.name), 0);
CREATE TABLE summary (
    stream TEXT PRIMARY KEY,
    seq INTEGER NOT NULL,
    v INTEGER NOT NULL,
    body TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""
_STEPS = (_LAYOUT_1, _LAYOUT_2, _LAYOUT_3)
"""What makes each layout out of the one before it."""

_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gluster", "gpfs", "beegfs", "fuse.")
"""File systems that other computers may write, too: the shared memory of SQLite's WAL ends at this one."""

_log = logging.getLogger(__name__)


def connect(path: Path, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """For reading and writing, in autocommit mode. Never makes the file. The caller closes it."""
    conn = _open(path, "mode=rw", busy_s)
    try:
        conn.execute("PRAGMA synchronous = FULL")
        conn.execute("PRAGMA fullfsync = 1")  # macOS: there, fsync alone leaves data in the drive's cache
    except sqlite3.Error:
        conn.close()
        raise
    return conn


def connect_reader(path: Path, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """For reading only; also where nothing may be written. The caller closes it."""
    conn = _open(path, "mode=ro", busy_s)
    try:
        conn.execute("SELECT count(*) FROM meta").fetchone()
        return conn
    except sqlite3.Error as err:
        conn.close()
        if _primary(err) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or _unmerged(path):
            raise
    # SQLite cannot put its shared memory here, and no writer is at work or has left anything to merge.
    return _open(path, "immutable=1", busy_s)


def _open(path: Path, how: str, busy_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    # Each connection is used by one thread at a time, not always by the one that opened it.
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=busy_s, check_same_thread=False)


def _unmerged(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


@contextlib.contextmanager
def transaction(conn: sqlite3.Connection) -> Generator[None]:
    """All or nothing. The write lock is taken first, so what is read inside stays true until the end."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has rolled back by itself.
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def check_header(path: Path) -> None:
    """Raises JournalForeign unless the file is an evalfleet journal. Reads a hundred bytes, opens nothing."""
    try:
        header = _header(path)
    except IsADirectoryError:
        header = b""
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise JournalForeign(
            f"{path} is not a database, or its beginning is damaged: nothing was changed; "
            "restore it from a copy, or choose another home"
        )
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise JournalForeign(
            f"{path} is a database of another program: nothing was changed; choose another home"
        )


_kept: dict[tuple[int, int], int] = {}
_keeping = threading.Lock()
_MOST_KEPT = 200


def _header(path: Path) -> bytes:
    """The file's first hundred bytes, through a descriptor that stays open.

    Closing it would take from this process every lock that SQLite holds on the file (so POSIX wants it),
    and the next process to come and go would believe itself alone, and remove the log we write to.
    """
    with _keeping:
        about = path.stat()
        key = about.st_dev, about.st_ino
        if key not in _kept:
            _kept[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        header = os.pread(_kept[key], 100, 0)
        if len(_kept) > _MOST_KEPT:  # the home used longest ago: nobody works there any more
            os.close(_kept.pop(next(iter(_kept))))
        return header


def check_layout(conn: sqlite3.Connection, path: Path) -> None:
    """Raises JournalForeign unless this evalfleet knows the database's layout."""
    (layout,) = conn.execute("PRAGMA user_version").fetchone()
    if layout > LAYOUT:
        raise JournalForeign(
            f"{path} was written by a newer evalfleet (layout {layout}, this one knows up to {LAYOUT}): "
            "upgrade evalfleet"
        )
    if layout < 1:
        raise damaged(path, f"layout {layout}")


def bring_up_to_date(conn: sqlite3.Connection) -> None:
    """Turn an older layout into ours. Another process may do it at the same time: one of them does."""
    if conn.execute("PRAGMA user_version").fetchone() == (LAYOUT,):
        return
    with transaction(conn):
        (layout,) = conn.execute("PRAGMA user_version").fetchone()
        _take_steps(conn, layout)


def _take_steps(conn: sqlite3.Connection, layout: int) -> None:
    for step in _STEPS[layout:]:
        for statement in step.split(";\n"):
            conn.execute(statement)


def check_writable(conn: sqlite3.Connection) -> None:
    """Raises sqlite3.Error now, and not at the first event, when the database cannot be written.

    A page is really changed: SQLite lets an empty transaction pass on a read-only database.
    """
    conn.execute("BEGIN IMMEDIATE")
    try:
        conn.execute("UPDATE meta SET home_id = home_id")
    finally:
        if conn.in_transaction:
            conn.execute("ROLLBACK")


def refuse_file(home: Path) -> None:
    """Raises RequestError when a file is where the home, or a folder above it, should be."""
    for folder in (home, *home.parents):
        if folder.is_file():
            raise RequestError(f"{folder} is a file, not a folder: choose another home with EVALFLEET_HOME")


def ensure(home: Path) -> None:
    """Make the home and its database, unless they exist."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / FILE
    if _present(path):
        return
    (home / ".locks").mkdir(exist_ok=True)
    with (home / ".locks" / "create").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _present(path):
            _create(path)


def _present(path: Path) -> bool:
    """An empty file counts as none: that is how a home made by hand, or by `touch`, begins."""
    try:
        return path.is_dir() or path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _create(path: Path) -> None:
    scratch = path.with_name(f".{path.name}.new")
    shared = is_network(path.parent)
    try:
        build(scratch, wal=not shared)
    except sqlite3.OperationalError as err:
        if _primary(err) == sqlite3.SQLITE_FULL:
            raise
        shared = True
        build(scratch, wal=False)
    if shared:
        _warn_rollback(path.parent)
    scratch.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def build(path: Path, *, wal: bool) -> None:
    """A new, empty database at `path`. With `wal`: proves that this file system can do it, or raises."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.touch()
    with contextlib.closing(connect(path)) as conn:
        with transaction(conn):
            _take_steps(conn, 0)
            conn.execute("INSERT INTO meta VALUES (?)", (_new_home_id(),))
        if wal:
            _prove_wal(conn, path)


def _prove_wal(conn: sqlite3.Connection, path: Path) -> None:
    (mode,) = conn.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError("this file system cannot do WAL")
    with contextlib.closing(connect(path)) as other, transaction(conn):
        conn.execute("UPDATE meta SET home_id = home_id")
        # Only with working shared memory can another connection read while this one writes.
        other.execute("SELECT home_id FROM meta").fetchone()


def _new_home_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(6))


def home_id(conn: sqlite3.Connection, path: Path) -> str:
    row = conn.execute("SELECT home_id FROM meta").fetchone()
    if row is None:
        raise damaged(path, "it has no home id")
    return str(row[0])


def leave_wal_if_shared(path: Path) -> None:
    """A home that has been moved to a network file system gets a rollback journal."""
    wal = _header(path)[18:20] == b"\x02\x02"
    if not wal or not is_network(path.parent):
        return
    _warn_rollback(path.parent)
    with contextlib.closing(_open(path, "mode=rw", BUSY_S)) as conn:
        conn.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access: needs no shared memory
        conn.execute("PRAGMA journal_mode = DELETE")


def _warn_rollback(home: Path) -> None:
    _log.warning(
        "%s is on a file system without SQLite's WAL: the journal uses a rollback journal, which is slower",
        home,
    )


def is_network(folder: Path) -> bool:
    """Is it on a file system that other computers may write? False where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape")
    except OSError:
        return False
    return file_system(folder.resolve(), mounts).startswith(_NETWORK)


def file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that holds `folder`, by a table such as /proc/mounts."""
    found, depth = "", -1
    for line in mounts.splitlines():
        _, where, kind, *_ = line.split(" ")
        point = Path(where.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # The last of several mounts at one point is the one that is seen.
        if folder.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kind, len(point.parts)
    return found


@contextlib.contextmanager
def explained(path: Path) -> Generator[None]:
    """Turns errors of SQLite and of the file system into one line that says what to do."""
    try:
        yield
    except sqlite3.Error as err:
        raise explain(err, path) from err
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise damaged(path, str(err)) from err
    except OSError as err:
        raise JournalError(
            f"{err.filename or path}: {err.strerror}: make it readable and writable for you, "
            "or choose another home with EVALFLEET_HOME"
        ) from err


def explain(err: sqlite3.Error, path: Path) -> JournalError:
    """What a SQLite error means here, and what to do about it."""
    code = _primary(err)
    if code in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,
    ):  # the last: no such table
        return damaged(path, str(err))
    if code == sqlite3.SQLITE_FULL:
        return JournalError(
            f"{path}: the disk is full; what was recorded is safe: free some space, then resume"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(f"{path} stays locked by another process: end what keeps it open, then try again")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return JournalError(
            f"{path} cannot be written ({err}): give yourself write access to {path.parent}, "
            "or choose another home with EVALFLEET_HOME"
        )
    return JournalError(f"{path} cannot be read or written ({err}): check the disk, then try again")


def damaged(path: Path, detail: str) -> JournalForeign:
    return JournalForeign(
        f"{path} is damaged ({detail}): nothing was changed; restore it from a copy, or choose another home"
    )


def _primary(err: sqlite3.Error) -> int:
    """SQLite's result code without its extension; 0 for errors of the module itself."""
    code: int = getattr(err, "sqlite_errorcode", 0)
    return code & 0xFF
