"""A machine on a host as a Channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.channels.link import Incoming
from evalfleet.channels.resident import Resident
from evalfleet.errors import SetupFailed
from evalfleet.model import AttemptId, Bundle, Ended, Job
from evalfleet.ports import Fence, TellStep

from .bridge import dial
from .host_home import HostHome
from .mover import SshMover

Verdict = Callable[[bool], None]
"""Told after each job, and each failed set-up: did the host do well?"""


class SshChannel(Resident):
    """One machine on a host. Its line to the supervisor is renewed when lost, while anybody waits."""

    def __init__(
        self,
        host_home: HostHome,
        machine: str,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: Callable[[float, float, float], None] | None = None,
        verdict: Verdict | None = None,
        caps: Caps = STANDARD_CAPS,
    ) -> None:
        async def connect(protocol: asyncio.Protocol) -> asyncio.WriteTransport:
            return await dial(host_home, machine, fence, protocol)

        mover = SshMover(host_home, machine, secrets, caps)
        super().__init__(connect, mover, fence, secrets, on_load)
        mover.ask, mover.alive = self.ask, self.alive
        self._host = host_home.host
        self._files = mover
        self._verdict = verdict

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> dict[str, float]:
        try:
            return await super().prepare(bundle, left, tell)
        except SetupFailed:
            self._judge(False)
            raise

    async def _turn(self) -> None:
        await self._host.turn()

    def on_push(self, message: Incoming) -> None:
        if message.push == "ended" and message.data is not None and self.is_ours(message.job):
            self._files.arrived(message.job, message.data)
        super().on_push(message)

    def forget(self, job: AttemptId) -> None:
        self._files.forget(job)
        super().forget(job)

    def _spec(self, job: Job, in_bundle: bool) -> dict[str, Any]:
        spec = super()._spec(job, in_bundle)
        return spec if in_bundle else {**spec, "fetch": self._files.with_the_end}

    async def ended(self, job: AttemptId) -> Ended:
        ended = await super().ended(job)
        self._judge(ended.result is not None or ended.exit_code == 0)
        return ended

    def _judge(self, well: bool) -> None:
        if self._verdict is not None:
            self._verdict(well)
