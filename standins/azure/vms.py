"""Microsoft.Compute/virtualMachines: making, showing and deleting them."""

from __future__ import annotations

import base64
import copy
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from standins.cloud.machines import Guest, MachineTrouble
from standins.cloud.words import Json

from . import firewall
from .addresses import Interfaces
from .disks import DISK, Disks
from .kind import Kind, merged, reference
from .network import PIP
from .quota import Place, vm_uses
from .store import Resource
from .vm_rules import VmRules, dig, zone_of
from .words import ArmError, ResourceId, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

VM = "Microsoft.Compute/virtualMachines"
MOST_BOOT_S = 1200.0


@dataclass(eq=False)
class Vm(Resource):
    """`power`: as in the instance view; empty before it is allocated for the first time."""

    power: str = ""
    power_since: float = 0.0
    has_booted: bool = False
    evicting: bool = False
    generalized: bool = False
    new_address: bool = False
    """Does it get another address when it starts next?"""

    @property
    def is_spot(self) -> bool:
        return self.properties.get("priority") in ("Spot", "Low")

    @property
    def size(self) -> str:
        return str(self.properties["hardwareProfile"]["vmSize"])

    @property
    def disk_name(self) -> str:
        return str(self.properties["storageProfile"]["osDisk"]["name"])

    @property
    def nic_ids(self) -> list[ResourceId]:
        return [parse_id(reference(each)) for each in self.properties["networkProfile"]["networkInterfaces"]]


class VirtualMachines(Kind):
    type = VM
    can_be_preempted = True

    def __init__(self, cloud: Cloud, disks: Disks, interfaces: Interfaces) -> None:
        super().__init__(cloud)
        self._rules = VmRules(cloud)
        self._disks = disks
        self._interfaces = interfaces
        cloud.on_rules.append(self.protect_all)

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        self.check_name(id)
        if old is None:
            self._rules.check_new(id, body)
        else:
            self._rules.check_change(old, body)

    def preflight(self, id: ResourceId, body: Json) -> None:
        region = self.cloud.catalog.region(body.get("location"), VM)
        size = self.cloud.catalog.size(dig(body, "properties.hardwareProfile.vmSize"))
        self.cloud.catalog.check_offered(size, region, zone_of(body))
        spot = dig(body, "properties.priority") in ("Spot", "Low")
        self.cloud.quota.check(id.key, region, vm_uses(size, spot))

    def make(self, id: ResourceId, location: str, now: float) -> Vm:
        vm = Vm(id, location, {}, {}, {}, now)
        vm.details["vmId"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{id} {now}"))
        return vm

    def keep(self, properties: Json, old: Resource | None) -> Json:
        sent = {
            key: value
            for key, value in properties.items()
            if key not in ("vmId", "timeCreated", "instanceView")
        }
        return merged(old.properties, sent) if old is not None else copy.deepcopy(sent)

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        assert isinstance(resource, Vm)
        size = self.cloud.catalog.size(resource.size)
        self.cloud.quota.take(resource.id.key, resource.location, vm_uses(size, resource.is_spot))
        if is_new:
            disk: Json = resource.properties["storageProfile"].setdefault(
                "osDisk", {"createOption": "FromImage"}
            )
            disk.setdefault(
                "name", f"{resource.id.name}_OsDisk_1_{resource.details['vmId'].replace('-', '')}"
            )
            disk.setdefault("osType", "Linux")
            disk.setdefault("deleteOption", "Detach")
            for id in resource.nic_ids:
                nic = self.cloud.store.get(id)
                assert nic is not None
                nic.details["vm"] = str(resource.id)

    async def bring(self, resource: Resource, is_new: bool) -> None:
        assert isinstance(resource, Vm)
        if resource.has_booted:
            await self.cloud.pause(self.cloud.timing.network_s)
            return
        await self.cloud.pause(self.cloud.timing.allocation_s)
        self.allocate(resource)
        self._disks.make_for(resource)
        await self.boot(resource)

    def allocate(self, vm: Vm) -> None:
        """It has a place, and costs money from now on. Raises if there is none."""
        place = Place(vm.location, zone_of(vm.extra), vm.size, vm.is_spot)
        self.cloud.capacity.take(vm.id.key, place)
        self.set_power(vm, "starting")
        now = self.cloud.clock.now()
        self.cloud.meters.start("vm", str(vm.id), vm.size, vm.location, now, spot=vm.is_spot)
        for nic in self.interfaces_of(vm):
            self._interfaces.assign(nic, new=vm.new_address)
            self._interfaces.go_public(nic, new=vm.new_address)
        vm.new_address = False

    async def boot(self, vm: Vm, *, fresh_temp_disk: bool = False) -> None:
        """Switch it on, its place being there."""
        await self.cloud.pause(self.cloud.timing.boot_s)
        await self._be_slow(vm)
        address = str(self.interfaces_of(vm)[0].details["ip"])
        try:
            await self.cloud.really(self._switch_on(vm, address, fresh_temp_disk))
        except MachineTrouble as err:
            raise _timed_out(vm, str(err)) from err
        self.set_power(vm, "running")

    async def _be_slow(self, vm: Vm) -> None:
        delay_s = self.cloud.faults.boot_delay_s(vm.id.name)
        await self.cloud.clock.sleep(min(delay_s, MOST_BOOT_S))
        if delay_s > MOST_BOOT_S:
            self.set_power(vm, "running")  # and billed: only the guest is not heard of
            raise _timed_out(vm, "However, the VM guest agent was not detected running.")

    async def _switch_on(self, vm: Vm, address: str, fresh_temp_disk: bool) -> None:
        if vm.has_booted:
            await self.cloud.machines.power_on(str(vm.id), address, fresh_temp_disk=fresh_temp_disk)
        else:
            await self.cloud.machines.create(self._guest(vm, address))
        vm.has_booted = True
        await self._protect(vm)

    async def _protect(self, vm: Vm) -> None:
        for nic in self.interfaces_of(vm)[:1]:
            await self.cloud.machines.protect(str(vm.id), firewall.rules(self.cloud, nic))

    def protect_all(self) -> None:
        """After a change of rules."""
        for each in self.cloud.store.of_type(VM):
            if isinstance(each, Vm) and each.power == "running":
                self.cloud.operations.spawn(self._protect(each))

    def _guest(self, vm: Vm, address: str) -> Guest:
        profile: Json = vm.properties.get("osProfile") or {}
        keys: list[Json] = dig(profile, "linuxConfiguration.ssh.publicKeys") or []
        image = str(dig(vm.properties, "storageProfile.imageReference.id") or "").lower()
        return Guest(
            str(vm.id),
            str(profile.get("computerName") or vm.id.name),
            address,
            str(profile.get("adminUsername") or ""),
            tuple(str(key["keyData"]).strip() for key in keys),
            base64.b64decode(profile.get("customData") or ""),
            self.cloud.catalog.size(vm.size).temp_disk_gib > 0,
            image if "/versions/" in image else "",
        )

    def set_power(self, vm: Vm, power: str) -> None:
        vm.power, vm.power_since = power, self.cloud.clock.now()

    def interfaces_of(self, vm: Vm) -> list[Resource]:
        found = [self.cloud.store.get(id) for id in vm.nic_ids]
        return [nic for nic in found if nic is not None]

    async def unplace(self, vm: Vm) -> None:
        """Off, and its place given back: it costs nothing any more."""
        await self.cloud.really(self.cloud.machines.power_off(str(vm.id)))
        self._end_billing(vm)
        for nic in self.interfaces_of(vm):
            vm.new_address |= self._interfaces.let_go(nic)
        self.set_power(vm, "deallocated")

    def _end_billing(self, vm: Vm) -> None:
        self.cloud.capacity.release(vm.id.key)
        self.cloud.meters.stop("vm", str(vm.id), self.cloud.clock.now())

    # -- the end -------------------------------------------------------------------------------

    async def remove(self, resource: Resource) -> None:
        assert isinstance(resource, Vm)
        await self.cloud.pause(self.cloud.timing.delete_s)
        await self.destroy(resource)

    async def destroy(self, vm: Vm) -> None:
        """With what is to go with it."""
        await self.cloud.really(self.cloud.machines.destroy(str(vm.id)))
        self._end_billing(vm)
        nics = self.interfaces_of(vm)
        options = {
            reference(each).lower(): dig(each, "properties.deleteOption")
            for each in vm.properties["networkProfile"]["networkInterfaces"]
        }
        self.cloud.forget(vm)
        self._disks.detach_from(vm)
        for nic in nics:
            nic.details.pop("vm", None)
            if options.get(nic.id.key) == "Delete":
                self._drop_interface(nic)

    def _drop_interface(self, nic: Resource) -> None:
        addresses = [dig(each, "properties.publicIPAddress") for each in nic.properties["ipConfigurations"]]
        self._interfaces.drop(nic)
        for each in addresses:
            address = self.cloud.store.get(parse_id(reference(each))) if each else None
            if address is None:
                continue
            option = dig(each, "properties.deleteOption") or address.properties.get("deleteOption")
            if option == "Delete":
                self.cloud.kinds[PIP.lower()].drop(address)

    def is_busy(self, resource: Resource) -> ArmError:
        return ArmError(
            409,
            "Conflict",
            "The request failed due to conflict with a concurrent request. To resolve it, please refer to "
            "https://aka.ms/activitylog to get more details on the conflicting requests.",
        )

    # -- showing -------------------------------------------------------------------------------

    def show(self, resource: Resource) -> Json:
        assert isinstance(resource, Vm)
        shown = super().show(resource)
        properties = copy.deepcopy(shown["properties"])
        profile = properties.get("osProfile")
        if profile:
            for secret in ("customData", "adminPassword"):  # never told again
                profile.pop(secret, None)
            profile.setdefault("secrets", [])
            profile.setdefault("allowExtensionOperations", True)
        disk = self.cloud.store.get(resource.id.sibling(DISK, resource.disk_name))
        if disk is not None:
            properties["storageProfile"]["osDisk"].setdefault("managedDisk", {})["id"] = str(disk.id)
        properties["storageProfile"].setdefault("dataDisks", [])
        properties["vmId"] = resource.details["vmId"]
        properties["timeCreated"] = self.cloud.clock.stamp(resource.created_at)
        return {**shown, "properties": properties}

    def part(self, resource: Resource, tail: str) -> Json | None:
        assert isinstance(resource, Vm)
        return self.instance_view(resource) if tail.lower() == "instanceview" else None

    def instance_view(self, vm: Vm) -> Json:
        words = {"Succeeded": "succeeded", "Failed": "failed", "Creating": "creating", "Deleting": "deleting"}
        state = words.get(vm.state, "updating")
        statuses: list[Json] = [
            {
                "code": f"ProvisioningState/{state}",
                "level": "Error" if state == "failed" else "Info",
                "displayStatus": f"Provisioning {state}",
                "time": self.cloud.clock.stamp(vm.changed_at),
            }
        ]
        if vm.busy is not None and vm.busy.error is not None and state == "failed":
            statuses[0]["code"] += f"/{vm.busy.error.code}"
            statuses[0]["message"] = vm.busy.error.message
        if vm.generalized:
            told = {"code": "OSState/generalized", "level": "Info", "displayStatus": "VM generalized"}
            statuses.append(told)
        if vm.power:
            statuses.append(
                {"code": f"PowerState/{vm.power}", "level": "Info", "displayStatus": f"VM {vm.power}"}
            )
        view: Json = {"statuses": statuses, "hyperVGeneration": "V2"}
        if vm.power == "running":
            ready = {"code": "ProvisioningState/succeeded", "level": "Info", "displayStatus": "Ready"}
            view["vmAgent"] = {"vmAgentVersion": "2.13.1.1", "statuses": [ready]}
            view["computerName"] = dig(vm.properties, "osProfile.computerName")
        return view


def _timed_out(vm: Vm, why: str) -> ArmError:
    return ArmError(
        409,
        "OSProvisioningTimedOut",
        f"OS Provisioning for VM '{vm.id.name}' did not finish in the allotted time. {why}",
    )
