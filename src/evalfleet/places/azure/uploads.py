"""Files that machines fetch, kept in a container of blobs: sent once, whole or not at all.

A set of files has a folder whose name is the digest of their contents. The list of all files comes last:
without it, the folder counts as not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable
from typing import IO

from evalfleet.clock import pauses
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import KeptFiles
from evalfleet.ports import Bucket

READ_BYTES = 4 << 20
AWAY_S = 600.0
"""A file is sent again for so long after the storage has last taken some of it."""
TELL_S = 10.0
LIST = "complete.json"
"""The last blob of a folder: what is in it."""


class _UnreadableError(Exception):
    """A file that cannot be read. It is no error of the storage."""


class FolderUpload:
    """Sends a set of files to a folder of a container. Raises PlaceError, and RequestError for a file that
    changes or cannot be read."""

    def __init__(self, bucket: Bucket, files: KeptFiles, tell: Callable[[str], None]) -> None:
        self._bucket, self._files, self._tell = bucket, files, tell
        self._sizes = {name: _size(path) for name, path in files.paths.items()}
        self._done = 0
        self._told_at = self._sent_at = time.monotonic()

    @property
    def _whole(self) -> int:
        return sum(self._sizes.values())

    async def bring(self) -> bool:
        """Have all of it there. Returns False if it was there already, and nothing was sent."""
        where, folder = f"{self._bucket.url}/{self._files.name}", self._files.name
        listed = await self._bucket.read(f"{folder}/{LIST}")
        if listed is not None:
            self._tell(f"{self._files.label} is in {where} already")
            return False
        self._tell(f"{self._files.label}, {self._whole >> 20:,} MB, is sent to {where}, once")
        there = {name.rpartition("/")[2] for name in await self._bucket.names(f"{folder}/")}
        for name, path in self._files.paths.items():
            mark = f"{name}.{self._files.digests[name]}"
            if mark in there:  # an earlier try has sent it
                self._advance(self._sizes[name])
                continue
            await self._persist(f"{folder}/{name}", path, self._files.digests[name])
            await self._bucket.replace(f"{folder}/{mark}", b"")
        about = {"sizes": self._sizes, "sha256": dict(self._files.digests)}
        await self._bucket.replace(f"{folder}/{LIST}", json.dumps(about).encode())
        self._tell(f"{self._files.label} is in {where}")
        return True

    async def _persist(self, name: str, path: str, digest: str) -> None:
        """Send a file, again and again while the storage is away."""
        rests, done = pauses(1.0, 60.0), self._done
        self._sent_at = time.monotonic()
        while True:
            self._done = done
            whole = hashlib.sha256()
            try:
                await self._bucket.replace(name, self._contents(path, whole.update))
                break
            except _UnreadableError as err:
                raise RequestError(str(err)) from err
            except PlaceError as err:
                if not err.transient or time.monotonic() - self._sent_at > AWAY_S:
                    raise
                self._tell(f"{self._files.label}: {err}; it is tried again")
                await asyncio.sleep(next(rests))
        if whole.hexdigest() != digest:
            await self._bucket.remove([name])
            raise RequestError(f"{path} was changed while it was sent; nothing of it is used: try again")

    async def _contents(self, path: str, add: Callable[[bytes], None]) -> AsyncGenerator[bytes]:
        try:
            file: IO[bytes] = await asyncio.to_thread(open, path, "rb")
            with file:
                while content := await asyncio.to_thread(file.read, READ_BYTES):
                    await asyncio.to_thread(add, content)
                    yield content
                    self._sent_at = time.monotonic()
                    self._advance(len(content))
        except OSError as err:
            raise _UnreadableError(f"{path}: {err.strerror or err}") from err

    def _advance(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            self._tell(f"{self._files.label}: {self._done >> 20:,} of {self._whole >> 20:,} MB are there")


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as err:
        raise RequestError(f"{path}: {err.strerror or err}") from err
