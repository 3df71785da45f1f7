"""What exists in the resource group, of a few lists: as many requests for one machine as for a hundred."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from msgspec import Struct

from evalfleet.model import Machine, MachineId
from evalfleet.single_flight import SingleFlight

from .arm import Arm
from .names import EXPIRES, HOME, MACHINE, moment
from .refusals import ArmFault
from .template import ADDRESS, COMPUTE, DISK, NETWORK, NIC, RESOURCES, VM
from .words import Json, rows, table, tags_in

Phase = Literal["pending", "up", "gone", "evicted"]
FIRST_PAUSE_S, LONGEST_PAUSE_S, SHARE = 0.1, 3.0, 0.1
SPACING_S = 0.1
BURST, REFILL_S = 30.0, 1.0
"""Thirty looks may follow one another closely; in the long run there is one a second."""
ACTIVE = frozenset(
    {"accepted", "running", "creating", "created", "updating", "deleting", "ready", "notspecified"}
)


class Part(Struct, frozen=True):
    """A resource of a machine of ours, the machine itself included."""

    id: str
    type: str


class Vm(Struct, frozen=True):
    """`power`: running, deallocated, ...; empty while it has none. `state`: of its last change."""

    id: str
    name: str
    region: str
    size: str
    spot: bool
    state: str
    power: str
    expires_at: float | None
    nics: tuple[str, ...]


class Deployed(Struct, frozen=True):
    """The record of a deployment of ours."""

    name: str
    state: str
    error: Mapping[str, Any] | None

    @property
    def active(self) -> bool:
        return self.state.lower() in ACTIVE


class View(Struct, frozen=True):
    """What is this home's, by machine; `taken` are names, in lower case, of what is not, by type."""

    vms: Mapping[MachineId, Vm]
    parts: Mapping[MachineId, tuple[Part, ...]]
    deployments: Mapping[MachineId, Deployed]
    taken: frozenset[tuple[str, str]]

    @property
    def machines(self) -> set[MachineId]:
        return {*self.vms, *self.parts, *self.deployments}

    def has_disk(self, machine: MachineId) -> bool:
        return any(part.type == DISK.lower() for part in self.parts.get(machine, ()))

    def phase(self, machine: MachineId, now: float) -> Phase:
        vm, deployed = self.vms.get(machine), self.deployments.get(machine)
        if vm is None:
            return "pending" if deployed is not None and deployed.active else "gone"
        expired = vm.expires_at is not None and now > vm.expires_at
        if expired or vm.state == "deleting":
            return "gone"
        if vm.power == "running":
            return "pending" if vm.state == "creating" else "up"
        if vm.power in ("", "starting"):
            return "gone" if vm.state == "failed" else "pending"
        return "evicted" if vm.spot else "gone"


NOTHING = View({}, {}, {}, frozenset())


def read(
    home: str, vms: list[Json], statuses: list[Json], resources: list[Json], deployments: list[Json]
) -> View:
    """Pure: of the lists as Azure gives them."""
    power = {each["id"].lower(): _power(each) for each in statuses}
    ours: dict[MachineId, Vm] = {}
    parts: dict[MachineId, list[Part]] = {}
    taken: set[tuple[str, str]] = set()
    for each in vms:
        machine = _machine(home, each)
        if machine is None:
            taken.add((VM.lower(), each["name"].lower()))
        else:
            ours[machine] = _vm(each, power.get(each["id"].lower(), ""))
    for each in resources:
        machine = _machine(home, each)
        if machine is None:
            taken.add((each["type"].lower(), each["name"].lower()))
        elif each["type"].lower() != VM.lower() or machine in ours:  # this list may lag behind the first
            parts.setdefault(machine, []).append(Part(each["id"], each["type"].lower()))
    records = {
        machine: Deployed(
            each["name"], each["properties"]["provisioningState"], each["properties"].get("error")
        )
        for each in deployments
        if (machine := _machine(home, each)) is not None
    }
    return View(ours, {key: tuple(found) for key, found in parts.items()}, records, frozenset(taken))


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


class Pace:
    """How soon the next look may be. No clock of its own: `now` is given."""

    def __init__(self) -> None:
        self._left, self._at = BURST, 0.0

    def wait_s(self, now: float) -> float:
        """Take a look from the allowance, and tell how long to wait before it."""
        self._left = min(BURST, self._left + (now - self._at) / REFILL_S)
        self._at = now
        self._left -= 1.0
        return SPACING_S if self._left >= 0.0 else -self._left * REFILL_S


class Looks:
    """Many ask at once, and share the answers; Azure is not asked too often."""

    def __init__(self, arm: Arm, group: str, home: str) -> None:
        self._arm = arm
        self._root = f"{arm.root}/resourceGroups/{group}"
        self._home = home
        pace = Pace()
        self._view = SingleFlight(self._fetch, lambda: pace.wait_s(time.monotonic()))
        self._table = SingleFlight(self._fetch_addresses)
        self._addresses: dict[str, str] = {}

    async def fresh(self) -> View:
        """Never older than the question. Raises ArmFault."""
        return await self._view.fresh()

    async def watch(self) -> AsyncGenerator[View]:
        """What there is now, and at every later look, whoever asks for it. Raises ArmFault.

        Who has waited for long can wait a little longer: that costs a small share of the whole time, and the
        most impatient of all that wait decides.
        """
        begun = time.monotonic()
        view = await self.fresh()
        while True:
            yield view
            waited_s = time.monotonic() - begun
            view = await self._view.soon(min(max(FIRST_PAUSE_S, waited_s * SHARE), LONGEST_PAUSE_S))

    async def _fetch(self) -> View:
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
        """Their power states: in one list of the subscription, or one by one where that may not be read."""
        try:
            return await self._arm.all(f"{self._arm.root}/providers/{VM}", COMPUTE, statusOnly="true")
        except ArmFault as fault:
            if fault.status != 403:
                raise
        view = {"$expand": "instanceView"}
        found = await asyncio.gather(
            *(self._arm.send("GET", each["id"], COMPUTE, query=view) for each in own), return_exceptions=True
        )
        return [each for each in found if isinstance(each, dict)]

    # -- addresses -----------------------------------------------------------------------------

    async def machines(self, view: View, now: float) -> dict[MachineId, Machine]:
        """As the engine sees them. One that is up has an address, or is not up yet."""
        phases: dict[MachineId, Phase] = {machine: view.phase(machine, now) for machine in view.machines}
        up = [view.vms[each] for each, phase in phases.items() if phase == "up"]
        ids = {vm.id.lower() for vm in up}  # what has stopped in between may have another address now
        self._addresses = {vm: address for vm, address in self._addresses.items() if vm in ids}
        await self._learn(up)
        return {each: self._machine(view, each, phase) for each, phase in phases.items()}

    def _machine(self, view: View, machine: MachineId, phase: Phase) -> Machine:
        vm = view.vms.get(machine)
        if vm is None or phase != "up":
            return Machine(machine, phase)
        address = self._addresses.get(vm.id.lower())
        node = f"{vm.name} ({vm.region})"
        return Machine(machine, "up", address, node) if address else Machine(machine, "pending")

    async def address(self, vm: Vm) -> str:
        """Of one that runs; empty if it has none yet."""
        await self._learn([vm])
        return self._addresses.get(vm.id.lower(), "")

    async def _learn(self, up: list[Vm]) -> None:
        if all(vm.id.lower() in self._addresses for vm in up):
            return
        by_nic = await self._table.fresh()
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
