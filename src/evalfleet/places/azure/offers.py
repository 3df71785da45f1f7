"""What can be had at Azure, at what price. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from evalfleet.model import Needs, Offer
from evalfleet.places.vm.price_book import Quote

from .expiry import LEAST_LIFE_S
from .prices import ADDRESS, AzurePriceBook, disk
from .settings import AzureSettings
from .sizes import VmSize, fits, region_and_zone, size_of, where

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
    return sorted((*spot, *mended), key=lambda offer: offer.usd_per_hour)


def _priced(
    place: str, settings: AzureSettings, book: AzurePriceBook, needs: Needs, *, spot: bool
) -> tuple[Offer, ...]:
    ceiling = settings.max_vcpus
    return tuple(
        _offer(place, settings, book, size, where(region, zone), spot=spot)
        for size in filter(None, map(size_of, settings.sizes))
        if fits(size, needs, settings.disk_gb) and not (ceiling and size.cpus > ceiling)
        for region in settings.regions
        for zone in settings.zones or ("",)
    )


def _offer(
    place: str, s: AzureSettings, book: AzurePriceBook, size: VmSize, there: str, *, spot: bool
) -> Offer:
    region, zone = region_and_zone(there)
    machine, extras = _machine(s, book, size, region, spot=spot), _extras(s, book, region)
    idle = sum(each.usd for each in extras)
    return Offer(
        place,
        size.name,
        there,
        usd_per_hour=round(machine.usd + idle, 6),
        spot=spot,
        capacity=s.max_vcpus // size.cpus if s.max_vcpus else None,
        teardown_s=s.teardown_s,
        settle_s=s.settle_s,
        area=region if zone else "",
        family=SPOT_FAMILY if spot else size.series.family,
        idle_usd_per_hour=round(idle, 6),
        sweep_s=s.sweep_s,
        least_life_s=LEAST_LIFE_S,
        priced=", ".join(dict.fromkeys((machine.as_of, *(each.as_of for each in extras)))),
    )


def _machine(s: AzureSettings, book: AzurePriceBook, size: VmSize, region: str, *, spot: bool) -> Quote:
    given = s.prices.get(f"{size.name}@{region}", s.prices.get(size.name))
    return book.machine(size, region, spot=spot) if given is None else Quote(given, OWN)


def _extras(s: AzureSettings, book: AzurePriceBook, region: str) -> list[Quote]:
    """An hour of the disk, and of the address: billed also while the machine is stopped."""
    quote = book.extra(disk(s.disk, s.disk_gb), region)
    return [quote, *([book.extra(ADDRESS, region)] if s.public_ip else [])]
