"""What exists in the project, by a few lists over all zones: as many requests for one machine as for a
hundred."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from evalfleet.model import MachineId
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.place import Snapshots
from evalfleet.single_flight import SingleFlight

from .client import ComputeClient, last_word, path_of
from .names import EXPIRES, HOME, label, machine_in, moment, seconds

Phase = Literal["pending", "up", "gone", "evicted"]
COMING = frozenset(("PROVISIONING", "STAGING", "REPAIRING", "PENDING"))
PREEMPTED = 'operationType="compute.instances.preempted"'
REFILL_S = 0.5
"""A snapshot is two calls, of which Google bears 25 a second."""
INSERTING = '(operationType="insert") AND (status!="DONE")'


class Instance(Struct, frozen=True):
    """An instance of ours, as Google shows it."""

    path: str
    """`projects/.../instances/NAME`."""
    id: str
    """Google's number for it: another one, if one of the same name was there before."""
    name: str
    zone: str
    type: str
    spot: bool
    status: str
    """PROVISIONING, STAGING, RUNNING, STOPPING, TERMINATED, ..."""
    expires_at: float | None
    """By its label."""
    ends_at: float | None
    """When Google will end it; None while it does not run."""
    address: str
    """The public one, or, without one, that of its network; empty while it has none."""
    created: str
    """When it was made, as Google writes it."""
    started_at: float | None
    """When it was last started."""
    label_fingerprint: str
    labels: Mapping[str, str]


class Preemption(Struct, frozen=True):
    """Google took an instance back."""

    name: str
    id: str
    at: float

    def is_of(self, name: str, vm: Instance | None) -> bool:
        """Is that why the instance, which is gone or has stopped, does not run? It may have started since."""
        return self.name == name and (vm is None or (self.id == vm.id and self.at >= (vm.started_at or 0.0)))


class OwnDisk(Struct, frozen=True):
    """A disk of ours."""

    path: str
    zone: str
    attached: bool


class ProjectSnapshot(Struct, frozen=True):
    """What is there of this home, by machine, at one moment."""

    vms: Mapping[MachineId, Instance]
    doubles: tuple[Instance, ...]
    """Names are unique in a zone only: of two of one machine, the older is in `vms`, the other here."""
    disks: Mapping[MachineId, tuple[OwnDisk, ...]]

    @property
    def machines(self) -> set[MachineId]:
        return {*self.vms, *self.disks}

    def phase(self, machine: MachineId, now: float) -> Phase:
        """As the engine sees it; whether one that has stopped was taken back, only operations tell."""
        vm = self.vms.get(machine)
        if vm is None or (vm.expires_at is not None and now > vm.expires_at):
            return "gone"
        if vm.status == "RUNNING":
            return "up"
        return "pending" if vm.status in COMING else "gone"


def read(instances: list[Json], disks: list[Json]) -> ProjectSnapshot:
    """Make a snapshot of the lists as Google gives them. Pure."""
    vms: dict[MachineId, Instance] = {}
    doubles: list[Instance] = []
    ours = [(machine, vm_of(row)) for row in instances if (machine := machine_in(row)) is not None]
    for machine, vm in sorted(ours, key=lambda pair: (pair[1].created, pair[1].id)):
        if machine in vms:
            doubles.append(vm)
        else:
            vms[machine] = vm
    found: dict[MachineId, tuple[OwnDisk, ...]] = {}
    for row in disks:
        if (machine := machine_in(row)) is not None:
            disk = OwnDisk(path_of(row), last_word(row.get("zone")), bool(row.get("users")))
            found[machine] = (*found.get(machine, ()), disk)
    return ProjectSnapshot(vms, tuple(doubles), found)


def vm_of(shown: Json) -> Instance:
    scheduling = table(shown.get("scheduling"))
    status = table(table(shown.get("resourceStatus")).get("scheduling"))
    return Instance(
        path=path_of(shown),
        id=str(shown.get("id", "")),
        name=str(shown["name"]),
        zone=last_word(shown.get("zone")),
        type=last_word(shown.get("machineType")),
        spot=scheduling.get("provisioningModel") == "SPOT",
        status=str(shown.get("status", "")),
        expires_at=seconds(table(shown.get("labels")).get(EXPIRES, "")),
        ends_at=moment(status.get("terminationTimestamp")),
        address=address_in(shown),
        created=str(shown.get("creationTimestamp", "")),
        started_at=moment(shown.get("lastStartTimestamp")),
        label_fingerprint=str(shown.get("labelFingerprint", "")),
        labels={key: str(value) for key, value in table(shown.get("labels")).items()},
    )


def address_in(shown: Json) -> str:
    for interface in rows(shown.get("networkInterfaces")):
        outside = rows(interface.get("accessConfigs"))
        if outside:
            return str(outside[0].get("natIP") or "")
        return str(interface.get("networkIP") or "")
    return ""


class ProjectInventory(Snapshots[ProjectSnapshot]):
    """What there is of this home in the project. Raises GoogleFault."""

    def __init__(self, client: ComputeClient, home: str) -> None:
        super().__init__(self._fetch, REFILL_S)
        self._client = client
        self._filter = f"labels.{HOME}={label(home)}"
        self._insertions = SingleFlight(lambda: client.everywhere("operations", filter=INSERTING))

    async def _fetch(self) -> ProjectSnapshot:
        instances, disks = await asyncio.gather(
            self._client.everywhere("instances", filter=self._filter),
            self._client.everywhere("disks", filter=self._filter),
        )
        return read(instances, disks)

    async def preempted(self) -> list[Preemption]:
        """The instances that Google took back, also those that are gone by now."""
        found = await self._client.everywhere("operations", filter=PREEMPTED)
        return [
            Preemption(
                last_word(each.get("targetLink")),
                str(each.get("targetId", "")),
                moment(each.get("endTime") or each.get("insertTime")) or 0.0,
            )
            for each in found
        ]

    async def inserting(self, name: str) -> list[Json]:
        """The operations by which an instance of this name is being made, in whatever zone."""
        found = await self._insertions.fresh()  # a hundred that are asked for at once need it once
        return [each for each in found if str(each.get("targetLink", "")).endswith(f"/instances/{name}")]
