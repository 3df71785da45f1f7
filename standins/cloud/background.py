"""What a stand-in does by itself, without being asked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Work that goes on until the server ends. Belongs to the server's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.troubles: list[BaseException] = []
        """What went wrong that no client asked for: a mistake of the stand-in's."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (trouble := task.exception()) is not None:
            self.troubles.append(trouble)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
