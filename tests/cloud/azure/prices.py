"""Azure's public price list, as prices.azure.com answers. The prices are made up: linear in vCPUs."""

from __future__ import annotations

from collections.abc import Iterator

from .catalog import REGIONS, SIZES, Size
from .groups import equals
from .words import Answer, Call, Json

PAGE = 100
USD_A_CPU = 0.048
SPOT_SHARE = 0.2


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
            yield _item(size, region, "")
            if size.spot:
                yield _item(size, region, " Spot")


def _item(size: Size, region: str, suffix: str) -> Json:
    usd = price(size.name, region, spot=bool(suffix))
    series = size.family.removeprefix("standard").removesuffix("Family")
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "location": region,
        "effectiveStartDate": "2026-08-01T00:00:00Z",
        "meterId": f"{size.name}-{region}{suffix}".replace(" ", "-"),
        "meterName": f"{size.name.removeprefix('Standard_').replace('_', ' ')}{suffix}",
        "productId": f"DZH-{series}",
        "skuId": f"DZH-{series}/{size.name}",
        "productName": f"Virtual Machines {series} Series",
        "skuName": f"{size.name.removeprefix('Standard_').replace('_', ' ')}{suffix}",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "priceType": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": size.name,
    }
