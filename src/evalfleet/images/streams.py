"""Bytes that are read once, in order, with an end that was told beforehand."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from typing import BinaryIO, Protocol

BLOCK = 1 << 18
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
MOST_INFLATED = 64 << 30
"""Of one layer: more than twice the whole image that we know of."""


class Unreadable(Exception):
    """An image, or a part of it, cannot be read. The message is one line for the user."""


def one_line(text: str) -> str:
    """What strangers have written, for a message."""
    return "".join(each if each.isprintable() else "?" for each in text[:200])


class Source(Protocol):
    def read(self, size: int, /) -> bytes:
        """As many, but at the end. Raises Unreadable, OSError."""
        ...


class Stream(Source, Protocol):
    def skip(self, size: int) -> None:
        """Raises Unreadable where there are not as many."""
        ...


def exactly(stream: Stream, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise Unreadable("it is cut short")
    return data


def whole(stream: Stream, most: int, what: str) -> bytes:
    """All of something that is to be small."""
    data = stream.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"{what} is larger than {most >> 20} MB")
    return data


class Window:
    """A part of a file in which one can seek, so that what is skipped is never read."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._at = start
        self._end = start + size

    def read(self, size: int) -> bytes:
        self._file.seek(self._at)
        data = self._file.read(max(0, min(size, self._end - self._at)))
        self._at += len(data)
        return data

    def skip(self, size: int) -> None:
        if size > self._end - self._at:
            raise Unreadable("it is cut short")
        self._at += size


class Passing(ABC):
    """What other streams share that cannot seek."""

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0 and (part := self._some(min(size, BLOCK))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(exactly(self, min(size, BLOCK)))

    def drain(self) -> None:
        while self._some(BLOCK):
            pass

    @abstractmethod
    def _some(self, most: int) -> bytes:
        """At least one byte, but at the end."""


class Verified(Passing):
    """A blob of which size and digest are known: `finish` raises Unreadable if it is another."""

    def __init__(self, source: Source, digest: str, size: int) -> None:
        self._source = source
        self._digest = digest
        self._left = size
        self._sum = hashlib.sha256()

    def _some(self, most: int) -> bytes:
        data = self._source.read(min(most, self._left))
        self._left -= len(data)
        self._sum.update(data)
        return data

    def finish(self) -> None:
        self.drain()
        if self._left:
            raise Unreadable(f"{self._digest[:19]}... is cut short: {self._left} bytes are missing")
        if f"sha256:{self._sum.hexdigest()}" != self._digest:
            raise Unreadable(f"what came is not {self._digest[:19]}...: its digest is another")


class Inflated(Passing):
    """What a gzip stream holds, also one of several members."""

    def __init__(self, source: Stream, head: bytes, most: int = MOST_INFLATED) -> None:
        self._source = source
        self._waiting = head
        self._inflater = zlib.decompressobj(31)
        self._left = most

    def _some(self, most: int) -> bytes:
        while True:
            if self._inflater.eof:
                self._waiting = self._inflater.unused_data or self._source.read(BLOCK)
                if not self._waiting.strip(b"\0"):
                    return b""
                self._inflater = zlib.decompressobj(31)
            try:
                data = self._inflater.decompress(self._waiting, most)
            except zlib.error:
                raise Unreadable("its gzip data is damaged") from None
            self._waiting = self._inflater.unconsumed_tail
            if data:
                self._left -= len(data)
                if self._left < 0:
                    raise Unreadable("a layer holds more than any image that we know of")
                return data
            if not self._waiting and not self._inflater.eof:
                self._waiting = self._source.read(BLOCK)
                if not self._waiting:
                    raise Unreadable("it is cut short")


class Headed(Passing):
    """A stream whose first bytes were looked at."""

    def __init__(self, head: bytes, source: Stream) -> None:
        self._head = head
        self._source = source

    def _some(self, most: int) -> bytes:
        if self._head:
            data, self._head = self._head[:most], self._head[most:]
            return data
        return self._source.read(most)

    def skip(self, size: int) -> None:
        """Where the source can seek, nothing is read."""
        known = min(size, len(self._head))
        self._head = self._head[known:]
        self._source.skip(size - known)


def unpacked(source: Stream) -> Stream:
    """A layer's tar, whatever it is packed with."""
    head = source.read(4)
    if head.startswith(ZSTD):
        raise Unreadable("its layers are packed with zstd, which is not understood")
    return Inflated(source, head) if head.startswith(GZIP) else Headed(head, source)
