"""Sizes of Azure's machines, and what they have. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from evalfleet.model import Needs

_SIZE = re.compile(
    r"Standard_(?P<letter>[A-Z]{1,2})(?P<cpus>\d+)(?:-\d+)?(?P<kind>[a-z]*)(?P<chip>_(?!v\d)[A-Z]+\d+)?"
    r"(?:_(?P<version>v\d+))?",
    re.IGNORECASE,
)
"""As Standard_D4ds_v5, Standard_F8s_v2, Standard_NC4as_T4_v3."""


class Series(Struct, frozen=True):
    """A series of sizes: Dds_v5 is Standard_D{n}ds_v5."""

    name: str
    family: str
    """What Azure's quota calls it."""
    memory_gb_a_cpu: float | None
    """None: its name does not tell."""
    nested: bool = True
    """Can its machines run virtual machines?"""
    local_disk: bool = False
    """Is there a disk that a stop empties?"""

    listed: bool = True
    """Are there built-in prices?"""

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


MEMORY_GB_A_CPU = {"D": 4.0, "E": 8.0, "F": 2.0, "L": 8.0}
"""By the letter of a series; `l` in the rest of its name is half of it."""


class VmSize(Struct, frozen=True):
    """A size of Azure's machines."""

    name: str
    cpus: int
    series: Series

    @property
    def memory_gb(self) -> float | None:
        """None: its name does not tell."""
        each = self.series.memory_gb_a_cpu
        return None if each is None else self.cpus * each

    @property
    def premium(self) -> bool:
        """Can it have Premium disks?"""
        found = _SIZE.fullmatch(self.name)
        return found is not None and "s" in found["kind"].lower()


def size_of(name: str) -> VmSize | None:
    """What the name tells; None if it is no size's."""
    found = _SIZE.fullmatch(name)
    if found is None:
        return None
    known = SERIES.get(f"{found['letter'].upper()}{found['kind'].lower()}_{(found['version'] or '').lower()}")
    return VmSize(name, int(found["cpus"]), known or _by_name(found))


def _by_name(found: re.Match[str]) -> Series:
    """A series that the table does not have, as far as its name tells."""
    letter, kind, version = found["letter"].upper(), found["kind"].lower(), found["version"] or ""
    memory = MEMORY_GB_A_CPU.get(letter)
    if memory is not None and "l" in kind:
        memory /= 2
    nested = _nests(letter, kind, int(version[1:] or 1))
    name = f"{letter}{kind}{found['chip'] or ''}{f'_{version}' if version else ''}"
    return Series(name, name, memory, nested, local_disk="d" in kind, listed=False)


def _nests(letter: str, kind: str, version: int) -> bool:
    """Return True if machines of a series can run virtual machines, by Azure's page of it (2026-08)."""
    if "p" in kind:
        return False  # a processor by ARM, on which machines for PCs do not run
    match letter:
        case "D" | "E":
            return version >= (5 if "a" in kind else 3)  # `a` is a processor by AMD
        case "F":
            return version >= 2
        case "FX":
            return True
        case "L":
            return version >= 3
        case "M":
            return version == 1 or version >= 4
        case _:
            return False


def fits(size: VmSize, needs: Needs, disk_gb: int) -> bool:
    """Does a machine of this size with such a system disk have what is needed?

    Sizes without a disk of their own keep everything on the system disk, so that alone counts.
    """
    return (
        size.cpus >= needs.cpus
        and (size.memory_gb is None or size.memory_gb >= needs.memory_gb)
        and disk_gb >= needs.disk_gb
        and (size.series.nested or not needs.nested_virtualization)
    )


def where(region: str, zone: str) -> str:
    return f"{region}-{zone}" if zone else region


def region_and_zone(text: str) -> tuple[str, str]:
    region, _, zone = text.partition("-")
    return region, zone


def strange(sizes: Iterable[str]) -> list[str]:
    """The names that are no names of sizes."""
    return [name for name in sizes if size_of(name) is None]


def vcpus(name: str) -> int:
    """The vCPUs of a size of this name; 0 if nobody knows."""
    known = size_of(name)
    return known.cpus if known is not None else 0
