"""The part of a place of VMs that does not depend on the cloud."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from evalfleet.channels.samples import Samples
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Machine, MachineId
from evalfleet.ports import Channel, Dialled, Fence, PlaceContext

from .keys import SshKeys
from .readiness import Readiness
from .ssh_access import SshAccess, SshLogin


class VmPlace:
    """A place of VMs as far as all clouds are alike: its machines have keys of ours, and SSH leads there."""

    def __init__(
        self, name: str, context: PlaceContext, keys: SshKeys, login: SshLogin, max_vcpus: int
    ) -> None:
        self._name = name
        self._home = context.home_id
        self._secrets = context.secrets
        self._samples = Samples(context.home)
        self._keys = keys
        self._access = SshAccess(login, keys, context.home_id)
        self._readiness = Readiness(self._access)
        self._ceiling = VcpuCeiling(max_vcpus)
        self._turns: dict[MachineId, asyncio.Lock] = {}

    @property
    def name(self) -> str:
        return self._name

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        on_load = functools.partial(self._samples.keep, machine.id)
        host_home = self._access.host_home(machine.id, machine.address)
        return SshChannel(host_home, machine.id, fence, self._secrets, on_load)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        return self._access.shell(machine, command)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self._access.host_home(machine.id, machine.address).host.dial(port)

    async def close(self) -> None:
        await self._access.close()

    def _turn(self, machine: MachineId) -> asyncio.Lock:
        """Held by whoever makes or mends the machine: it is done once at a time."""
        return self._turns.setdefault(machine, asyncio.Lock())


class VcpuCeiling:
    """The most vCPUs that all machines of a home may have together in one place; 0: there is no ceiling.

    Machines that are being made count from the moment that somebody asks for them, so that many asked for at
    the same time do not pass the ceiling together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._coming: dict[MachineId, int] = {}

    @contextmanager
    def counting(self, machine: MachineId, vcpus: int) -> Generator[None]:
        """Count a machine that is being made."""
        self._coming[machine] = vcpus
        try:
            yield
        finally:
            self._coming.pop(machine, None)

    def check(self, machine: MachineId, existing: Mapping[MachineId, int]) -> None:
        """Raises PlaceError if the machine, which is being counted, is too much beside those that exist."""
        used = sum(vcpus for other, vcpus in existing.items() if other not in self._coming)
        if self._most and used + sum(self._coming.values()) > self._most:
            raise PlaceError(
                f"{machine}: {used} of max_vcpus = {self._most} are in use", transient=True, scope="place"
            )


def check_installed(place: str, modules: Iterable[str], extra: str) -> None:
    """Raises RequestError that names the extra of evalfleet to install, if one of the modules is missing."""
    for module in modules:
        try:
            missing = find_spec(module) is None
        except ModuleNotFoundError:  # of the package that it is in
            missing = True
        if missing:
            raise RequestError(f"place {place!r} needs {module}; pip install 'evalfleet[{extra}]'")
