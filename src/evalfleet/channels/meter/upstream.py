"""The models' APIs that calls are passed on to, and the connections to them."""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from .http import HEAD_LIMIT, BadMessage, Head, read_head

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


async def ask(message: bytes, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> Head | None:
    """The head of the answer to a message; None if the connection ended without one."""
    try:
        upstream.write(message)
        await upstream.drain()
        head = await read_head(reader)
        while head is not None and head.first[1] == "100":
            head = await read_head(reader)
        return head
    except (ConnectionError, BadMessage):
        return None
