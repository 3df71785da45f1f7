"""A machine on a host as a Channel: the line to its supervisor, and files there and back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncssh

from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.channels.link import Dial, OpenLink
from evalfleet.channels.parcels import ParcelChannel, ParcelMover, Stage, pack_bundle
from evalfleet.channels.session import OnLoad
from evalfleet.channels.supervisor.parcel import BadParcel
from evalfleet.errors import ChannelError, SetupFailed
from evalfleet.model import AttemptId, Bundle, Collected, Ended, Isolation
from evalfleet.ports import Fence, TellStep

from .connection import OPENING_ERRORS, reason_of
from .host_home import NO_SUPERVISOR, HostHome
from .hosts import SAID_CAP, Errors, PooledConnection, SshHost, converse
from .target import HostDown, HostLost

READ = 4 << 20
"""More than asyncssh holds before it pauses (2 MiB). What a read leaves there makes asyncssh let the host
send far more than was read: a big file would pile up in memory while our disk is slow."""
STALL_S = 45.0


class SshMover(ParcelMover):
    """A mover of files between here and one machine on a host."""

    interrupted = (HostDown, HostLost, BadParcel, asyncssh.Error)

    def __init__(
        self,
        host_home: HostHome,
        machine: str,
        secrets: Mapping[str, str],
        caps: Caps = STANDARD_CAPS,
        stall_s: float = STALL_S,
    ) -> None:
        super().__init__(secrets, caps)
        self._host_home = host_home
        self._machine = machine
        self._stall_s = stall_s

    async def _send(self, bundle: Bundle, same: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        async with self._host_home.host.process(self._host_home.command("put", self._machine)) as process:

            async def send(data: bytes) -> None:
                process.stdin.write(data)
                await process.stdin.drain()
                self.alive()

            def write(data: bytes) -> None:
                asyncio.run_coroutine_threadsafe(send(data), loop).result()

            with contextlib.suppress(BrokenPipeError):  # it has ended already, and tells why
                await send(self._host_home.request(self._machine, {"digest": bundle.digest}))
                await asyncio.to_thread(pack_bundle, bundle, same, write)
            said, errors = await converse(process)
            self._host_home.check(process.exit_status, errors)
        answer = self._host_home.answer(said)
        if answer.error:
            raise SetupFailed("files", f"{self._host_home.host.name}: {answer.detail}")

    async def _receive(self, caps: dict[str, Any], into: Path) -> Collected:
        stage = await asyncio.to_thread(Stage, into, self._caps)
        try:
            async with self._host_home.host.process(
                self._host_home.command("pack", self._machine)
            ) as process:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(self._host_home.request(self._machine, caps))
                async with Errors(process) as errors:
                    while data := await self._next(process):
                        self.alive()
                        await asyncio.to_thread(stage.unpacker.feed, data)
                await converse(process)
                self._host_home.check(process.exit_status, errors.end)
            return await asyncio.to_thread(stage.settle, self._values)
        except HostLost as err:
            if isinstance(err.__cause__, TimeoutError):
                raise err.__cause__ from None  # to ask again would not help
            raise
        finally:
            await asyncio.to_thread(stage.remove)

    async def _next(self, process: asyncssh.SSHClientProcess[bytes]) -> bytes:
        """What comes next of a stream. Raises TimeoutError if nothing does."""
        try:
            async with asyncio.timeout(self._stall_s):
                return await process.stdout.read(READ)
        except TimeoutError:
            raise TimeoutError(
                f"{self._host_home.host.name}: nothing came of the files for {self._stall_s:g} s"
            ) from None


# -- the channel --------------------------------------------------------------------------------------------

READY = re.compile(rb"(?:^|\n)ok ([^ \n]*) ([0-9a-f]*)\n$")
WORDS_CAP = 4096


class Direct(asyncssh.SSHUNIXSession[bytes]):
    """Hands on what arrives from the supervisor's socket."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.channel: Any = None  # an SSHUNIXChannel, whose methods have no types
        self.lost = False
        self._protocol = protocol

    def connection_made(self, chan: asyncssh.SSHUNIXChannel[bytes]) -> None:
        self.channel = chan

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        self._protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._protocol.connection_lost(exc)


class Bridge(asyncssh.SSHClientSession[bytes]):
    """Tells where the supervisor is, and hands on what its process carries, if it is told to."""

    def __init__(self, request: bytes) -> None:
        self.channel: Any = None  # an SSHClientChannel, whose methods have no types
        self.status: int | None = None
        self.errors = b""
        self.lost = False
        self.flood = False
        self.address = self.key = ""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.at_end: list[Any] = []
        self._request = request
        self._protocol: asyncio.Protocol | None = None
        self._head = b""
        self._open = False
        self._noise = 0

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self.channel = chan

    def carry_for(self, protocol: asyncio.Protocol) -> None:
        """There is no other way. The supervisor has said nothing yet: it speaks when it is spoken to."""
        self._protocol = protocol

    def leave(self) -> None:
        """We are connected without it."""
        if not self.lost:
            self.channel.close()

    def session_started(self) -> None:
        if self.channel is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and tells why
                self.channel.write(self._request)

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None or not self._open:
            self._noise += len(data)
            if self._noise > SAID_CAP:
                self.flood = True
                self.leave()
                if not self.ready.done():
                    self.ready.set_result(False)  # now: who floods us need not say goodbye
                return
        if datatype is not None:
            self.errors = (self.errors + data)[-WORDS_CAP:]
        elif not self._open:
            self._head = (self._head + data)[-WORDS_CAP:]  # a login shell may have said something first
            if (found := READY.search(self._head)) is not None:
                self.address, self.key = (word.decode("ascii", "replace") for word in found.groups())
                self._open = True
                if not self.ready.done():
                    self.ready.set_result(True)
        elif self._protocol is not None:
            self._protocol.data_received(data)

    def exit_status_received(self, status: int) -> None:
        self.status = status

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for call in self.at_end:
            call()
        if not self.ready.done():
            self.ready.set_result(False)
        elif self._protocol is not None:
            self._protocol.connection_lost(exc)


class SshTransport(asyncio.WriteTransport):
    """What a Link needs of a transport."""

    def __init__(self, host: SshHost, wire: PooledConnection, session: Direct | Bridge) -> None:
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


async def dial(host_home: HostHome, machine: str, fence: Fence, protocol: asyncio.Protocol) -> OpenLink:
    """Connect the protocol to the machine's supervisor. OSError: try again; ChannelError: no use."""
    for brought in (False, True):
        wire, bridge = await _begin(host_home, machine, fence)
        try:
            if await bridge.ready:
                session = await _connect(wire, bridge, protocol)
                return OpenLink(SshTransport(host_home.host, wire, session), bridge.key)
        except asyncio.CancelledError:
            if not bridge.lost:
                host_home.host.suspect(wire)  # it was waited for in vain
            raise
        if bridge.flood:
            raise host_home.host.flooded()
        if bridge.status == NO_SUPERVISOR and not brought:
            await host_home.bring_supervisor()
            continue
        host_home.check(bridge.status, bridge.errors)
        break
    raise HostLost(f"{host_home.host.name}: there is no line to the supervisor")


async def _begin(host_home: HostHome, machine: str, fence: Fence) -> tuple[PooledConnection, Bridge]:
    request = host_home.connect_request(machine, fence)
    command = host_home.command("connect", machine)
    wire, bridge = await host_home.host.session(lambda: Bridge(request), command)

    def release() -> None:
        wire.used -= 1

    if bridge.lost:
        release()
    else:
        bridge.at_end.append(release)
    return wire, bridge


async def _connect(wire: PooledConnection, bridge: Bridge, protocol: asyncio.Protocol) -> Direct | Bridge:
    """Connect by the server's own connection to the supervisor, or by the bridge where it makes none."""
    direct: Direct | None = None
    untyped: Any = wire.connection.ssh
    try:
        if bridge.address:
            _, direct = await untyped.create_unix_connection(lambda: Direct(protocol), bridge.address)
    except asyncssh.ChannelOpenError:
        pass  # forwarding is not allowed there, or the supervisor has just left
    except OPENING_ERRORS as err:
        raise HostLost(f"the connection was lost: {reason_of(err)}") from err
    if direct is not None:
        bridge.leave()
        return direct
    if bridge.lost:
        raise HostLost("the line to the supervisor was lost as it was made")
    bridge.carry_for(protocol)
    return bridge


Verdict = Callable[[bool], None]
"""Told after each job, and each failed set-up: did the host do well?"""


class SshChannel(ParcelChannel):
    """One machine on a host. Its line to the supervisor is renewed when lost, while anybody waits.

    `made`: the host is a machine that we made, so that sudo is used for isolation without being asked for it.
    `connect`: another way to the supervisor than through the host's own socket.
    `stall_s`: so long files may stop coming before they are given up.
    """

    def __init__(
        self,
        host_home: HostHome,
        machine: str,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: OnLoad | None = None,
        verdict: Verdict | None = None,
        caps: Caps = STANDARD_CAPS,
        made: bool = False,
        connect: Dial | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        async def connect_there(protocol: asyncio.Protocol) -> OpenLink:
            return await dial(host_home, machine, fence, protocol)

        mover = SshMover(host_home, machine, secrets, caps, stall_s)
        super().__init__(connect or connect_there, mover, fence, secrets, on_load)
        self._host_home, self._machine, self._made = host_home, machine, made
        self._verdict = verdict

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> dict[str, float]:
        try:
            return await super().prepare(bundle, left, tell)
        except SetupFailed:
            self._judge(False)
            raise

    async def _turn(self) -> None:
        await self._host_home.host.turn()

    async def _elevate(self, wanted: Isolation) -> str:
        """Become root by sudo, where the machine is ours or whoever set the place up has asked for it."""
        if wanted != "user" and not self._made:
            return 'the login is not root; with isolation = "user", sudo is tried'
        run, epoch = self._fence.run, self._fence.epoch
        try:
            answer = await self._host_home.ask("elevate", self._machine, run=run, epoch=epoch)
        except OSError as err:  # the connection was lost: who waits patiently asks again
            raise ChannelError(str(err)) from err
        return answer.detail or answer.error

    async def ended(self, job: AttemptId) -> Ended:
        ended = await super().ended(job)
        self._judge(ended.result is not None or ended.exit_code == 0)
        return ended

    def _judge(self, well: bool) -> None:
        if self._verdict is not None:
            self._verdict(well)
