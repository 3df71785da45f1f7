"""The line to a machine's supervisor: a process on the host that carries our messages to its socket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import asyncssh

from evalfleet.ports import Fence

from .asking import NO_SUPERVISOR, Lot
from .hosts import Host, Wire
from .words import HostLost

READY = b"ok\n"
WORDS_CAP = 4096


class Session(asyncssh.SSHClientSession[bytes]):
    """Hands on what arrives, once the other end has said that it is there."""

    def __init__(self, request: bytes, protocol: asyncio.Protocol) -> None:
        self.channel: Any = None  # an SSHClientChannel, whose methods have no types
        self.status: int | None = None
        self.errors = b""
        self.lost = False
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.at_end: list[Any] = []
        self._request = request
        self._protocol = protocol
        self._head = b""
        self._open = False

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self.channel = chan

    def session_started(self) -> None:
        if self.channel is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and tells why
                self.channel.write(self._request)

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None:
            self.errors = (self.errors + data)[-WORDS_CAP:]
        elif self._open:
            self._protocol.data_received(data)
        else:
            self._head = (self._head + data)[-WORDS_CAP:]  # a login shell may have said something first
            if self._head.endswith(READY):
                self._open = True
                if not self.ready.done():
                    self.ready.set_result(True)

    def exit_status_received(self, status: int) -> None:
        self.status = status

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for call in self.at_end:
            call()
        if not self.ready.done():
            self.ready.set_result(False)
        elif self._open:
            self._protocol.connection_lost(exc)


class Line(asyncio.WriteTransport):
    """What a Link needs of a transport."""

    def __init__(self, host: Host, wire: Wire, session: Session) -> None:
        super().__init__()
        self._host = host
        self._wire = wire
        self._session = session

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._session.channel is not None and not self._session.lost:
            with contextlib.suppress(BrokenPipeError):  # the loss is being told
                self._session.channel.write(bytes(data))

    def is_closing(self) -> bool:
        return self._session.lost

    def close(self) -> None:
        if self._session.channel is not None and not self._session.lost:
            self._session.channel.close()

    def abort(self) -> None:
        if not self._session.lost:
            self._host.suspect(self._wire)


async def dial(lot: Lot, machine: str, fence: Fence, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
    """Connect the protocol to the machine's supervisor. OSError: try again; ChannelError: no use."""
    for brought in (False, True):
        wire, session = await _begin(lot, machine, fence, protocol)
        try:
            ready = await session.ready
        except asyncio.CancelledError:
            if not session.lost:
                lot.host.suspect(wire)  # it was waited for in vain
            raise
        if ready:
            return Line(lot.host, wire, session)
        if session.status == NO_SUPERVISOR and not brought:
            await lot.bring_supervisor()
            continue
        lot.check(session.status, session.errors)
        break
    raise HostLost(f"{lot.host.name}: there is no line to the supervisor")


async def _begin(lot: Lot, machine: str, fence: Fence, protocol: asyncio.Protocol) -> tuple[Wire, Session]:
    request = lot.connect_request(machine, fence)
    command = lot.command("connect", machine)
    wire, session = await lot.host.session(lambda: Session(request, protocol), command)

    def release() -> None:
        wire.used -= 1

    if session.lost:
        release()
    else:
        session.at_end.append(release)
    return wire, session
