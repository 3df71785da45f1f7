"""The durable record of facts and decisions, embedded in one SQLite file of the home."""

from __future__ import annotations

from .holder import Holder
from .holds import Hold, Holds
from .sqlite import Store, StreamInfo, StreamKind
from .stream import SqliteJournal

__all__ = ["Hold", "Holder", "Holds", "SqliteJournal", "Store", "StreamInfo", "StreamKind"]
