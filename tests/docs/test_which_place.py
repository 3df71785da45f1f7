"""The table of money and minutes in docs/places.md is what built-in prices and its assumptions come to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from evalfleet.model import Needs, Offer
from evalfleet.places import azure_batch, azure_ml
from evalfleet.places.azure.prices import AzurePriceBook, offers_of
from evalfleet.places.azure.settings import AzureSettings
from evalfleet.places.azure_batch.preflight import offers_of as batch_offers
from evalfleet.places.azure_ml.preflight import instance_offers
from evalfleet.places.azure_ml.preflight import offers_of as ml_offers

from .pages import ROOT

ROW = re.compile(
    r"^\| `(\w+)`, ([a-z, ]+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) h (\d\d) min \| \$([\d.]+) \|$", re.M
)
ROWS = [found.groups() for found in ROW.finditer((ROOT / "docs/places.md").read_text("utf-8"))]
SIZES, REGION = ("Standard_D4s_v5",), "eastus"
TASKS, MACHINES, TASK_MIN = 154, 10, 11


def offers(place: str, kind: str, folder: Path) -> Sequence[Offer]:
    book, spot = AzurePriceBook.of(folder), "spot" in kind
    if place == "azure_vm":
        vms = AzureSettings(sizes=SIZES, regions=(REGION,), spot=spot, spot_only=spot)
        return offers_of("p", vms, book, Needs())
    if place == "azure_batch":
        nodes = azure_batch.AzureBatchSettings(sizes=SIZES, spot=spot, spot_only=spot)
        return batch_offers("p", nodes, REGION, book, Needs())
    ml = azure_ml.AzureMlSettings(sizes=SIZES, spot=spot, spot_only=spot)
    return (instance_offers if kind == "instances" else ml_offers)("p", ml, REGION, book, Needs())


def test_the_table_has_all_tiers() -> None:
    assert len(ROWS) == 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_money_and_minutes_are_what_prices_and_assumptions_come_to(
    row: tuple[str, ...], tmp_path: Path
) -> None:
    place, kind, until_ready, idle, hours, done_h, done_min, usd = row
    (offer,) = offers(place, kind, tmp_path)
    rounds = -(-TASKS // MACHINES)
    assert int(done_h) * 60 + int(done_min) == int(until_ready) + rounds * TASK_MIN
    billed_h = (TASKS * TASK_MIN + MACHINES * (int(until_ready) + int(idle))) / 60
    assert float(hours) == round(billed_h, 1)
    assert float(usd) == round(billed_h * offer.cost.usd_per_hour, 2)
