"""A machine on a host as a Channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from evalfleet.channels.resident import Resident
from evalfleet.errors import SetupFailed
from evalfleet.model import AttemptId, Bundle, Ended
from evalfleet.ports import Fence

from .asking import Lot
from .bridge import dial
from .mover import SshMover

Verdict = Callable[[bool], None]
"""Told after each job, and each failed set-up: did the host do well?"""


class SshChannel(Resident):
    """One machine on a host. Its line to the supervisor is renewed when lost, while anybody waits."""

    def __init__(
        self,
        lot: Lot,
        machine: str,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: Callable[[float, float, float], None] | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        async def connect(protocol: asyncio.Protocol) -> asyncio.WriteTransport:
            return await dial(lot, machine, fence, protocol)

        mover = SshMover(lot, machine, secrets)
        super().__init__(connect, mover, fence, secrets, on_load)
        mover.ask, mover.alive = self.ask, self.alive
        self._verdict = verdict

    async def prepare(self, bundle: Bundle) -> None:
        try:
            await super().prepare(bundle)
        except SetupFailed:
            self._judge(False)
            raise

    async def ended(self, job: AttemptId) -> Ended:
        ended = await super().ended(job)
        self._judge(ended.result is not None or ended.exit_code == 0)
        return ended

    def _judge(self, well: bool) -> None:
        if self._verdict is not None:
            self._verdict(well)
