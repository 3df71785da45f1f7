"""A channel to a machine that nothing but a mailbox reaches: messages and files are mail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.channels.link import UNREADABLE, OpenLink, plain
from evalfleet.channels.parcels import ParcelChannel, ParcelMover, Stage, pack_bundle
from evalfleet.channels.session import OnLoad
from evalfleet.errors import ChannelError, SetupFailed
from evalfleet.model import Bundle, Collected, decodable
from evalfleet.ports import Fence

from .lines import Mail, MailTransport, open_mail

MOST_PIECES = 4
"""So many pieces of files may wait here before reading is paused."""
STALL_S = 900.0
"""A store may be away for ten minutes: what comes after it is no stall."""
ANSWER_CAP = 1 << 16
NO_JOB = 96
"""How the program that packs a job's files ends where there is no such job."""
GOODBYE_S = 5.0


MailKey: TypeAlias = "str | Callable[[], Awaitable[str]]"
"""The machine's key, or what tells it once it is needed. Raises OSError."""


async def _told(key: MailKey) -> str:
    return key if isinstance(key, str) else await key()


class Stream(asyncio.Protocol):
    """What comes on a line that carries files, piece by piece."""

    def __init__(self) -> None:
        self.line: MailTransport | None = None
        self._pieces: list[bytes] = []
        self._news = asyncio.Event()
        self._lost = False

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        if self.line is not None and len(self._pieces) >= MOST_PIECES:
            self.line.pause_reading()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._news.set()

    async def read(self) -> bytes:
        """What comes next; empty once the line is over. Raises ConnectionError if nothing comes for long."""
        while not self._pieces and not self._lost:
            self._news.clear()
            try:
                async with asyncio.timeout(STALL_S):
                    await self._news.wait()
            except TimeoutError:
                raise ConnectionError(f"nothing came of the files for {STALL_S:g} s") from None
        if self.line is not None:
            self.line.resume_reading()
        return self._pieces.pop(0) if self._pieces else b""


class PutAnswer(msgspec.Struct, frozen=True):
    """What the program says that unpacks a bundle's files."""

    error: str = ""
    detail: str = ""


class MailMover(ParcelMover):
    """A mover of files that go through the mailbox, too: large ones on lines of their own."""

    def __init__(
        self, mail: Mail, key: MailKey, secrets: Mapping[str, str], caps: Caps = STANDARD_CAPS
    ) -> None:
        super().__init__(secrets, caps)
        self._mail, self._key = mail, key

    async def _open(self, verb: str, request: Mapping[str, Any]) -> tuple[Stream, MailTransport]:
        stream = Stream()
        try:
            stream.line = await open_mail(self._mail, await _told(self._key), stream, verb)
        except OSError as err:
            raise ConnectionError(str(err)) from err
        stream.line.write(json.dumps(request).encode() + b"\n")
        return stream, stream.line

    async def _send(self, bundle: Bundle, same: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        stream, line = await self._open("put", {"digest": bundle.digest})

        async def send(data: bytes) -> None:
            line.write(data)
            await line.drain()

        def write(data: bytes) -> None:
            asyncio.run_coroutine_threadsafe(send(data), loop).result()

        try:
            await asyncio.to_thread(pack_bundle, bundle, same, write)
            line.write_eof()
            said = b""
            while len(said) < ANSWER_CAP and (data := await stream.read()):
                said += data
        finally:
            line.close()
        try:
            answer = msgspec.json.decode(said, type=decodable(PutAnswer))
        except UNREADABLE:
            raise ConnectionError(f"the machine answered {said[:100]!r}, and {line.code}") from None
        if answer.error:
            raise SetupFailed("files", plain(answer.detail))

    async def _receive(self, caps: dict[str, Any], into: Path) -> Collected:
        stage = await asyncio.to_thread(Stage, into, self._caps)
        try:
            stream, line = await self._open("pack", caps)
            try:
                while data := await stream.read():
                    self.alive()
                    await asyncio.to_thread(stage.unpacker.feed, data)
            finally:
                line.close()
            if line.code == NO_JOB:
                raise ChannelError(f"no files of job {caps['job']!r} are on the machine")
            return await asyncio.to_thread(stage.settle, self._values)
        finally:
            await asyncio.to_thread(stage.remove)


class MailChannel(ParcelChannel):
    """A channel to a machine that only a mailbox reaches: all that goes there and back is mail."""

    hello_s = 30.0  # both ends look every two seconds, and a store may be slow
    watch_s = 15.0  # each word costs a handful of requests

    def __init__(
        self,
        mail: Mail,
        key: MailKey,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: OnLoad | None = None,
        caps: Caps = STANDARD_CAPS,
    ) -> None:
        self._line: MailTransport | None = None

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
            self._line = await open_mail(mail, await _told(key), protocol)
            return OpenLink(self._line, write_secret=self._line.write_secret)

        super().__init__(dial, MailMover(mail, key, secrets, caps), fence, secrets, on_load)

    async def close(self) -> None:
        """Says goodbye, so that the machine does not go on writing, but not for long."""
        await super().close()
        if self._line is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._line.ended.wait()
            self._line.abort()
