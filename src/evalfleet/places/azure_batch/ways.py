"""The two ways to a machine of Batch: SSH to its node, or a mailbox that its pilot asks for orders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from evalfleet.channels.mail.boxes import KeptMailbox, Mailboxes, MailPilot
from evalfleet.channels.samples import Samples
from evalfleet.model import Machine, MachineId
from evalfleet.places.azure.services import storage_checks, without_mail
from evalfleet.places.vm.ssh_access import SshAccess
from evalfleet.ports import Channel, Fence, PlaceContext

from .service import BatchClient, Sighting
from .storage import MailStorage
from .template import NodeStart

MAILBOX = "mailbox"
"""The address of a machine that nothing can connect to."""


class BatchWay(Protocol):
    """A way to the machines of an account."""

    silence: str
    """What is wrong while `meet` finds nothing."""

    async def prepare(
        self, machine: MachineId, life_s: float, wait_s: float, *, kvm: bool
    ) -> tuple[MailPilot | None, str]:
        """Return what the job runs to be reached by a mailbox, or else our public key. Raises PlaceError."""
        ...

    async def mark_allocated(self, machine: MachineId, at: float) -> None:
        """Write down when the machine's node was had. Raises PlaceError."""
        ...

    def has_met(self, seen: Sighting, start: NodeStart) -> bool:
        """Return True if the pilot was reached before."""
        ...

    async def meet(self, seen: Sighting, start: NodeStart) -> NodeStart | None:
        """Reach the pilot for the first time. Returns the start with its address, or None if the pilot has
        not told that it is there. Raises FleetError, ArmFault, and as hosts do."""
        ...

    def shown(self, machine: Machine, *, has_box: bool) -> Machine:
        """Return the machine as it is by the way to it, whatever Batch says."""
        ...

    def channel(self, machine: Machine, fence: Fence) -> Channel: ...

    async def boxes(self) -> Sequence[KeptMailbox]:
        """The mailboxes of all homes. Raises ArmFault."""
        ...

    async def boxes_left(self) -> Sequence[KeptMailbox]:
        """The mailboxes of all homes that can be seen."""
        ...

    async def check(self) -> None:
        """Raises ArmFault if what it needs besides the account does not let us in."""
        ...

    async def drop(self, machine: MachineId) -> None:
        """End the connection to a machine."""
        ...

    async def remove(self, machine: MachineId) -> None:
        """Remove what there was for a machine that is deleted. Raises PlaceError."""
        ...

    async def remove_kept(self, box: str) -> None:
        """Remove a mailbox by its name. Raises PlaceError."""
        ...

    async def close(self) -> None: ...


class SshWay:
    """SSH to the node, with a key of ours. The pilot tells the node's host key through Batch, as nobody else
    could."""

    silence = "the pilot has not told its host key yet"

    def __init__(self, client: BatchClient, access: SshAccess, *, public_ip: bool) -> None:
        self._client, self._public_ip = client, public_ip
        self.access = access

    async def prepare(
        self, machine: MachineId, life_s: float, wait_s: float, *, kvm: bool
    ) -> tuple[MailPilot | None, str]:
        return None, self.access.keys.login().public

    async def mark_allocated(self, machine: MachineId, at: float) -> None:
        """The job tells it."""

    def has_met(self, seen: Sighting, start: NodeStart) -> bool:
        if not start.key or seen.state != "active":
            return False
        if not self.access.keys.has_host(seen.machine):
            self.access.keys.pin(seen.machine, start.key)
        return True

    async def meet(self, seen: Sighting, start: NodeStart) -> NodeStart | None:
        key = await self._client.host_key(str(seen.job["id"]))
        address = seen.address if self._public_ip else f"{seen.node.get('ipAddress')}:22"
        if not key or not address:
            return None
        self.access.keys.pin(seen.machine, key)
        until = start.allocated + seen.life_s - self._client.arm.skew_s
        await self.access.take(seen.machine, address, until, None)
        return structs.replace(start, address=address, key=key)

    def shown(self, machine: Machine, *, has_box: bool) -> Machine:
        return machine

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        return self.access.channel(machine, fence)

    async def boxes(self) -> Sequence[KeptMailbox]:
        return ()

    async def boxes_left(self) -> Sequence[KeptMailbox]:
        return ()

    async def check(self) -> None:
        """It needs nothing but the account."""

    async def drop(self, machine: MachineId) -> None:
        await self.access.drop(machine)

    async def remove(self, machine: MachineId) -> None:
        self.access.keys.drop(machine)

    async def remove_kept(self, box: str) -> None:
        """There are none."""

    async def close(self) -> None:
        await self.access.close()


class MailWay:
    """A mailbox in a storage account: nothing connects to the node."""

    silence = "the pilot has not come to its mailbox yet"

    def __init__(self, boxes: Mailboxes, storage: MailStorage, context: PlaceContext) -> None:
        self._boxes, self._storage, self._secrets = boxes, storage, context.secrets
        self._samples = Samples(context.home)

    async def prepare(
        self, machine: MachineId, life_s: float, wait_s: float, *, kvm: bool
    ) -> tuple[MailPilot | None, str]:
        return await self._boxes.make(machine, life_s, wait_s, kvm=kvm), ""

    async def mark_allocated(self, machine: MachineId, at: float) -> None:
        if not self._boxes.gone:
            await self._boxes.mark_allocated(machine, at)

    def has_met(self, seen: Sighting, start: NodeStart) -> bool:
        return start.address == MAILBOX

    async def meet(self, seen: Sighting, start: NodeStart) -> NodeStart | None:
        """It is written down with the job, so that nobody looks into the mailbox again."""
        told = (await self._boxes.marks(seen.machine)).start
        return None if told is None else structs.replace(start, address=MAILBOX)

    def shown(self, machine: Machine, *, has_box: bool) -> Machine:
        return without_mail(machine, self._boxes, has_box=has_box)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        on_load = functools.partial(self._samples.keep, machine.id)
        return self._boxes.channel(machine.id, fence, self._secrets, on_load)

    async def boxes(self) -> Sequence[KeptMailbox]:
        return await self._boxes.seen()

    async def boxes_left(self) -> Sequence[KeptMailbox]:
        return await self._boxes.left()

    async def check(self) -> None:
        """What cannot be made cannot be seen to be gone, either."""
        await storage_checks(self._storage.opened)

    async def drop(self, machine: MachineId) -> None:
        """There is none."""

    async def remove(self, machine: MachineId) -> None:
        await self._boxes.remove(machine)

    async def remove_kept(self, box: str) -> None:
        await self._boxes.remove_named(box)

    async def close(self) -> None:
        """The storage is closed with the place."""
