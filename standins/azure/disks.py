"""Microsoft.Compute: disks, images and snapshots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from standins.cloud.words import Json

from .kind import Kind, invalid
from .store import Resource
from .vm_rules import dig
from .vm_shape import DISK_SKUS
from .words import ArmError, ResourceId, names

if TYPE_CHECKING:
    from .cloud import Cloud
    from .vms import Vm

DISK = "Microsoft.Compute/disks"


class Disks(Kind):
    type = DISK
    fields = names(
        "osType hyperVGeneration creationData diskSizeGB diskState encryption tier maxShares "
        "networkAccessPolicy publicNetworkAccess timeCreated uniqueId diskSizeBytes diskIOPSReadWrite "
        "diskMBpsReadWrite supportedCapabilities securityProfile purchasePlan burstingEnabled "
        "dataAccessAuthMode"
    )

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        sku = (body.get("sku") or {}).get("name", "Standard_LRS")
        if sku not in DISK_SKUS:
            raise invalid(f"The value '{sku}' of sku.name is invalid.", "sku.name")
        if old is None and not dig(body, "properties.creationData.createOption"):
            raise invalid("Required parameter 'disk.creationData' is missing (null).", "disk.creationData")

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        resource.extra.setdefault("sku", {"name": "Standard_LRS", "tier": "Standard"})
        if is_new:
            self._count(resource)

    def _count(self, disk: Resource) -> None:
        sku = disk.extra["sku"]["name"]
        self.cloud.quota.take(disk.id.key, disk.location, {DISK_SKUS[sku]: 1})
        size = disk.properties.get("diskSizeGB", 30)
        self.cloud.meters.start("disk", str(disk.id), f"{sku} {size}", disk.location, self.cloud.clock.now())

    def make_for(self, vm: Vm) -> None:
        """A virtual machine's own, from its image."""
        id = vm.id.sibling(DISK, vm.disk_name)
        wanted: Json = vm.properties["storageProfile"]["osDisk"]
        sku = dig(wanted, "managedDisk.storageAccountType") or "Standard_LRS"
        now = self.cloud.clock.now()
        disk = self.cloud.store.get(id) or self.make(id, vm.location, now)
        disk.properties = {
            "osType": "Linux",
            "diskSizeGB": wanted.get("diskSizeGB", 30),
            "creationData": {"createOption": "FromImage"},
            "timeCreated": self.cloud.clock.stamp(now),
        }
        disk.extra = {"sku": {"name": sku, "tier": sku.split("_")[0]}}
        if vm.extra.get("zones"):
            disk.extra["zones"] = vm.extra["zones"]
        disk.tags = dict(vm.tags) if self.cloud.disks_inherit_tags else {}
        disk.details["vm"] = str(vm.id)
        disk.state = "Succeeded"
        self.cloud.store.add(disk)
        self._count(disk)
        vm.properties["storageProfile"]["osDisk"]["diskSizeGB"] = disk.properties["diskSizeGB"]

    def detach_from(self, vm: Vm) -> None:
        """The machine is gone: its disk goes, too, or stays and is billed on."""
        disk = self.cloud.store.get(vm.id.sibling(DISK, vm.disk_name))
        if disk is None:
            return
        disk.details.pop("vm", None)
        if vm.properties["storageProfile"]["osDisk"].get("deleteOption") == "Delete":
            self.drop(disk)

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        holder = resource.details.get("vm")
        shown["properties"]["diskState"] = self._state(holder) if holder else "Unattached"
        return {**shown, "managedBy": holder} if holder else shown

    def _state(self, holder: str) -> str:
        running = any(span.kind == "vm" and span.id == holder for span in self.cloud.meters.running())
        return "Attached" if running else "Reserved"

    def check_delete(self, resource: Resource) -> None:
        holder = resource.details.get("vm")
        if holder:
            raise ArmError(
                409,
                "OperationNotAllowed",
                f"Disk {resource.id.name} is attached to VM {holder}.",
            )

    def drop(self, resource: Resource) -> None:
        super().drop(resource)
        self.cloud.meters.stop("disk", str(resource.id), self.cloud.clock.now())


class Plain(Kind):
    """Kept as it came: what machines refer to but we do not look into."""

    names = re.compile(r"[\w.-]{1,80}")

    def __init__(self, cloud: Cloud, type: str) -> None:
        super().__init__(cloud)
        self.type = type


def plain_kinds(cloud: Cloud) -> list[Kind]:
    return [Plain(cloud, type) for type in ("Microsoft.Compute/images", "Microsoft.Compute/snapshots")]
