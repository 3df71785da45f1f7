"""How VMs are reached: SSH, by the keys that were made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from evalfleet.channels.ssh.target import Access, Target, openssh
from evalfleet.errors import MachineUnavailable
from evalfleet.model import Machine, MachineId

from .keys import SshKeys

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import Answer, HostHome

HANDSHAKES = 16
CONNECT_S = 10.0


class SshLogin(Struct, frozen=True):
    """How the settings of a place say that its VMs are entered."""

    user: str
    """The user on the VM."""
    port: int
    """The port of the VM's sshd."""
    jump: str
    """Jump hosts to go through, as OpenSSH writes them; empty: none."""
    connect_timeout_s: float
    """The longest that one connection may take to come up; never more than CONNECT_S."""
    agent: str | None
    """The socket of the user's SSH agent, which is asked for jump hosts only."""


class SshAccess:
    """The SSH connections to a place's VMs, one a machine, and the orders that are given over them."""

    def __init__(self, login: SshLogin, keys: SshKeys, home: str) -> None:
        self._login = login
        self._keys = keys
        self._home = home
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._homes: dict[MachineId, HostHome] = {}

    @property
    def in_use(self) -> Sequence[MachineId]:
        """The machines that this process has connected to, or tried to."""
        return tuple(self._homes)

    def host_home(self, machine: MachineId, address: str) -> HostHome:
        """What is ours on the machine's host; another connection, if its address has changed."""
        from evalfleet.channels.ssh.host_home import HostHome
        from evalfleet.channels.ssh.hosts import SshHost

        host_home = self._homes.get(machine)
        if host_home is None or host_home.host.where.host != address:
            where = Target(f"{machine} ({address})", address, self._login.port)
            host = SshHost(where, self._access(machine, address), self._handshakes)
            host_home = self._homes[machine] = HostHome(host, self._home)
        return host_home

    async def take(
        self, machine: MachineId, address: str, until: float, notices: Mapping[str, object] | None
    ) -> Answer:
        """Bring the supervisor there. `notices`: where the cloud tells the VM that it will be taken back.

        Raises HostDown, HostLost, HostRefused, MachineUnavailable.
        """
        return await self._order("take", machine, address, until, anew=True, boot=True, watch=notices)

    async def extend(self, machine: MachineId, address: str, until: float) -> None:
        """Tell the supervisor the new expiry. Raises as `take` does."""
        await self._order("extend", machine, address, until)

    async def _order(
        self, verb: Literal["take", "extend"], machine: MachineId, address: str, until: float, **more: Any
    ) -> Answer:
        host_home = self.host_home(machine, address)
        answer = await host_home.ask(verb, machine, most=1, expires_s=max(0.0, until - time.time()), **more)
        if answer.error:
            raise MachineUnavailable(machine, answer.detail)
        return answer

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client, with the key and the host key that we made."""
        where = Target(machine.id, machine.address, self._login.port)
        return openssh(where, self._access(machine.id, machine.address), command)

    def _access(self, machine: MachineId, address: str) -> Access:
        login = self._login
        others = _users_known_hosts() if login.jump else ""
        return Access(
            user=login.user,
            key=str(self._keys.login().path),
            known_hosts=str(self._keys.known_hosts(machine, address, login.port, others)),
            jump=login.jump or None,
            connect_timeout_s=min(CONNECT_S, login.connect_timeout_s),
            agent=login.agent if login.jump else None,
        )

    async def drop(self, machine: MachineId) -> None:
        if (host_home := self._homes.pop(machine, None)) is not None:
            await host_home.host.close()

    async def close(self) -> None:
        await asyncio.gather(*(host_home.host.close() for host_home in self._homes.values()))


def _users_known_hosts() -> str:
    """The user's own known_hosts: whoever goes through a jump host has it there already."""
    try:
        return Path("~/.ssh/known_hosts").expanduser().read_text()
    except OSError:
        return ""
