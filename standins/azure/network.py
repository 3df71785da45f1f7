"""Microsoft.Network: virtual networks with subnets, security groups with rules."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from standins.cloud.words import Json

from .kind import Kind, reference
from .store import Resource
from .words import ArmError, ResourceId, names, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

VNET = "Microsoft.Network/virtualNetworks"
SUBNET = f"{VNET}/subnets"
NSG = "Microsoft.Network/networkSecurityGroups"
RULE = f"{NSG}/securityRules"
PIP = "Microsoft.Network/publicIPAddresses"
NIC = "Microsoft.Network/networkInterfaces"
COUNTED = {
    VNET: "VirtualNetworks",
    NSG: "NetworkSecurityGroups",
    NIC: "NetworkInterfaces",
}


class NetworkKind(Kind):
    creating = "Updating"

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        counted = COUNTED.get(self.type)
        if counted and is_new:
            self.cloud.quota.take(resource.id.key, resource.location, {counted: 1})

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        return {**shown, "etag": f'W/"{resource.changed_at}"'}

    def need_reference(self, value: object, where: ResourceId) -> Resource:
        """What a body points to."""
        id = parse_id(reference(value))
        found = self.cloud.store.get(id)
        if found is None:
            raise ArmError(
                400,
                "InvalidResourceReference",
                f"Resource {id} referenced by resource {where} was not found. Please make sure that the "
                "referenced resource exists, and that both resources are in the same region.",
            )
        return found


class Parent(NetworkKind):
    """Has children that can be put along with it: `lists` maps a property to the kind of child."""

    lists = ""

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        children = (body.get("properties") or {}).get(self.lists) or []
        kind = self._child_kind()
        for child in children:
            name = child.get("name")
            if not isinstance(name, str):
                raise ArmError(400, "InvalidRequestFormat", f"An item of {self.lists} has no name.")
            beside = [each for each in children if each is not child]
            kind.check_child(body, child, beside)
        if old is not None:
            gone = {each.id.name.lower() for each in self._children(old.id)} - _names(children)
            for each in self._children(old.id):
                if each.id.name.lower() in gone:
                    kind.check_delete(each)

    def _child_kind(self) -> Child:
        kind = self.cloud.kinds[f"{self.type}/{self.lists}".lower()]
        assert isinstance(kind, Child)
        return kind

    def _children(self, id: ResourceId) -> list[Resource]:
        return self.cloud.store.children(id, self.lists)

    def keep(self, properties: Json, old: Resource | None) -> Json:
        return {**properties, self.lists: properties.get(self.lists) or []}

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        super().accept(resource, is_new=is_new)
        wanted: list[Json] = resource.properties.pop(self.lists)
        for each in self._children(resource.id):
            if each.id.name.lower() not in _names(wanted):
                self.cloud.forget(each)
        for child in wanted:
            self._child_kind().set(resource, child)

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        kind = self._child_kind()
        shown["properties"][self.lists] = [kind.show(each) for each in self._children(resource.id)]
        return shown

    def drop(self, resource: Resource) -> None:
        for each in self._children(resource.id):
            self.cloud.forget(each)
        super().drop(resource)

    def check_delete(self, resource: Resource) -> None:
        for each in self._children(resource.id):
            self._child_kind().check_delete(each)


def _names(children: list[Json]) -> set[str]:
    return {str(child.get("name")).lower() for child in children}


class Child(NetworkKind):
    has_location = False

    def check_child(self, parent: Json, child: Json, beside: list[Json]) -> None:
        """Bodies all."""

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        parent = self.cloud.need(id.parent)
        siblings = self.cloud.store.children(id.parent, id.types[-1])
        beside: list[Json] = [
            {"name": each.id.name, "properties": each.properties} for each in siblings if each is not old
        ]
        self.check_child({"properties": parent.properties}, {**body, "name": id.name}, beside)

    def set(self, parent: Resource, child: Json) -> None:
        """As part of the parent's body."""
        id = parent.id.child(self.type.rsplit("/", 1)[-1], child["name"])
        old = self.cloud.store.get(id)
        resource = old or self.make(id, "", self.cloud.clock.now())
        resource.properties = dict(child.get("properties") or {})
        resource.state = "Succeeded"
        self.cloud.store.add(resource)


# -- virtual networks ------------------------------------------------------------------------------


class VirtualNetworks(Parent):
    type = VNET
    lists = "subnets"
    fields = names(
        "addressSpace dhcpOptions subnets enableDdosProtection enableVmProtection "
        "virtualNetworkPeerings encryption flowTimeoutInMinutes privateEndpointVNetPolicies "
        "resourceGuid"
    )

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        prefixes = ((body.get("properties") or {}).get("addressSpace") or {}).get("addressPrefixes")
        if not prefixes:
            raise ArmError(
                400,
                "InvalidRequestFormat",
                "Cannot parse the request: addressSpace.addressPrefixes is required.",
            )
        for prefix in prefixes:
            _network(prefix)
        super().check(id, body, old)

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        shown["properties"].setdefault("enableDdosProtection", False)
        shown["properties"].setdefault("virtualNetworkPeerings", [])
        return shown


class Subnets(Child):
    type = SUBNET
    fields = names(
        "addressPrefix addressPrefixes networkSecurityGroup routeTable natGateway delegations "
        "serviceEndpoints privateEndpointNetworkPolicies privateLinkServiceNetworkPolicies "
        "defaultOutboundAccess ipConfigurations"
    )

    def check_child(self, parent: Json, child: Json, beside: list[Json]) -> None:
        name, mine = child["name"], subnet_range(child)
        space = [_network(each) for each in parent["properties"]["addressSpace"]["addressPrefixes"]]
        if not any(_is_within(mine, each) for each in space):
            raise ArmError(
                400,
                "NetcfgInvalidSubnet",
                f"Subnet '{name}' is not valid because its IP address range is outside the IP address range "
                "of its virtual network.",
            )
        for other in beside:
            if mine.overlaps(subnet_range(other)):
                raise ArmError(
                    400,
                    "NetcfgSubnetRangesOverlap",
                    f"Subnet '{name}' is not valid because its IP address range overlaps with that of an "
                    f"existing subnet '{other['name']}'.",
                )

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        uses = [{"id": each} for each in self._used_by(resource)]
        if uses:
            shown["properties"]["ipConfigurations"] = uses
        return shown

    def _used_by(self, subnet: Resource) -> list[str]:
        return [
            f"{nic.id}/ipConfigurations/{each['name']}"
            for nic in self.cloud.store.of_type(NIC)
            for each in nic.properties["ipConfigurations"]
            if reference(each["properties"].get("subnet")).lower() == subnet.id.key
        ]

    def check_delete(self, resource: Resource) -> None:
        uses = self._used_by(resource)
        if uses:
            raise ArmError(
                400,
                "InUseSubnetCannotBeDeleted",
                f"Subnet {resource.id.name} is in use by {uses[0]} and cannot be deleted. In order to delete "
                "the subnet, delete all the resources within the subnet. See aka.ms/deletesubnet.",
            )


def _network(prefix: object) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(str(prefix))
    except ValueError as err:
        raise ArmError(
            400,
            "InvalidAddressPrefixFormat",
            f"Address prefix {prefix} of resource is not formatted correctly.",
        ) from err


def subnet_range(child: Json) -> ipaddress.IPv4Network:
    properties: dict[str, Any] = child.get("properties") or {}
    return _network(properties.get("addressPrefix") or (properties.get("addressPrefixes") or [""])[0])


def _is_within(inner: ipaddress.IPv4Network, outer: ipaddress.IPv4Network) -> bool:
    return inner.subnet_of(outer)


def kinds(cloud: Cloud) -> list[Kind]:
    return [VirtualNetworks(cloud), Subnets(cloud)]
