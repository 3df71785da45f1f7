"""Machine types of Compute Engine, as far as their names tell, and the zones of its regions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from evalfleet.model import Needs

_TYPE = re.compile(
    r"(?P<family>[a-z]\d+[a-z]?)-(?P<kind>standard|highmem|highcpu|custom|ultramem|megamem|hypermem)"
    r"-(?P<cpus>\d+)(?:-(?P<mb>\d+))?(?P<rest>(?:-[a-z]+)*)"
)
"""As n2-standard-4, e2-custom-4-8192, c3-standard-8-lssd."""
GB_A_CPU: Mapping[str, float] = {"standard": 4.0, "highmem": 8.0, "highcpu": 1.0}
OTHER_GB: Mapping[tuple[str, str], float] = {
    ("n1", "standard"): 3.75,
    ("n1", "highmem"): 6.5,
    ("n1", "highcpu"): 0.9,
    ("c3", "highcpu"): 2.0,
    ("c4", "highcpu"): 2.0,
    ("c4", "standard"): 3.75,
    ("c4", "highmem"): 7.75,
    ("n4", "highcpu"): 2.0,
}
NESTING = frozenset(("n1", "n2", "c2", "c3", "c4", "n4", "h3", "a2", "a3", "g2"))
"""Families whose machines can run virtual machines: Intel's, but not E2 and not the memory-optimised."""
OWN_QUOTA: Mapping[str, str] = {
    "n2": "N2_CPUS",
    "n2d": "N2D_CPUS",
    "c2": "C2_CPUS",
    "c2d": "C2D_CPUS",
    "c3": "C3_CPUS",
    "t2d": "T2D_CPUS",
    "t2a": "T2A_CPUS",
    "m1": "M1_CPUS",
    "m2": "M2_CPUS",
    "m3": "M3_CPUS",
    "a2": "A2_CPUS",
}
"""Families with a quota of their own; the others count as CPUS."""
SPOT_QUOTA = "PREEMPTIBLE_CPUS"
HYPERDISK = "hyperdisk-balanced"
HYPERDISK_SINCE = 4
"""From this generation on (C4, N4, ...), machine series take no Persistent Disk."""
ODD_ZONES: Mapping[str, str] = {"us-central1": "abcf", "us-east1": "bcd", "europe-west1": "bcd"}
"""The letters of regions whose zones are not a, b and c."""
KNOWN_REGIONS = (
    "us-central1",
    "us-east1",
    "us-east4",
    "us-west1",
    "us-west2",
    "europe-west1",
    "europe-west4",
    "asia-southeast1",
)
"""Regions whose prices are built in."""
ZONE = re.compile(r"[a-z]+(?:-[a-z]+)+\d+-[a-z]")
REGION = re.compile(r"[a-z]+(?:-[a-z]+)+\d+")


class MachineType(Struct, frozen=True):
    """A type of machine."""

    name: str
    family: str
    """`n2` of n2-standard-4."""
    cpus: int
    memory_gb: float | None
    """None: its name does not tell."""

    @property
    def nested(self) -> bool:
        """Can it run virtual machines?"""
        return self.family in NESTING

    def disk(self, wanted: str) -> str:
        """Return the kind of system disk that it gets where the settings name this one."""
        generation = re.search(r"\d+", self.family)
        return HYPERDISK if generation and int(generation[0]) >= HYPERDISK_SINCE else wanted

    @property
    def quota(self) -> str:
        """The region's quota that its vCPUs count in."""
        return OWN_QUOTA.get(self.family, "CPUS")


def type_of(name: str) -> MachineType | None:
    """What the name tells; None if it is no type's."""
    found = _TYPE.fullmatch(name)
    if found is None:
        return None
    family, kind, cpus = found["family"], found["kind"], int(found["cpus"])
    if found["mb"]:
        return MachineType(name, family, cpus, int(found["mb"]) / 1024)
    each = OTHER_GB.get((family, kind), GB_A_CPU.get(kind))
    return MachineType(name, family, cpus, None if each is None else cpus * each)


def strange(names: Iterable[str]) -> list[str]:
    """Those that are no names of machine types."""
    return [name for name in names if type_of(name) is None]


def fits(type: MachineType, needs: Needs, disk_gb: int) -> bool:
    """Does a machine of this type with such a disk have what is needed?"""
    return (
        type.cpus >= needs.cpus
        and (type.memory_gb is None or type.memory_gb >= needs.memory_gb)
        and disk_gb >= needs.disk_gb
        and (type.nested or not needs.nested_virtualization)
    )


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def zones_of(region: str) -> list[str]:
    return [f"{region}-{letter}" for letter in ODD_ZONES.get(region, "abc")]


def disk_of(name: str, wanted: str) -> str:
    """The kind of system disk of a machine type of this name."""
    known = type_of(name)
    return wanted if known is None else known.disk(wanted)


def vcpus(name: str) -> int:
    """Of a machine type of this name; 0 if nobody knows."""
    known = type_of(name)
    return known.cpus if known is not None else 0
