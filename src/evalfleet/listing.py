"""One place's listing, shared by all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .model import Machine, MachineId
from .ports import Place


class Listing:
    """Asks a place what exists, with at most one call under way and one waiting.

    An answer is never older than the question: who asks while a call is under way gets the next one.
    A thousand machines that wait for their boot so cost one listing at a time, not a thousand.
    """

    def __init__(self, place: Place, pool: str) -> None:
        self._place = place
        self._pool = pool
        self._next: asyncio.Task[Mapping[MachineId, Machine]] | None = None
        self._lock = asyncio.Lock()

    async def fresh(self) -> Mapping[MachineId, Machine]:
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._next.add_done_callback(_heed)
        # one asker's cancellation must not take the answer from the others
        return await asyncio.shield(self._next)

    async def _ask(self) -> Mapping[MachineId, Machine]:
        async with self._lock:
            self._next = None  # from here on the question is put: later askers need another one
            return {machine.id: machine for machine in await self._place.list(self._pool)}


def _heed(task: asyncio.Task[Mapping[MachineId, Machine]]) -> None:
    """An error that no asker stayed to hear is not worth a warning."""
    if not task.cancelled():
        task.exception()
