"""Mailboxes in folders that the machines see, too: all of a file system's are looked after by one thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, cast

from evalfleet.channels.supervisor.mailbox import FolderPost, Pace

from .lines import Mail

FOLDER_PACE_S = (0.2, 1.0)
TOGETHER_S = 0.05
"""What would be looked for so soon after something else is looked for with it: to wake up costs the most."""
LINGER_S = 10.0
"""The thread ends when it has had nothing to do for so long."""
P = ParamSpec("P")
T = TypeVar("T")


class Errand(Generic[T]):
    """Something to do with a folder, and who waits for it. With a pace it is done again until something is
    found."""

    def __init__(self, call: Callable[[], T | None], pace: Pace | None, due: float) -> None:
        self.call, self.pace, self.due = call, pace, due
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = self._loop.create_future()

    def run(self) -> bool:
        """Is it done? Else it is due again later. In the thread."""
        try:
            found = self.call()
        except OSError as err:
            if self.pace is None:
                return self._tell(self.answer.set_exception, err)
            self.due = time.monotonic() + self.pace.slow_s  # the file system is away
            return False
        except Exception as err:  # whoever waits is told: others wait for this thread, too
            return self._tell(self.answer.set_exception, err)
        if found is None and self.pace is not None:
            self.due = time.monotonic() + self.pace.next()
            return False
        return self._tell(self.answer.set_result, cast("T", found))

    def _tell(self, how: Callable[[Any], None], what: Any) -> bool:
        def tell() -> None:
            if not self.answer.done():  # who waited may have been cancelled
                how(what)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(tell)
        return True


class FolderClerk:
    """A thread that does all errands to the mailboxes of one file system, and keeps looking for what is
    waited for.

    If that file system hangs, the thread does, and nobody else: neither the event loop nor other threads.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._errands: list[Errand[Any]] = []
        self._wakes_at = 0.0
        self._runs = False

    async def do(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do it once, and at once. Raises OSError."""
        return await self._sent(Errand(partial(call, *args, **options), None, 0.0))

    async def find(self, call: Callable[[], T | None], pace: Pace, after_s: float) -> T:
        """What `call` returns once it returns something, the first time after so many seconds."""
        return await self._sent(Errand(call, pace, time.monotonic() + after_s))

    async def _sent(self, errand: Errand[T]) -> T:
        with self._news:
            self._errands.append(errand)
            if not self._runs:
                self._runs = True
                # a thread that hangs must not keep the program from ending
                threading.Thread(target=self._run, name="mailboxes", daemon=True).start()
            elif errand.due < self._wakes_at:
                self._wakes_at = errand.due
                self._news.notify()
        return await errand.answer

    def _run(self) -> None:
        while due := self._next():
            again = [errand for errand in due if not errand.run()]
            if again:
                with self._news:
                    self._errands += again

    def _next(self) -> list[Errand[Any]]:
        """What is to be done now, once there is something; empty: nothing is, for long."""
        until = time.monotonic() + LINGER_S
        with self._news:
            while True:
                errands = [errand for errand in self._errands if not errand.answer.done()]
                now = time.monotonic()
                self._wakes_at = min((errand.due for errand in errands), default=until)
                if self._wakes_at <= now:
                    break
                self._news.wait(self._wakes_at - now)
            self._errands = [errand for errand in errands if errand.due > now + TOGETHER_S]
            self._wakes_at = 0.0  # whatever comes while these are done is seen after them
            self._runs = bool(errands)
            return [errand for errand in errands if errand.due <= now + TOGETHER_S]


class FolderMail(Mail):
    """A mailbox in a folder that the machine sees, too. Those on one file system have one clerk."""

    def __init__(self, clerk: FolderClerk, folder: str, pace_s: tuple[float, float] = FOLDER_PACE_S) -> None:
        self.pace_s = pace_s
        self._clerk = clerk
        self._post = FolderPost(folder)

    async def create(self, name: str, content: bytes) -> bool:
        return await self._clerk.do(self._post.create, name, content)

    async def read(self, name: str) -> bytes | None:
        return await self._clerk.do(self._post.read, name)

    async def find(self, name: str, pace: Pace, after_s: float) -> bytes:
        return await self._clerk.find(partial(self._post.read, name), pace, after_s)

    async def names(self, below: str) -> list[str]:
        return await self._clerk.do(self._post.names, below)

    async def remove(self, names: Sequence[str]) -> None:
        await self._clerk.do(self._post.remove, list(names))
