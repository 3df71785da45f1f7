"""Azure's public price list, as prices.azure.com answers. The prices are made up: linear in vCPUs.

With what else is sold under the names that one looks for: Windows, low priority, prices that are no longer.
"""

from __future__ import annotations

from collections.abc import Iterator

from standins.cloud.words import Answer, Call, Json

from .catalog import REGIONS, SIZES, Size
from .groups import equals

PAGE = 100
USD_A_CPU = 0.048
SPOT_SHARE = 0.2
DISK_USD_A_GB = {"P": 0.15, "E": 0.075, "S": 0.045}
PRODUCTS = {"P": "Premium SSD", "E": "Standard SSD", "S": "Standard HDD"}
TIERS = {4: 32, 6: 64, 10: 128, 15: 256, 20: 512, 30: 1024, 40: 2048, 50: 4096}
ADDRESS_USD = 0.006


def retail_prices(call: Call) -> Answer:
    wanted = call.asks("$filter")
    items = [each for each in _items() if _fits(each, wanted)]
    start = int(call.asks("$skip") or 0)
    here = items[start : start + PAGE]
    more = start + PAGE < len(items)
    following = f"{call.base}{call.path}?$filter={wanted}&$skip={start + PAGE}" if more else None
    return Answer(
        200,
        {
            "BillingCurrency": "USD",
            "CustomerEntityId": "Default",
            "CustomerEntityType": "Retail",
            "Items": here,
            "NextPageLink": following,
            "Count": len(here),
        },
    )


def price(size: str, region: str, *, spot: bool = False) -> float:
    """What the list says, in USD an hour."""
    dearer = 1.0 + 0.02 * list(REGIONS).index(region)
    usd = SIZES[size.lower()].vcpus * USD_A_CPU * dearer
    return round(usd * (SPOT_SHARE if spot else 1.0), 6)


def _fits(item: Json, text: str) -> bool:
    fields = (
        "serviceName",
        "armRegionName",
        "armSkuName",
        "priceType",
        "currencyCode",
        "serviceFamily",
        "productName",
    )
    return all(not equals(text, field) or item[field] == equals(text, field) for field in fields)


def _items() -> Iterator[Json]:
    for region in REGIONS:
        for size in SIZES.values():
            yield from _machine(size, region)
        yield from _extras(region)


def _machine(size: Size, region: str) -> Iterator[Json]:
    plain = _item(size, region, "")
    yield plain
    yield {**plain, "effectiveStartDate": "2024-01-01T00:00:00Z", "retailPrice": plain["retailPrice"] * 2}
    yield {**plain, "productName": f"{plain['productName']} Windows", "retailPrice": 9.0}
    if size.spot:
        yield _item(size, region, " Spot")
        yield {**_item(size, region, " Low Priority"), "retailPrice": 0.0001}


def _extras(region: str) -> Iterator[Json]:
    for letter, product in PRODUCTS.items():
        for tier, gigabytes in TIERS.items():
            usd, sku = round(DISK_USD_A_GB[letter] * gigabytes, 4), f"{letter}{tier} LRS"
            names = {"productName": f"{product} Managed Disks", "skuName": sku, "serviceName": "Storage"}
            yield _thing(region, usd, "1/Month", meterName=f"{sku} Disk", **names)
            yield _thing(region, 0.0005, "10K", meterName=f"{sku} Disk Operations", **names)
    names = {"productName": "IP Addresses", "skuName": "Standard", "serviceName": "Virtual Network"}
    yield _thing(region, ADDRESS_USD, "1 Hour", meterName="Standard IPv4 Static Public IP", **names)
    yield _thing(region, 0.1, "1 Hour", meterName="Global IPv4 Static Public IP", **names)


def _thing(region: str, usd: float, unit: str, **names: str) -> Json:
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "location": region,
        "effectiveStartDate": "2026-08-01T00:00:00Z",
        "unitOfMeasure": unit,
        "type": "Consumption",
        "priceType": "Consumption",
        "serviceFamily": "Storage",
        "isPrimaryMeterRegion": True,
        "armSkuName": "",
        **names,
    }


def _item(size: Size, region: str, suffix: str) -> Json:
    series = size.family.removeprefix("standard").removesuffix("Family")
    name = f"{size.name.removeprefix('Standard_').replace('_', ' ')}{suffix}"
    return _thing(
        region,
        price(size.name, region, spot=bool(suffix)),
        "1 Hour",
        meterId=f"{size.name}-{region}{suffix}".replace(" ", "-"),
        meterName=name,
        productId=f"DZH-{series}",
        skuId=f"DZH-{series}/{size.name}",
        productName=f"Virtual Machines {series} Series",
        skuName=name,
        serviceName="Virtual Machines",
        serviceId="DZH313Z7MMC8",
        serviceFamily="Compute",
        armSkuName=size.name,
    )
