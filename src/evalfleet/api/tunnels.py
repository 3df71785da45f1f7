"""Ports of a pool's machines, reached from this computer alone, by way of the connections we have anyway."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from evalfleet.errors import ChannelError, RequestError
from evalfleet.http_client import ask
from evalfleet.model import Machine
from evalfleet.named_pools import machine_of
from evalfleet.ports import Place, Reachable
from evalfleet.state import MachineState

from .pools import Pool

HERE = "127.0.0.1"
CHUNK = 4 << 20  # all that asyncssh holds: of a part, it would let more and more come
PORTS_TRIED = 1000

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tunnel:
    """Who connects to `here` on this computer speaks to `there` on the machine."""

    machine: MachineState
    here: int
    there: int


@asynccontextmanager
async def open_tunnels(
    pool: Pool, machines: Sequence[MachineState], ports: Sequence[tuple[int, int]], tell: Tell
) -> AsyncGenerator[list[Tunnel]]:
    """Does what `carry` does, for machines of a pool."""
    async with pool.places() as places, carry(places, machines, ports, tell) as tunnels:
        yield tunnels


@asynccontextmanager
async def carry(
    places: Mapping[str, Place],
    machines: Sequence[MachineState],
    ports: Sequence[tuple[int, int]],
    tell: Tell,
) -> AsyncGenerator[list[Tunnel]]:
    """Open a tunnel for every machine and every pair (first port here, port there), passing taken ports over.

    `tell` is told of connections that did not get through. Raises RequestError.
    """
    async with AsyncExitStack() as stack:
        opened: list[Tunnel] = []
        for machine in machines:
            place = places[machine.offer.place]
            if not isinstance(place, Reachable):
                raise RequestError(f"ports of machines of {place.name} cannot be reached")
            for first, there in ports:
                carrier = _Carrier(place, machine_of(machine), there, tell)
                stack.push_async_callback(carrier.close)
                opened.append(Tunnel(machine, await carrier.listen(first), there))
        yield opened


class _Carrier:
    """A carrier of every connection that is made to a port here, to a port there."""

    def __init__(self, place: Reachable, machine: Machine, port: int, tell: Tell) -> None:
        self._place = place
        self._machine = machine
        self._port = port
        self._tell = tell
        self._carrying: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, first: int) -> int:
        """On the first port that is free."""
        for port in range(first, min(first + PORTS_TRIED, 65536)):
            try:
                self._server = await asyncio.start_server(self._accept, HERE, port)
                return port
            except OSError as err:
                if err.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
        raise RequestError(f"no port from {first} on is free here; name another one")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._place.dial(self._machine, self._port)
        except (OSError, ChannelError) as err:
            self._tell(str(err))
            writer.close()
            return
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    async def close(self) -> None:
        """Close everything, also what is still in use: a browser never hangs up by itself."""
        if self._server is not None:
            self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side has said all; then the other side is told so."""
    with suppress(Exception):  # asyncssh has its own: whatever it is, nothing more comes
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


async def fetch(tunnel: Tunnel, path: str, timeout_s: float, most: int) -> bytes:
    """What the server behind it answers to a GET. Raises OSError."""
    url = f"http://{HERE}:{tunnel.here}{path}"
    answer = await asyncio.to_thread(ask, url, timeout_s=timeout_s, most_bytes=most, direct=True)
    if answer.code != 200:
        raise OSError(f"port {tunnel.there} answers {answer.code}")
    return answer.body
