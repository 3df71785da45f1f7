"""List prices: looked up in the list that was fetched last, and behind it in the one that came with us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from evalfleet.files import replace
from evalfleet.model import decodable
from evalfleet.ports import Price, PriceTable


class Quote(Struct, frozen=True):
    """A price, and of when it is."""

    usd: float
    """For an hour."""
    as_of: str
    """The date of the list that has it, or where else it is from."""


class PriceBook:
    """One list of prices, if there is one, with a book behind it for what the list does not have."""

    def __init__(self, table: PriceTable | None, behind: PriceBook | None = None) -> None:
        self._as_of = table.as_of if table else ""
        self._behind = behind
        prices = table.prices if table else ()
        self._prices = {(price.what.lower(), price.region): price for price in prices}

    def quote(self, what: str, region: str, *, spot: bool = False) -> Quote | None:
        """An hour of a size, or of what comes with a machine; None if no list has it."""
        price = self._prices.get((what.lower(), region))
        usd = None if price is None else price.spot_usd_per_hour if spot else price.usd_per_hour
        if usd is not None:
            return Quote(usd, self._as_of)
        return None if self._behind is None else self._behind.quote(what, region, spot=spot)


def load_prices(path: Path) -> PriceTable | None:
    """The list that was fetched last, if any. One that cannot be read is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=decodable(PriceTable))
    except (OSError, msgspec.MsgspecError):
        return None


def save_prices(path: Path, table: PriceTable) -> None:
    """Put it in the place of the one before, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, msgspec.json.format(msgspec.json.encode(table), indent=1))


def named_in(tables: Sequence[Mapping[str, object]], setting: str, default: Sequence[str]) -> list[str]:
    """What the settings of places name, each once; the default for one that names nothing, and for none."""
    lists = [table.get(setting) or default for table in tables] or [default]
    named = [cast("list[Any]", given) for given in lists if isinstance(given, list | tuple)]
    return list(dict.fromkeys(str(each) for given in named for each in given))


def price_rows(text: str, regions: Sequence[str]) -> dict[tuple[str, str], float]:
    """The prices of a table whose rows begin with a size, and whose columns are regions."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {
        (name, region): float(usd)
        for name, *figures in lines
        for region, usd in zip(regions, figures, strict=True)
    }


def machine_prices(regular: str, spot: str, regions: Sequence[str]) -> list[Price]:
    """The machines of two such tables."""
    spots = price_rows(spot, regions)
    return [
        Price(name, region, usd, spots[name, region])
        for (name, region), usd in sorted(price_rows(regular, regions).items())
    ]
