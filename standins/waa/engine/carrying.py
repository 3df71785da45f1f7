"""Bytes between the host's sockets and the container's."""

from __future__ import annotations

import asyncio
import contextlib
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

OUTSIDE = "127.0.0.2"
"""Where all seems to come from that enters a container: its programs can tell, as its rules would."""


def run(listening: Sequence[tuple[socket.socket, int]]) -> None:
    asyncio.run(_carry_all(listening))


async def _carry_all(listening: Sequence[tuple[socket.socket, int]]) -> None:
    for sock, port in listening:

        def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> object:
            return _carry(reader, writer, port)

        await asyncio.start_server(carry, sock=sock)  # type: ignore[arg-type]
    await asyncio.Event().wait()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port, local_addr=(OUTSIDE, 0))
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            data = await reader.read(1 << 16)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
