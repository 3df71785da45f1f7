"""Sizes of Azure's machines, and what they have. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from evalfleet.model import Needs

_SIZE = re.compile(r"Standard_(?P<letter>[DE])(?P<cpus>\d+)(?P<kind>[a-z]*)_(?P<version>v\d)", re.IGNORECASE)


class Series(Struct, frozen=True):
    """A series of sizes: Dds_v5 is Standard_D{n}ds_v5."""

    name: str
    family: str
    """What Azure's quota calls it."""
    memory_gb_a_cpu: float
    nested: bool = True
    """Can its machines run virtual machines?"""
    local_disk: bool = False
    """Is there a disk that a stop empties?"""

    def size_name(self, cpus: int) -> str:
        return f"Standard_{self.name[0]}{cpus}{self.name[1:]}"


_SERIES = (
    Series("Ds_v3", "standardDSv3Family", 4.0, local_disk=True),
    Series("Ds_v4", "standardDSv4Family", 4.0),
    Series("Ds_v5", "standardDSv5Family", 4.0),
    Series("Dds_v4", "standardDDSv4Family", 4.0, local_disk=True),
    Series("Dds_v5", "standardDDSv5Family", 4.0, local_disk=True),
    Series("Das_v5", "standardDASv5Family", 4.0),
    Series("Dads_v5", "standardDADSv5Family", 4.0, local_disk=True),
    Series("Es_v3", "standardESv3Family", 8.0, local_disk=True),
    Series("Es_v5", "standardESv5Family", 8.0),
    Series("Eds_v5", "standardEDSv5Family", 8.0, local_disk=True),
)
SERIES: Mapping[str, Series] = {series.name: series for series in _SERIES}


class VmSize(Struct, frozen=True):
    """A size of Azure's machines."""

    name: str
    cpus: int
    series: Series

    @property
    def memory_gb(self) -> float:
        return self.cpus * self.series.memory_gb_a_cpu


def size_of(name: str) -> VmSize | None:
    """None if the table does not have it."""
    found = _SIZE.fullmatch(name)
    if found is None:
        return None
    series = SERIES.get(f"{found['letter'].upper()}{found['kind'].lower()}_{found['version'].lower()}")
    return None if series is None else VmSize(name, int(found["cpus"]), series)


def fits(size: VmSize, needs: Needs, disk_gb: int) -> bool:
    """Does a machine of this size with such a system disk have what is needed?

    Sizes without a disk of their own keep everything on the system disk, so that alone counts.
    """
    return (
        size.cpus >= needs.cpus
        and size.memory_gb >= needs.memory_gb
        and disk_gb >= needs.disk_gb
        and (size.series.nested or not needs.nested_virtualization)
    )


def where(region: str, zone: str) -> str:
    return f"{region}-{zone}" if zone else region


def region_and_zone(text: str) -> tuple[str, str]:
    region, _, zone = text.partition("-")
    return region, zone


def unknown(sizes: Iterable[str]) -> list[str]:
    return [name for name in sizes if size_of(name) is None]
