"""Microsoft.Network: public addresses and network interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from standins.cloud.words import Json

from .kind import Kind, invalid, reference
from .network import NIC, NSG, PIP, SUBNET, NetworkKind, subnet_range
from .store import Resource
from .words import ArmError, ResourceId, names, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud


class PublicAddresses(NetworkKind):
    type = PIP
    fields = names(
        "publicIPAllocationMethod publicIPAddressVersion idleTimeoutInMinutes dnsSettings "
        "deleteOption ddosSettings ipTags ipAddress ipConfiguration resourceGuid"
    )

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        properties = body.get("properties") or {}
        sku = (body.get("sku") or {}).get("name", "Basic")
        method = properties.get("publicIPAllocationMethod", "Dynamic")
        if sku not in ("Basic", "Standard"):
            raise invalid(f"The value '{sku}' of sku.name is invalid.", "sku.name")
        if method not in ("Static", "Dynamic"):
            raise invalid(f"The value '{method}' is invalid.", "publicIPAllocationMethod")
        if sku == "Standard" and method != "Static":
            raise ArmError(
                400,
                "PublicIPAddressWithStandardSkuMustBeStatic",
                f"Standard sku publicIp {id} must have AllocationMethod set to Static.",
            )
        if old is not None and (old.extra.get("sku") or {}).get("name", "Basic") != sku:
            raise ArmError(
                409,
                "PropertyChangeNotAllowed",
                "Changing property 'sku.name' is not allowed.",
                target="sku.name",
            )

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        resource.extra.setdefault("sku", {"name": "Basic", "tier": "Regional"})
        resource.properties.setdefault("publicIPAllocationMethod", "Dynamic")
        resource.properties.setdefault("publicIPAddressVersion", "IPv4")
        resource.properties.setdefault("idleTimeoutInMinutes", 4)
        for read_only in ("ipAddress", "ipConfiguration"):
            resource.properties.pop(read_only, None)
        if is_new:
            standard = resource.extra["sku"]["name"] == "Standard"
            uses = {"PublicIPAddresses": 1} | ({"IPv4StandardSkuPublicIpAddresses": 1} if standard else {})
            self.cloud.quota.take(resource.id.key, resource.location, uses)
            sku = resource.extra["sku"]["name"]
            self.cloud.meters.start(
                "address", str(resource.id), sku, resource.location, self.cloud.clock.now()
            )

    def finish(self, resource: Resource) -> None:
        if resource.properties["publicIPAllocationMethod"] == "Static" and "ip" not in resource.details:
            resource.details["ip"] = self.cloud.machines.new_address(taken_addresses(self.cloud))

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        if resource.details.get("ip"):
            shown["properties"]["ipAddress"] = resource.details["ip"]
        user = self._used_by(resource)
        if user:
            shown["properties"]["ipConfiguration"] = {"id": user}
        return shown

    def _used_by(self, address: Resource) -> str:
        for nic in self.cloud.store.of_type(NIC):
            for each in nic.properties["ipConfigurations"]:
                if reference(each["properties"].get("publicIPAddress")).lower() == address.id.key:
                    return f"{nic.id}/ipConfigurations/{each['name']}"
        return ""

    def check_delete(self, resource: Resource) -> None:
        user = self._used_by(resource)
        if user:
            raise ArmError(
                400,
                "PublicIPAddressCannotBeDeleted",
                f"Public IP address {resource.id} can not be deleted since it is still allocated to resource "
                f"{user}. In order to delete the public IP, disassociate/detach the Public IP "
                "address from the "
                "resource.",
            )

    def drop(self, resource: Resource) -> None:
        super().drop(resource)
        self.cloud.meters.stop("address", str(resource.id), self.cloud.clock.now())


class Interfaces(NetworkKind):
    type = NIC
    fields = names(
        "ipConfigurations networkSecurityGroup enableAcceleratedNetworking enableIPForwarding "
        "dnsSettings nicType auxiliaryMode disableTcpStateTracking virtualMachine primary macAddress "
        "resourceGuid tapConfigurations hostedWorkloads vnetEncryptionSupported"
    )

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        properties = body.get("properties") or {}
        configurations = properties.get("ipConfigurations") or []
        if not configurations:
            raise ArmError(
                400,
                "NetworkInterfaceMustHaveAtLeastOneIpConfiguration",
                f"Network interface {id} must have at least one ip configuration.",
            )
        for each in configurations:
            self._check_configuration(id, body["location"], each)
        group = properties.get("networkSecurityGroup")
        if group is not None:
            self._same_region(self.need_reference(group, id), NSG, body["location"])

    def _check_configuration(self, id: ResourceId, location: str, configuration: Json) -> None:
        properties = configuration.get("properties") or {}
        if not configuration.get("name"):
            raise ArmError(400, "InvalidRequestFormat", "An ip configuration has no name.")
        subnet = self.need_reference(properties.get("subnet"), id)
        if subnet.id.type.lower() != SUBNET.lower():
            raise ArmError(400, "InvalidRequestFormat", f"{subnet.id} is no subnet.")
        vnet = self.cloud.need(subnet.id.parent)
        self._same_region(vnet, "Microsoft.Network/virtualNetworks", location)
        if properties.get("publicIPAddress") is None:
            return
        address = self.need_reference(properties["publicIPAddress"], id)
        self._same_region(address, PIP, location)
        for nic in self.cloud.store.of_type(NIC):
            if nic.id.key != id.key and address.id.key in public_addresses(nic):
                raise ArmError(
                    400,
                    "PublicIPAddressInUse",
                    f"Resource {id}/ipConfigurations/{configuration['name']} is referencing "
                    "public IP address "
                    f"{address.id} that is already allocated to resource {nic.id}.",
                )

    def _same_region(self, resource: Resource, type: str, location: str) -> None:
        if resource.id.type.lower() != type.lower():
            raise ArmError(
                400, "InvalidRequestFormat", f"Cannot parse the request: {resource.id} is no {type}."
            )
        if resource.location != location:
            raise ArmError(
                400,
                "InvalidResourceReference",
                f"Resource {resource.id} was not found. Please make sure that the referenced "
                "resource exists, "
                "and that both resources are in the same region.",
            )

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        super().accept(resource, is_new=is_new)
        for read_only in ("virtualMachine", "macAddress"):
            resource.properties.pop(read_only, None)

    def finish(self, resource: Resource) -> None:
        if not resource.details.get("vm"):
            self.assign(resource)
        self.cloud.rules_changed()

    def assign(self, nic: Resource, *, new: bool = False) -> str:
        """Its addresses, private and public; what it has it keeps unless it is to be a `new` one."""
        first = nic.properties["ipConfigurations"][0]["properties"]
        public = self._public(first)
        given = first.get("privateIPAddress") if first.get("privateIPAllocationMethod") == "Static" else None
        if self.cloud.machines.is_flat:
            fixed = public is not None and public.properties["publicIPAllocationMethod"] == "Static"
            if fixed and public is not None and public.details.get("ip"):
                nic.details["ip"] = public.details["ip"]
            elif new or "ip" not in nic.details:
                nic.details["ip"] = self.cloud.machines.new_address(taken_addresses(self.cloud))
        else:
            nic.details.setdefault("ip", given or self._private(first))
        return str(nic.details["ip"])

    def go_public(self, nic: Resource, *, new: bool) -> None:
        """A dynamic address is given when the machine starts."""
        public = self._public(nic.properties["ipConfigurations"][0]["properties"])
        if public is not None and (new or "ip" not in public.details):
            flat = self.cloud.machines.is_flat
            other = (
                nic.details["ip"] if flat else self.cloud.machines.new_address(taken_addresses(self.cloud))
            )
            public.details["ip"] = other

    def let_go(self, nic: Resource) -> bool:
        """A dynamic public address goes when the machine is deallocated. Did one?"""
        public = self._public(nic.properties["ipConfigurations"][0]["properties"])
        if public is None or public.properties["publicIPAllocationMethod"] == "Static":
            return False
        public.details.pop("ip", None)
        return True

    def _public(self, configuration: Json) -> Resource | None:
        id = reference(configuration.get("publicIPAddress"))
        return self.cloud.store.get(parse_id(id)) if id else None

    def _private(self, configuration: Json) -> str:
        subnet = self.cloud.store.get(parse_id(reference(configuration["subnet"])))
        assert subnet is not None
        taken = {nic.details.get("ip") for nic in self.cloud.store.of_type(NIC)}
        for n, each in enumerate(subnet_range({"properties": subnet.properties}).hosts()):
            if n >= 3 and str(each) not in taken:  # the first ones are Azure's own
                return str(each)
        raise ArmError(
            400, "SubnetIsFull", f"Subnet {subnet.id.name} does not have enough capacity for 1 IP addresses."
        )

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        properties = shown["properties"]
        properties["ipConfigurations"] = [
            self._configuration(resource, each) for each in properties["ipConfigurations"]
        ]
        if resource.details.get("vm"):
            properties["virtualMachine"] = {"id": resource.details["vm"]}
        return {**shown, "properties": {"enableIPForwarding": False, **properties}}

    def _configuration(self, nic: Resource, configuration: Json) -> Json:
        own: Json = {
            "primary": True,
            "privateIPAddressVersion": "IPv4",
            "privateIPAllocationMethod": "Dynamic",
        }
        own |= configuration["properties"]
        own["provisioningState"] = nic.state
        if nic.details.get("ip"):
            own["privateIPAddress"] = nic.details["ip"]
        id = f"{nic.id}/ipConfigurations/{configuration['name']}"
        return {"name": configuration["name"], "id": id, "properties": own}

    def check_delete(self, resource: Resource) -> None:
        user = resource.details.get("vm")
        if user:
            raise ArmError(
                400,
                "NicInUse",
                f"Network Interface {resource.id} is used by existing resource {user}. In order "
                "to delete the "
                "network interface, it must be dissociated from the resource. To learn more, see "
                "aka.ms/deletenic.",
            )


def public_addresses(nic: Resource) -> list[str]:
    """Keys of those it refers to."""
    return [
        reference(each["properties"].get("publicIPAddress")).lower()
        for each in nic.properties["ipConfigurations"]
    ]


def taken_addresses(cloud: Cloud) -> set[str]:
    both = [*cloud.store.of_type(NIC), *cloud.store.of_type(PIP)]
    return {str(each.details["ip"]) for each in both if each.details.get("ip")}


def kinds(cloud: Cloud) -> list[Kind]:
    return [PublicAddresses(cloud), Interfaces(cloud)]
