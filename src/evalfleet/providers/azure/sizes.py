"""Sizes of Azure's machines: what they have, and what they cost. Pure.

List prices in USD, for Linux, pay as you go, as of the date below; `prices` in the settings goes before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from evalfleet.model import Needs, Offer

AS_OF = "2026-08"
HOURS_A_MONTH = 730.0
ADDRESS_USD = 0.005
DISK_USD_A_MONTH: Mapping[str, Mapping[int, float]] = {
    "Premium_LRS": {32: 5.28, 64: 10.21, 128: 19.71, 256: 38.02, 512: 73.22, 1024: 135.17, 2048: 259.05},
    "StandardSSD_LRS": {32: 2.4, 64: 4.8, 128: 9.6, 256: 19.2, 512: 38.4, 1024: 76.8, 2048: 153.6},
    "Standard_LRS": {32: 1.54, 64: 3.01, 128: 5.89, 256: 11.33, 512: 21.76, 1024: 40.96, 2048: 77.83},
}
SPOT_SHARE = 0.14
"""Of the list price: 11 to 14 percent in the regions of the table. Azure changes it daily."""
REGION_FACTOR: Mapping[str, float] = {
    **dict.fromkeys(("eastus", "eastus2", "northcentralus", "westus2", "westus3"), 1.0),
    "centralus": 1.13,
    "southcentralus": 1.2,
    "westcentralus": 1.2,
    "westus": 1.17,
}
"""Against eastus, for most series; then those that differ."""
SERIES_FACTOR: Mapping[str, float] = {
    "Ds_v3@centralus": 1.146,
    "Es_v3@centralus": 1.159,
    "Es_v3@eastus2": 1.056,
    "Ds_v3@northcentralus": 1.042,
    "Dds_v4@southcentralus": 1.301,
    "Ds_v3@southcentralus": 1.146,
    "Es_v3@southcentralus": 1.159,
    "Ds_v3@westcentralus": 1.146,
    "Es_v3@westcentralus": 1.159,
    "Dads_v5@westus": 1.184,
    "Ds_v3@westus": 1.219,
    "Eds_v5@westus": 1.125,
    "Es_v3@westus": 1.175,
    "Es_v5@westus": 1.111,
}
ELSEWHERE = 1.5
"""Where no price is known: more than in any region that we looked at."""
_SIZE = re.compile(r"Standard_(?P<letter>[DE])(?P<cpus>\d+)(?P<kind>[a-z]*)_(?P<version>v\d)", re.IGNORECASE)


class Series(Struct, frozen=True):
    """A series of sizes: Dds_v5 is Standard_D{n}ds_v5. `local_disk`: is there a disk that a stop empties?"""

    name: str
    family: str
    memory_gb_a_cpu: float
    usd_a_cpu: float
    nested: bool = True
    local_disk: bool = False


_SERIES = (
    Series("Ds_v3", "standardDSv3Family", 4.0, 0.048, local_disk=True),
    Series("Ds_v4", "standardDSv4Family", 4.0, 0.048),
    Series("Ds_v5", "standardDSv5Family", 4.0, 0.048),
    Series("Dds_v4", "standardDDSv4Family", 4.0, 0.0565, local_disk=True),
    Series("Dds_v5", "standardDDSv5Family", 4.0, 0.0565, local_disk=True),
    Series("Das_v5", "standardDASv5Family", 4.0, 0.043),
    Series("Dads_v5", "standardDADSv5Family", 4.0, 0.0515, local_disk=True),
    Series("Es_v3", "standardESv3Family", 8.0, 0.063, local_disk=True),
    Series("Es_v5", "standardESv5Family", 8.0, 0.063),
    Series("Eds_v5", "standardEDSv5Family", 8.0, 0.072, local_disk=True),
)
SERIES: Mapping[str, Series] = {series.name: series for series in _SERIES}


class Size(Struct, frozen=True):
    name: str
    cpus: int
    series: Series

    @property
    def memory_gb(self) -> float:
        return self.cpus * self.series.memory_gb_a_cpu


def size_of(name: str) -> Size | None:
    """None if the table does not have it."""
    found = _SIZE.fullmatch(name)
    if found is None:
        return None
    series = SERIES.get(f"{found['letter'].upper()}{found['kind'].lower()}_{found['version'].lower()}")
    return None if series is None else Size(name, int(found["cpus"]), series)


def fits(size: Size, needs: Needs, disk_gb: int) -> bool:
    """Sizes without a disk of their own keep everything on the system disk, so that alone counts."""
    return (
        size.cpus >= needs.cpus
        and size.memory_gb >= needs.memory_gb
        and disk_gb >= needs.disk_gb
        and (size.series.nested or not needs.nested_virtualization)
    )


class Menu(Struct, frozen=True):
    """What the settings say of sizes and prices."""

    place: str
    sizes: tuple[str, ...]
    regions: tuple[str, ...]
    zones: tuple[str, ...]
    spot: bool
    disk: str
    disk_gb: int
    public_ip: bool
    prices: Mapping[str, float]
    max_vcpus: int
    settle_s: float


TEARDOWN_S = 120.0
SPOT_FAMILY = "spot"
"""Spot machines of all sizes share one quota of their region."""


def offers_of(menu: Menu, needs: Needs) -> Sequence[Offer]:
    """Cheapest first; in the order of the settings where prices are equal."""
    found = [
        _offer(menu, size, region, zone)
        for size in filter(None, map(size_of, menu.sizes))
        if fits(size, needs, menu.disk_gb) and not (menu.max_vcpus and size.cpus > menu.max_vcpus)
        for region in menu.regions
        for zone in menu.zones or ("",)
    ]
    return sorted(found, key=lambda offer: offer.usd_per_hour)


def _offer(menu: Menu, size: Size, region: str, zone: str) -> Offer:
    usd = machine_usd(size, region, menu.prices, menu.spot) + extras_usd(
        menu.disk, menu.disk_gb, menu.public_ip
    )
    return Offer(
        menu.place,
        size.name,
        where(region, zone),
        usd_per_hour=round(usd, 5),
        spot=menu.spot,
        capacity=menu.max_vcpus // size.cpus if menu.max_vcpus else None,
        teardown_s=TEARDOWN_S,
        settle_s=menu.settle_s,
        area=region if zone else "",
        family=SPOT_FAMILY if menu.spot else size.series.family,
    )


def where(region: str, zone: str) -> str:
    return f"{region}-{zone}" if zone else region


def region_and_zone(text: str) -> tuple[str, str]:
    region, _, zone = text.partition("-")
    return region, zone


def machine_usd(size: Size, region: str, prices: Mapping[str, float], spot: bool) -> float:
    given = prices.get(f"{size.name}@{region}", prices.get(size.name))
    if given is not None:
        return given
    factor = SERIES_FACTOR.get(f"{size.series.name}@{region}", REGION_FACTOR.get(region, ELSEWHERE))
    usd = size.cpus * size.series.usd_a_cpu * factor
    return usd * SPOT_SHARE if spot else usd


def extras_usd(disk: str, disk_gb: int, public_ip: bool) -> float:
    """Of an hour of the disk, billed by the next larger kind, and of the address."""
    kinds = DISK_USD_A_MONTH[disk]
    largest = max(kinds)
    month = next(
        (usd for gb, usd in sorted(kinds.items()) if gb >= disk_gb), kinds[largest] * disk_gb / largest
    )
    return month / HOURS_A_MONTH + (ADDRESS_USD if public_ip else 0.0)


def unknown(sizes: Iterable[str]) -> list[str]:
    return [name for name in sizes if size_of(name) is None]
