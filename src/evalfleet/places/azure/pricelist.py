"""Azure's prices for `evalfleet prices`: shown and fetched without an account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from evalfleet.ports import PriceTable

from . import prices, retail
from .settings import AzureSettings


class PriceList:
    """What ports.Priced asks of a kind of place."""

    price_source = retail.SOURCE

    @classmethod
    def prices(cls, home: Path) -> PriceTable:
        return prices.load(home) or prices.built_in()

    @classmethod
    def wanted(cls, tables: Sequence[Mapping[str, object]]) -> Sequence[tuple[str, str]]:
        sizes, regions = _named(tables, "sizes"), _named(tables, "regions")
        extras = [prices.disk("Premium_LRS", 128), prices.disk("StandardSSD_LRS", 128), prices.ADDRESS]
        return [(what, region) for region in regions for what in (*sizes, *extras)]

    @classmethod
    def update_prices(
        cls, home: Path, tables: Sequence[Mapping[str, object]], source: str, today: str
    ) -> PriceTable:
        table = retail.fetch(_named(tables, "sizes"), _named(tables, "regions"), source, today)
        prices.save(home, table)
        return table


def _named(tables: Sequence[Mapping[str, object]], setting: str) -> list[str]:
    """What the places name; the default, for one that names nothing, or if there is none."""
    default: tuple[str, ...] = getattr(AzureSettings(), setting)
    lists = [table.get(setting) or default for table in tables] or [default]
    named = [cast("list[Any]", given) for given in lists if isinstance(given, list | tuple)]
    return list(dict.fromkeys(str(each) for given in named for each in given))
