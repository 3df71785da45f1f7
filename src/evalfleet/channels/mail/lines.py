"""The controller's end of a mailbox: lines to machines that it cannot reach, as objects in a store.

`supervisor.mailbox` is the other end, and explains how a mailbox works.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from evalfleet.channels.supervisor.mailbox import (
    OBJECT_CAP,
    PAYLOAD_BYTES,
    WINDOW,
    Pace,
    is_beat,
    line_name,
    mail_in,
    mail_new,
    mail_out,
    once_of,
    opened,
    sealed,
)
from evalfleet.errors import FleetError
from evalfleet.ports import Bucket

STORE_PACE_S = (1.5, 2.0)
"""How soon to look again after something has happened, and how often while nothing does."""
REMOVE_AT = 16
"""Objects that were read are removed so many at once."""
QUICK_BYTES = 256 << 10
LINES_AHEAD = 16
"""A machine has the addresses of the first objects of so many lines that are not open yet."""
INPUTS_AHEAD = 4
"""It has those of so many objects that come next on a line."""
ADDRESSES_S = 7 * 86_400.0 - 300.0
"""How long addresses last at most. S3 and Azure sign for a week, and clocks differ."""
P = ParamSpec("P")
T = TypeVar("T")


class Mail(Protocol):
    """The objects of one mailbox, as the controller reaches them. OSError: not now, perhaps later."""

    pace_s: tuple[float, float]
    is_signed: bool = False
    """Does the machine need an address for each object?"""

    async def addresses(self, uses: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Return signed addresses for methods and names of objects, by "METHOD NAME". Empty where the machine
        sees the objects itself."""
        return {}

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


def first_uses(numbers: range) -> list[tuple[str, str]]:
    """What a machine does with the objects by which lines of these numbers begin: methods and names."""
    uses: list[tuple[str, str]] = []
    for number in numbers:
        second = mail_in(line_name(number), 2)
        uses += [("GET", mail_new(number)), *_input_uses(second)]
    return uses


def _input_uses(name: str) -> list[tuple[str, str]]:
    return [("GET", name), ("GET", once_of(name)), ("DELETE", once_of(name))]


class StoreMail(Mail):
    """A mailbox below a prefix of a bucket. `opened` opens the bucket."""

    is_signed = True

    def __init__(
        self,
        opened: Callable[[], Awaitable[Bucket]],
        prefix: str = "",
        pace_s: tuple[float, float] = STORE_PACE_S,
    ) -> None:
        self.pace_s = pace_s
        self._opened = opened
        self._prefix = f"{prefix}/" if prefix else ""

    async def addresses(self, uses: Sequence[tuple[str, str]]) -> dict[str, str]:
        with _away():
            return await signed(await self._opened(), self._prefix, uses, ADDRESSES_S)

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


async def signed(
    bucket: Bucket, prefix: str, uses: Sequence[tuple[str, str]], seconds: float
) -> dict[str, str]:
    """Return addresses for methods and names below the prefix, by "METHOD NAME". Raises FleetError."""
    addresses: dict[str, str] = {}
    for method in sorted({method for method, _ in uses}):
        names = [name for other, name in uses if other == method]
        urls = await bucket.sign(method, [prefix + name for name in names], seconds)
        addresses.update({f"{method} {name}": url for name, url in zip(names, urls, strict=True)})
    return addresses


@contextlib.contextmanager
def _away() -> Generator[None]:
    try:
        yield
    except FleetError as err:
        raise OSError(str(err)) from err


class Piece(NamedTuple):
    """Bytes that wait to be written. Those with a secret go into an object below `once`."""

    data: bytearray
    is_secret: bool


class MailTransport(asyncio.WriteTransport):
    """One line of a mailbox, as a transport. What is written is put into objects, what comes is read.

    A store that does not answer is asked again for as long as the line is wanted: it is who waits for an
    answer that gives it up.
    """

    def __init__(
        self, mail: Mail, key: str, protocol: asyncio.Protocol, next_new: int, verb: str = ""
    ) -> None:
        super().__init__()
        self.name = ""
        """The line's name; empty until its first object is written."""
        self.ended = asyncio.Event()
        self.code: int | None = None
        """How the program at the other end ended, where the line leads to one."""
        self._mail, self._key, self._protocol, self._verb = mail, key, protocol, verb
        self._next_new = next_new
        self._first = ""  # the name of the object that opened the line
        self._pieces: deque[Piece] = deque()
        self._has_opened = asyncio.Event()
        self._addressed_in, self._addressed_out = 1, 0
        """Up to these numbers the machine has the addresses of objects."""
        self._wants_addresses = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._pace = Pace(*mail.pace_s)
        self._written = self._acknowledged = self._read = self._told_read = 0
        self._rubbish: list[str] = []
        self._unread_once: dict[int, str] = {}
        """By number: objects below `once` that the machine has not said to have read, and so removed."""
        self._closing = self._half = self._said_half = self._over = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._read_all())]

    # -- a transport ---------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._add(data, is_secret=False)

    def write_secret(self, data: bytes) -> None:
        """Write bytes that must not stay in the store."""
        self._add(data, is_secret=True)

    def _add(self, data: bytes | bytearray | memoryview, *, is_secret: bool) -> None:
        if self._closing:
            return
        if not self._pieces or self._pieces[-1].is_secret != is_secret:
            self._pieces.append(Piece(bytearray(), is_secret))
        self._pieces[-1].data.extend(data)
        self._wake.set()

    async def drain(self) -> None:
        """Return when little of what was written is still here, or the line is over."""
        while sum(len(piece.data) for piece in self._pieces) >= PAYLOAD_BYTES and not self.ended.is_set():
            self._drained.clear()
            await self._drained.wait()

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
            if self._closing and not self._pieces:
                break
        # where the machine is gone with its mailbox, nothing is to be left there
        if self._first and not self._over:
            first = await self._patiently(self._mail.read, self._first)
            if first is not None:
                await self._write_one({"end": True})
        self._rubbish += self._unread_once.values()
        await self._remove(0)
        self.abort()

    def _owes(self) -> bool:
        half = self._half and not self._said_half
        return (
            bool(self._pieces) or half or self._wants_addresses or self._read - self._told_read >= WINDOW // 2
        )

    async def _write_one(self, header: dict[str, Any]) -> None:
        number = self._written + 1
        piece = self._pieces[0] if self._pieces else Piece(bytearray(), is_secret=False)
        payload = b"" if number == 1 and piece.is_secret else bytes(piece.data[:PAYLOAD_BYTES])
        half = self._half and len(self._pieces) <= 1 and len(payload) == len(piece.data)
        header = {"n": number, "read": self._read, **header, **({"half": True} if half else {})}
        if number == 1:
            await self._open({**header, "verb": self._verb}, payload)
        else:
            name = mail_in(self.name, number)
            addresses = await self._patiently(self._next_addresses, number)
            if addresses or piece.is_secret:
                await self._write_object(once_of(name), {"urls": addresses}, payload)
                self._unread_once[number] = once_of(name)
                header, written = {**header, "once": True}, b""
            else:
                written = payload
            if not await self._write_object(name, header, written):
                self._forged(b"another object in place of ours")
                return
        self._written, self._told_read = number, header["read"]
        self._said_half = self._said_half or half
        del piece.data[: len(payload)]
        if self._pieces and self._pieces[0] is piece and not piece.data:
            self._pieces.popleft()
        self._drained.set()
        self._pace.stir()

    async def _write_object(self, name: str, header: dict[str, Any], payload: bytes) -> bool:
        """Return False if there is another object of this name."""
        # the hash of a large one is made in a thread: others need the loop meanwhile
        seal = functools.partial(sealed, self._key, name, header, payload)
        content = await asyncio.to_thread(seal) if len(payload) > QUICK_BYTES else seal()
        return await self._patiently(self._create, name, content)

    async def _next_addresses(self, number: int) -> dict[str, str]:
        """Return addresses of what comes after the line's object of this number, where the machine runs short
        of them. The line's second object brings those of the next lines, too."""
        uses: list[tuple[str, str]] = []
        inputs, outputs = self._addressed_in, self._addressed_out
        if self._addressed_in <= number:
            inputs = number + INPUTS_AHEAD
            for later in range(max(number, self._addressed_in) + 1, inputs + 1):
                uses += _input_uses(mail_in(self.name, later))
        if self._read + WINDOW - self._addressed_out >= WINDOW // 2:
            outputs = self._read + WINDOW
            uses += [
                ("PUT", mail_out(self.name, later)) for later in range(self._addressed_out + 1, outputs + 1)
            ]
        if number == 2:
            uses += first_uses(range(self._next_new, self._next_new + LINES_AHEAD))
        addresses = await self._mail.addresses(uses) if uses else {}
        self._addressed_in, self._addressed_out = inputs, outputs
        self._wants_addresses = False
        return addresses

    async def _open(self, header: dict[str, Any], payload: bytes) -> None:
        """Write the first object under the next free number: others may open lines at the same time."""
        while not self._first:
            name = mail_new(self._next_new)
            if await self._patiently(self._create, name, sealed(self._key, name, header, payload)):
                self._first, self.name = name, line_name(self._next_new)
            self._next_new += 1
        self._wants_addresses = self._mail.is_signed
        self._has_opened.set()

    async def _create(self, name: str, content: bytes) -> bool:
        # the answer to an earlier try may have been lost on its way to us
        return await self._mail.create(name, content) or await self._mail.read(name) == content

    async def _read_all(self) -> None:
        await self._has_opened.wait()
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
            for number in [number for number in self._unread_once if number <= self._acknowledged]:
                del self._unread_once[number]
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
