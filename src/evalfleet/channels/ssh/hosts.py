"""One host: its connections, and the sessions opened over them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import asyncssh

from evalfleet.clock import pauses
from evalfleet.ports import Dialled

from .connection import OPENING_ERRORS, Connection, open_connection, reason_of
from .target import Access, HostDown, HostLost, HostRefused, Target

SESSIONS = 8
"""Sessions a connection carries; OpenSSH allows 10 unless told otherwise (MaxSessions)."""
CHUNK = 4 << 20  # more than asyncssh holds: what a read leaves there lets a host send ever more
SAID_CAP = 1 << 20
"""Bytes that a host may say to one question, and before our program speaks there: all of that is noise."""
ERRORS_KEPT = 4096
LET_IN_S = 30.0
"""For so long a host may go on to refuse a key that somebody is letting in."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.3, 2.0

UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})

S = TypeVar("S", bound=asyncssh.SSHClientSession[bytes])
T = TypeVar("T")


class PooledConnection:
    """A connection with room for some sessions."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.used = 0
        self.most = SESSIONS


def is_loss(err: Exception) -> bool:
    """Is it the network's doing? asyncssh hands the socket's errors on as they are; a full disk is ours."""
    network = isinstance(err, asyncssh.Error | ConnectionError | TimeoutError)
    return network or (isinstance(err, OSError) and err.errno in UNREACHABLE)


class Flood(Exception):
    """A host says more than anything of ours would."""


class Errors:
    """Reads what a process says on its standard error: else that would hold up its output.

    `end` is the last of it. Raises Flood when the block is left, if it was too much; then the process was
    ended.
    """

    def __init__(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self.end = b""
        self._process = process
        self._flood = False

    async def __aenter__(self) -> Errors:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if err is not None:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=err is not None)
        if self._flood:
            raise Flood

    async def _read(self) -> None:
        count = 0
        while data := await self._process.stderr.read(CHUNK):
            count += len(data)
            self.end = (self.end + data)[-ERRORS_KEPT:]
            if count > SAID_CAP:
                self._flood = True
                self._process.close()
                return


async def converse(process: asyncssh.SSHClientProcess[bytes], data: bytes = b"") -> tuple[bytes, bytes]:
    """Its output and its last errors, once it has ended. Raises Flood, which `SshHost.process` explains."""
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and tells why
        process.stdin.write(data)
        process.stdin.write_eof()
    parts: list[bytes] = []
    count = 0
    async with Errors(process) as errors:
        while part := await process.stdout.read(CHUNK):
            parts.append(part)
            count += len(part)
            if count > SAID_CAP:
                raise Flood
    await process.wait_closed()
    return b"".join(parts), errors.end


class SshHost:
    """A host and the connections to it: one, unless it must carry more sessions than a server allows."""

    def __init__(
        self,
        where: Target,
        access: Access,
        handshakes: asyncio.Semaphore,
        let_in: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`let_in`: is called when the host lets nobody in with our key; True: it soon will."""
        self.where = where
        self._let_in = let_in
        self.access = access
        self._handshakes = handshakes
        self._wires: list[PooledConnection] = []
        self._opening: asyncio.Task[PooledConnection] | None = None
        self._begun = asyncio.Event()
        self._closed = False

    @property
    def name(self) -> str:
        return self.where.name

    @property
    def connected(self) -> bool:
        return bool(self._wires)

    async def connect(self) -> None:
        """Be connected: hosts that wait for their turn are not silent. Raises HostDown, HostRefused."""
        await self._wire()

    async def turn(self) -> None:
        """Wait until there is a connection, or it is this host's turn to get one."""
        if not self._wires and not self._closed:
            self._open_soon()
            await self._begun.wait()

    @contextlib.asynccontextmanager
    async def process(self, command: str) -> AsyncGenerator[asyncssh.SSHClientProcess[bytes]]:
        """A process on the host, ended when the block is left. Raises HostDown, HostLost, HostRefused."""
        wire, process = await self._open_session(lambda ssh: ssh.create_process(command, encoding=None))
        try:
            yield process
        except Flood:
            raise self.flooded() from None
        except (asyncssh.Error, OSError) as err:
            if not is_loss(err):
                raise
            raise HostLost(f"{self.name}: the connection was lost: {err}") from err
        finally:
            process.close()
            wire.used -= 1

    def flooded(self) -> HostRefused:
        """The error of a host that says far more than was asked of it."""
        what = f"it printed more than {SAID_CAP >> 20} MB where our program should have answered"
        return HostRefused(self.name, what, "see what its login shell prints (~/.bashrc and the like)")

    async def session(self, make: Callable[[], S], command: str) -> tuple[PooledConnection, S]:
        """Open one that stays. Who opened it uncounts it from its wire. Raises HostDown, HostRefused."""

        async def begin(ssh: asyncssh.SSHClientConnection) -> S:
            session = make()
            untyped: Any = ssh
            await untyped.create_session(lambda: session, command, encoding=None)
            return session

        return await self._open_session(begin)

    async def dial(self, port: int) -> Dialled:
        """A connection to one of the host's own ports: no session, so servers do not count it.

        Raises HostDown, HostRefused, and ConnectionRefusedError where nobody listens.
        """
        for last in (False, True):
            wire = await self._wire()
            try:
                untyped: Any = wire.connection.ssh
                streams: Dialled = await untyped.open_connection("127.0.0.1", port, encoding=None)
                return streams
            except asyncssh.ChannelOpenError as err:
                if wire in self._wires:
                    raise ConnectionRefusedError(f"{self.name} port {port}: {err}") from err
            except OPENING_ERRORS as err:
                self.suspect(wire)
                if last:
                    raise HostDown(f"{self.name} port {port}: {reason_of(err)}") from err
        raise HostDown(f"{self.name} port {port}: the connection was lost")

    async def _open_session(
        self, begin: Callable[[asyncssh.SSHClientConnection], Awaitable[T]]
    ) -> tuple[PooledConnection, T]:
        """Once more if it fails: the connection may just have ended, or the server allows no more on it."""
        for last in (False, True):
            wire = await self._wire()
            wire.used += 1
            try:
                return wire, await begin(wire.connection.ssh)
            except OPENING_ERRORS as err:
                wire.used -= 1
                if wire.used and isinstance(err, asyncssh.ChannelOpenError):
                    wire.most = wire.used
                else:
                    self.suspect(wire)
                if last:
                    raise HostDown(f"{self.name} opens no session: {reason_of(err)}") from err
            except BaseException:
                wire.used -= 1
                self.suspect(wire)  # it was waited for in vain
                raise
        raise AssertionError

    def suspect(self, wire: PooledConnection) -> None:
        """Something over this connection was waited for in vain: the next session gets a new one."""
        if wire in self._wires:
            self._wires.remove(wire)
        wire.connection.abort()

    async def close(self) -> None:
        self._closed = True
        if (opening := self._opening) is not None:
            opening.cancel()
            await asyncio.wait([opening])  # it may have come to its end in this moment, and left a connection
        wires, self._wires = self._wires, []
        await asyncio.gather(*(wire.connection.close() for wire in wires))

    # -- connections ---------------------------------------------------------------------------

    async def _wire(self) -> PooledConnection:
        while True:
            for wire in self._wires:
                if wire.used < wire.most:
                    return wire
            if self._closed:
                raise HostDown(f"{self.name}: closed")
            # who asked may be cancelled; others wait for the same connection
            await asyncio.shield(self._open_soon())

    def _open_soon(self) -> asyncio.Task[PooledConnection]:
        if self._opening is None:
            self._begun.clear()
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return self._opening

    def _opened(self, task: asyncio.Task[PooledConnection]) -> None:
        self._opening = None
        self._begun.set()
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more

    async def _open(self) -> PooledConnection:
        lost = asyncio.Event()
        opened: list[PooledConnection] = []

        def on_lost() -> None:
            lost.set()
            for wire in opened:
                if wire in self._wires:
                    self._wires.remove(wire)

        wire = PooledConnection(await self._enter(on_lost))
        opened.append(wire)
        if not lost.is_set():
            self._wires.append(wire)
        return wire

    async def _enter(self, on_lost: Callable[[], None]) -> Connection:
        """A connection, also if our key must be let in first. Raises HostDown, HostRefused."""
        until: float | None = None
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S):
            try:
                async with self._handshakes:
                    self._begun.set()
                    return await open_connection(self.where, self.access, on_lost)
            except HostRefused as err:
                if err.stage != "login" or self._let_in is None:
                    raise
                if until is None:
                    self._begun.clear()  # while it is let in, it is not silent
                    try:
                        if not await self._let_in():
                            raise
                    finally:
                        self._begun.set()
                    until = time.monotonic() + LET_IN_S
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses never end")
