"""The stand-in as tests hold it: a server in a thread, and hands to read and break it with."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from standins.cloud.hosts import Hosts
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.words import Json

from . import addresses, galleries, network, security
from .arm import Arm
from .cloud import Cloud, Timing
from .deployments import Deployments
from .disks import Disks, plain_kinds
from .entra import EntraStandIn
from .faults import Faults
from .groups import Groups, Locks
from .metadata import Metadata
from .power import Power
from .schedules import Schedules
from .server import Server
from .store import Resource
from .subscription import Subscription
from .vms import VM, VirtualMachines, Vm

SHARED = ("virtualNetworks", "networkSecurityGroups", "subnets", "securityRules")
"""Types of what machines share."""


class StandIn(EntraStandIn):
    """The stand-in for Azure.

    `environment`: what makes azure-identity's DefaultAzureCredential work against it. Tests set faults, quota
    and the like through `cloud`, before clients come or with `do`, which runs in the server's thread.
    """

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__("azure", machines, speed)
        self.cloud = Cloud(self.clock, self._machines, timing or Timing(), seed)
        self.arm = Arm(self.cloud)
        self.server = Server(self.cloud, self.arm, self.identity)
        self.metadata = Metadata(self.cloud)
        self._furnish()
        self.port = self._ports[0]

    def _furnish(self) -> None:
        disks = Disks(self.cloud)
        public, interfaces = addresses.PublicAddresses(self.cloud), addresses.Interfaces(self.cloud)
        self.vms = VirtualMachines(self.cloud, disks, interfaces)
        self.power = Power(self.cloud, self.vms, self.metadata)
        for kind in (
            *network.kinds(self.cloud),
            *security.kinds(self.cloud),
            *plain_kinds(self.cloud),
            *galleries.kinds(self.cloud),
            disks,
            public,
            interfaces,
            self.vms,
        ):
            self.cloud.add_kind(kind)
        self.cloud.add_kind(Schedules(self.cloud, self.power))
        Deployments(self.cloud, self.arm)
        Locks(self.cloud, self.arm)
        Groups(self.cloud, self.arm)
        Subscription(self.cloud, self.arm)

    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        await self.server.listen(sock, context)

    async def _listen_metadata(self, sock: socket.socket, hosts: Hosts) -> None:
        await self.metadata.listen(sock, hosts)

    async def _close(self) -> None:
        await self.server.close()
        await self.metadata.close()
        await self.cloud.operations.close()

    def _troubles(self) -> Sequence[BaseException]:
        return self.cloud.operations.troubles

    def _machine(self, name: str) -> str:
        return str(self.vm(name).id)

    # -- for tests -----------------------------------------------------------------------------

    @property
    def faults(self) -> Faults:
        return self.cloud.faults

    @property
    def meters(self) -> Meters:
        return self.cloud.meters

    def left(self) -> list[str]:
        """What is there beside the network that machines share, which costs nothing."""
        return [str(each.id) for each in self.resources() if each.id.types[-1] not in SHARED]

    def resources(self, type: str = "") -> list[Resource]:
        """All there are now, whatever lists say; of one type, or of all."""
        return self.do(
            lambda: [each for each in self.cloud.store if type.lower() in ("", each.id.type.lower())]
        )

    def vm(self, name: str) -> Vm:
        """The machine of this name, in whatever group."""
        for each in self.resources(VM):
            if isinstance(each, Vm) and each.id.name.lower() == name.lower():
                return each
        raise KeyError(name)

    def evict(self, name: str, notice_s: float = 30.0) -> None:
        """Announce the eviction of a machine; it goes `notice_s` later, or when it agrees."""
        vm = self.vm(name)
        self.do(lambda: self.metadata.evict(vm, notice_s))

    def shown(self) -> list[Json]:
        return self.do(lambda: [self.cloud.show(each) for each in self.cloud.store])
