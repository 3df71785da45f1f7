"""A loop on which one controller can be put to sleep, as a laptop is: the world goes on without it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .loop import SimLoop
from .world import Life

H = TypeVar("H", bound=asyncio.Handle)

LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class NapLoop(SimLoop):
    """Nothing of a sleeping life runs. When it wakes, all that was due comes at once, in its order."""

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self._gated(super().call_soon, partial(callback, *args), context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._gated(partial(super().call_at, when), partial(callback, *args), context)

    def _gated(
        self, schedule: Callable[..., H], callback: Callable[[], object], context: contextvars.Context | None
    ) -> H:
        context = contextvars.copy_context() if context is None else context
        life = context.get(LIFE)
        if life is None:
            return schedule(callback, context=context)
        handles: list[H] = []

        def fire() -> None:
            if life.held is not None:
                life.held.append(partial(SimLoop.call_soon, self, fire, context=context))
            elif not handles[0].cancelled():  # a timer that fired asleep may be cancelled on waking
                callback()

        handles.append(schedule(fire, context=context))
        return handles[0]


def fall_asleep(life: Life) -> None:
    if life.held is None:
        life.held = []


def wake(life: Life) -> None:
    held, life.held = life.held or [], None
    for due in held:
        due()
