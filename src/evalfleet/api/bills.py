"""Exported bills: what clouds and models' vendors say that they have billed, whoever wrote the file.

Clouds' own forms are read by their places; here are that of FOCUS, which several clouds export, and those of
models' vendors.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from evalfleet.channels.meter.accounts import Prices, price_of
from evalfleet.errors import RequestError
from evalfleet.planning.config import CostSettings
from evalfleet.planning.plugins import known, place_kind
from evalfleet.ports import BillLine, BillReader
from evalfleet.toml_tables import reason

NO_PRICE = " (no price)"
"""Behind a model's name: its tokens cannot be valued."""


# -- clouds -------------------------------------------------------------------------------------------------


class FocusBills:
    """The FinOps Open Cost and Usage Specification, which clouds export beside their own forms."""

    source = "FOCUS"

    def reads(self, columns: Collection[str]) -> bool:
        return {"chargeperiodstart", "billedcost", "billingcurrency"} <= set(columns)

    def line(self, row: Mapping[str, object]) -> BillLine:
        return BillLine(
            day=_day(row["chargeperiodstart"]),
            amount=_number(row, "billedcost"),
            currency=str(row["billingcurrency"] or "").upper(),
            account=str(row.get("subaccountid") or "").removeprefix("/subscriptions/"),
            what=str(row.get("chargedescription") or row.get("servicename") or ""),
            tags=_tags(row.get("tags")),
            reserved=bool(row.get("commitmentdiscountid")),
        )


def _tags(value: object) -> dict[str, str]:
    """JSON: an object, or a list of keys and values. No JSON tells of no tags."""
    try:
        found: Any = json.loads(value or "{}") if isinstance(value, str) else value
    except ValueError:
        return {}
    if isinstance(found, list):
        pairs = [_named(each) for each in cast("list[object]", found)]
        found = {str(pair.get("key")): pair.get("value") for pair in pairs}
    told = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return {name.lower(): str(each) for name, each in told.items()}


# -- models' vendors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VendorBills:
    """Costs of a model's vendor, a row for each day and model. The others are names of columns; `currency` is
    empty where all is in dollars."""

    source: str
    day: str
    amount: str
    currency: str
    model: str
    unit: float = 1.0
    """What 1 in the column is, in the currency."""

    def reads(self, columns: Collection[str]) -> bool:
        return {self.day, self.amount, self.model} <= set(columns)

    def line(self, row: Mapping[str, object]) -> BillLine:
        currency = str(row.get(self.currency) or "USD").upper() if self.currency else "USD"
        # a line item is "gpt-4o-2024-08-06, input"
        model = str(row[self.model] or row.get("description") or "").partition(",")[0].strip()
        return BillLine(_day(row[self.day]), self.unit * _number(row, self.amount), currency, what=model)


VENDORS = (
    VendorBills("OpenAI costs", "start_time", "amount_value", "amount_currency", "line_item"),
    VendorBills("Anthropic costs", "usage_date_utc", "cost_usd", "", "model"),
    VendorBills("Anthropic cost report", "starting_at", "amount", "currency", "model", unit=0.01),
)


@dataclass(frozen=True)
class VendorUsage:
    """Tokens that a model's vendor has counted, a row for each day and model. They are valued at the prices
    that the meter of the runs had."""

    source: str
    day: str
    model: str
    tokens: Mapping[str, tuple[str, ...]]
    """Kind of token, as prices name it -> the columns that count it, of which the first must be there."""
    cached_in: bool = False
    """Tokens that go in include those that were cached."""
    prices: Prices | None = None

    def reads(self, columns: Collection[str]) -> bool:
        needed = {self.day, self.model, *(kind[0] for kind in self.tokens.values())}
        return needed <= set(columns)

    def line(self, row: Mapping[str, object]) -> BillLine:
        day, model = _day(row[self.day]), str(row[self.model] or "")
        counts = {kind: sum(_number(row, name) for name in names) for kind, names in self.tokens.items()}
        if self.cached_in:
            counts["in"] -= counts["cached"]
        price = price_of(self.prices or {}, model)
        if price is None:
            return BillLine(day, 0.0, what=model + NO_PRICE)
        usd = sum(many * price.get(kind, price["in"]) for kind, many in counts.items())
        return BillLine(day, usd, what=model)


USAGES = (
    VendorUsage(
        "OpenAI usage",
        "start_time",
        "model",
        {"in": ("input_tokens",), "cached": ("input_cached_tokens",), "out": ("output_tokens",)},
        cached_in=True,
    ),
    VendorUsage(
        "Anthropic usage",
        "usage_date_utc",
        "model_version",
        {
            "in": ("usage_input_tokens_no_cache",),
            "cached": ("usage_input_tokens_cache_read",),
            "cache_write": ("usage_input_tokens_cache_write_5m", "usage_input_tokens_cache_write_1h"),
            "out": ("usage_output_tokens",),
        },
    ),
    VendorUsage(
        "Anthropic usage report",
        "starting_at",
        "model",
        {
            "in": ("uncached_input_tokens",),
            "cached": ("cache_read_input_tokens",),
            "cache_write": (
                "cache_creation_ephemeral_5m_input_tokens",
                "cache_creation_ephemeral_1h_input_tokens",
            ),
            "out": ("output_tokens",),
        },
    ),
)


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row.get(name) or 0))


def _day(value: object) -> str:
    """A date that may be written as seconds since 1970."""
    text = str(value)
    if text.isdigit():
        return datetime.fromtimestamp(int(text), UTC).date().isoformat()
    return datetime.fromisoformat(text[:10]).date().isoformat()


# -- a file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """An exported bill, in dollars."""

    source: str
    lines: Sequence[BillLine]
    of_models: bool
    """It is a vendor's of models, and not a cloud's of machines."""

    @property
    def last_day(self) -> str:
        return max(line.day for line in self.lines)


def read_export(path: Path, settings: CostSettings, prices: Prices) -> Export:
    """The bill in a CSV or JSON file, whoever exported it. RequestError says what is wrong with it.

    `prices`: of models, for exports that tell tokens and no money.
    """
    try:
        rows = list(_rows(path.read_text("utf-8-sig")))
    except _Incomplete:
        raise RequestError(
            f"--export {path} is one page of several (`has_more`): ask for more days at once with `limit`, "
            "or put the next pages behind it, one in a line"
        ) from None
    except (OSError, UnicodeError, ValueError, TypeError, csv.Error) as err:
        raise RequestError(f"--export {path} cannot be read ({reason(err)})") from None
    if not rows:
        raise RequestError(f"--export {path} has no rows; export a period in which something was billed")
    columns = {name for row in rows[:100] for name in row}
    usages = (replace(each, prices=prices) for each in USAGES)
    readers: Sequence[BillReader] = (*_cloud_readers(), FocusBills(), *VENDORS, *usages)
    reader = next((each for each in readers if each.reads(columns)), None)
    if reader is None:
        known_sources = ", ".join(dict.fromkeys(each.source for each in readers))
        raise RequestError(f"--export {path} is no export that is known: {known_sources}; see docs/costs.md")
    lines = list(_lines(path, rows, reader))
    of_models = isinstance(reader, VendorBills | VendorUsage)
    return Export(reader.source, _in_dollars(path, lines, settings), of_models)


def _lines(path: Path, rows: Iterable[Mapping[str, object]], reader: BillReader) -> Iterator[BillLine]:
    for number, row in enumerate(rows, 1):
        try:
            line = reader.line(row)
            if not math.isfinite(line.amount + line.credited):
                raise ValueError(f"{line.amount} is no sum")
            yield line
        except (ValueError, KeyError, TypeError, OverflowError, OSError) as err:
            told = f"row {number} of --export {path} is no row of {reader.source} ({reason(err)})"
            raise RequestError(f"{told}; export it anew") from None


def _cloud_readers() -> Iterator[BillReader]:
    for name in known("place"):
        try:
            reader = place_kind(name).bill_reader
        except RequestError:
            continue  # a plug-in that cannot be imported
        if reader is not None:
            yield reader


class _Incomplete(Exception):
    """An answer of an API says that there is more, and that is not there."""


def _rows(text: str) -> Iterator[dict[str, object]]:
    """Rows of CSV, of a JSON list, of JSON lines, or of pages of an API with buckets of results."""
    if not text.lstrip().startswith(("[", "{")):
        for row in csv.DictReader(io.StringIO(text)):
            yield {(name or "").strip().lower(): value for name, value in row.items()}
        return
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    more = False
    for each in cast("list[object]", data if isinstance(data, list) else [data]):
        page = _named(each)
        more = bool(page.get("has_more"))
        for bucket in cast("list[object]", page["data"]) if isinstance(page.get("data"), list) else [each]:
            yield from _rows_of(_named(bucket))
    if more:
        raise _Incomplete


def _rows_of(bucket: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Those of a day's bucket of an API, each with the day; another object is a row itself."""
    if "results" not in bucket:
        yield {name.lower(): value for name, value in bucket.items()}
        return
    days = {name: bucket[name] for name in ("start_time", "starting_at") if name in bucket}
    for result in cast("list[object]", bucket["results"]):
        row = _named(result)
        inner = {
            name: cast("dict[str, object]", each) for name, each in row.items() if isinstance(each, dict)
        }
        flat = {f"{name}_{part}": value for name, parts in inner.items() for part, value in parts.items()}
        yield {**days, **row, **flat}


def _named(value: object) -> dict[str, object]:
    """Raises ValueError if it is no JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is no row")
    return cast("dict[str, object]", value)


def _in_dollars(path: Path, lines: Sequence[BillLine], settings: CostSettings) -> list[BillLine]:
    missing = sorted({line.currency for line in lines} - {"USD", "", *settings.rates})
    if missing:
        raise RequestError(
            f"--export {path} has amounts in {' and '.join(missing)}; say what one is in dollars: "
            f"[cost] rates = {{{missing[0]} = 1.1}} in evalfleet.toml"
        )
    rates = {"USD": 1.0, "": 1.0, **settings.rates}
    return [
        structs.replace(
            line,
            amount=line.amount * rates[line.currency],
            credited=line.credited * rates[line.currency],
            currency="USD",
        )
        for line in lines
    ]
