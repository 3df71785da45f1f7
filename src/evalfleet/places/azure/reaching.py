"""How machines are reached: SSH, by the keys that were made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalfleet.channels.ssh.target import Access, Target, openssh
from evalfleet.errors import PlaceError
from evalfleet.model import Machine, MachineId

from .keys import Keys
from .settings import AzureSettings
from .views import Vm

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import Answer, Lot

HANDSHAKES = 16
CONNECT_S = 10.0
NOTICES = {
    "address": "169.254.169.254",
    "port": 80,
    "path": "/metadata/scheduledevents?api-version=2020-07-01",
}
"""Where Azure tells a machine that it takes it back."""


class Reach:
    """One host a machine, and the supervisor there."""

    def __init__(self, settings: AzureSettings, keys: Keys, home: str, agent: str | None) -> None:
        self._settings = settings
        self._keys = keys
        self._home = home
        self._agent = agent
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._lots: dict[MachineId, Lot] = {}

    @property
    def in_use(self) -> Sequence[MachineId]:
        """Those that we have to do with."""
        return tuple(self._lots)

    def lot(self, machine: MachineId, address: str) -> Lot:
        from evalfleet.channels.ssh.host_home import Lot
        from evalfleet.channels.ssh.hosts import Host

        lot = self._lots.get(machine)
        if lot is None or lot.host.where.host != address:
            where = Target(f"{machine} ({address})", address, self._settings.port)
            host = Host(where, self._access(machine, address), self._handshakes)
            lot = self._lots[machine] = Lot(host, self._home)
        return lot

    async def take(self, machine: MachineId, vm: Vm, address: str, until: float) -> Answer:
        """Bring the supervisor there. Raises HostDown, HostLost, HostRefused, PlaceError."""
        watch = {**NOTICES, "resource": vm.name} if vm.spot else None
        return await self._order("take", machine, address, until, anew=True, boot=True, watch=watch)

    async def extend(self, machine: MachineId, address: str, until: float) -> None:
        """Raises as `take` does."""
        await self._order("extend", machine, address, until)

    async def _order(
        self, verb: Literal["take", "extend"], machine: MachineId, address: str, until: float, **more: Any
    ) -> Answer:
        lot = self.lot(machine, address)
        answer = await lot.ask(verb, machine, most=1, expires_s=max(0.0, until - time.time()), **more)
        if answer.error:
            raise PlaceError(f"{machine}: {answer.detail}", transient=True, scope="machine")
        return answer

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        where = Target(machine.id, machine.address, self._settings.port)
        return openssh(where, self._access(machine.id, machine.address), command)

    def _access(self, machine: MachineId, address: str) -> Access:
        settings = self._settings
        others = _users_own() if settings.jump else ""
        return Access(
            user=settings.user,
            key=str(self._keys.own().path),
            known_hosts=str(self._keys.known_hosts(machine, address, settings.port, others)),
            jump=settings.jump or None,
            connect_timeout_s=min(CONNECT_S, settings.answer_s),
            agent=self._agent if settings.jump else None,
        )

    async def drop(self, machine: MachineId) -> None:
        if (lot := self._lots.pop(machine, None)) is not None:
            await lot.host.close()

    async def close(self) -> None:
        await asyncio.gather(*(lot.host.close() for lot in self._lots.values()))


def _users_own() -> str:
    """Who goes through a jump host knows it already."""
    try:
        return Path("~/.ssh/known_hosts").expanduser().read_text()
    except OSError:
        return ""
