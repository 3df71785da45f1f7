"""How much of what a subscription may have, and how much of it the regions have left."""

from __future__ import annotations

from dataclasses import dataclass

from standins.cloud.words import Json

from .catalog import FAMILIES, Size
from .words import ArmError, names

DEFAULT_LIMITS = {
    "cores": 400,
    "virtualMachines": 25000,
    "lowPriorityCores": 400,
    "PremiumDiskCount": 50000,
    "StandardSSDDiskCount": 50000,
    "StandardDiskCount": 50000,
    "PublicIPAddresses": 1000,
    "IPv4StandardSkuPublicIpAddresses": 1000,
    "NetworkInterfaces": 65536,
    "NetworkSecurityGroups": 5000,
    "VirtualNetworks": 1000,
    **dict.fromkeys(FAMILIES, 400),
}
NETWORK = names(
    "PublicIPAddresses IPv4StandardSkuPublicIpAddresses NetworkInterfaces NetworkSecurityGroups "
    "VirtualNetworks"
)
TITLES = {
    "cores": "Total Regional vCPUs",
    "virtualMachines": "Virtual Machines",
    "lowPriorityCores": "Total Regional Low-priority vCPUs",
    "PremiumDiskCount": "Premium Storage Managed Disks",
    "StandardSSDDiskCount": "StandardSSDStorageDisks",
    "StandardDiskCount": "Standard Storage Managed Disks",
    "PublicIPAddresses": "Public IP Addresses",
    "IPv4StandardSkuPublicIpAddresses": "Public IPv4 Addresses - Standard",
    "NetworkInterfaces": "Network Interfaces",
    "NetworkSecurityGroups": "Network Security Groups",
    "VirtualNetworks": "Virtual Networks",
}


def vm_uses(size: Size, spot: bool) -> dict[str, int]:
    """Of quota; deallocated machines count, too."""
    cores = {"lowPriorityCores": size.vcpus} if spot else {"cores": size.vcpus, size.family: size.vcpus}
    return {"virtualMachines": 1, **cores}


class Quota:
    """`limits` by region and name. Use is held by whoever takes it, under its resource id."""

    def __init__(self) -> None:
        self.limits: dict[tuple[str, str], int] = {}
        self._held: dict[str, tuple[str, dict[str, int]]] = {}

    def limit(self, region: str, name: str) -> int:
        return self.limits.get((region, name), DEFAULT_LIMITS[name])

    def used(self, region: str, name: str) -> int:
        return sum(uses.get(name, 0) for where, uses in self._held.values() if where == region)

    def check(self, holder: str, region: str, uses: dict[str, int]) -> None:
        """Raises if there is not enough. What the holder has already does not count."""
        before = self._held.pop(holder.lower(), None)
        try:
            for name, amount in uses.items():
                if self.used(region, name) + amount > self.limit(region, name):
                    raise self._exceeded(region, name, amount)
        finally:
            if before is not None:
                self._held[holder.lower()] = before

    def take(self, holder: str, region: str, uses: dict[str, int]) -> None:
        """All of it, or raise."""
        self.check(holder, region, uses)
        self._held[holder.lower()] = (region, uses)

    def release(self, holder: str) -> None:
        self._held.pop(holder.lower(), None)

    def _exceeded(self, region: str, name: str, amount: int) -> ArmError:
        limit, used = self.limit(region, name), self.used(region, name)
        if name.endswith("PublicIpAddresses") or name == "PublicIPAddresses":
            return ArmError(
                400,
                "PublicIPCountLimitReached",
                f"Cannot create more than {limit} public IP addresses for this subscription in this region.",
            )
        title = TITLES.get(name, f"{name} Cores")
        title = {"cores": "Total Regional Cores", "lowPriorityCores": "LowPriorityCores"}.get(name, title)
        code = "QuotaExceeded" if name == "lowPriorityCores" else "OperationNotAllowed"
        return ArmError(
            409,
            code,
            f"Operation could not be completed as it results in exceeding approved {title} quota. "
            f"Additional details - Deployment Model: Resource Manager, Location: {region}, "
            f"Current Limit: {limit}, Current Usage: {used}, Additional Required: {amount}, "
            f"(Minimum) New Limit Required: {used + amount}. Setup Alerts when Quota reaches threshold.",
        )

    def usages(self, region: str, *, network: bool, base: str = "") -> list[Json]:
        names = [name for name in DEFAULT_LIMITS if (name in NETWORK) == network]
        shown: list[Json] = []
        for name in names:
            title = TITLES.get(name, f"{name.removesuffix('Family')} Family vCPUs")
            usage: Json = {
                "unit": "Count",
                "currentValue": self.used(region, name),
                "limit": self.limit(region, name),
                "name": {"value": name, "localizedValue": title},
            }
            shown.append({"id": f"{base}/usages/{name}", **usage} if network else usage)
        return shown


@dataclass(frozen=True)
class Place:
    """Where a machine is wanted."""

    region: str
    zone: str
    size: str
    spot: bool

    def scopes(self) -> list[tuple[str, str, str]]:
        sizes, zones = {self.size.lower(), ""}, {self.zone, ""}
        return [(self.region, zone, size) for zone in zones for size in sizes]


class Capacity:
    """Room for so many machines: `limits` by region, zone ("": any) and lower-case size ("": any)."""

    def __init__(self) -> None:
        self.limits: dict[tuple[str, str, str], int] = {}
        self._taken: dict[str, Place] = {}

    def take(self, holder: str, place: Place) -> None:
        """Raises what Azure says if there is no room."""
        self._taken.pop(holder.lower(), None)
        for scope in place.scopes():
            limit = self.limits.get(scope)
            if limit is not None and sum(scope in each.scopes() for each in self._taken.values()) >= limit:
                raise _no_room(place, scope)
        self._taken[holder.lower()] = place

    def release(self, holder: str) -> None:
        self._taken.pop(holder.lower(), None)


def _no_room(place: Place, scope: tuple[str, str, str]) -> ArmError:
    if place.spot and scope[2]:
        return ArmError(
            409,
            "OverconstrainedAllocationRequest",
            "Allocation failed. VM(s) with the following constraints cannot be allocated, because the "
            "condition is too restrictive. Please remove some constraints and try again. Constraints "
            "applied are:\n  - Low Priority VMs\n  - VM Size\n",
        )
    if scope[1]:
        return ArmError(
            409,
            "ZonalAllocationFailed",
            "Allocation failed. We do not have sufficient capacity for the requested VM size in this zone. "
            "Read more about improving likelihood of allocation success at "
            "http://aka.ms/allocation-guidance",
        )
    return ArmError(
        409,
        "AllocationFailed",
        "Allocation failed. We do not have sufficient capacity for the requested VM size in this region. "
        "Read more about improving likelihood of allocation success at http://aka.ms/allocation-guidance",
    )
