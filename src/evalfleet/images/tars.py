"""Tar archives, entry by entry.

Not by `tarfile`'s reader: it keeps every header, takes garbage for the end, and believes any size.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from .streams import Stream, Unreadable, exactly

BLOCK = 512
MOST_ENTRIES = 5_000_000
MOST_HEADER = 1 << 20
MOST_SIZE = 1 << 42
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NO_CONTENT = (
    *(tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE),
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
)
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")


class Entry(NamedTuple):
    """`kind`: file, folder, hard or soft (links), other. `name` and a hard link's `target` are plain."""

    name: str
    kind: str
    size: int
    target: str = ""


class Archive:
    """Iterate over it; `read` gives what the newest entry holds, unless one goes on before."""

    def __init__(self, stream: Stream, most: int = MOST_ENTRIES) -> None:
        self._stream = stream
        self._most = most
        self._left = 0
        self._padding = 0
        self.at = 0
        """Where the newest entry's content starts, or what comes next."""

    def __iter__(self) -> Iterator[Entry]:
        for _ in range(self._most):
            self._skip(self._left + self._padding)
            entry = self._next()
            if entry is None:
                return
            yield entry
        raise Unreadable(f"it has more than {self._most} entries")

    def read(self, most: int) -> bytes:
        """All of the newest entry's content."""
        if self._left > most:
            raise Unreadable(f"a file in it is larger than {most >> 20} MB")
        return self._take(self._left)

    def _next(self) -> Entry | None:
        told: dict[str, str] = {}
        while True:
            block = self._stream.read(BLOCK)
            self.at += len(block)
            if not block.strip(b"\0"):
                return None
            header = _header(block)
            if header.type not in (tarfile.XHDTYPE, tarfile.XGLTYPE, b"L", b"K", tarfile.SOLARIS_XHDTYPE):
                return self._entry(header, told)
            self._expect(header.size)
            data = self.read(MOST_HEADER)
            self._skip(self._padding)
            if header.type == b"L":
                told["path"] = _text(data.rstrip(b"\0"))
            elif header.type == b"K":
                told["linkpath"] = _text(data.rstrip(b"\0"))
            elif header.type != tarfile.XGLTYPE:
                told.update(_records(data))

    def _entry(self, header: tarfile.TarInfo, told: dict[str, str]) -> Entry:
        kind = _kind(header)
        size = 0 if header.type in _NO_CONTENT else header.size
        if "size" in told and kind == "file":
            size = _number(told["size"])
        self._expect(size)
        target = told.get("linkpath", header.linkname)
        return Entry(
            plain(told.get("path", header.name)), kind, size, plain(target) if kind == "hard" else target
        )

    def _expect(self, size: int) -> None:
        if not 0 <= size <= MOST_SIZE:
            raise Unreadable("an entry in it claims an absurd size")
        self._left, self._padding = size, -size % BLOCK

    def _take(self, size: int) -> bytes:
        data = exactly(self._stream, size)
        self._left -= size
        self.at += size
        return data

    def _skip(self, size: int) -> None:
        self._stream.skip(size)
        self.at += size
        self._left = self._padding = 0


def plain(name: str) -> str:
    """A path without what says nothing. Raises Unreadable where it would lead out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Unreadable(f"a name in it leads out of it: {name[:80]!r}")
    return "/".join(parts)


def _header(block: bytes) -> tarfile.TarInfo:
    if len(block) != BLOCK:
        raise Unreadable("it is cut short")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        raise Unreadable("it is damaged, or no tar archive") from None


def _kind(header: tarfile.TarInfo) -> str:
    if header.type == tarfile.GNUTYPE_SPARSE:
        raise Unreadable("it has sparse files, which are not understood")
    if header.type in _FILES:
        return "file"
    kinds = {tarfile.DIRTYPE: "folder", tarfile.LNKTYPE: "hard", tarfile.SYMTYPE: "soft"}
    return kinds.get(header.type, "other")


def _records(data: bytes) -> dict[str, str]:
    """Of a pax header: `LENGTH KEY=VALUE`, a line each."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at]:
        record = _RECORD.match(data, at)
        length = int(record[1]) if record else 0
        if record is None or not record.end() < at + length <= len(data):
            raise Unreadable("a header in it is damaged")
        found[_text(record[2])] = _text(data[record.end() : at + length - 1])
        at += length
    return found


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise Unreadable("a header in it is damaged")
    return int(text)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
