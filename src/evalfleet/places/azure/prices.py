"""What can be had at Azure, and what it costs: by the list that was fetched, or the one that is built in.

The built-in prices are USD an hour for Linux, pay as you go and spot, of the date below. Sizes with 4 and
8 vCPUs are as Azure's public list has them; the others are computed from these. Disks and addresses are those
of eastus. `evalfleet prices --update` fetches what is true today.
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

from .settings import AzureSettings
from .sizes import VmSize, fits, region_and_zone, size_of, where
from .template import LEAST_LIFE_S

FILE = Path(".azure") / "prices.json"
"""In the home: the list that was fetched last."""
HOURS_A_MONTH = 730.0
ELSEWHERE = 1.5
"""Where no price is known: more than in any region that we looked at."""
ADDRESS = "address"
BUILT_IN = "built in"
AS_OF = "2026-08"
REGIONS = (
    "eastus",
    "eastus2",
    "centralus",
    "northcentralus",
    "southcentralus",
    "westcentralus",
    "westus",
    "westus2",
    "westus3",
)
"""The columns of the two tables below."""
REGULAR = """
Standard_D4s_v3   0.192 0.192 0.22 0.2 0.22 0.22 0.234 0.192 0.192
Standard_D8s_v3   0.384 0.384 0.44 0.4 0.44 0.44 0.468 0.384 0.384
Standard_D4s_v4   0.192 0.192 0.217 0.192 0.23 0.23 0.224 0.192 0.192
Standard_D8s_v4   0.384 0.384 0.434 0.384 0.461 0.461 0.448 0.384 0.384
Standard_D4s_v5   0.192 0.192 0.217 0.192 0.23 0.23 0.224 0.192 0.192
Standard_D8s_v5   0.384 0.384 0.434 0.384 0.461 0.461 0.448 0.384 0.384
Standard_D4ds_v4  0.226 0.226 0.255 0.226 0.294 0.271 0.266 0.226 0.226
Standard_D8ds_v4  0.452 0.452 0.511 0.452 0.588 0.542 0.532 0.452 0.452
Standard_D4ds_v5  0.226 0.226 0.255 0.226 0.271 0.271 0.266 0.226 0.226
Standard_D8ds_v5  0.452 0.452 0.511 0.452 0.542 0.542 0.532 0.452 0.452
Standard_D4as_v5  0.172 0.172 0.194 0.172 0.206 0.206 0.202 0.172 0.172
Standard_D8as_v5  0.344 0.344 0.389 0.344 0.413 0.413 0.404 0.344 0.344
Standard_D4ads_v5 0.206 0.206 0.233 0.206 0.247 0.247 0.244 0.206 0.206
Standard_D8ads_v5 0.412 0.412 0.466 0.412 0.494 0.494 0.488 0.412 0.412
Standard_E4s_v3   0.252 0.266 0.292 0.252 0.292 0.292 0.296 0.252 0.252
Standard_E8s_v3   0.504 0.532 0.583 0.504 0.583 0.583 0.56 0.504 0.504
Standard_E4s_v5   0.252 0.252 0.285 0.252 0.302 0.302 0.28 0.252 0.252
Standard_E8s_v5   0.504 0.504 0.57 0.504 0.605 0.605 0.56 0.504 0.504
Standard_E4ds_v5  0.288 0.288 0.325 0.288 0.346 0.346 0.324 0.288 0.288
Standard_E8ds_v5  0.576 0.576 0.651 0.576 0.691 0.691 0.648 0.576 0.576
"""
SPOT = """
Standard_D4s_v3   0.02112 0.02496 0.0242 0.026 0.0242 0.0286 0.02574 0.02496 0.02112
Standard_D8s_v3   0.04224 0.04992 0.0484 0.052 0.0484 0.0572 0.05148 0.04992 0.04224
Standard_D4s_v4   0.02112 0.02496 0.02387 0.02496 0.0253 0.0299 0.02464 0.02496 0.02112
Standard_D8s_v4   0.04224 0.04992 0.04774 0.04992 0.05071 0.05993 0.04928 0.04992 0.04224
Standard_D4s_v5   0.02112 0.02496 0.02387 0.02496 0.027416 0.0299 0.024819 0.02496 0.02112
Standard_D8s_v5   0.04224 0.04992 0.04774 0.04992 0.054951 0.05993 0.049638 0.04992 0.04224
Standard_D4ds_v4  0.02486 0.02938 0.02805 0.02938 0.03234 0.03523 0.02926 0.02938 0.02486
Standard_D8ds_v4  0.04972 0.05876 0.05621 0.05876 0.06468 0.07046 0.05852 0.05876 0.04972
Standard_D4ds_v5  0.02486 0.02938 0.02805 0.02938 0.032303 0.03523 0.029473 0.02938 0.02486
Standard_D8ds_v5  0.04972 0.05876 0.05621 0.05876 0.064606 0.07046 0.058946 0.05876 0.04972
Standard_D4as_v5  0.01892 0.023616 0.02134 0.02236 0.02266 0.02678 0.02222 0.02236 0.01892
Standard_D8as_v5  0.03784 0.047231 0.04279 0.04472 0.04543 0.05369 0.04444 0.04472 0.03784
Standard_D4ads_v5 0.02266 0.028284 0.02563 0.02678 0.02717 0.03211 0.02684 0.02678 0.02266
Standard_D8ads_v5 0.04532 0.056568 0.05126 0.05356 0.05434 0.06422 0.05368 0.05356 0.04532
Standard_E4s_v3   0.02772 0.03458 0.03212 0.03276 0.03212 0.03796 0.03256 0.03276 0.02772
Standard_E8s_v3   0.05544 0.06916 0.06413 0.06552 0.06413 0.07579 0.0616 0.06552 0.05544
Standard_E4s_v5   0.02772 0.03276 0.03135 0.03276 0.035998 0.03926 0.031024 0.03276 0.02772
Standard_E8s_v5   0.05544 0.06552 0.0627 0.06552 0.072116 0.07865 0.062048 0.06552 0.05544
Standard_E4ds_v5  0.03168 0.03744 0.03575 0.03744 0.041243 0.04498 0.035899 0.03744 0.03168
Standard_E8ds_v5  0.06336 0.07488 0.07161 0.07488 0.082367 0.08983 0.071798 0.07488 0.06336
"""
ADDRESS_USD = 0.005
IMAGE_USD_A_GB_MONTH = 0.05
"""Of what is occupied, for each copy of an image: billed as a snapshot on a Standard disk."""


def _by_tier(*usd: float) -> Mapping[int, float]:
    """A month of disks of 32 GB to 2 TB; the next larger is taken for twice as dear, which it is at most."""
    gigabytes = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    return dict(zip(gigabytes, (*usd, 2 * usd[-1]), strict=True))


DISK_USD_A_MONTH: Mapping[str, Mapping[int, float]] = {
    "Premium_LRS": _by_tier(5.28, 10.21, 19.71, 38.02, 73.22, 135.17, 259.05),
    "StandardSSD_LRS": _by_tier(2.4, 4.8, 9.6, 19.2, 38.4, 76.8, 153.6),
    "Standard_LRS": _by_tier(1.54, 3.01, 5.89, 11.33, 21.76, 40.96, 77.83),
}


def disk(kind: str, gb: int) -> str:
    """A disk as price tables call it. Disks are billed as the next larger of a few."""
    tiers = DISK_USD_A_MONTH[kind]
    return f"disk {kind} {next((tier for tier in sorted(tiers) if tier >= gb), max(tiers))} GB"


class AzurePriceBook(PriceBook):
    """Azure's price book, which guesses what no list has."""

    def __init__(self, fetched: PriceTable | None) -> None:
        super().__init__(fetched, _built_in_book())

    @classmethod
    def of(cls, home: Path) -> AzurePriceBook:
        return cls(load_prices(home / FILE))

    def machine(self, size: VmSize, region: str, *, spot: bool) -> Quote | None:
        """None if no list has it, and there is nothing to guess it from."""
        quote = self.quote(size.name, region, spot=spot)
        if quote is not None or not size.series.listed:
            return quote
        return Quote(_guessed(size, region, spot=spot), AS_OF)

    def extra(self, what: str, region: str) -> Quote:
        """An hour of a disk, or of an address."""
        quote = self.quote(what, region)
        if quote is not None:
            return quote
        (usd,) = (price.usd_per_hour for price in _extras("eastus") if price.what == what)
        return Quote(usd * ELSEWHERE, AS_OF)


@functools.cache
def built_in() -> PriceTable:
    """The prices that come with evalfleet."""
    machines = machine_prices(REGULAR, SPOT, REGIONS)
    extras = [price for region in REGIONS for price in _extras(region)]
    return PriceTable(AS_OF, BUILT_IN, (*machines, *extras))


@functools.cache
def _built_in_book() -> PriceBook:
    return PriceBook(built_in())


def _extras(region: str) -> list[Price]:
    """Disks and addresses of other regions are as much dearer than eastus's as machines are there."""
    machines = price_rows(REGULAR, REGIONS)
    factor = max(1.0, machines["Standard_D4s_v5", region] / machines["Standard_D4s_v5", "eastus"])
    guessed = factor > 1.0
    disks = [
        Price(disk(kind, gb), region, round(factor * usd / HOURS_A_MONTH, 6), estimated=guessed)
        for kind, tiers in DISK_USD_A_MONTH.items()
        for gb, usd in tiers.items()
    ]
    return [*disks, Price(ADDRESS, region, ADDRESS_USD)]


def _guessed(size: VmSize, region: str, *, spot: bool) -> float:
    """By its vCPUs from a size of its series that is listed, rounded up; dearer where nothing is listed."""
    book = _built_in_book()
    base_cpus = 8 if size.cpus >= 8 else 4
    base = size.series.size_name(base_cpus)
    there = book.quote(base, region, spot=spot)
    quote = there or book.quote(base, "eastus", spot=spot)
    assert quote is not None, "each series is listed in eastus"
    factor = 1.0 if there is not None else ELSEWHERE
    return math.ceil(quote.usd * factor * size.cpus / base_cpus * 1000) / 1000


# -- offers ------------------------------------------------------------------------------------------

OWN = "your settings"
"""What a price is said to be from that the user has set."""
MENDS = ("restart", "redeploy")
SPOT_FAMILY = "spot"
"""Spot machines of all sizes share one quota of their region."""


def offers_of(place: str, settings: AzureSettings, book: AzurePriceBook, needs: Needs) -> Sequence[Offer]:
    """What can be had, cheapest first; in the order of the settings where prices are equal.

    With `spot`, there are regular machines beside the spot ones. Spot machines are not mended: they watch for
    notices, and Azure gives whoever does a quarter of an hour to agree to a restart.
    """
    only_spot = settings.spot and settings.spot_only
    regular = () if only_spot else _priced(place, settings, book, needs, spot=False)
    spot = _priced(place, settings, book, needs, spot=True) if settings.spot else ()
    mended = [structs.replace(each, mends=MENDS) for each in regular]
    return sorted((*spot, *mended), key=lambda offer: offer.cost.usd_per_hour)


def unpriced(settings: AzureSettings, book: AzurePriceBook) -> list[str]:
    """Sizes that have no price in any region of the settings."""
    sizes = [size for name in settings.sizes if (size := size_of(name)) is not None]
    return [
        size.name
        for size in sizes
        if not any(price_of(settings, book, size, region, spot=False) for region in settings.regions)
    ]


def _priced(
    place: str, settings: AzureSettings, book: AzurePriceBook, needs: Needs, *, spot: bool
) -> tuple[Offer, ...]:
    """What has no price is not offered: no budget could hold it."""
    ceiling = settings.max_vcpus
    return tuple(
        _offer(place, settings, book, size, where(region, zone), quote, spot=spot)
        for size in filter(None, map(size_of, settings.sizes))
        if fits(size, needs, settings.disk_gb) and not (ceiling and size.cpus > ceiling)
        for region in settings.regions
        if (quote := price_of(settings, book, size, region, spot=spot)) is not None
        for zone in settings.zones or ("",)
    )


def _offer(
    place: str,
    s: AzureSettings,
    book: AzurePriceBook,
    size: VmSize,
    there: str,
    machine: Quote,
    *,
    spot: bool,
) -> Offer:
    region, zone = region_and_zone(there)
    extras = _billed_when_stopped(s, book, region)
    idle = sum(each.usd for each in extras)
    return Offer(
        place,
        size.name,
        there,
        spot=spot,
        creates_a_minute=s.creates_a_minute,
        capacity=s.max_vcpus // size.cpus if s.max_vcpus else None,
        area=region if zone else "",
        family=SPOT_FAMILY if spot else size.series.family,
        cpus=size.cpus,
        memory_gb=size.memory_gb or 0.0,
        cost=Cost(
            usd_per_hour=round(machine.usd + idle, 6),
            idle_usd_per_hour=round(idle, 6),
            sweep_s=s.sweep_s,
            priced=", ".join(dict.fromkeys((machine.as_of, *(each.as_of for each in extras)))),
        ),
        life=Lifetime(
            teardown_s=s.teardown_s, settle_s=s.settle_s, least_life_s=LEAST_LIFE_S, lost_s=s.lost_s
        ),
    )


def price_of(
    s: AzureSettings, book: AzurePriceBook, size: VmSize, region: str, *, spot: bool
) -> Quote | None:
    """Of an hour of the machine alone: as the settings say, else by the lists; None if nobody knows."""
    given = s.prices.get(f"{size.name}@{region}", s.prices.get(size.name))
    return book.machine(size, region, spot=spot) if given is None else Quote(given, OWN)


def _billed_when_stopped(s: AzureSettings, book: AzurePriceBook, region: str) -> list[Quote]:
    """An hour of the disk, and of the address: billed also while the machine is stopped."""
    quote = book.extra(disk(s.disk, s.disk_gb), region)
    return [quote, *([book.extra(ADDRESS, region)] if s.public_ip else [])]
