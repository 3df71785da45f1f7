"""Files that machines fetch, kept in a container of blobs: sent once, whole or not at all.

A set of files has a folder whose name is the digest of their contents. Each file is sent in blocks, which
nobody can read before they are put together as a blob; a block that an earlier try has sent is not sent
again. The list of all files comes last: without it, the folder counts as not there.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import IO, Any

from evalfleet.clock import pauses
from evalfleet.errors import RequestError
from evalfleet.model import KeptFiles

from .answers import ArmFault
from .blobs import BlobClient

BLOCK_BYTES = 4 << 20
MOST_BLOCKS = 50_000
"""What Azure takes for one blob; larger files have larger blocks."""
AT_ONCE = 4
AWAY_S = 600.0
"""So long a storage that does not answer is asked again for one block."""
TELL_S = 10.0
LIST = "complete.json"
"""The last blob of a folder: what is in it."""


class FolderUpload:
    """Sends a set of files to a folder of a container. Raises ArmFault, and RequestError for a file that
    changes or cannot be read."""

    def __init__(
        self, blobs: BlobClient, container: str, root: str, files: KeptFiles, tell: Callable[[str], None]
    ) -> None:
        self._blobs, self._container, self._files, self._tell = blobs, container, files, tell
        self.folder = f"{root}/{files.name}"
        self._sizes = {name: _size(path) for name, path in files.paths.items()}
        self._done = 0
        self._told_at = time.monotonic()

    @property
    def _whole(self) -> int:
        return sum(self._sizes.values())

    async def bring(self) -> bool:
        """Have all of it there. False if it was there already, and nothing was sent."""
        if await self._blobs.read(self._container, f"{self.folder}/{LIST}") is not None:
            self._tell(f"{self._files.label} is in {self._container}/{self.folder} already")
            return False
        where = f"{self._container}/{self.folder}"
        self._tell(f"{self._files.label}, {self._whole >> 20:,} MB, is sent to {where}, once")
        for name, path in self._files.paths.items():
            await self._bring_file(name, path)
        listed = {"sizes": self._sizes, "sha256": dict(self._files.digests)}
        await self._blobs.create(self._container, f"{self.folder}/{LIST}", json.dumps(listed).encode())
        self._tell(f"{self._files.label} is in {where}")
        return True

    async def _bring_file(self, name: str, path: str) -> None:
        blob, digest = f"{self.folder}/{name}", self._files.digests[name]
        if await self._blobs.digest(self._container, blob) == digest:
            self._advance(self._sizes[name])  # put together by an earlier try
            return
        there = await self._blobs.blocks(self._container, blob)
        size, whole = max(BLOCK_BYTES, -(-self._sizes[name] // MOST_BLOCKS)), hashlib.sha256()
        ids: list[str] = []
        sending: set[asyncio.Task[None]] = set()
        try:
            async for content in _contents(path, size):
                await asyncio.to_thread(whole.update, content)
                ids.append(_block_id(len(ids), content))
                if ids[-1] in there:
                    self._advance(len(content))
                    continue
                if len(sending) >= AT_ONCE:
                    done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                sending.add(asyncio.create_task(self._send(blob, ids[-1], content)))
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*sending, return_exceptions=True)
        if whole.hexdigest() != digest:
            raise RequestError(f"{path} was changed while it was sent; nothing of it is used: try again")
        await self._persist(lambda: self._blobs.put_together(self._container, blob, ids, digest))

    async def _send(self, blob: str, block: str, content: bytes) -> None:
        await self._persist(lambda: self._blobs.put_block(self._container, blob, block, content))
        self._advance(len(content))

    async def _persist(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A storage that is busy or away is asked again for some minutes: what was sent would be sent again
        by a block at most, but whoever waits would have to come back."""
        until, rests = time.monotonic() + AWAY_S, pauses(1.0, 60.0)
        while True:
            try:
                return await call()
            except ArmFault as fault:
                if time.monotonic() > until or (fault.status != 429 and 0 < fault.status < 500):
                    raise
                self._tell(f"{self._files.label}: {fault}; it is tried again")
                await asyncio.sleep(next(rests))

    def _advance(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            self._tell(f"{self._files.label}: {self._done >> 20:,} of {self._whole >> 20:,} MB are there")


def _block_id(number: int, content: bytes) -> str:
    """All ids of a blob must be of one length. This one says what is in the block."""
    return base64.b64encode(f"{number:06d}-{hashlib.sha256(content).hexdigest()[:32]}".encode()).decode()


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as err:
        raise RequestError(f"{path}: {err.strerror or err}") from err


async def _contents(path: str, size: int) -> AsyncGenerator[bytes]:
    try:
        file: IO[bytes] = await asyncio.to_thread(open, path, "rb")
        with file:
            while content := await asyncio.to_thread(file.read, size):
                yield content
    except OSError as err:
        raise RequestError(f"{path}: {err.strerror or err}") from err
