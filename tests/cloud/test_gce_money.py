"""What Google's machines cost and where they are: by the list that was fetched, by discounts, by distance."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import Needs, Offer
from evalfleet.places.gce.machine_types import type_of
from evalfleet.places.gce.price_list import parts_of, prices_of
from evalfleet.places.gce.prices import GcePriceBook
from evalfleet.ports import Image
from evalfleet.testing.harness import raised
from standins.gce import StandIn
from standins.gce.price_list import ADDRESS_USD, DISK_USD, PATH, SPOT_ADDRESS_USD, machine_usd
from standins.gce.words import PROJECT
from tests.cloud.gce_places import FAST, examine, place
from tests.desk import Desk

CENTRAL, WEST = "us-central1", "us-west2"


@pytest.fixture
def google() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        yield made


def offers(google: StandIn, home: Path, **more: Any) -> list[Offer]:
    async def main() -> list[Offer]:
        made = place(google, home, **more)
        try:
            return list(await made.offers(Needs(cpus=4)))
        finally:
            await made.close()

    return asyncio.run(main())


# -- by price -----------------------------------------------------------------------------------------


def test_regions_and_types_are_chosen_by_price(google: StandIn, tmp_path: Path) -> None:
    regions, types = (WEST, "us-east4", CENTRAL), ("n2-standard-4", "e2-standard-4")
    found = offers(google, tmp_path, regions=regions, zones=(), types=types)
    costs = [each.cost.usd_per_hour for each in found]
    assert costs == sorted(costs)
    assert (found[0].size, found[0].area) == ("e2-standard-4", CENTRAL)
    assert {each.area for each in found} == set(regions), "the others come after it"
    assert {each.cost.least_billed_s for each in found} == {60.0}, "Google bills a minute at least"


def test_discounts_are_taken_off_regular_machines_of_their_family_alone(
    google: StandIn, tmp_path: Path
) -> None:
    given = {
        "types": ("e2-standard-4", "n2-standard-4"),
        "spot": True,
        "lost_s": 60.0,  # else it grows with the load of this computer, and offers that are compared differ
    }
    full = {(each.size, each.spot): each for each in offers(google, tmp_path, **given)}
    less = {(each.size, each.spot): each for each in offers(google, tmp_path, discounts={"n2": 0.2}, **given)}
    cheaper = ("n2-standard-4", False)
    saved = full[cheaper].cost.usd_per_hour - less[cheaper].cost.usd_per_hour
    assert saved == pytest.approx(0.2 * 0.19424, abs=1e-6), "of the machine, not of its disk and address"
    assert "discounted" in less[cheaper].cost.priced
    assert {key: each for key, each in less.items() if key != cheaper} == {
        key: each for key, each in full.items() if key != cheaper
    }


# -- Google's own list --------------------------------------------------------------------------------


class PricesDesk(Desk):
    """A desk with a place of Google's, and one whose prices are on another list."""

    def __init__(self, google: StandIn, folder: Path) -> None:
        super().__init__(folder, environ={**google.environment, "SSL_CERT_FILE": str(google.ca)})
        self.source = google.endpoint.removesuffix("/compute/v1") + PATH
        self.config(
            '[places.gce]\nssh_from = ["192.0.2.1"]\ntypes = ["e2-standard-8", "n2-highmem-4"]\n'
            f'regions = ["{CENTRAL}", "{WEST}"]\n[places.azure_vm]\n'
        )

    def update(self, code: int = 0) -> str:
        return self.done("prices", "gce", "--update", "--from", self.source, code=code).said


def test_where_no_price_is_built_in_it_is_an_upper_bound() -> None:
    """The dearest prices outside the built-in regions, of August 2026."""
    dear = [
        ("e2-standard-4", "me-central2", False, 0.21444),
        ("e2-standard-4", "me-central2", True, 0.12863),
        ("n2d-standard-16", "europe-west3", True, 0.5225),
        ("n1-standard-4", "southamerica-east1", False, 0.3016),
    ]
    for name, region, spot, usd in dear:
        type = type_of(name)
        assert type is not None
        quote = GcePriceBook(None).machine(type, region, spot=spot)
        assert quote is not None
        assert usd <= quote.usd <= 1.5 * usd, (name, region)


def test_prices_are_fetched_with_the_login_kept_and_used_with_their_date(
    google: StandIn, tmp_path: Path
) -> None:
    desk = PricesDesk(google, tmp_path)
    assert "list prices of 2026-08 (built in)" in desk.done("prices", "gce").out
    desk("prices", "--update", "--from", desk.source).refused("--from is one list")
    desk("prices", "gcp").refused("no kind of place")
    shown = desk.update()
    (kept,) = json.loads(desk.done("prices", "gce", "--json").out)
    assert kept["as_of"] in shown
    assert kept["as_of"] > "2026-08"
    assert kept["source"] == desk.source
    found = {(each["what"], each["region"]): each for each in kept["prices"]}
    for region in (CENTRAL, WEST):
        for name, (family, cpus, gb) in {
            "e2-standard-8": ("e2", 8, 32),
            "n2-highmem-4": ("n2", 4, 32),
        }.items():
            row = found[name, region]
            assert row["usd_per_hour"] == pytest.approx(machine_usd(family, cpus, gb, region), abs=1e-6)
            spot = machine_usd(family, cpus, gb, region, spot=True)
            assert row["spot_usd_per_hour"] == pytest.approx(spot, abs=1e-6)
        assert found["address", region]["usd_per_hour"] == ADDRESS_USD, "not what is free in a month"
        assert found["address", region]["spot_usd_per_hour"] == SPOT_ADDRESS_USD
    month = found["disk pd-balanced GB", CENTRAL]["usd_per_hour"] * 730
    assert month == pytest.approx(DISK_USD["Balanced PD"], abs=1e-4), "not that which is kept twice"
    (only,) = offers(google, desk.home, types=("e2-standard-8",))
    whole = machine_usd("e2", 8, 32, CENTRAL) + DISK_USD["Balanced PD"] * 128 / 730 + ADDRESS_USD
    assert only.cost.usd_per_hour == pytest.approx(whole, abs=1e-4)
    assert only.cost.priced == kept["as_of"]


def test_a_list_that_cannot_be_had_leaves_the_old_prices_in_force(google: StandIn, tmp_path: Path) -> None:
    desk = PricesDesk(google, tmp_path)
    google.faults.api_is_off = True
    assert "gcloud services enable cloudbilling.googleapis.com" in desk.update(code=4)
    google.faults.api_is_off = False
    google.identity.is_disabled = True
    told = desk.update(code=4)
    assert "gcloud auth application-default login" in told
    assert told.count("\n") == 1
    desk.source = desk.source.replace("https", "http")
    assert "https:// only" in desk.update(code=4)
    assert "(built in)" in desk.done("prices", "gce").out


def sku(text: str, nanos: Any = 1, unit: str = "h", usage: str = "OnDemand", **price: Any) -> dict[str, Any]:
    rate = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "nanos": nanos, **price}}
    return {
        "description": text,
        "category": {"usageType": usage},
        "serviceRegions": [CENTRAL],
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": [rate]}}],
    }


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (sku("E2 Instance Core running in Americas", unit="mo"), "by 'mo', not 'h'"),
        (sku("E2 Instance Core running in Americas", 0), "at a price of"),
        (sku("E2 Instance Core running in Americas", "cheap"), "at a price of"),
        (sku("E2 Instance Core running in Americas", currencyCode="EUR"), "at a price of"),
    ],
)
def test_prices_that_are_none_are_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(PlaceError, match=says):
        parts_of([row])


def test_spot_machines_that_are_dearer_than_others_are_refused() -> None:
    cores = [
        sku("E2 Instance Core running in Americas", 5),
        sku("E2 Instance Ram running in Americas", 5, "GiBy.h"),
        sku("Spot Preemptible E2 Instance Core running in Americas", 9, usage="Preemptible"),
        sku("Spot Preemptible E2 Instance Ram running in Americas", 9, "GiBy.h", "Preemptible"),
    ]
    scaled = [*cores[:2], sku("Commitment v1: E2 Cpu in Americas", 1)]
    assert [each.what for each in prices_of(parts_of(scaled), ["e2-standard-4"], [CENTRAL])] == [
        "e2-standard-4"
    ]
    with pytest.raises(PlaceError, match="dearer as spot"):
        list(prices_of(parts_of(cores), ["e2-standard-4000000"], [CENTRAL]))


# -- by distance --------------------------------------------------------------------------------------


@asynccontextmanager
async def at_a_distance(google: StandIn, delay_s: float) -> AsyncIterator[str]:
    """An endpoint of a region so far away: what is said gets to the stand-in, and back, so much later."""
    there = urlsplit(google.endpoint)

    carrying: set[asyncio.Task[None] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(delay_s)
                writer.write(data)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrying.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(there.hostname, there.port)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in filter(None, carrying):
            task.cancel()
        await asyncio.gather(*filter(None, carrying), return_exceptions=True)


def test_the_nearest_region_is_the_one_that_answers_soonest(google: StandIn, tmp_path: Path) -> None:
    async def main() -> None:
        async with at_a_distance(google, 0.5) as far, at_a_distance(google, 0.0) as near:
            by = {CENTRAL: far, WEST: near, "us-east4": "127.0.0.1:1"}
            made = place(google, tmp_path, zones="nearest", regions=tuple(by), distance_by=by)
            try:
                found = await made.offers(Needs())
                checks = {each.name: each for each in await made.examine(Needs())}
            finally:
                await made.close()
        assert {each.area for each in found} == {WEST}, "though it is the dearest"
        assert len({each.region for each in found}) == 3, "all of its zones"
        told = checks["distance"].found
        assert told.index(WEST) < told.index(CENTRAL)
        assert "us-east4" not in told, "nobody is there"
        assert not any(CENTRAL in name for name in checks), "only that region's quota is looked at"

    asyncio.run(main())


def test_if_no_region_answers_none_is_the_nearest(google: StandIn, tmp_path: Path) -> None:
    nobody: dict[str, Any] = {
        "zones": "nearest",
        "regions": (CENTRAL,),
        "distance_by": {CENTRAL: "127.0.0.1:1"},
    }
    made = place(google, tmp_path, **nobody)
    error = asyncio.run(raised(PlaceError, made.offers(Needs())))
    assert "name `zones` or `regions`" in str(error)
    (check,) = examine(google, tmp_path, **nobody).values()
    assert (check.name, check.verdict) == ("distance", "bad")
    assert "name `zones`" in check.remedy


def test_snapshots_of_machines_disks_are_listed_with_their_cost(google: StandIn, tmp_path: Path) -> None:
    """People make them by hand, and Google bills what they hold for months."""
    root, disks = f"projects/{PROJECT}/global/snapshots", f"projects/{PROJECT}/zones/us-central1-a/disks"
    for name, disk in (("mine", "pool-abc123-1"), ("strange", "database")):
        google.cloud.snapshots[f"{root}/{name}"] = {
            "name": name,
            "sourceDisk": f"https://www.googleapis.com/compute/v1/{disks}/{disk}",
            "storageBytes": str(40 << 30),
            "diskSizeGb": "128",
            "status": "READY",
            "storageLocations": ["us"],
        }

    async def main() -> Sequence[Image]:
        made = place(google, tmp_path)
        try:
            return await made.images()
        finally:
            await made.close()

    (found,) = asyncio.run(main())
    assert (found.kind, found.name, found.home, found.state) == ("snapshot", "mine", "abc123", "ready")
    assert (found.gb, found.usd_per_month) == (40.0, 2.0)
