"""What the stand-in's Azure sells: regions, zones, sizes, images; a small, plausible part of it."""

from __future__ import annotations

from dataclasses import dataclass

from standins.cloud.words import Json

from .words import ArmError

ZONES = ("1", "2", "3")
REGIONS = {
    "eastus": ZONES,
    "eastus2": ZONES,
    "westus2": ZONES,
    "westus3": ZONES,
    "centralus": ZONES,
    "northcentralus": (),
    "westeurope": ZONES,
    "northeurope": ZONES,
    "uksouth": ZONES,
    "swedencentral": ZONES,
}


@dataclass(frozen=True)
class Size:
    name: str
    family: str
    vcpus: int
    memory_gib: float
    temp_disk_gib: int = 0
    generations: str = "V1,V2"
    premium: bool = True
    spot: bool = True
    architecture: str = "x64"


def _series(
    name: str, family: str, gib_a_cpu: float, temp_a_cpu: int = 0, generations: str = "V1,V2"
) -> list[Size]:
    return [
        Size(name.format(n), family, n, n * gib_a_cpu, n * temp_a_cpu, generations) for n in (2, 4, 8, 16, 32)
    ]


SIZES = {
    size.name.lower(): size
    for size in (
        *_series("Standard_D{}s_v3", "standardDSv3Family", 4.0, 8),
        *_series("Standard_D{}s_v4", "standardDSv4Family", 4.0),
        *_series("Standard_D{}s_v5", "standardDSv5Family", 4.0),
        *_series("Standard_D{}ds_v4", "standardDDSv4Family", 4.0, 37),
        *_series("Standard_D{}ds_v5", "standardDDSv5Family", 4.0, 37),
        *_series("Standard_D{}as_v5", "standardDASv5Family", 4.0),
        *_series("Standard_D{}ads_v5", "standardDADSv5Family", 4.0, 37),
        *_series("Standard_D{}s_v6", "standardDSv6Family", 4.0, 0, "V2"),
        *_series("Standard_E{}s_v5", "standardESv5Family", 8.0),
        *_series("Standard_F{}s_v2", "standardFSv2Family", 2.0, 8),
        Size("Standard_D4_v3", "standardDv3Family", 4, 16.0, 100, premium=False),
        Size("Standard_B2ms", "standardBSFamily", 2, 8.0, 16, spot=False),
        Size("Standard_D4ps_v5", "standardDPSv5Family", 4, 16.0, generations="V2", architecture="Arm64"),
    )
}
FAMILIES = sorted({size.family for size in SIZES.values()})


@dataclass(frozen=True)
class Image:
    generation: str
    architecture: str = "x64"
    size_gib: int = 30
    version: str = "22.04.202610150"


IMAGES = {
    ("canonical", "0001-com-ubuntu-server-jammy", "22_04-lts-gen2"): Image("V2"),
    ("canonical", "0001-com-ubuntu-server-jammy", "22_04-lts"): Image("V1"),
    ("canonical", "0001-com-ubuntu-server-jammy", "22_04-lts-arm64"): Image("V2", "Arm64"),
    ("canonical", "ubuntu-24_04-lts", "server"): Image("V2", version="24.04.202610140"),
    ("debian", "debian-12", "12-gen2"): Image("V2", version="0.20261013.2200"),
}


@dataclass
class Restriction:
    """`zones` empty: the whole region."""

    size: str
    region: str
    zones: tuple[str, ...] = ()
    reason: str = "NotAvailableForSubscription"


class Catalog:
    """With what tests take away from it."""

    def __init__(self) -> None:
        self.restrictions: list[Restriction] = []
        self.not_made: set[tuple[str, str]] = set()
        """Types of resources, and regions where they are not to be had."""

    def region(self, location: object, type: str) -> str:
        """Its plain name. Azure takes `East US`, too."""
        plain = str(location or "").replace(" ", "").lower()
        if not plain:
            raise ArmError(400, "LocationRequired", "The location property is required for this definition.")
        if plain not in REGIONS or (type, plain) in self.not_made:
            known = ",".join(REGIONS)
            raise ArmError(
                400,
                "LocationNotAvailableForResourceType",
                f"The provided location '{location}' is not available for resource type '{type}'. "
                f"List of available regions for the resource type is '{known}'.",
            )
        return plain

    def size(self, name: object) -> Size:
        found = SIZES.get(str(name).lower())
        if found is None:
            raise ArmError(
                400,
                "InvalidParameter",
                f"The value {name} provided for the VM size is not valid. The valid sizes in the current "
                f"region are: {','.join(each.name for each in SIZES.values())}.",
                target="vmSize",
            )
        return found

    def check_offered(self, size: Size, region: str, zone: str) -> None:
        for each in self.restrictions:
            if each.size.lower() != size.name.lower() or each.region != region:
                continue
            if not each.zones or zone in each.zones:
                where = f"location '{region}'" + (f" zone '{zone}'" if each.zones else "")
                raise ArmError(
                    409,
                    "SkuNotAvailable",
                    "The requested VM size for resource 'Following SKUs have failed for Capacity "
                    f"Restrictions: {size.name}' is currently not available in {where}. "
                    "Please try another size or deploy to a different location or different zone.",
                )

    def skus(self, region: str = "") -> list[Json]:
        where = [region] if region else list(REGIONS)
        return [self._sku(size, each) for each in where for size in SIZES.values()]

    def _sku(self, size: Size, region: str) -> Json:
        zones = list(REGIONS[region])
        return {
            "resourceType": "virtualMachines",
            "name": size.name,
            "tier": "Standard",
            "size": size.name.removeprefix("Standard_"),
            "family": size.family,
            "locations": [region],
            "locationInfo": [{"location": region, "zones": zones, "zoneDetails": []}],
            "capabilities": _capabilities(size),
            "restrictions": [
                _restriction(each)
                for each in self.restrictions
                if each.size.lower() == size.name.lower() and each.region == region
            ],
        }


def _capabilities(size: Size) -> list[Json]:
    values = {
        "MaxResourceVolumeMB": size.temp_disk_gib * 1024,
        "OSVhdSizeMB": 1047552,
        "vCPUs": size.vcpus,
        "HyperVGenerations": size.generations,
        "MemoryGB": f"{size.memory_gib:g}",
        "MaxDataDiskCount": size.vcpus * 2,
        "CpuArchitectureType": size.architecture,
        "LowPriorityCapable": size.spot,
        "PremiumIO": size.premium,
        "VMDeploymentTypes": "IaaS",
        "vCPUsAvailable": size.vcpus,
        "vCPUsPerCore": 2,
        "EphemeralOSDiskSupported": size.temp_disk_gib > 0,
        "AcceleratedNetworkingEnabled": True,
        "MaxNetworkInterfaces": 2,
    }
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def _restriction(restriction: Restriction) -> Json:
    info: Json = {"locations": [restriction.region]}
    if restriction.zones:
        info["zones"] = list(restriction.zones)
    return {
        "type": "Zone" if restriction.zones else "Location",
        "values": [restriction.region],
        "restrictionInfo": info,
        "reasonCode": restriction.reason,
    }
