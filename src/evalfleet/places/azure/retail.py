"""Azure's public price list: no credentials, answers in pages."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evalfleet.errors import PlaceError
from evalfleet.http_client import NoAnswer, ask
from evalfleet.places.vm.answers import Json, rows
from evalfleet.places.vm.price_book import load_prices, named_in, save_prices
from evalfleet.ports import Price, PriceTable

from .prices import ADDRESS, DISK_USD_A_MONTH, FILE, HOURS_A_MONTH, built_in, disk
from .settings import AzureSettings

SOURCE = "https://prices.azure.com/api/retail/prices"
ALL_S, ONE_S = 120.0, 20.0
TRIES = 3
AT_ONCE = 4
PAGES = 40
PAGE_BYTES = 4_000_000
BUSY = (429, 500, 502, 503, 504)
PRODUCTS = {
    "Premium_LRS": ("Premium SSD Managed Disks", "P"),
    "StandardSSD_LRS": ("Standard SSD Managed Disks", "E"),
    "Standard_LRS": ("Standard HDD Managed Disks", "S"),
}
TIERS = {32: 4, 64: 6, 128: 10, 256: 15, 512: 20, 1024: 30, 2048: 40, 4096: 50}
ADDRESS_METER = "Standard IPv4 Static Public IP"
NOT_OURS = ("Windows", "Low Priority", "CloudServices", "Cloud Services")
"""In the names of what is sold under a size's name beside plain Linux machines."""


def fetch(sizes: Sequence[str], regions: Sequence[str], source: str, today: str) -> PriceTable:
    """The prices of these sizes in these regions, with disks and addresses. Raises PlaceError."""
    pages = PricePages(source, time.monotonic() + ALL_S)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        machines = [pool.submit(_machine, pages, size, region) for region in regions for size in sizes]
        extras = [pool.submit(_extras, pages, region) for region in regions]
        try:
            found = [price for each in (*machines, *extras) for price in each.result()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    sold = {price.what for price in found}
    if missing := [size for size in sizes if size not in sold]:
        raise _bad(f"{source} has no price for {', '.join(missing)}")
    if unpriced := [region for region in regions if not _has_extras(found, region)]:
        raise _bad(f"{source} has no prices of disks and addresses in {', '.join(unpriced)}")
    return PriceTable(today, source, tuple(found))


def _has_extras(found: Iterable[Price], region: str) -> bool:
    whats = {price.what for price in found if price.region == region}
    return {ADDRESS, disk("Premium_LRS", 128), disk("StandardSSD_LRS", 128)} <= whats


class PricePages:
    """The pages of a price list: items that match, asked for until the time for all is over."""

    def __init__(self, source: str, until: float) -> None:
        parts = urllib.parse.urlsplit(source)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _bad(f"{source!r} is no address of a price list: give one that begins with https://")
        self._source, self._host = source, parts.hostname
        self._until = until

    def items(self, **wanted: str) -> list[Json]:
        words = {"priceType": "Consumption", **wanted}
        query = " and ".join(f"{field} eq '{value}'" for field, value in words.items())
        link = f"{self._source}?{urllib.parse.urlencode({'$filter': query})}"
        found: list[Json] = []
        for _ in range(PAGES):
            page = self._page(link)
            if not isinstance(page.get("Items"), list) or page.get("BillingCurrency", "USD") != "USD":
                raise _bad(f"{self._source} does not answer as a price list in USD does")
            found += [each for each in rows(page["Items"]) if _agrees(each, wanted)]
            link = str(page.get("NextPageLink") or "")
            if not link:
                return found
        raise _bad(f"{self._source} answers with more than {PAGES} pages")

    def _page(self, link: str) -> Json:
        if urllib.parse.urlsplit(link).hostname != self._host:
            raise _bad(f"{self._source} sends us to another computer for the next page")
        problem = ""
        for tries in range(1, TRIES + 1):
            timeout_s, retry_after = self._left_s(ONE_S), ""
            try:
                answer = ask(link.replace(" ", "%20"), timeout_s=timeout_s, most_bytes=PAGE_BYTES)
            except NoAnswer as err:
                problem = f"cannot be read: {err}"
            else:
                if answer.code == 200:
                    return _decoded(answer.body, self._source)
                problem, retry_after = f"answers {answer.code}", answer.retry_after
                if answer.code not in BUSY:
                    break
            if tries < TRIES:
                pause_s = float(retry_after) if retry_after.isdecimal() else 0.5 * tries
                time.sleep(self._left_s(pause_s))
        raise _bad(f"{self._source} {problem}")

    def _left_s(self, most_s: float) -> float:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise _bad(f"{self._source} took longer than {ALL_S:.0f} s")
        return min(left_s, most_s)


def _decoded(body: bytes, source: str) -> Json:
    try:
        page = json.loads(body)
    except ValueError as err:
        raise _bad(f"{source} does not answer with JSON") from err
    if not isinstance(page, dict):
        raise _bad(f"{source} does not answer as a price list does")
    return page  # pyright: ignore[reportUnknownVariableType]


def _agrees(item: Json, wanted: dict[str, str]) -> bool:
    """A list that does not know a filter sends all it has."""
    return item.get("type") == "Consumption" and all(item.get(field) == wanted[field] for field in wanted)


def _machine(pages: PricePages, size: str, region: str) -> list[Price]:
    items = pages.items(serviceName="Virtual Machines", armRegionName=region, armSkuName=size)
    plain = [each for each in items if not any(word in _names(each) for word in NOT_OURS)]
    regular = _newest([each for each in plain if "Spot" not in _names(each)], "1 Hour")
    spot = _newest([each for each in plain if "Spot" in _names(each)], "1 Hour")
    if regular is None:
        return []
    if spot is not None and spot > regular:
        raise _bad(f"the price list has {size} in {region} dearer as spot (${spot:g}) than regular")
    return [Price(size, region, regular, spot)]


def _names(item: Json) -> str:
    return f"{item.get('productName')} {item.get('skuName')} {item.get('meterName')}"


def _extras(pages: PricePages, region: str) -> list[Price]:
    found: list[Price] = []
    for kind, (product, letter) in PRODUCTS.items():
        items = pages.items(serviceName="Storage", armRegionName=region, productName=product)
        for gb in DISK_USD_A_MONTH[kind]:
            meter = f"{letter}{TIERS[gb]} LRS Disk"
            month = _newest([each for each in items if each.get("meterName") == meter], "1/Month")
            if month is not None:
                found.append(Price(disk(kind, gb), region, round(month / HOURS_A_MONTH, 6)))
    items = pages.items(serviceName="Virtual Network", armRegionName=region, productName="IP Addresses")
    hour = _newest([each for each in items if each.get("meterName") == ADDRESS_METER], "1 Hour")
    return found if hour is None else [*found, Price(ADDRESS, region, hour)]


def _newest(items: list[Json], unit: str) -> float | None:
    """The price that came into force last, of the first tier."""
    known = [each for each in items if each.get("unitOfMeasure") == unit and not each.get("tierMinimumUnits")]
    if not known:
        return None
    price = max(known, key=lambda each: str(each.get("effectiveStartDate"))).get("retailPrice")
    if not isinstance(price, int | float) or not math.isfinite(price) or price <= 0:
        raise _bad(f"the price list has a price of {price!r}")
    return float(price)


def _bad(why: str) -> PlaceError:
    return PlaceError(why, transient=False)


class RetailPrices:
    """The price list of Azure's VMs, which is shown and fetched without an account."""

    source = SOURCE

    def prices(self, home: Path) -> PriceTable:
        return load_prices(home / FILE) or built_in()

    def wanted(self, tables: Sequence[Mapping[str, object]]) -> Sequence[tuple[str, str]]:
        sizes, regions = _sizes_and_regions(tables)
        extras = [disk("Premium_LRS", 128), disk("StandardSSD_LRS", 128), ADDRESS]
        return [(what, region) for region in regions for what in (*sizes, *extras)]

    async def update(
        self,
        home: Path,
        tables: Sequence[Mapping[str, object]],
        source: str,
        today: str,
        environ: Mapping[str, str],
    ) -> PriceTable:
        table = await asyncio.to_thread(fetch, *_sizes_and_regions(tables), source, today)
        save_prices(home / FILE, table)
        return table


def _sizes_and_regions(tables: Sequence[Mapping[str, object]]) -> tuple[list[str], list[str]]:
    """Those that the settings of places name."""
    default = AzureSettings()
    return named_in(tables, "sizes", default.sizes), named_in(tables, "regions", default.regions)
