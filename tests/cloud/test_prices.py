"""`evalfleet prices`: fetched from a list that answers as Azure's does, and kept only if they make sense."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import Needs
from evalfleet.places.azure import AzurePlace, AzureSettings
from evalfleet.places.azure.prices import FILE, AzurePriceBook, offers_of
from standins.azure import StandIn
from standins.azure.prices import ADDRESS_USD, DISK_USD_A_GB, price
from tests.desk import Desk

TOML = """
[places.azure]
kind = "azure_vm"
sizes = ["Standard_D4ds_v5", "Standard_E8s_v5"]
regions = ["eastus", "westeurope"]
ssh_from = ["192.0.2.1"]
"""


class PricesDesk(Desk):
    """A desk with a place whose prices are asked for."""

    def __init__(self, folder: Path, **environ: str) -> None:
        super().__init__(folder, environ=environ)
        self.config(TOML)

    def say(self, *words: str, code: int = 0) -> str:
        """What it prints, or why it refuses."""
        done = self.done(*words, code=code)
        return done.err if code else done.out


def test_prices_are_fetched_kept_and_used_with_their_date(azure: StandIn, tmp_path: Path) -> None:
    desk = PricesDesk(tmp_path, SSL_CERT_FILE=str(azure.ca))
    assert "list prices of 2026-08 (built in)" in desk.say("prices")
    shown = desk.say("prices", "--update", "--from", f"{azure.endpoint}/api/retail/prices")
    kept = next(each for each in json.loads(desk.say("prices", "--json")) if each["place"] == "azure_vm")
    assert kept["as_of"] in shown
    assert kept["as_of"] > "2026-08"
    found = {(each["what"], each["region"]): each for each in kept["prices"]}
    for region in ("eastus", "westeurope"):
        for size in ("Standard_D4ds_v5", "Standard_E8s_v5"):
            row = found[size, region]
            assert row["usd_per_hour"] == price(size, region), "not Windows', not that of 2024"
            assert row["spot_usd_per_hour"] == price(size, region, spot=True), "not low priority's"
        month = found["disk Premium_LRS 128 GB", region]["usd_per_hour"] * 730
        assert month == pytest.approx(DISK_USD_A_GB["P"] * 128, abs=0.001)
        assert found["address", region]["usd_per_hour"] == ADDRESS_USD

    settings = AzureSettings(sizes=("Standard_D4ds_v5",), regions=("eastus",), spot=True)
    offers = offers_of("azure", settings, AzurePriceBook.of(desk.home), Needs())
    assert [offer.spot for offer in offers] == [True, False], "regular ones beside spot, cheapest first"
    idle = DISK_USD_A_GB["P"] * 128 / 730 + ADDRESS_USD
    for offer in offers:
        assert offer.cost.idle_usd_per_hour == pytest.approx(idle, abs=1e-5)
        machine = price("Standard_D4ds_v5", "eastus", spot=offer.spot)
        assert offer.cost.usd_per_hour == pytest.approx(machine + idle, abs=1e-5)
        assert offer.cost.priced == kept["as_of"]


# -- lists that are none ---------------------------------------------------------------------------


@contextmanager
def listening(answer: Any, status: int = 200) -> Iterator[str]:
    """A server that says the same to all."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/prices"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def page(**more: Any) -> dict[str, Any]:
    item = {
        "retailPrice": 0.2,
        "armRegionName": "eastus",
        "armSkuName": "Standard_D4ds_v5",
        "serviceName": "Virtual Machines",
        "productName": "Virtual Machines Ddsv5 Series",
        "skuName": "D4ds v5",
        "meterName": "D4ds v5",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
    }
    return {"BillingCurrency": "USD", "Items": [{**item, **more}], "NextPageLink": None}


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (b"<html>welcome to the hotel's network</html>", 200, "does not answer with JSON"),
        ([1, 2], 200, "does not answer as a price list"),
        ({"Items": "none"}, 200, "does not answer as a price list"),
        ({**page(), "BillingCurrency": "EUR"}, 200, "in USD"),
        ({"Items": []}, 200, "no price for Standard_D4ds_v5, Standard_E8s_v5"),
        (page(), 200, "no price for Standard_E8s_v5"),
        (page(retailPrice=-1), 200, "a price of -1"),
        (page(retailPrice="cheap"), 200, "a price of 'cheap'"),
        ({**page(), "NextPageLink": "http://192.0.2.1/more"}, 200, "another computer"),
        (b"", 404, "answers 404"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, answer: Any, status: int, says: str) -> None:
    place = {"sizes": ["Standard_D4ds_v5", "Standard_E8s_v5"], "regions": ["eastus"]}
    with listening(answer, status) as source, pytest.raises(PlaceError, match=says):
        asyncio.run(AzurePlace.price_list.update(tmp_path, [place], source, "2026-11-15", {}))
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_if_prices_cannot_be_fetched_the_old_ones_stay(tmp_path: Path) -> None:
    desk = PricesDesk(tmp_path)
    kept = desk.home / FILE
    kept.parent.mkdir(parents=True)
    kept.write_text('{"as_of": "2026-09-01", "source": "s", "prices": []}')
    with listening(page()) as source:
        told = desk.say("prices", "--update", "--from", source, code=4)
    assert told == f"evalfleet: {source} has no price for Standard_E8s_v5\n"
    assert "2026-09-01" in desk.say("prices")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "nothing half written is left"


def test_a_proxy_is_honoured(tmp_path: Path) -> None:
    with listening(b"no way through", 403) as proxy:
        desk = PricesDesk(tmp_path, http_proxy=proxy, no_proxy="")
        assert "answers 403" in desk.say("prices", "--update", "--from", "http://192.0.2.1/list", code=4)


def test_a_place_that_cannot_be_asked_is_told_in_one_line(tmp_path: Path) -> None:
    desk = PricesDesk(
        tmp_path, HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9", no_proxy=""
    )
    told = desk.say("prices", "--update", code=4)
    assert told.startswith("evalfleet: https://prices.azure.com/api/retail/prices cannot be read")
    assert told.count("\n") == 1
    assert "say --update" in desk.say("prices", "--from", "http://127.0.0.1:9", code=2)
