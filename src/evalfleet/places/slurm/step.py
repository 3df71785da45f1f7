"""A line to a supervisor through the standard streams of a program."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import cast

from evalfleet.channels import children
from evalfleet.channels.link import plain

READY = b"ok  \n"
"""What the program says; over SSH, an address and a key may stand between the spaces."""
WORDS_CAP = 4096
WORDS_S = 2.0


class StepTransport(asyncio.WriteTransport, asyncio.SubprocessProtocol):
    """A program that carries bytes. What it prints goes to the protocol, once it has said `ok`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.errors = b""
        self._protocol = protocol
        self._process: asyncio.SubprocessTransport | None = None
        self._head = b""
        self._open = self._lost = False
        self._exited = self._has_spoken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.errors = (self.errors + data)[-WORDS_CAP:]
        elif self._open:
            self._protocol.data_received(data)
        else:
            self._head = (self._head + data)[-WORDS_CAP:]
            before, found, rest = self._head.partition(READY)
            if found and (not before or before.endswith(b"\n")):
                self._open = True
                if not self.ready.done():
                    self.ready.set_result(True)
                if rest:
                    self._protocol.data_received(rest)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 2:
            self._has_spoken = True
            if self._exited:
                self._end()

    def process_exited(self) -> None:
        """What it said last may be read only now: it says why it could not begin."""
        self._exited = True
        if self._has_spoken or self.ready.done():
            self._end()
        else:  # whoever it has started may hold its stderr open for ever
            asyncio.get_running_loop().call_later(WORDS_S, self._end)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
        self.ended.set()
        if not self._lost:
            self._lost = True
            if not self.ready.done():
                self.ready.set_result(False)
            else:
                self._protocol.connection_lost(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pipe = self._process.get_pipe_transport(0) if self._process is not None else None
        if pipe is not None and not self._lost:
            cast("asyncio.WriteTransport", pipe).write(data)

    def is_closing(self) -> bool:
        return self._lost

    def close(self) -> None:
        """End of input ends the program, once it has everything."""
        pipe = self._process.get_pipe_transport(0) if self._process is not None else None
        if pipe is not None and not self._lost:
            cast("asyncio.WriteTransport", pipe).close()

    def abort(self) -> None:
        if self._process is not None and not self._lost:
            children.send_signal(self._process, signal.SIGKILL)


async def open_step(
    argv: Sequence[str], environ: Mapping[str, str], protocol: asyncio.Protocol, patience_s: float
) -> StepTransport:
    """Start the program, and return once it has reached the supervisor. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, step = await loop.subprocess_exec(
        lambda: StepTransport(protocol),
        *argv,
        env=environ,
        start_new_session=True,  # srun would end the step at Ctrl-C, which is for us
    )
    try:
        async with asyncio.timeout(patience_s):
            if await step.ready:
                return step
    except BaseException:
        step.abort()
        raise
    said = plain(step.errors.decode("utf-8", "replace").strip()) or "it ended without a word"
    raise OSError(f"{argv[0]}: {said}")
