"""Google's price list, as the catalogue of Cloud Billing answers. The prices are made up.

With what else is sold in nearly the same words: commitments, sole tenancy, custom types, disks that are kept
twice, and prices that are no longer.
"""

from __future__ import annotations

from collections.abc import Iterator

from standins.cloud.words import Call, Json

from .words import ApiError

PATH = "/v1/services/6F81-5844-456A/skus"
REGIONS = {"us-central1": "Americas", "us-west2": "Los Angeles", "europe-west1": "Belgium"}
NAMES = {"e2": "E2 Instance", "n1": "N1 Predefined Instance", "n2": "N2 Instance", "n2d": "N2D AMD Instance"}
CPU_USD = {"e2": 0.022, "n1": 0.032, "n2": 0.031, "n2d": 0.027}
GB_USD = {"e2": 0.003, "n1": 0.0042, "n2": 0.0042, "n2d": 0.0036}
SPOT_SHARE = 0.4
DISK_USD = {"SSD backed PD": 0.17, "Balanced PD": 0.11, "Storage PD": 0.04, "Hyperdisk Balanced": 0.09}
ADDRESS_USD, SPOT_ADDRESS_USD = 0.005, 0.0025


def machine_usd(family: str, cpus: int, memory_gb: float, region: str, *, spot: bool = False) -> float:
    """What an hour costs by this list."""
    usd = _dearer(region) * (CPU_USD[family] * cpus + GB_USD[family] * memory_gb)
    return usd * (SPOT_SHARE if spot else 1.0)


def catalogue(call: Call) -> Json:
    if call.method != "GET" or call.path != PATH:
        raise ApiError(404, "notFound", f"{call.path}: the stand-in does not have that")
    every = list(_skus())
    start, size = int(call.query.get("pageToken") or 0), min(int(call.query.get("pageSize") or 5000), 20)
    more = str(start + size) if start + size < len(every) else ""
    return {"skus": every[start : start + size], "nextPageToken": more}


def _dearer(region: str) -> float:
    return 1.0 + 0.1 * list(REGIONS).index(region)


def _skus() -> Iterator[Json]:
    for region, where in REGIONS.items():
        for family, name in NAMES.items():
            for part, usd, unit in (("Core", CPU_USD[family], "h"), ("Ram", GB_USD[family], "GiBy.h")):
                usd *= _dearer(region)
                words = f"{name} {part} running in {where}"
                yield _sku(words, region, usd, unit)
                yield _sku(f"Spot Preemptible {words}", region, usd * SPOT_SHARE, unit, "Preemptible")
                yield _sku(f"Commitment v1: {words}", region, usd / 2, unit, "Commit1Yr")
                for other in ("Sole Tenancy", "Custom", "Reserved", "DWS Calendar Mode"):
                    other_words = words.replace(" Instance", f" {other} Instance")
                    yield _sku(other_words, region, usd * 3, unit)
        for kind, usd in DISK_USD.items():
            yield _sku(f"{kind} Capacity in {where}", region, usd * _dearer(region), "GiBy.mo")
            yield _sku(f"Regional {kind} Capacity in {where}", region, 2 * usd, "GiBy.mo")
    yield _sku("External IP Charge on a Standard VM", "global", ADDRESS_USD, "h", free=744)
    yield _sku("External IP Charge on a Spot Preemptible VM", "global", SPOT_ADDRESS_USD, "h", "Preemptible")


def _sku(text: str, region: str, usd: float, unit: str, usage: str = "OnDemand", *, free: int = 0) -> Json:
    category = {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "usageType": usage}
    tiers = [(0, 0.0), (free, usd)] if free else [(0, usd)]
    return {
        "name": f"services/6F81-5844-456A/skus/{text}",
        "description": text,
        "category": {**category, "resourceGroup": "CPU"},
        "serviceRegions": [region],
        "pricingInfo": [_info("2024-01-01", [(0, 2 * usd)], unit), _info("2026-11-01", tiers, unit)],
        "serviceProviderName": "Google",
    }


def _info(since: str, tiers: list[tuple[int, float]], unit: str) -> Json:
    rates = [
        {
            "startUsageAmount": start,
            "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": round(1e9 * usd)},
        }
        for start, usd in tiers
    ]
    expression = {"usageUnit": unit, "displayQuantity": 1, "tieredRates": rates}
    return {"effectiveTime": f"{since}T00:00:00Z", "pricingExpression": expression}
