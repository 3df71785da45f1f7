"""A run as it is now, kept current from the journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from evalfleet.events import Record
from evalfleet.state import RunState, apply_all


class EventSource(Protocol):
    """What a follower needs of a store. `journal.Store` has it."""

    def read_pages(self, stream: str, after: int = 0) -> Iterable[list[Record]]:
        """The records that follow number `after`, many at a time."""
        ...


class Follower:
    """Holds a state of its own and brings it up to date on request.

    Each poll reads through a connection of its own, so a follower works in any process or thread, beside
    the controller or long after it. Used by one thread at a time.
    """

    def __init__(self, store: EventSource, run: str) -> None:
        self._store = store
        self.run = run
        self.seq = 0
        self.state = RunState()

    def poll(self) -> list[Record]:
        """What was recorded since the last poll, already part of the state.

        Raises what the store raises: RequestError if there is no such run, JournalError if it cannot be
        read. The state then holds all that was read until there, and the next poll goes on from it.
        """
        news: list[Record] = []
        for page in self._store.read_pages(self.run, self.seq):
            try:
                apply_all(self.state, [record.at for record in page], [record.event for record in page])
            finally:
                self.seq = self.state.events
            news += page
        return news
