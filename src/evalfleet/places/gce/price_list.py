"""Google's own price list, the catalogue of Cloud Billing: read with the login that the place has.

It has no machine types, but hours of their parts: a vCPU and a GB of memory of each family, a GB of each kind
of disk for a month, an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evalfleet.errors import PlaceError
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.price_book import load_prices, named_in, save_prices
from evalfleet.ports import Price, PriceTable

from .answers import GoogleFault
from .client import ComputeClient, ComputeEndpoint
from .machine_types import HYPERDISK, type_of
from .prices import ADDRESS, DISK_USD_A_GB_MONTH, FILE, HOURS_A_MONTH, built_in, disk
from .settings import REGIONS, TYPES

SOURCE = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
PAGE, MOST_PAGES = 5000, 40
MACHINE = re.compile(
    r"(?:(?:Spot )?Preemptible )?(?P<family>[A-Z]\d+[A-Z]?|Compute optimized)"
    r"(?: AMD| Arm| Predefined)*(?: Instance)? (?P<part>Core|Ram) running in .+"
)
"""The rest (commitments, sole tenancy, custom types, reservations) has other words before or between."""
DISK = re.compile(r"(?P<kind>(?:SSD backed|Balanced|Storage) PD|Hyperdisk Balanced) Capacity(?: in .+)?")
DISKS = {
    "SSD backed PD": "pd-ssd",
    "Balanced PD": "pd-balanced",
    "Storage PD": "pd-standard",
    "Hyperdisk Balanced": HYPERDISK,
}
ADDRESSES = re.compile(r"External IP Charge on a (?:Standard|Spot Preemptible) VM")
SPOT = "Preemptible"
Parts = dict[tuple[str, str, str, bool], float]
"""USD of an hour, by family or kind, part, region, and whether it is spot."""


class GcePrices:
    """The price list of Compute Engine's machines, which is fetched with the login of the place."""

    source = SOURCE

    def prices(self, home: Path) -> PriceTable:
        return load_prices(home / FILE) or built_in()

    def wanted(self, tables: Sequence[Mapping[str, object]]) -> Sequence[tuple[str, str]]:
        types, regions = _types_and_regions(tables)
        whats = [*types, *map(disk, DISK_USD_A_GB_MONTH), ADDRESS]
        return [(what, region) for what in whats for region in regions]

    async def update(
        self,
        home: Path,
        tables: Sequence[Mapping[str, object]],
        source: str,
        today: str,
        environ: Mapping[str, str],
    ) -> PriceTable:
        if not tables:
            return self.prices(home)  # nobody here uses them, and there may be no login
        if not source.startswith("https://"):
            raise _bad(f"{source!r} is no address of a price list: tokens are sent to https:// only")
        parts = parts_of(await _skus(source, str(tables[0].get("ca") or ""), environ))
        found = PriceTable(today, source, tuple(prices_of(parts, *_types_and_regions(tables))))
        sold = {price.what for price in found.prices}
        if missing := [name for name in _types_and_regions(tables)[0] if name not in sold]:
            raise _bad(f"{source} has no price for {', '.join(missing)}; set `prices` for it")
        save_prices(home / FILE, found)
        return found


def _types_and_regions(tables: Sequence[Mapping[str, object]]) -> tuple[list[str], list[str]]:
    """Those that the settings of places name."""
    return named_in(tables, "types", TYPES), named_in(tables, "regions", REGIONS)


async def _skus(source: str, ca: str, environ: Mapping[str, str]) -> list[Json]:
    """Every page of the catalogue. Raises PlaceError."""
    base, _, path = source.rpartition("/v1/")
    client = ComputeClient(ComputeEndpoint("", f"{base}/v1", ca), environ)
    found: list[Json] = []
    query = {"pageSize": str(PAGE), "currencyCode": "USD"}
    try:
        for _ in range(MOST_PAGES):
            page = await client.get(path, **query)
            if not isinstance(page.get("skus"), list):
                raise _bad(f"{source} does not answer as a price list does")
            found += rows(page["skus"])
            if not (token := page.get("nextPageToken")):
                return found
            query["pageToken"] = str(token)
    except GoogleFault as fault:
        if fault.has("SERVICE_DISABLED", "accessNotConfigured"):
            remedy = "switch it on: `gcloud services enable cloudbilling.googleapis.com`"
            raise _bad(f"the Cloud Billing API is off in this project; {remedy}") from fault
        raise fault.refusal("Google's price list") from fault
    finally:
        await client.close()
    raise _bad(f"{source} answers with more than {MOST_PAGES} pages")


# -- reading the catalogue: pure --------------------------------------------------------------------


def parts_of(skus: Iterable[Json]) -> Parts:
    """What an hour of each part costs. Raises PlaceError at prices that are none."""
    found: Parts = {}
    for sku in skus:
        usage, text = table(sku.get("category")).get("usageType"), str(sku.get("description"))
        if usage not in ("OnDemand", SPOT):
            continue
        if machine := MACHINE.fullmatch(text):
            family = "c2" if machine["family"].startswith("Compute") else machine["family"].lower()
            what, unit = (family, machine["part"]), "h" if machine["part"] == "Core" else "GiBy.h"
        elif kind := DISK.fullmatch(text):
            what, unit = (disk(DISKS[kind["kind"]]), ""), "GiBy.mo"
        elif ADDRESSES.fullmatch(text):
            what, unit = (ADDRESS, ""), "h"
        else:
            continue
        usd = _usd(sku, unit) / (HOURS_A_MONTH if unit == "GiBy.mo" else 1.0)
        for region in sku.get("serviceRegions") or ():
            found[*what, str(region), usage == SPOT] = usd
    return found


def _usd(sku: Json, unit: str) -> float:
    """The price in force, without what of it is free in a month: the list's last tier."""
    text = sku.get("description")
    nothing: Json = {}
    newest = max(
        rows(sku.get("pricingInfo")), key=lambda each: str(each.get("effectiveTime")), default=nothing
    )
    expression = table(newest.get("pricingExpression"))
    tiers = rows(expression.get("tieredRates"))
    if expression.get("usageUnit") != unit or not tiers:
        raise _bad(f"Google's price list has {text!r} by {expression.get('usageUnit')!r}, not {unit!r}")
    price = table(max(tiers, key=lambda each: float(each.get("startUsageAmount") or 0)).get("unitPrice"))
    try:
        usd = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
    except (TypeError, ValueError):
        usd = 0.0
    if usd <= 0 or price.get("currencyCode", "USD") != "USD":
        raise _bad(f"Google's price list has {text!r} at a price of {price}")
    return usd


def prices_of(parts: Parts, types: Iterable[str], regions: Sequence[str]) -> Iterable[Price]:
    """Machines, disks and addresses, as far as the parts are listed."""
    for type in filter(None, map(type_of, types)):
        for region in regions:
            regular, spot = (
                _whole(parts, type.family, type.cpus, type.memory_gb, region, spot=spot)
                for spot in (False, True)
            )
            if regular is None:
                continue
            if spot is not None and spot > regular:
                raise _bad(f"Google's price list has {type.name} in {region} dearer as spot than regular")
            yield Price(type.name, region, regular, spot)
    for region in regions:
        for what in (*map(disk, DISK_USD_A_GB_MONTH), ADDRESS):
            regular = parts.get((what, "", region, False), parts.get((what, "", "global", False)))
            spot = parts.get((what, "", region, True), parts.get((what, "", "global", True)))
            if regular is not None:
                yield Price(what, region, round(regular, 8), None if spot is None else round(spot, 8))


def _whole(
    parts: Parts, family: str, cpus: int, memory_gb: float | None, region: str, *, spot: bool
) -> float | None:
    core, ram = parts.get((family, "Core", region, spot)), parts.get((family, "Ram", region, spot))
    if core is None or ram is None or memory_gb is None:
        return None
    return round(core * cpus + ram * memory_gb, 6)


def _bad(why: str) -> PlaceError:
    return PlaceError(why, transient=False)
