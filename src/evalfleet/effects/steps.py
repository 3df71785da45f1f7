"""Following the steps of attempts that run, for whoever watches: nothing is decided by them.

The newest step of each attempt is a small file in the run's folder while the attempt runs; once it has ended,
its trajectory is among its artefacts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.errors import ChannelError
from evalfleet.files import replace
from evalfleet.model import AttemptId, NewestStep, Step
from evalfleet.names import STEPS, safe_name
from evalfleet.ports import Channel, Stepped
from evalfleet.state import AttemptState

from .tools import Tools

LOOK_S = 5.0
"""How often a trajectory that is one document is read again, and how soon after trouble another is tried."""
WRITE_S = 0.5
MOST_BYTES = 4 << 20
"""A document that is larger is not read while it grows."""


"""What is done beside most attempts: runs of many short ones feel what it costs."""


def following_steps(
    tools: Tools, channel: Channel, attempt: AttemptState
) -> AbstractAsyncContextManager[None]:
    """While the attempt runs, keep its newest step in the run's folder."""
    if tools.stepped is None:
        return nullcontext()
    path = tools.artefacts / STEPS / f"{safe_name(attempt.id)}.json"
    return _following(path, _follow(tools.stepped, channel, attempt.id, path))


@asynccontextmanager
async def _following(path: Path, follow: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    following = asyncio.create_task(follow)
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        with suppress(OSError):
            path.unlink(missing_ok=True)


async def _follow(benchmark: Stepped, channel: Channel, attempt: AttemptId, path: Path) -> None:
    """Until it is cancelled. Whatever goes wrong is nobody's trouble but that of those who watch."""
    file, teller = f"out/{benchmark.steps}", _Teller(path)
    lines = _TrajectoryLines(benchmark)
    while True:
        with suppress(ChannelError, OSError):
            if benchmark.steps.endswith(".json"):
                if (data := await _whole(channel, attempt, file)) is not None:
                    steps, problem = benchmark.read_steps(data)
                    await teller.tell(steps[-1] if steps else None, len(steps), problem)
            else:
                async with aclosing(channel.follow(attempt, file, lines.offset)) as pieces:
                    async for piece in pieces:
                        if piece.data:
                            lines.add(piece.offset, piece.data, piece.next)
                            await teller.tell(lines.newest, lines.count, lines.problem)
        await asyncio.sleep(LOOK_S)


async def _whole(channel: Channel, attempt: AttemptId, file: str) -> bytes | None:
    """What the file holds now; None if that is too much."""
    read = bytearray()
    async with aclosing(channel.follow(attempt, file)) as pieces:
        async for piece in pieces:
            read += piece.data
            if len(read) > MOST_BYTES:
                return None
            if piece.at_end:
                break
    return bytes(read)


class _TrajectoryLines:
    """A trajectory of lines, read as it grows: only its newest step is kept."""

    def __init__(self, benchmark: Stepped) -> None:
        self._benchmark = benchmark
        self._rest = b""
        self.offset = 0
        self.count = 0
        self.newest: Step | None = None
        self.problem = ""

    def add(self, offset: int, data: bytes, following: int) -> None:
        if offset != self.offset:  # another file has taken its place
            self._rest, self.count = b"", 0
        self.offset = following
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        self._rest = self._rest[-MOST_BYTES:]
        if newline:
            steps, problem = self._benchmark.read_steps(whole + newline)
            self.count += len(steps)
            self.newest = steps[-1] if steps else self.newest
            self.problem = self.problem or problem


class _Teller:
    """Writes the newest step down, a few times a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0

    async def tell(self, step: Step | None, count: int, problem: str) -> None:
        loop = asyncio.get_running_loop()
        if (pause := self._next - loop.time()) > 0:
            await asyncio.sleep(pause)
        self._next = loop.time() + WRITE_S
        newest = NewestStep(time.time_ns() // 1000, count, step, problem)
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, msgspec.json.encode(newest))
