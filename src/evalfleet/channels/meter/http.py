"""HTTP/1.1 as far as a proxy needs it: callers, heads, bodies whose parts are passed on as they come, and
the models' APIs that calls are passed on to.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Awaitable, Callable, NamedTuple, cast
from urllib.parse import urlsplit

from .accounts import Account

HEAD_LIMIT = 32 << 10
BACKLOG = 64
"""Connections that are accepted at a time: what is accepted then is looked at before the next ones come."""
MANY_DESCRIPTORS = 1 << 16
PART = 64 << 10
SIOCGIFADDR = 0x8915
_HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)


class BadMessage(Exception):
    """The other side did not speak HTTP/1.1, or said more than is allowed."""


class Head(NamedTuple):
    """The first line of a message, in its three parts, and its headers in their order."""

    first: tuple[str, str, str]
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def end_to_end(self, *without: str) -> list[tuple[str, str]]:
        """The headers that are meant for the other end, not for this connection."""
        dropped = _HOP_BY_HOP | {word.strip().lower() for word in self.get("connection").split(",")}
        return [(key, value) for key, value in self.headers if key.lower() not in dropped.union(without)]

    @property
    def keeps(self) -> bool:
        """May the connection serve another message after this one?"""
        return "HTTP/1.1" in self.first and self.get("connection").lower() != "close"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None if the connection ended before one began. Raises BadMessage."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise BadMessage("the connection ended within a head") from None
        return None
    except asyncio.LimitOverrunError:
        raise BadMessage(f"the head is longer than {HEAD_LIMIT} bytes") from None
    lines = raw.decode("latin-1").lstrip("\r\n").split("\r\n")
    first = lines[0].split(" ", 2)
    if len(first) < 2:
        raise BadMessage(f"{lines[0][:80]!r} is not HTTP")
    headers: list[tuple[str, str]] = []
    for line in lines[1:]:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadMessage(f"{line[:80]!r} is not a header")
        headers.append((name, value.strip()))
    return Head((first[0], first[1], first[2] if len(first) > 2 else ""), headers)


def write_head(first: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    if any("\r" in line or "\n" in line for line in lines):
        raise BadMessage("a header has a line break in it")
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


async def parts_of(head: Head, reader: asyncio.StreamReader, *, to_end: bool) -> AsyncIterator[bytes]:
    """A message's body in the parts in which it comes. `to_end`: without a length, the connection ends it.

    Raises BadMessage, also when the connection ends before the body does.
    """
    if "chunked" in head.get("transfer-encoding").lower():
        async for part in _chunks(reader):
            yield part
        return
    length = head.get("content-length")
    if length and not length.isdigit():
        raise BadMessage(f"Content-Length is {length[:40]!r}")
    left = int(length) if length else None
    if left is None and not to_end:
        return
    while left is None or left > 0:
        part = await reader.read(PART if left is None else min(PART, left))
        if not part and left is None:
            return
        if not part:
            raise BadMessage("the connection ended within a body")
        left = None if left is None else left - len(part)
        yield part


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while True:
            size = (await reader.readuntil(b"\r\n")).split(b";", 1)[0].strip()
            try:
                left = int(size, 16)
            except ValueError:
                raise BadMessage(f"a chunk's size is {size[:40]!r}") from None
            if left == 0:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
                return
            while left > 0:
                part = await reader.read(min(PART, left))
                if not part:
                    raise BadMessage("the connection ended within a chunk")
                left -= len(part)
                yield part
            await reader.readexactly(2)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise BadMessage("the connection ended within a body") from None


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


LAST_CHUNK = b"0\r\n\r\n"


class Caller(asyncio.StreamReaderProtocol):
    """A caller's connection, which says when its other side has gone.

    A caller that goes away ends its call: nobody pays for an answer that nobody reads. It is among the
    `strangers` until it has shown a key; where there are more than `most` of them, the oldest is hung up on.
    """

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        strangers: dict[Caller, None],
        most: int,
    ) -> None:
        loop = asyncio.get_event_loop()
        super().__init__(asyncio.StreamReader(limit=HEAD_LIMIT, loop=loop), serve, loop=loop)
        self.gone = loop.create_future()
        self.account: Account | None = None
        self._strangers = strangers
        self._most = most
        self._connection: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = transport.get_extra_info("sockname")[0]
        if not address.startswith("127.") and address not in bridge_addresses():
            cast("asyncio.WriteTransport", transport).abort()
            return
        self._connection = cast("asyncio.WriteTransport", transport)
        self._strangers[self] = None
        if len(self._strangers) > self._most:
            next(iter(self._strangers)).hang_up()
        super().connection_made(transport)

    def hang_up(self) -> None:
        self._strangers.pop(self, None)
        if self._connection is not None:
            self._connection.abort()

    def eof_received(self) -> bool | None:
        self._is_gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.pop(self, None)
        self._is_gone()
        super().connection_lost(exc)

    def _is_gone(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


def descriptors() -> int:
    """How many files and connections this process may have open, after it has asked for as many as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (many, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def bridge_addresses() -> set[str]:
    """The addresses of this machine's bridges, to which container engines connect networks. Linux only."""
    found: set[str] = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in os.listdir("/sys/class/net"):
            if os.path.isdir(f"/sys/class/net/{name}/bridge"):
                with contextlib.suppress(OSError):  # it has none
                    told = fcntl.ioctl(sock, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                    found.add(socket.inet_ntoa(told[20:24]))
    return found


# -- connections to the models' APIs ------------------------------------------------------------------------

CONNECT_S = 30.0
IDLE_CONNECTIONS = 256


class Upstream(NamedTuple):
    """A model's API, or a gateway to several: where it is, its key, and in which header the key goes."""

    name: str
    url: str
    key: str
    header: str  # authorization, x-api-key, api-key or x-goog-api-key

    @property
    def credentials(self) -> tuple[str, str]:
        return (self.header, f"Bearer {self.key}" if self.header == "authorization" else self.key)


class Connections:
    """Connections to one upstream, kept for the next call: a TLS handshake costs more than the rest of it."""

    def __init__(self, upstream: Upstream, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(upstream.url)
        self.tls = context if parts.scheme == "https" else None
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/")
        self.netloc = parts.netloc.rpartition("@")[2]
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def take(self, *, fresh: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bool]:
        """A connection, and whether it was used before."""
        while self._idle and not fresh:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer, True
            writer.close()
        opening = asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=HEAD_LIMIT)
        reader, writer = await asyncio.wait_for(opening, CONNECT_S)
        return reader, writer, False

    def give_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append((reader, writer))
        else:
            writer.close()


async def ask(
    sent: bytes, body: bytes, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter
) -> Head | None:
    """The head of the answer to a head and its body; None if the connection ended without one."""
    try:
        upstream.write(sent)
        upstream.write(body)
        await upstream.drain()
        head = await read_head(reader)
        while head is not None and head.first[1] == "100":
            head = await read_head(reader)
        return head
    except (ConnectionError, BadMessage):
        return None
