"""Microsoft.Network: security groups and their rules."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from standins.cloud.words import Json

from .kind import Kind, invalid, reference
from .network import NIC, NSG, RULE, SUBNET, Child, Parent
from .store import Resource
from .words import ArmError, names

if TYPE_CHECKING:
    from .cloud import Cloud


class SecurityGroups(Parent):
    type = NSG
    lists = "securityRules"
    fields = names("securityRules flushConnection resourceGuid defaultSecurityRules")

    def finish(self, resource: Resource) -> None:
        self.cloud.rules_changed()

    def check_delete(self, resource: Resource) -> None:
        users = self._users(resource)
        if users:
            raise ArmError(
                400,
                "InUseNetworkSecurityGroupCannotBeDeleted",
                f"Network security group {resource.id} cannot be deleted because it is in use by "
                "the following "
                f"resources: {', '.join(users)}. In order to delete the Network security group, remove the "
                "association with the resource(s).",
            )

    def _users(self, group: Resource) -> list[str]:
        both = [*self.cloud.store.of_type(NIC), *self.cloud.store.of_type(SUBNET)]
        linked = [
            each
            for each in both
            if reference(each.properties.get("networkSecurityGroup")).lower() == group.id.key
        ]
        return [str(each.id) for each in linked]


class SecurityRules(Child):
    type = RULE
    fields = names(
        "description protocol access direction priority sourceApplicationSecurityGroups sourceAddressPrefix "
        "sourceAddressPrefixes sourcePortRange sourcePortRanges destinationAddressPrefix "
        "destinationAddressPrefixes destinationPortRange destinationPortRanges "
        "destinationApplicationSecurityGroups"
    )
    choices = (
        ("protocol", ("tcp", "udp", "icmp", "esp", "ah", "*")),
        ("access", ("allow", "deny")),
        ("direction", ("inbound", "outbound")),
    )

    def finish(self, resource: Resource) -> None:
        self.cloud.rules_changed()

    def check_child(self, parent: Json, child: Json, beside: list[Json]) -> None:
        rule: Json = child.get("properties") or {}
        self.check_fields(child)
        for field, allowed in self.choices:
            if str(rule.get(field, "")).lower() not in allowed:
                raise invalid(f"Security rule has invalid {field}: {rule.get(field)}.", field)
        priority = rule.get("priority")
        if not isinstance(priority, int) or not 100 <= priority <= 4096:
            raise ArmError(
                400,
                "SecurityRuleInvalidPriority",
                f"Security rule has invalid Priority. Value provided: {priority}. Allowed range 100-4096.",
            )
        for field in ("AddressPrefix", "PortRange"):
            for end in ("source", "destination"):
                if not any(rule.get(f"{end}{field}{many}") for many in ("", "s", "es")):
                    raise ArmError(
                        400,
                        "SecurityRuleParameterMissing",
                        f"Required security rule parameters are missing: {end}{field}.",
                    )
        self._check_sources(rule)
        for other in beside:
            theirs = other.get("properties") or {}
            if (theirs.get("priority"), theirs.get("direction")) == (priority, rule.get("direction")):
                raise ArmError(
                    400,
                    "SecurityRuleConflict",
                    f"Security rule {child['name']} conflicts with rule {other['name']}. Rules "
                    "cannot have the "
                    "same Priority and Direction.",
                )

    def _check_sources(self, rule: Json) -> None:
        one = rule.get("sourceAddressPrefix")
        for each in [*([one] if one else []), *(rule.get("sourceAddressPrefixes") or [])]:
            try:
                if each[0].isdigit():  # else a service tag, such as VirtualNetwork
                    ipaddress.ip_network(each, strict=False)
            except ValueError as err:
                raise ArmError(
                    400,
                    "SecurityRuleInvalidAddressPrefix",
                    f"Security rule has invalid Address prefix. Value provided: {each}.",
                ) from err


def kinds(cloud: Cloud) -> list[Kind]:
    return [SecurityGroups(cloud), SecurityRules(cloud)]
