"""The channel to a machine that is lent to us no longer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evalfleet.errors import ChannelError
from evalfleet.model import AttemptId, Bundle, Collected, Command, Ended, Job
from evalfleet.ports import TellStep


class Unreachable:
    """Says so whatever is asked: who has the machine now is not to be disturbed."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        raise ChannelError(self._why)

    async def probe(self, command: Command | None) -> bool:
        raise ChannelError(self._why)

    async def start(self, job: Job) -> None:
        raise ChannelError(self._why)

    async def ended(self, job: AttemptId) -> Ended:
        raise ChannelError(self._why)

    async def stop(self, job: AttemptId) -> None:
        raise ChannelError(self._why)

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        raise ChannelError(self._why)

    def forget(self, job: AttemptId) -> None:
        """Whoever had the machine next has cleared it."""

    async def close(self) -> None:
        """Nothing is open."""
