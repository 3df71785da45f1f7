"""The controller's end of a mailbox: lines to machines that nobody can reach, as objects in a store.

How a mailbox works is said in `supervisor.mailbox`, which is its other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from evalfleet.errors import FleetError
from evalfleet.ports import Objects

from .supervisor.mailbox import (
    OBJECT_CAP,
    PAYLOAD_BYTES,
    WINDOW,
    Pace,
    is_beat,
    mail_in,
    mail_new,
    mail_out,
    opened,
    sealed,
)

STORE_PACE_S = (1.5, 2.0)
"""How soon to look again after something has happened, and how often while nothing does."""
REMOVE_AT = 16
"""Objects that were read are removed so many at once."""
QUICK_BYTES = 256 << 10
P = ParamSpec("P")
T = TypeVar("T")


class Mail(Protocol):
    """The objects of one mailbox, as the controller reaches them. OSError: not now, perhaps later."""

    pace_s: tuple[float, float]

    async def create(self, name: str, content: bytes) -> bool:
        """False if there is an object of this name: nothing was written."""
        ...

    async def read(self, name: str) -> bytes | None:
        """None if there is none. What is too long to be mail is cut off."""
        ...

    async def find(self, name: str, pace: Pace, after_s: float) -> bytes:
        """The object of this name, once there is one: it is looked for after so many seconds, then at this
        pace, however long the store is away."""
        while True:
            await asyncio.sleep(after_s)
            after_s = pace.slow_s
            with contextlib.suppress(OSError):
                content = await self.read(name)
                if content is not None:
                    return content
                after_s = pace.next()

    async def names(self, below: str) -> list[str]: ...

    async def remove(self, names: Sequence[str]) -> None:
        """Remove those of the objects that are there."""
        ...


class StoreMail(Mail):
    """A mailbox below a prefix of a store; `opened` opens it, anew where a token has expired."""

    def __init__(
        self,
        opened: Callable[[], Awaitable[Objects]],
        prefix: str = "",
        pace_s: tuple[float, float] = STORE_PACE_S,
    ) -> None:
        self.pace_s = pace_s
        self._opened = opened
        self._prefix = f"{prefix}/" if prefix else ""

    async def create(self, name: str, content: bytes) -> bool:
        with _away():
            try:
                await (await self._opened()).create(self._prefix + name, content)
            except FileExistsError:
                return False
            return True

    async def read(self, name: str) -> bytes | None:
        with _away():
            return await (await self._opened()).read(self._prefix + name, OBJECT_CAP + 1)

    async def names(self, below: str) -> list[str]:
        with _away():
            names = await (await self._opened()).names(self._prefix + below)
        return [name.removeprefix(self._prefix) for name in names]

    async def remove(self, names: Sequence[str]) -> None:
        with _away():
            await (await self._opened()).remove([self._prefix + name for name in names])


@contextlib.contextmanager
def _away() -> Generator[None]:
    try:
        yield
    except FleetError as err:
        raise OSError(str(err)) from err


class MailTransport(asyncio.WriteTransport):
    """One line of a mailbox, as a transport. What is written is put into objects, what comes is read.

    A store that does not answer is asked again for as long as the line is wanted: it is who waits for an
    answer that gives it up.
    """

    def __init__(
        self, mail: Mail, key: str, protocol: asyncio.Protocol, next_new: int, verb: str = ""
    ) -> None:
        super().__init__()
        self.name = os.urandom(8).hex()
        self.ended = asyncio.Event()
        self.code: int | None = None
        """How the program at the other end ended, where the line leads to one."""
        self._mail, self._key, self._protocol, self._verb = mail, key, protocol, verb
        self._way: Mapping[str, Any] | None = None
        self._next_new = next_new
        self._first = ""  # the name of the object that opened the line
        self._buffer = bytearray()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._pace = Pace(*mail.pace_s)
        self._written = self._acknowledged = self._read = self._told_read = 0
        self._rubbish: list[str] = []
        self._closing = self._half = self._said_half = self._over = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._read_all())]

    # -- a transport ---------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._buffer += data
            self._wake.set()

    async def drain(self) -> None:
        """Returns when little of what was written is still here, or the line is over."""
        while len(self._buffer) >= PAYLOAD_BYTES and not self.ended.is_set():
            self._drained.clear()
            await self._drained.wait()

    def renew(self, way: Mapping[str, Any]) -> None:
        """Tell the machine another way to its mailbox: its token is about to expire."""
        self._way = way
        self._wake.set()

    def pause_reading(self) -> None:
        """Objects wait in the store, as far as the machine may write ahead."""
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def write_eof(self) -> None:
        self._half = True
        self._wake.set()

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Once everything is written."""
        if not self._closing:
            self._closing = True
            self._wake.set()

    def abort(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        self.ended.set()
        self._drained.set()

    # -- its two directions --------------------------------------------------------------------

    async def _write_all(self) -> None:
        while not self._over:
            await self._wake.wait()
            self._wake.clear()
            while self._owes() and self._written - self._acknowledged < WINDOW and not self._over:
                await self._write_one({})
            if self._closing and not self._buffer:
                break
        # where the machine is gone with its mailbox, nothing is to be left there
        if self._first and not self._over:
            first = await self._patiently(self._mail.read, self._first)
            if first is not None:
                await self._write_one({"end": True})
        await self._remove(0)
        self.abort()

    def _owes(self) -> bool:
        half = self._half and not self._said_half
        return (
            bool(self._buffer) or half or self._way is not None or self._read - self._told_read >= WINDOW // 2
        )

    async def _write_one(self, header: dict[str, Any]) -> None:
        number, payload = self._written + 1, bytes(self._buffer[:PAYLOAD_BYTES])
        half = self._half and len(payload) == len(self._buffer)
        header = {"n": number, "read": self._read, **header, **({"half": True} if half else {})}
        way, self._way = self._way, None
        if way is not None:
            header["way"] = way
        if number == 1:
            await self._open({**header, "line": self.name, "verb": self._verb}, payload)
        else:
            name = mail_in(self.name, number)
            # a large one is sealed in a thread: others need the loop meanwhile
            seal = functools.partial(sealed, self._key, name, header, payload)
            content = await asyncio.to_thread(seal) if len(payload) > QUICK_BYTES else seal()
            if not await self._patiently(self._create, name, content):
                self._forged(b"another object in place of ours")
                return
        self._written, self._told_read = number, header["read"]
        self._said_half = self._said_half or half
        del self._buffer[: len(payload)]
        self._drained.set()
        self._pace.stir()

    async def _open(self, header: dict[str, Any], payload: bytes) -> None:
        """Under the next number that is free: others may open lines at the same time."""
        while not self._first:
            name = mail_new(self._next_new)
            if await self._patiently(self._create, name, sealed(self._key, name, header, payload)):
                self._first = name
            self._next_new += 1

    async def _create(self, name: str, content: bytes) -> bool:
        # the answer to an earlier try may have been lost on its way to us
        return await self._mail.create(name, content) or await self._mail.read(name) == content

    async def _read_all(self) -> None:
        after_s = self._pace.next()
        while not self._over:
            await self._may_read.wait()
            name = mail_out(self.name, self._read + 1)
            content = await self._mail.find(name, self._pace, after_s)
            try:
                unseal = functools.partial(opened, self._key, name, content)
                header, payload = await asyncio.to_thread(unseal) if len(content) > QUICK_BYTES else unseal()
                acknowledged, code = int(header["read"]), int(header.get("code") or 0)
            except (ValueError, KeyError, TypeError, OverflowError):
                self._forged(content)
                return
            self._read += 1
            self._rubbish.append(name)
            self._rubbish += [
                mail_in(self.name, number)
                for number in range(max(self._acknowledged, 1) + 1, min(acknowledged, self._written) + 1)
            ]
            self._acknowledged = max(self._acknowledged, min(acknowledged, self._written))
            await self._remove(REMOVE_AT)
            if payload:
                if not is_beat(payload):
                    self._pace.stir()
                self._protocol.data_received(payload)
            if header.get("end"):
                self.code = code
                self._hang_up()
            self._wake.set()
            # what comes after the last piece of something is seldom there yet
            after_s = 0.0 if len(payload) >= PAYLOAD_BYTES else self._pace.next()

    def _forged(self, content: bytes) -> None:
        """Hand on what is no mail as the nonsense it is: a machine that repeats it is condemned."""
        self._protocol.data_received(b"\0" + content[:60].replace(b"\n", b" ") + b"\n")
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._over:
            self._over = self._closing = True
            self._protocol.connection_lost(None)
            self._wake.set()

    async def _remove(self, least: int) -> None:
        """What both ends have read."""
        if self._rubbish and len(self._rubbish) >= least:
            rubbish, self._rubbish = self._rubbish, []
            await self._patiently(self._mail.remove, rubbish)

    async def _patiently(self, call: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        """Again and again while the store is away."""
        while True:
            try:
                return await call(*args, **options)
            except OSError:
                await asyncio.sleep(self._mail.pace_s[1])


async def open_mail(mail: Mail, key: str, protocol: asyncio.Protocol, verb: str = "") -> MailTransport:
    """A new line to whoever empties this mailbox. Raises OSError if the store does not answer."""
    numbers = [name.rpartition("/")[2] for name in await mail.names("new")]
    newest = max((int(number) for number in numbers if re.fullmatch("[0-9]{10,18}", number)), default=0)
    return MailTransport(mail, key, protocol, newest + 1, verb)


async def empty_mail(mail: Mail) -> None:
    """Remove all of a mailbox: its machine is gone. Raises OSError."""
    for below in ("new", "in", "out"):
        if names := await mail.names(below):
            await mail.remove(names)
