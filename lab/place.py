"""The place `lab`: a fleet of real hosts on this computer, each with its own address, processes and sshd."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from evalfleet.channels.samples import Samples
from evalfleet.channels.ssh.target import Access, HostDown, HostLost, HostRefused, Target, openssh
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Dialled, Fence, PlaceContext
from evalfleet.version import install_command

from .keeper_client import KeeperClient
from .lab import Lab
from .network import Network
from .protocol import Add, End, ExtendExpiry, KeeperAnswer, KeeperRecord, List, Remove, Shape, Taken

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostHome

HANDSHAKES = 16
CONNECT_S = 10.0
SSH_PORT = 22
GIB = 1 << 30


class LabSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a lab. Hosts cost nothing; what they use is this computer's."""

    max_hosts: Annotated[int, Meta(ge=1, le=500, description="never more than this at once")] = 50
    cpus: Annotated[float, Meta(ge=0, description="cores a host may use; 0: all there are")] = 0.0
    memory_gb: Annotated[float, Meta(ge=0, description="a host's memory; 0: all there is")] = 0.0
    disk_gb: Annotated[float, Meta(gt=0, description="what a host may write; it is memory, once written")] = (
        1.0
    )
    user: Annotated[Literal["lab", "root"], Meta(description="who tasks run as")] = "lab"
    isolation: Annotated[
        Literal["user", "container", "none"] | None,
        Meta(description="user: each attempt is a user of its own; else so if they run as root"),
    ] = None
    expose: Annotated[
        tuple[str, ...], Meta(description="directories of this computer that hosts see, read-only")
    ] = ()


class LabPlace:
    """Hosts of namespaces on this computer, each with its own address, processes and sshd. Needs root."""

    Settings = LabSettings
    extra = "ssh"

    def __init__(self, name: str, settings: LabSettings, shape: Shape, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._shape = shape
        self._home_id = context.home_id
        self._secrets = context.secrets
        self._samples = Samples(context.home)
        self._keeper = KeeperClient(context.home, name)
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._homes: dict[MachineId, HostHome] = {}
        self._used = False

    @classmethod
    def make(cls, name: str, settings: LabSettings, context: PlaceContext) -> LabPlace:
        complaint = Lab.missing()
        if complaint:
            raise RequestError(f"place {name!r}: {complaint}; `--on local` needs no root")
        if find_spec("asyncssh") is None:
            raise RequestError(f"place {name!r} needs asyncssh: {install_command('ssh')}")
        return cls(name, settings, shape_of(name, settings, context), context)

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        return (Offer(self._name, "host", capacity=self._settings.max_hosts),)

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        self._used = True
        answer = await self._keeper.add(Add(machine, expires_s, self._settings.max_hosts, self._shape))
        self._check(machine, answer)
        await self._order("take", machine, answer.machines[0].address, expires_s=expires_s)
        self._check(machine, await self._keeper.ask(Taken(machine)))

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        answer = self._check(machine, await self._keeper.ask(ExtendExpiry(machine, expires_s)))
        await self._order("extend", machine, answer.machines[0].address, expires_s=expires_s)

    async def list(self, pool: str) -> Sequence[Machine]:
        answer = await self._keeper.ask(List())
        seen = answer.machines if answer is not None else ()
        return tuple(
            Machine(MachineId(each.machine), each.phase, each.address, each.host)
            for each in sorted(seen, key=lambda each: each.machine)
            if each.machine.startswith(f"{pool}-")
        )

    async def delete(self, machine: MachineId) -> None:
        self._used = True
        self._samples.drop(machine)
        host_home = self._homes.pop(machine, None)
        if host_home is not None:
            await host_home.host.close()
        answer = await self._keeper.ask(Remove(machine))
        if answer is not None:
            self._check(machine, answer)

    async def stop(self, machine: MachineId) -> None:
        """End what runs there; the host stays."""
        seen = [each for each in await self.list(machine.rsplit("-", 1)[0]) if each.id == machine]
        if not seen:
            raise NoSuchMachine(machine)
        await self._order("halt", machine, seen[0].address)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client in the lab's network."""
        record = self._keeper.record()
        if record is None:
            raise PlaceError(f"{machine.id} is gone: the lab has ended", transient=False, scope="machine")
        where = Target(machine.id, machine.address, SSH_PORT)
        ssh, *words = openssh(where, self._access(record), command)
        return (*Network(Path(record.network)).prefix, ssh, "-F", "none", *words)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self._host_home(machine.id, machine.address).host.dial(port)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        on_load = functools.partial(self._samples.keep, machine.id)
        host_home = self._host_home(machine.id, machine.address)
        return SshChannel(host_home, machine.id, fence, self._secrets, on_load)

    async def close(self) -> None:
        await asyncio.gather(*(host_home.host.close() for host_home in self._homes.values()))
        if self._used:
            with contextlib.suppress(PlaceError):  # it ends by itself, only later
                await self._keeper.ask(End())

    # -- hosts ---------------------------------------------------------------------------------

    def _host_home(self, machine: MachineId, address: str) -> HostHome:
        from evalfleet.channels.ssh.host_home import HostHome
        from evalfleet.channels.ssh.hosts import SshHost

        access = self._access(self._keeper.record())
        host_home = self._homes.get(machine)
        if host_home is None or (host_home.host.where.host, host_home.host.access.key) != (
            address,
            access.key,
        ):
            where = Target(f"{machine} ({address})", address, SSH_PORT)
            host_home = self._homes[machine] = HostHome(
                SshHost(where, access, self._handshakes), self._home_id
            )
        return host_home

    def _access(self, record: KeeperRecord | None) -> Access:
        if record is None:
            return Access(new_socket=_no_lab)
        network = Network(Path(record.network))
        return Access(
            user=self._settings.user,
            key=record.key,
            known_hosts=record.known_hosts,
            connect_timeout_s=CONNECT_S,
            new_socket=network.socket,
        )

    async def _order(
        self, verb: Literal["take", "extend", "halt"], machine: MachineId, address: str, **more: float
    ) -> None:
        """To the machine's host, as to one that we are lent."""
        try:
            answer = await self._host_home(machine, address).ask(verb, machine, most=1, **more)
        except (HostDown, HostLost, HostRefused) as err:
            raise MachineUnavailable(machine, str(err)) from err
        if answer.error:
            raise MachineUnavailable(machine, answer.detail)

    def _check(self, machine: MachineId, answer: KeeperAnswer | None) -> KeeperAnswer:
        """Raise what a refusal means."""
        if answer is None or answer.refusal == "unknown":
            raise NoSuchMachine(machine)
        if answer.refusal == "full":
            most = self._settings.max_hosts
            raise PlaceError(f"all {most} hosts of {self._name} are taken; see max_hosts", transient=True)
        if answer.refusal == "shape":
            raise PlaceError(
                f"the hosts of {self._name} are up with other settings, for another run; use the same, or "
                "wait until it is over",
                transient=False,
                scope="place",
            )
        if answer.refusal:
            raise MachineUnavailable(machine, answer.detail or "it is being deleted")
        return answer


def _no_lab() -> socket.socket:
    raise ConnectionRefusedError("the lab has ended")


def shape_of(name: str, settings: LabSettings, context: PlaceContext) -> Shape:
    """Raises RequestError."""
    exposed = [context.base / Path(given).expanduser() for given in settings.expose]
    for path in exposed:
        if not path.is_dir():
            raise RequestError(
                f"place {name!r}: expose names {str(path)!r}, which is no directory; correct it"
            )
    return Shape(
        cpus=settings.cpus or None,
        memory_bytes=int(settings.memory_gb * GIB) or None,
        disk_bytes=int(settings.disk_gb * GIB),
        expose=tuple(str(path.resolve()) for path in exposed),
    )
