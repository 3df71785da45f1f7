"""One connection to a supervisor: JSON lines, answers matched to requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import msgspec
from msgspec import Raw, Struct

from evalfleet.model import EndReason, Metered, decodable

from .samples import ENGINE_DOWN, Load

encode = msgspec.json.Encoder().encode

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""
LINE_CAP = 16 << 20
LONGEST_TOLD_S = 86_400e6
"""Bytes of a message. The longest tells a result of 1 MB, each byte of which may take 6 as JSON."""


class Incoming(Struct):
    """An answer (`n`) or a push; the fields of all kinds.

    `result_bytes`: how large a result.json is that is too large to be told.
    """

    n: int | None = None
    push: str = ""
    error: str = ""
    detail: str = ""
    state: str = ""
    job: str = ""
    reason: EndReason = "lost"
    exit_code: int | None = None
    seconds: float = 0.0
    result: str | None = None
    result64: bytes | None = None
    result_bytes: int = 0
    pid: int = 0
    hash: str = ""
    jobs: Raw = Raw(b"{}")
    cpu: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    received: float | None = None
    sent: float | None = None
    containers: int | None = None
    data: bytes | None = None
    same: dict[str, str] = {}
    follower: int = 0
    offset: int = 0
    at_end: bool = False
    over: bool = False
    metered: Metered | None = None


class Pulse(Struct):
    """What a beat tells of a job that runs."""

    said: str = ""
    log_bytes: int = 0
    calls_bytes: int = 0


decode_line = msgspec.json.Decoder(decodable(Incoming)).decode
_pulses = msgspec.json.Decoder(decodable(dict[str, Pulse])).decode


def plain(text: str, cap: int = 500) -> str:
    """What a host says, in one line that a terminal shows and does not obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:cap])


def seconds_told(told: Any) -> float | None:
    """A time or a duration that a host tells; None if it is neither, or of more than a million days."""
    try:
        seconds = float(told)
    except (ValueError, TypeError, OverflowError):
        return None
    return seconds if abs(seconds) < LONGEST_TOLD_S else None


def said_in(beat: Incoming, job: str) -> str:
    """The last line of a job of set-up; empty from a supervisor that does not tell."""
    try:
        return _pulses(beat.jobs).get(job, Pulse()).said
    except UNREADABLE:
        return ""


MOST_JOBS = 1000
MOST_RATE = 1e12
MOST_CONTAINERS = 100_000


def written_bytes(beat: Incoming) -> dict[str, int]:
    """How much each job that runs there has written to its log, and the meter to the list of its calls."""
    try:
        pulses = _pulses(beat.jobs)
    except UNREADABLE:
        return {}
    return {job: pulse.log_bytes + pulse.calls_bytes for job, pulse in islice(pulses.items(), MOST_JOBS)}


def load_of(beat: Incoming) -> Load:
    """How busy the machine says it is, within bounds: it may say anything."""
    cpu, memory, disk = (min(max(share, 0.0), 1.0) for share in (beat.cpu, beat.memory, beat.disk))
    received, sent = (
        None if rate is None else min(max(rate, 0.0), MOST_RATE) for rate in (beat.received, beat.sent)
    )
    known = None if beat.containers is None else min(max(beat.containers, ENGINE_DOWN), MOST_CONTAINERS)
    return Load(cpu, memory, disk, received, sent, known)


class Hearer(Protocol):
    """Who is told what a link hears."""

    def on_push(self, message: Incoming) -> None: ...

    def on_refusal(self, message: Incoming) -> None: ...

    def on_lost(self, link: Link) -> None: ...

    def on_nonsense(self, why: str) -> None:
        """The other side said what no supervisor says; the connection is about to be dropped."""
        ...


class Lost(ConnectionError):
    """The connection ended before the answer came."""


class OpenLink(NamedTuple):
    """A connection to a machine's supervisor, which obeys who shows it the machine's key."""

    transport: asyncio.WriteTransport
    key: str = ""
    """Read where it is kept, on the machine; empty where a supervisor of an earlier version made none, and
    where the machine's end of a mailbox shows it."""
    write_secret: Callable[[bytes], None] | None = None
    """How a message with secrets is written, where it must not go with the others."""


Dial = Callable[[asyncio.Protocol], Awaitable[OpenLink]]
"""Connects the protocol to the machine's supervisor. OSError: try again; ChannelError: no use."""


class Link(asyncio.Protocol):
    """A connection to a supervisor, by callbacks instead of streams: a stream costs a task switch a
    message."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hearer: Hearer) -> None:
        self.heard = loop.time()
        self.asked = 0.0
        """When something was last said that is answered."""
        self.lost = False
        self._loop = loop
        self._hearer = hearer
        self._transport: asyncio.WriteTransport | None = None
        self._write_secret: Callable[[bytes], None] | None = None
        self._waiting: dict[int, Callable[[Incoming | None], None]] = {}
        self._count = 0
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._queued = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def use(self, line: OpenLink) -> None:
        """Take up the connection that was dialled."""
        self.connection_made(line.transport)
        self._write_secret = line.write_secret

    def data_received(self, data: bytes) -> None:
        if self.lost:
            return
        self.heard = self._loop.time()
        first, *others = data.split(b"\n")
        # joined when the line is whole: to join at every turn would take the square of its length
        self._rest.append(first)
        self._rest_bytes += len(first)
        for other in others:
            line = b"".join(self._rest) if len(self._rest) > 1 else self._rest[0]
            self._rest, self._rest_bytes = [other], len(other)
            if not self._hear(line):
                return
        if self._rest_bytes > LINE_CAP:
            self._give_up(f"a line of more than {LINE_CAP >> 20} MB")

    def _hear(self, line: bytes) -> bool:
        """False: it was nonsense, or the connection was dropped for another reason."""
        try:
            message = decode_line(line)
        except UNREADABLE:
            self._give_up(f"{line[:60]!r}")
            return False
        self._dispatch(message)
        return not self.lost

    def _give_up(self, why: str) -> None:
        self._rest, self._rest_bytes = [], 0
        self._hearer.on_nonsense(why)
        self.drop()  # not a supervisor, or a broken one: a new connection may help

    def _dispatch(self, message: Incoming) -> None:
        if message.push:
            self._hearer.on_push(message)
        elif message.n is not None:
            waiting = self._waiting.pop(message.n, None)
            if waiting is not None:
                waiting(message)
        elif message.error:
            self._hearer.on_refusal(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost:
            self.lost = True
            waiting, self._waiting = self._waiting, {}
            for call in waiting.values():
                call(None)
            self._hearer.on_lost(self)

    def drop(self) -> None:
        """Hang up without waiting for the other side: it may hear nothing."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def close(self) -> None:
        """Hang up once everything is sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
        self.connection_lost(None)

    def send(
        self,
        op: str,
        body: dict[str, Any],
        answered: Callable[[Incoming | None], None],
        *,
        is_secret: bool = False,
    ) -> None:
        """Send a request. `answered` gets the answer, or None if the connection is lost. Raises Lost.

        `is_secret`: the request holds secrets.
        """
        if self._transport is None or self.lost:
            raise Lost
        self._count = n = self._count + 1
        self._waiting[n] = answered
        self.asked = self._loop.time()
        message = encode({"op": op, "n": n, **body}) + b"\n"
        if is_secret and self._write_secret is not None:
            self.flush()
            self._write_secret(message)
        else:
            self._transport.write(self._queued + message)
            self._queued = b""

    def queue(self, op: str, body: dict[str, Any]) -> None:
        """What needs no answer goes with the next request."""
        self._queued += encode({"op": op, **body}) + b"\n"

    def flush(self) -> None:
        if self._queued and self._transport is not None and not self.lost:
            self._transport.write(self._queued)
            self._queued = b""

    async def ask(
        self,
        op: str,
        body: dict[str, Any],
        at_once: Callable[[Incoming], None] | None = None,
        *,
        is_secret: bool = False,
    ) -> Incoming:
        """The answer, which may be an error. `at_once` sees it before anything else is heard. Raises Lost."""
        future: asyncio.Future[Incoming] = self._loop.create_future()

        def answered(message: Incoming | None) -> None:
            if future.done():
                return  # who asked was cancelled
            if message is None:
                future.set_exception(Lost())
            else:
                if at_once is not None:
                    at_once(message)
                future.set_result(message)

        self.send(op, body, answered, is_secret=is_secret)
        return await future
