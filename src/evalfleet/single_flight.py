"""One question that many have at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """A question that many ask, with at most one call under way and one waiting.

    An answer is never older than the question: whoever asks while a call is under way gets the answer of the
    next. So a thousand machines that wait for their boot cost one listing at a time, not a thousand.
    `wait_s` says, before each call, how long to wait with it.
    """

    def __init__(self, call: Callable[[], Awaitable[T]], wait_s: Callable[[], float] | None = None) -> None:
        self._call = call
        self._wait_s = wait_s
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None
        self._under_way: asyncio.Task[T] | None = None
        self._watchers: set[asyncio.Future[T]] = set()

    async def fresh(self) -> T:
        """The answer of a call that begins after this question. Raises what the call raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_call())
            # an error that no asker stayed to hear is not worth a warning
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        # one asker's cancellation must not take the answer from the others
        return await asyncio.shield(self._next)

    async def soon(self, patience_s: float) -> T:
        """The next answer that anybody gets; if nobody gets one in `patience_s`, we ask ourselves."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._watchers.add(answer)
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            return await (self.fresh() if self._under_way is None else asyncio.shield(self._under_way))
        finally:
            self._watchers.discard(answer)

    async def _make_call(self) -> T:
        async with self._lock:
            if self._wait_s is not None:
                await asyncio.sleep(self._wait_s())
            # from here on the call is made: later askers need another one
            self._under_way, self._next = self._next, None
            try:
                answer = await self._call()
            finally:
                self._under_way = None
            for watcher in self._watchers:
                if not watcher.done():
                    watcher.set_result(answer)
            return answer
