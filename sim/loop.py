"""An event loop in virtual time: waiting costs nothing, and the same seed gives the same order."""

from __future__ import annotations

import asyncio
import sys
from asyncio.events import _set_running_loop  # pyright: ignore[reportPrivateUsage]: made for event loops
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

from evalfleet.model import SECOND, Micros, after

T = TypeVar("T")

EPOCH: Micros = 1_800_000_000 * SECOND
"""Where simulated time begins. Any instant will do, as long as it is the same one every time."""


LONGEST_S = 90 * 86400.0


class SimHandle(asyncio.TimerHandle):
    """A call that is to be made. One of asyncio's own would cost twice as much to make."""

    __slots__ = ()

    def __init__(self, when: float, call: Callable[..., object], args: Any, context: Context | None) -> None:
        self._when = when
        self._callback = call
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._args = ()  # it may be long until its time, and nobody else needs them

    def __repr__(self) -> str:
        return f"<SimHandle at {self._when:g} s: {self._callback!r}>"

    def run(self) -> None:
        if not self._cancelled:
            self._context.run(self._callback, *self._args)


class SimLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time: `time()` is virtual, and `now()` is the same as an instant.

    It watches no files and has no threads. When nothing is left to do at one time, it goes on to the next one
    for which something was asked. What was asked for one time is done in the order in which it was asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._limit = LONGEST_S
        self._due: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def now(self) -> Micros:
        return EPOCH + round(self._now * SECOND)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = SimHandle(self._now, callback, args, context)
        self._due.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = SimHandle(when, callback, args, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        task: asyncio.Task[T] = self.create_task(future)
        due = self._due
        with self._running():
            while not task.done():
                if not due:
                    self._go_on()
                due.popleft().run()
        return task.result()

    def _go_on(self) -> None:
        """Go on to the next time for which something was asked."""
        timers, due = self._timers, self._due
        if not timers:
            raise RuntimeError("simulation deadlock: nothing is left to happen")
        self._now = max(self._now, timers[0][0])
        if self._now > self._limit:
            self._limit = float("inf")  # once is enough: what is left must be able to end
            raise RuntimeError(f"simulation without end: {LONGEST_S / 86400:.0f} virtual days have passed")
        while timers and timers[0][0] <= self._now:
            due.append(heappop(timers)[2])

    @contextmanager
    def _running(self) -> Generator[None]:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._end_generator)
        _set_running_loop(self)
        try:
            yield
        finally:
            _set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _end_generator(self, left: AsyncGenerator[Any, Any]) -> None:
        """Somebody has left a generator before its end."""
        if not self.is_closed():
            self.call_soon(self.create_task, left.aclose())

    def close(self) -> None:
        super().close()
        self._due.clear()
        self._timers.clear()


class SimComputer:
    """The clocks of one computer: the controllers', or a machine. Anybody sets its wall clock, and the steady
    one counts since its boot."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._boots = 1
        self._booted_at = loop.now()
        self.ahead_s = 0.0  # by how much its wall clock is wrong
        self.strobe: tuple[float, float] | None = None  # (every, by): also by so much in every second period
        self._fate: Iterator[tuple[float, float]] = iter(())
        self._next: tuple[float, float] | None = None

    @property
    def boot(self) -> str:
        return f"boot {self._boots}"

    def reboot(self) -> None:
        self._boots += 1
        self._booted_at = self._loop.now()

    def set_by(self, fate: Iterator[tuple[float, float]]) -> None:
        """From now on the wall clock is set at these moments, each to so far from the truth.

        It takes no timer: nothing else in the world is to change by it.
        """
        self._fate = fate
        self._next = next(fate, None)

    def wall(self) -> Micros:
        while self._next is not None and self._next[0] <= self._loop.time():
            self.ahead_s = self._next[1]
            self._next = next(self._fate, None)
        ahead_s = self.ahead_s
        if self.strobe is not None and self._loop.time() // self.strobe[0] % 2:
            ahead_s += self.strobe[1]
        return after(self._loop.now(), ahead_s)

    def steady(self) -> Micros:
        return self._loop.now() - self._booted_at
