"""What Google sells here: regions, zones, machine types, images; and what a project may have of it."""

from __future__ import annotations

from dataclasses import dataclass, field

REGIONS = {
    "us-central1": "abcf",
    "us-east1": "bcd",
    "us-west1": "abc",
    "europe-west1": "bcd",
    "europe-west4": "abc",
}
ZONES = tuple(f"{region}-{letter}" for region, letters in REGIONS.items() for letter in letters)
FAMILIES = {"e2": 4.0, "n1": 3.75, "n2": 4.0, "n2d": 4.0, "c3": 4.0, "t2d": 4.0, "c4": 3.75, "n4": 4.0}
"""GB a vCPU of the `standard` kind."""
INTEL = ("n1", "n2", "c3", "c4", "n4")
HYPERDISK = "hyperdisk-balanced"
HYPERDISK_ONLY, NO_HYPERDISK = ("c4", "n4"), ("e2", "n1", "n2", "n2d", "t2d")
OWN_QUOTA = {"n2": "N2_CPUS", "n2d": "N2D_CPUS", "c3": "C3_CPUS", "t2d": "T2D_CPUS"}


@dataclass(frozen=True)
class MachineType:
    name: str
    family: str
    cpus: int
    memory_mb: int

    @property
    def nests(self) -> bool:
        return self.family in INTEL

    @property
    def metric(self) -> str:
        return OWN_QUOTA.get(self.family, "CPUS")


def _types() -> dict[str, MachineType]:
    found: dict[str, MachineType] = {}
    for family, gb in FAMILIES.items():
        for kind, factor in (("standard", 1.0), ("highmem", 2.0)):
            for cpus in (2, 4, 8, 16):
                name = f"{family}-{kind}-{cpus}"
                found[name] = MachineType(name, family, cpus, int(cpus * gb * factor * 1024))
    return found


TYPES = _types()
PUBLIC_IMAGES = {
    ("ubuntu-os-cloud", "ubuntu-2204-lts"): ("ubuntu-2204-jammy-v20261101", 10),
    ("ubuntu-os-cloud", "ubuntu-2404-lts-amd64"): ("ubuntu-2404-noble-amd64-v20261101", 10),
    ("debian-cloud", "debian-12"): ("debian-12-bookworm-v20261101", 10),
}
"""By project and family: the name of the newest one, and the least GB of a disk."""
DISK_TYPES = {
    "pd-ssd": "SSD_TOTAL_GB",
    "pd-balanced": "SSD_TOTAL_GB",
    "pd-standard": "DISKS_TOTAL_GB",
    HYPERDISK: "HDB_TOTAL_GB",
}
LIMITS = {
    "CPUS": 2400,
    "N2_CPUS": 2400,
    "N2D_CPUS": 2400,
    "C3_CPUS": 2400,
    "T2D_CPUS": 2400,
    "PREEMPTIBLE_CPUS": 0,
    "IN_USE_ADDRESSES": 575,
    "SSD_TOTAL_GB": 81920,
    "DISKS_TOTAL_GB": 81920,
    "HDB_TOTAL_GB": 81920,
    "HDB_TOTAL_IOPS": 1_000_000,
    "HDB_TOTAL_THROUGHPUT": 40_000,
    "INSTANCES": 6000,
}


@dataclass
class Catalog:
    """What of it is to be had. Tests take things away."""

    limits: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """By region and metric, where it is not the usual one; the project's have no region."""
    capacity: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """By zone and machine type: so many can run at once there. A type of "" is every one."""
    unsold: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Zone and machine type."""
    refuses_quota_at_once: bool = False
    """403 as the answer to the call, in place of an error of the operation."""

    def limit(self, region: str, metric: str) -> int:
        usual = LIMITS.get(metric, 10**6) if region else 10**6
        return self.limits.get((region, metric), usual)

    def room(self, zone: str, type: str) -> int:
        return min(self.capacity.get((zone, type), 10**6), self.capacity.get((zone, ""), 10**6))
