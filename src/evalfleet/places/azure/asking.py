"""One question that many have at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Asks with at most one question under way and one waiting.

    An answer is never older than the question: who asks while one is under way gets the next. `wait_s` says
    how long to wait before the next one is put.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], wait_s: Callable[[], float] = lambda: 0.0) -> None:
        self._put = ask
        self._wait_s = wait_s
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None
        self._now: asyncio.Task[T] | None = None
        self._watchers: set[asyncio.Future[T]] = set()

    async def fresh(self) -> T:
        """Raises what asking raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        # one asker's cancellation must not take the answer from the others
        return await asyncio.shield(self._next)

    async def soon(self, patience_s: float) -> T:
        """The next answer that anybody gets; if nobody asks for so long, one that we ask for."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._watchers.add(answer)
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            return await (self.fresh() if self._now is None else asyncio.shield(self._now))
        finally:
            self._watchers.discard(answer)

    async def _ask(self) -> T:
        async with self._lock:
            await asyncio.sleep(self._wait_s())
            self._now, self._next = self._next, None  # it is put: later askers need another one
            try:
                answer = await self._put()
            finally:
                self._now = None
            for each in self._watchers:
                if not each.done():
                    each.set_result(answer)
            return answer
