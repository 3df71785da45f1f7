"""The controller's side of following a file on a machine: pieces in order, with secrets masked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from evalfleet.model import AttemptId, Piece

from .link import Incoming
from .secrecy import MASK, SHORTEST, Secrets

Ask = Callable[[str, dict[str, Any]], Awaitable[Incoming]]

MOST_WAITING = 64
"""Pieces that may wait to be taken. What comes beyond that is asked for again later."""
PIECE_CAP = 1 << 20
LAST_OFFSET = 1 << 62


class MaskedStream:
    """A mask over a file that comes in pieces: it hides values of secrets, also one that lies across two
    pieces."""

    def __init__(self, secrets: Secrets, offset: int) -> None:
        self._secrets = secrets
        self._rest = b""
        self._next = offset
        self._cut = offset > 0
        """What comes next may begin in the middle of a value."""

    @property
    def offset(self) -> int:
        """Where in the file what was not handed out yet begins."""
        return self._next - len(self._rest)

    def feed(self, offset: int, data: bytes, over: bool) -> tuple[int, bytes]:
        """What can be shown now, and where it begins. The rest may be the beginning of a value."""
        if offset != self._next:
            self._rest, self._cut = b"", offset > 0
        begins = offset - len(self._rest)
        shown = self._rest + data
        self._next = offset + len(data)
        if self._cut and not over and self._secrets.is_inside(shown):
            self._rest = shown  # it may be the middle of a value: more will tell
            return begins, b""
        shown = self._secrets.mask_head(shown) if self._cut else self._secrets.mask(shown)
        self._cut = False
        begun = self._secrets.begun_at_end(shown)
        self._rest = shown[len(shown) - begun :]
        shown = shown[: len(shown) - begun]
        if over:
            shown += MASK.encode() if len(self._rest) >= SHORTEST else self._rest
            self._rest = b""
        return begins, shown


class Follows:
    """The files of one machine that are followed over its channel.

    `ask` puts a request to the supervisor, over a new connection if the last was lost; `drop` tells it that
    a follower wants no more.
    """

    def __init__(self, ask: Ask, drop: Callable[[int], None]) -> None:
        self._ask = ask
        self._drop = drop
        self._count = 0
        self._waiting: dict[int, asyncio.Queue[Incoming | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def pieces(self, job: AttemptId, path: str, offset: int, secrets: Secrets) -> AsyncGenerator[Piece]:
        """The pieces of the file, as `Channel.follow` has them."""
        self._count += 1
        number, queue = self._count, asyncio.Queue[Incoming | None]()
        self._waiting[number] = queue
        stream = MaskedStream(secrets, offset)
        try:
            while True:
                where = {"follower": number, "job": job, "path": path, "offset": stream.offset}
                stream = MaskedStream(secrets, stream.offset)
                if (await self._ask("follow", where)).state == "unknown":
                    return
                while (piece := await queue.get()) is not None:
                    begins, shown = stream.feed(piece.offset, piece.data or b"", piece.over)
                    yield Piece(begins, shown, stream.offset, piece.at_end)
                    if piece.over:
                        return
        finally:
            del self._waiting[number]
            self._drop(number)

    def on_piece(self, message: Incoming) -> bool:
        """A piece has come. False: no supervisor would send it."""
        if len(message.data or b"") > PIECE_CAP or not 0 <= message.offset < LAST_OFFSET:
            return False
        queue = self._waiting.get(message.follower)
        if queue is None:
            return True  # it was under way when we said that we want no more
        if queue.qsize() < MOST_WAITING:
            queue.put_nowait(message)
        elif queue.qsize() == MOST_WAITING:
            self._drop(message.follower)
            queue.put_nowait(None)
        return True

    def on_lost(self) -> None:
        """The connection is gone, or will be: each goes on where it was, or hears why it cannot."""
        for queue in self._waiting.values():
            queue.put_nowait(None)
