"""A small parcel, held whole in memory: most attempts leave a result and a log, and there are many."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.channels.artefacts import LEFT_OUT, LOG, tally
from evalfleet.channels.link import UNREADABLE
from evalfleet.channels.supervisor.parcel import BadParcel, ForgedParcel, file_time, inner_name
from evalfleet.model import Collected
from evalfleet.names import PARTIAL


class Entry(Struct, frozen=True):
    """One record of a parcel, as `supervisor.parcel` writes it."""

    file: str | None = None
    size: int = 0
    mode: int = 0o600
    mtime: int = 0
    folder: str | None = None
    link: str | None = None
    end: str | None = None
    changed: tuple[str, ...] = ()
    left_out: tuple[msgspec.Raw, ...] = ()


_decode = msgspec.json.Decoder(Entry).decode


class Flat(Struct, frozen=True):
    """Files only, all of them in out/ itself, none left out: nothing to be sieved."""

    files: dict[str, tuple[Entry, memoryview]]
    note: bytes

    def make(self, into: Path) -> Collected:
        """All at once: under its own name the directory is complete. One that is there already stays."""
        _make_parent(into)
        partial = f"{into}{PARTIAL}"
        _make_empty(partial)
        try:
            total = sum(_make(partial, name, *entry) for name, entry in self.files.items() if name != LOG)
            if LOG in self.files:
                _make(partial, LOG, *self.files[LOG])
            os.rename(partial, into)
        except OSError as err:
            shutil.rmtree(partial)
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return tally(into)
        return Collected(len(self.files) - (LOG in self.files), total)


def _make(folder: str, name: str, entry: Entry, content: memoryview) -> int:
    """Its size."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(f"{folder}/{name}", flags, entry.mode & 0o777 | 0o600)
    try:
        _write_all(fd, content)
        mtime = file_time(entry.mtime)
        os.utime(fd, ns=(mtime, mtime))
    finally:
        os.close(fd)
    return len(content)


def flat(parcel: bytes, most: int) -> Flat | None:
    """The parcel, if it is so plain, with no more files than `most`. Raises BadParcel if it is not whole."""
    files: dict[str, tuple[Entry, memoryview]] = {}
    note = b""
    for entry, content in _entries(parcel):
        if entry.end is not None:
            return Flat(files, note) if not entry.changed and not entry.left_out else None
        if entry.folder == "out":
            continue
        if entry.file is None:
            return None  # the long way tells what is wrong with it, if anything is
        name = inner_name(entry.file)
        if name == "job.json":
            note = bytes(content)
            continue
        last = LOG if name == "log" else name.removeprefix("out/")
        ours = name in (f"out/{LOG}", f"out/{LEFT_OUT}")
        if last == name or "/" in last or ours or last in files or len(files) > most:
            return None
        files[last] = (entry, content)
    raise BadParcel("it ended before it was whole")


def _entries(parcel: bytes) -> Iterable[tuple[Entry, memoryview]]:
    """SSH vouches for the bytes, and the message's own frame for their number."""
    view = memoryview(parcel)
    start = 0
    while (stop := parcel.find(b"\n", start)) >= 0:
        try:
            entry = _decode(view[start:stop])
        except UNREADABLE as err:
            raise ForgedParcel(f"not a record: {err}") from None
        start = stop + 1 + entry.size
        if entry.size < 0 or start > len(parcel):
            raise BadParcel("it ended before it was whole")
        yield entry, view[stop + 1 : start]


def _write_all(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _make_parent(into: Path) -> None:
    try:
        os.mkdir(into.parent)
    except FileExistsError:
        pass
    except FileNotFoundError:
        into.parent.mkdir(parents=True, exist_ok=True)


def _make_empty(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # an earlier try was cut short
        shutil.rmtree(folder)
        os.mkdir(folder, 0o700)
