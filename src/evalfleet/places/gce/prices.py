"""What can be had at Compute Engine, and what it costs: by the list that was fetched, or the one that is
built in, or by the settings.

The built-in prices are USD an hour for Linux, on demand and spot, of the date below, for machines of 4 vCPUs:
within a family Google's prices are in proportion to the vCPUs. Disks and addresses are those of us-central1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from evalfleet.model import Cost, Lifetime, Needs, Offer
from evalfleet.places.vm.price_book import PriceBook, Quote, load_prices, machine_prices, price_rows
from evalfleet.ports import Price, PriceTable

from .machine_types import HYPERDISK, KNOWN_REGIONS, SPOT_QUOTA, MachineType, fits, region_of, type_of
from .settings import GceSettings
from .template import LEAST_LIFE_S, LONGEST_LIFE_S

LEAST_BILLED_S = 60.0
"""Google bills machines by the second, and for a minute at least."""
FILE = Path(".gce") / "prices.json"
"""In the home: the list that was fetched last."""
HOURS_A_MONTH = 730.0
ELSEWHERE = 1.75
"""Where no price is known, in prices of us-central1. The dearest region, me-central2, has 1.6 (2026-08)."""
SPOT_SHARE = 0.61
"""Where no spot price is known, of the regular one. In no region Google asks for more than 0.6 (2026-08)."""
ADDRESS, ADDRESS_USD, SPOT_ADDRESS_USD = "address", 0.005, 0.0025
BUILT_IN, AS_OF = "built in", "2026-08"
OWN = "your settings"
"""What a price is said to be from that the user has set."""
# the columns of these two tables are KNOWN_REGIONS
REGULAR = """
e2-standard-4   0.13402 0.13402 0.15094 0.13402 0.16098 0.14743 0.14754 0.16533
e2-highmem-4    0.1808 0.1808 0.20361 0.1808 0.21716 0.19889 0.19903 0.22303
n1-standard-4   0.19 0.19 0.21398 0.19 0.22822 0.20901 0.20917 0.23439
n2-standard-4   0.19424 0.19424 0.21876 0.19424 0.2333 0.21367 0.21383 0.23961
n2-highmem-4    0.26203 0.26203 0.29509 0.26203 0.31473 0.28824 0.28846 0.32323
n2d-standard-4  0.16898 0.16898 0.19032 0.16898 0.20297 0.18589 0.18604 0.20847
c3-standard-4   0.20161 0.20161 0.20161 0.20161 0.24235 0.22199 0.21169 0.24872
"""
SPOT = """
e2-standard-4   0.08042 0.08042 0.08664 0.08042 0.05198 0.08266 0.07386 0.09039
e2-highmem-4    0.10849 0.10849 0.11688 0.10849 0.07013 0.11153 0.09963 0.12194
n1-standard-4   0.08918 0.08918 0.07286 0.08918 0.0917 0.10019 0.12549 0.05434
n2-standard-4   0.11147 0.11147 0.05246 0.11147 0.07233 0.04442 0.06666 0.11858
n2-highmem-4    0.15038 0.15038 0.07077 0.15038 0.09758 0.05993 0.08993 0.15995
n2d-standard-4  0.05922 0.05922 0.11422 0.05922 0.11876 0.09339 0.07487 0.04277
c3-standard-4   0.06279 0.06279 0.05422 0.06279 0.04833 0.0803 0.10841 0.12842
"""
DISK_USD_A_GB_MONTH: Mapping[str, float] = {
    "pd-ssd": 0.17,
    "pd-balanced": 0.1,
    "pd-standard": 0.04,
    HYPERDISK: 0.08,
}
IMAGE_USD_A_GB_MONTH = 0.05
SNAPSHOT_USD_A_GB_MONTH = 0.05
MENDS = ("reset", "restart")


def disk(kind: str) -> str:
    """A GB of a disk, as price tables call it."""
    return f"disk {kind} GB"


class GcePriceBook(PriceBook):
    """Google's price book, which computes what the list does not have from what it has."""

    def __init__(self, fetched: PriceTable | None) -> None:
        super().__init__(fetched, _built_in_book())

    @classmethod
    def of(cls, home: Path) -> GcePriceBook:
        return cls(load_prices(home / FILE))

    def machine(self, type: MachineType, region: str, *, spot: bool) -> Quote | None:
        """None if no list has it, and there is nothing to compute it from."""
        quote = self.quote(type.name, region, spot=spot)
        if quote is not None:
            return quote
        base = type.name.rpartition("-")[0] + "-4"
        there = self.quote(base, region, spot=spot)
        known = there or self.quote(base, "us-central1")
        if known is None or not type.name.endswith(f"-{type.cpus}"):
            return None
        share = 1.0 if there else ELSEWHERE * (SPOT_SHARE if spot else 1.0)  # spot prices follow no region's
        return Quote(math.ceil(known.usd * type.cpus / 4 * share * 100_000) / 100_000, known.as_of)

    def extra(self, what: str, region: str) -> Quote:
        """An hour of a GB of a disk, or of an address."""
        quote = self.quote(what, region)
        if quote is not None:
            return quote
        at_home = self.quote(what, "us-central1")
        assert at_home is not None, f"{what} is in the list that is built in"
        return Quote(at_home.usd * ELSEWHERE, at_home.as_of)


@functools.cache
def built_in() -> PriceTable:
    """The prices that come with evalfleet."""
    machines = machine_prices(REGULAR, SPOT, KNOWN_REGIONS)
    extras = [price for region in KNOWN_REGIONS for price in _extras(region)]
    return PriceTable(AS_OF, BUILT_IN, (*machines, *extras))


@functools.cache
def _built_in_book() -> PriceBook:
    return PriceBook(built_in())


def _extras(region: str) -> list[Price]:
    """Disks of other regions are as much dearer than us-central1's as machines are there."""
    machines = price_rows(REGULAR, KNOWN_REGIONS)
    factor = max(1.0, machines["e2-standard-4", region] / machines["e2-standard-4", "us-central1"])
    disks = [
        Price(disk(kind), region, round(factor * usd / HOURS_A_MONTH, 8), estimated=factor > 1.0)
        for kind, usd in DISK_USD_A_GB_MONTH.items()
    ]
    return [*disks, Price(ADDRESS, region, ADDRESS_USD, SPOT_ADDRESS_USD)]


# -- offers ------------------------------------------------------------------------------------------


def offers_of(
    place: str,
    settings: GceSettings,
    zones: Sequence[str],
    book: GcePriceBook,
    needs: Needs,
    *,
    for_pool: bool = False,
) -> Sequence[Offer]:
    """What can be had, cheapest first; in the order of the settings where prices are equal.

    With `spot`, there are regular machines beside the spot ones. Spot machines are not mended: one that was
    stopped may not come back.
    """
    only_spot = settings.spot and settings.spot_only
    kinds = [*([True] if settings.spot else []), *([] if only_spot else [False])]
    wanted = structs.replace(needs, nested_virtualization=wants_nesting(settings, needs))
    offers = [
        _offer(place, settings, book, type, zone, quote, spot=spot, for_pool=for_pool)
        for spot in kinds
        for type in filter(None, map(type_of, settings.types))
        if fits(type, wanted, settings.disk_gb) and not (0 < settings.max_vcpus < type.cpus)
        for zone in zones
        if (quote := price_of(settings, book, type, region_of(zone), spot=spot)) is not None
    ]
    return sorted(offers, key=lambda offer: offer.cost.usd_per_hour)


def wants_nesting(settings: GceSettings, needs: Needs) -> bool:
    return needs.nested_virtualization if settings.nested is None else settings.nested


def unpriced(settings: GceSettings, zones: Sequence[str], book: GcePriceBook) -> list[str]:
    """Machine types that have no price in any region of the settings."""
    regions = dict.fromkeys(region_of(zone) for zone in zones)
    return [
        type.name
        for type in filter(None, map(type_of, settings.types))
        if not any(price_of(settings, book, type, region, spot=False) for region in regions)
    ]


def _offer(
    place: str,
    s: GceSettings,
    book: GcePriceBook,
    type: MachineType,
    zone: str,
    machine: Quote,
    *,
    spot: bool,
    for_pool: bool,
) -> Offer:
    """Google ends a machine at its limit, with its disk; a pool's machine is stopped, and its disk stays."""
    region = region_of(zone)
    gigabyte = book.extra(disk(type.disk(s.disk)), region)
    idle = gigabyte.usd * s.disk_gb
    address = _address_usd(book, region, spot=spot) if s.public_ip else 0.0
    return Offer(
        place,
        type.name,
        zone,
        spot=spot,
        creates_a_minute=s.creates_a_minute,
        capacity=s.max_vcpus // type.cpus if s.max_vcpus else None,
        mends=() if spot else MENDS,
        area=region,
        family=SPOT_QUOTA if spot else type.quota,
        cpus=type.cpus,
        memory_gb=type.memory_gb or 0.0,
        cost=Cost(
            usd_per_hour=round(machine.usd + idle + address, 6),
            idle_usd_per_hour=round(idle, 6),
            sweep_s=3600.0 if for_pool else 0.0,
            least_billed_s=LEAST_BILLED_S,
            priced=", ".join(dict.fromkeys((machine.as_of, gigabyte.as_of))),
        ),
        life=Lifetime(
            teardown_s=s.teardown_s,
            settle_s=s.settle_s,
            least_life_s=LEAST_LIFE_S,
            extendable=False,
            max_life_s=LONGEST_LIFE_S,
            lost_s=s.lost_s,
        ),
    )


def _address_usd(book: GcePriceBook, region: str, *, spot: bool) -> float:
    listed = book.quote(ADDRESS, region, spot=spot)
    return listed.usd if listed is not None else ADDRESS_USD


def price_of(
    s: GceSettings, book: GcePriceBook, type: MachineType, region: str, *, spot: bool
) -> Quote | None:
    """Of an hour of the machine alone: as the settings say, else by the list; None if nobody knows."""
    given = s.prices.get(f"{type.name}@{region}", s.prices.get(type.name))
    if given is not None:
        return Quote(given, OWN)
    listed = book.machine(type, region, spot=spot)
    off = 0.0 if spot else s.discounts.get(type.family, 0.0)
    return (
        listed
        if listed is None or not off
        else Quote(listed.usd * (1.0 - off), f"{listed.as_of}, discounted")
    )
