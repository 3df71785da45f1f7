"""What exists in the resource group, by a few lists: as many requests for one machine as for a hundred."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from evalfleet.model import Machine, MachineId
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.place import Snapshots
from evalfleet.single_flight import SingleFlight

from .answers import ArmFault, tags_in
from .arm import ArmClient
from .names import EXPIRES, HOME, MACHINE, moment
from .template import ADDRESS, COMPUTE, DISK, NETWORK, NIC, RESOURCES, VM

Phase = Literal["pending", "up", "gone", "evicted"]
ACTIVE = frozenset(
    {"accepted", "running", "creating", "created", "updating", "deleting", "ready", "notspecified"}
)


class MachineResource(Struct, frozen=True):
    """A resource that belongs to a machine of ours: its VM, or its disk, interface, address or schedule."""

    id: str
    type: str
    """In lower case."""


class Vm(Struct, frozen=True):
    """A virtual machine of ours, as Azure shows it."""

    id: str
    name: str
    region: str
    size: str
    spot: bool
    state: str
    """Of its last change, in lower case: creating, succeeded, failed, deleting, ..."""
    power: str
    """In lower case: running, deallocated, ...; empty while it has none."""
    expires_at: float | None
    nics: tuple[str, ...]
    """The ids of its network interfaces, in lower case."""


class DeploymentRecord(Struct, frozen=True):
    """Azure's record of a deployment of ours."""

    name: str
    state: str
    error: Mapping[str, Any] | None

    @property
    def active(self) -> bool:
        return self.state.lower() in ACTIVE


class GroupSnapshot(Struct, frozen=True):
    """What is there of this home, by machine, at one moment."""

    vms: Mapping[MachineId, Vm]
    resources: Mapping[MachineId, tuple[MachineResource, ...]]
    """The VM itself is among them."""
    deployments: Mapping[MachineId, DeploymentRecord]
    taken: frozenset[tuple[str, str]]
    """Type and name, in lower case, of what is there and is not this home's."""

    @property
    def machines(self) -> set[MachineId]:
        return {*self.vms, *self.resources, *self.deployments}

    def has_disk(self, machine: MachineId) -> bool:
        return any(resource.type == DISK.lower() for resource in self.resources.get(machine, ()))

    def phase(self, machine: MachineId, now: float) -> Phase:
        """As the engine sees it. A spot machine that does not run any more was taken back."""
        vm, record = self.vms.get(machine), self.deployments.get(machine)
        if vm is None:
            return "pending" if record is not None and record.active else "gone"
        expired = vm.expires_at is not None and now > vm.expires_at
        if expired or vm.state == "deleting":
            return "gone"
        if vm.power == "running":
            return "pending" if vm.state == "creating" else "up"
        if vm.power in ("", "starting"):
            return "gone" if vm.state == "failed" else "pending"
        return "evicted" if vm.spot else "gone"


NOTHING = GroupSnapshot({}, {}, {}, frozenset())


def read(
    home: str, vms: list[Json], statuses: list[Json], resources: list[Json], deployments: list[Json]
) -> GroupSnapshot:
    """Make a snapshot of the lists as Azure gives them. Pure."""
    power = {row["id"].lower(): _power(row) for row in statuses}
    ours: dict[MachineId, Vm] = {}
    parts: dict[MachineId, list[MachineResource]] = {}
    taken: set[tuple[str, str]] = set()
    for row in vms:
        machine = _machine(home, row)
        if machine is None:
            taken.add((VM.lower(), row["name"].lower()))
        else:
            ours[machine] = _vm(row, power.get(row["id"].lower(), ""))
    for row in resources:
        machine = _machine(home, row)
        if machine is None:
            taken.add((row["type"].lower(), row["name"].lower()))
        elif row["type"].lower() != VM.lower() or machine in ours:  # this list may lag behind the first
            parts.setdefault(machine, []).append(MachineResource(row["id"], row["type"].lower()))
    records = {
        machine: DeploymentRecord(
            row["name"], row["properties"]["provisioningState"], row["properties"].get("error")
        )
        for row in deployments
        if (machine := _machine(home, row)) is not None
    }
    return GroupSnapshot(ours, {key: tuple(some) for key, some in parts.items()}, records, frozenset(taken))


def _machine(home: str, shown: Json) -> MachineId | None:
    """The machine of ours that it belongs to."""
    tags = tags_in(shown)
    machine = tags.get(MACHINE)
    return MachineId(machine) if machine and tags.get(HOME) == home else None


def _vm(shown: Json, power: str) -> Vm:
    properties: Json = shown["properties"]
    tags = tags_in(shown)
    return Vm(
        id=shown["id"],
        name=shown["name"],
        region=shown["location"],
        size=properties["hardwareProfile"]["vmSize"],
        spot=properties.get("priority") == "Spot",
        state=str(properties.get("provisioningState", "")).lower(),
        power=power,
        expires_at=moment(str(tags.get(EXPIRES, ""))),
        nics=tuple(nic["id"].lower() for nic in properties["networkProfile"]["networkInterfaces"]),
    )


def _power(shown: Json) -> str:
    view = table(table(shown.get("properties")).get("instanceView"))
    codes = [str(each.get("code", "")) for each in rows(view.get("statuses"))]
    return next((code.split("/", 1)[1].lower() for code in codes if code.startswith("PowerState/")), "")


class GroupInventory(Snapshots[GroupSnapshot]):
    """What there is of this home in the resource group: snapshots of it, and addresses. Raises ArmFault."""

    def __init__(self, arm: ArmClient, group: str, home: str) -> None:
        super().__init__(self._fetch)
        self._arm = arm
        self._root = f"{arm.root}/resourceGroups/{group}"
        self._home = home
        self._address_lists = SingleFlight(self._fetch_addresses)
        self._addresses: dict[str, str] = {}

    async def _fetch(self) -> GroupSnapshot:
        arm, root = self._arm, self._root
        try:
            vms, resources, deployments = await asyncio.gather(
                arm.all(f"{root}/providers/{VM}", COMPUTE),
                arm.all(f"{root}/resources", RESOURCES),
                arm.all(f"{root}/providers/Microsoft.Resources/deployments", RESOURCES),
            )
        except ArmFault as fault:
            if fault.has("ResourceGroupNotFound"):
                return NOTHING
            raise
        own = [each for each in vms if _machine(self._home, each) is not None]
        statuses = await self._statuses(own) if own else []
        return read(self._home, vms, statuses, resources, deployments)

    async def _statuses(self, own: list[Json]) -> list[Json]:
        """The power states of our VMs: in one list of the subscription, or, where we may not, one by one."""
        try:
            return await self._arm.all(f"{self._arm.root}/providers/{VM}", COMPUTE, statusOnly="true")
        except ArmFault as fault:
            if fault.status != 403:
                raise
        expanded = {"$expand": "instanceView"}
        found = await asyncio.gather(
            *(self._arm.send("GET", each["id"], COMPUTE, query=expanded) for each in own),
            return_exceptions=True,
        )
        return [each for each in found if isinstance(each, dict)]

    # -- addresses -----------------------------------------------------------------------------

    async def machines(self, snapshot: GroupSnapshot, now: float) -> dict[MachineId, Machine]:
        """The machines of a snapshot as the engine sees them. One without an address is not up yet."""
        phases: dict[MachineId, Phase] = {
            machine: snapshot.phase(machine, now) for machine in snapshot.machines
        }
        up = [snapshot.vms[each] for each, phase in phases.items() if phase == "up"]
        ids = {vm.id.lower() for vm in up}  # what has stopped in between may have another address now
        self._addresses = {vm: address for vm, address in self._addresses.items() if vm in ids}
        await self._learn(up)
        return {each: self._machine(snapshot, each, phase) for each, phase in phases.items()}

    def _machine(self, snapshot: GroupSnapshot, machine: MachineId, phase: Phase) -> Machine:
        vm = snapshot.vms.get(machine)
        if vm is None or phase != "up":
            return Machine(machine, phase)
        address = self._addresses.get(vm.id.lower())
        node = f"{vm.name} ({vm.region})"
        return Machine(machine, "up", address, node) if address else Machine(machine, "pending")

    async def address(self, vm: Vm) -> str:
        """Where a VM that runs is reached; empty if it has no address yet."""
        await self._learn([vm])
        return self._addresses.get(vm.id.lower(), "")

    async def _learn(self, up: list[Vm]) -> None:
        if all(vm.id.lower() in self._addresses for vm in up):
            return
        by_nic = await self._address_lists.fresh()
        for vm in up:
            address = next((by_nic[nic] for nic in vm.nics if by_nic.get(nic)), "")
            if address:
                self._addresses[vm.id.lower()] = address

    async def _fetch_addresses(self) -> dict[str, str]:
        nics, publics = await asyncio.gather(
            self._arm.all(f"{self._root}/providers/{NIC}", NETWORK),
            self._arm.all(f"{self._root}/providers/{ADDRESS}", NETWORK),
        )
        return nic_addresses(nics, publics)


def nic_addresses(nics: list[Json], publics: list[Json]) -> dict[str, str]:
    """Id of an interface, in lower case -> the public address if it has one, else the private one."""
    public = {each["id"].lower(): each["properties"].get("ipAddress", "") for each in publics}
    found: dict[str, str] = {}
    for nic in nics:
        for each in nic["properties"]["ipConfigurations"]:
            properties: Json = each["properties"]
            outside: Json | None = properties.get("publicIPAddress")
            inside = str(properties.get("privateIPAddress", ""))
            found.setdefault(nic["id"].lower(), public.get(outside["id"].lower(), "") if outside else inside)
    return found
