"""What evalfleet counted, beside what clouds and models' vendors have billed, by day."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evalfleet.channels.meter.accounts import Prices, price_of
from evalfleet.errors import JournalForeign, RequestError
from evalfleet.model import SECOND, Micros, Offer, seconds_between
from evalfleet.named_pools.pool_places import SIZE as BORROWED
from evalfleet.planning.config import CostSettings
from evalfleet.planning.plugins import known, place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import BillLine, BillReader
from evalfleet.state import MachineState, RunState
from evalfleet.toml_tables import reason
from evalfleet.views.follow import Follower
from evalfleet.views.format import table, usd
from evalfleet.views.stats import machine_end, machine_usd

if TYPE_CHECKING:
    from evalfleet.views.fleet_documents import ReconcileDocument

HOME_TAG, POOL_TAG = "evalfleet-home", "evalfleet-pool"
"""What places write on all that they make: whose it is, and the run or pool that it was made for."""
SHARED = "shared"
"""What was made for no run or pool alone."""
ALIKE, LEAST_USD = 0.02, 0.01
"""A difference below this share, or this sum, is none."""


# -- what was billed ----------------------------------------------------------------------------------------


class VendorBills:
    """Costs of a model's vendor, a row for each day and model. `columns` are names: of the day, the amount,
    its currency (empty: dollars) and the model."""

    def __init__(self, source: str, day: str, amount: str, currency: str, model: str) -> None:
        self.source = source
        self._day, self._amount, self._currency, self._model = day, amount, currency, model

    def reads(self, columns: Collection[str]) -> bool:
        return {self._day, self._amount, self._model} <= set(columns)

    def line(self, row: Mapping[str, object]) -> BillLine:
        currency = str(row.get(self._currency) or "USD").upper() if self._currency else "USD"
        # a line item is "gpt-4o-2024-08-06, input"
        model = str(row[self._model] or "").partition(",")[0].strip()
        return BillLine(_day(row[self._day]), float(str(row[self._amount] or 0)), currency, what=model)


VENDORS = (
    VendorBills("OpenAI costs", "start_time", "amount_value", "amount_currency", "line_item"),
    VendorBills("Anthropic costs", "usage_date_utc", "cost_usd", "", "model"),
)


class VendorUsage:
    """Tokens that a model's vendor has counted, a row for each day and model. They are valued at the prices
    that the meter of the runs had. `tokens`: kind of token, as prices name it -> the columns that count it.
    """

    def __init__(self, source: str, day: str, model: str, tokens: Mapping[str, tuple[str, ...]]) -> None:
        self.source = source
        self._day, self._model, self._tokens = day, model, tokens
        self.prices: Prices = {}

    def priced(self, prices: Prices) -> VendorUsage:
        found = VendorUsage(self.source, self._day, self._model, self._tokens)
        found.prices = prices
        return found

    def reads(self, columns: Collection[str]) -> bool:
        needed = {self._day, self._model, *(kind[0] for kind in self._tokens.values())}
        return needed <= set(columns)

    def line(self, row: Mapping[str, object]) -> BillLine:
        model = str(row[self._model] or "")
        counts = {kind: sum(_number(row, name) for name in names) for kind, names in self._tokens.items()}
        if self.source == OPENAI_USAGE:  # its input tokens include those that were cached
            counts["in"] -= counts["cached"]
        price = price_of(self.prices, model)
        if price is None:
            return BillLine(_day(row[self._day]), 0.0, "USD", what=f"{model} (no price)")
        usd = sum(many * price.get(kind, price["in"]) for kind, many in counts.items())
        return BillLine(_day(row[self._day]), usd, "USD", what=model)


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row.get(name) or 0))


def _day(value: object) -> str:
    """A date that may be written as seconds since 1970."""
    text = str(value)
    if text.isdigit():
        return datetime.fromtimestamp(int(text), UTC).date().isoformat()
    return datetime.fromisoformat(text[:10]).date().isoformat()


OPENAI_USAGE = "OpenAI usage"
USAGES = (
    VendorUsage(
        OPENAI_USAGE,
        "start_time",
        "model",
        {"in": ("input_tokens",), "cached": ("input_cached_tokens",), "out": ("output_tokens",)},
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
)


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
    except (OSError, UnicodeError, ValueError) as err:
        raise RequestError(f"--export {path} cannot be read ({reason(err)})") from None
    if not rows:
        raise RequestError(f"--export {path} has no rows; export a period in which something was billed")
    columns = {name for row in rows[:100] for name in row}
    readers = (*_cloud_readers(), *VENDORS, *(usage.priced(prices) for usage in USAGES))
    reader = next((each for each in readers if each.reads(columns)), None)
    if reader is None:
        known_sources = ", ".join(each.source for each in readers)
        raise RequestError(f"--export {path} is no export that is known: {known_sources}; see docs/costs.md")
    lines: list[BillLine] = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(reader.line(row))
        except (ValueError, KeyError, TypeError) as err:
            told = f"row {number} of --export {path} is no row of {reader.source} ({reason(err)})"
            raise RequestError(f"{told}; export it anew") from None
    of_models = isinstance(reader, VendorBills | VendorUsage)
    return Export(reader.source, _in_dollars(path, lines, settings), of_models)


def _cloud_readers() -> Iterator[BillReader]:
    for name in known("place"):
        try:
            reader = place_kind(name).bill_reader
        except RequestError:
            continue  # a plug-in that cannot be imported
        if reader is not None:
            yield reader


def _rows(text: str) -> Iterator[dict[str, object]]:
    """Rows of CSV, of a JSON list, of JSON lines, or of a page of an API with buckets of results."""
    if not text.lstrip().startswith(("[", "{")):
        for row in csv.DictReader(io.StringIO(text)):
            yield {(name or "").strip().lower(): value for name, value in row.items()}
        return
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(data, dict):
        page = cast("dict[str, Any]", data)
        data = page.get("data", [page])
    for each in cast("list[dict[str, Any]]", data):
        results = each.get("results")
        if results is None:
            yield {name.lower(): value for name, value in each.items()}
            continue
        for result in results:
            amount: dict[str, Any] = result.get("amount") or {}
            flat = {f"amount_{name}": value for name, value in amount.items()}
            yield {"start_time": each.get("start_time"), **result, **flat}


def _in_dollars(path: Path, lines: Sequence[BillLine], settings: CostSettings) -> list[BillLine]:
    missing = sorted({line.currency for line in lines} - {"USD", "", *settings.rates})
    if missing:
        raise RequestError(
            f"--export {path} has amounts in {' and '.join(missing)}; say what one is in dollars: "
            f"[cost] rates = {{{missing[0]} = 1.1}} in evalfleet.toml"
        )
    return [
        BillLine(
            line.day,
            line.amount * settings.rates.get(line.currency, 1.0),
            "USD",
            line.account,
            line.what,
            line.tags,
            line.reserved,
        )
        for line in lines
    ]


# -- what was counted ---------------------------------------------------------------------------------------


@dataclass
class Counted:
    """What evalfleet counted for one run, pool or model on one day."""

    usd: float = 0.0
    slack_usd: float = 0.0
    """The part that a cloud may not bill: from a request until the machine ran, and after its deletion."""


Key = tuple[str, str]
"""A day, and a run, pool or model."""


def _machines_by_day(states: Iterable[RunState], settings: CostSettings, now: Micros) -> dict[Key, Counted]:
    found: defaultdict[Key, Counted] = defaultdict(Counted)
    for state in states:
        for machine in state.machines.values():
            if machine.offer.size == BORROWED or not machine.offer.usd_per_hour:
                continue  # its pool has it, or it costs nothing
            paid = _billed_share(machine.offer, settings)
            cost, slack = paid * machine_usd(machine, now), paid * _slack_usd(machine)
            for day, share in _shares(machine.billed_at, machine.gone_at or machine_end(machine, now)):
                counted = found[day, state.plan.run]
                counted.usd += cost * share
                counted.slack_usd += slack * share
    return found


def _billed_share(offer: Offer, settings: CostSettings) -> float:
    """What of an offer's list price is billed, by what the settings say of the contract."""
    if offer.size in settings.reserved and not offer.spot:
        return offer.idle_usd_per_hour / offer.usd_per_hour
    return 1 - settings.discount


def _slack_usd(machine: MachineState) -> float:
    up = machine.up_at or machine.ready_at or machine.condemned_at or machine.billed_at
    ended = (
        0.0
        if machine.condemned_at is None or machine.gone_at is None
        else max(0.0, seconds_between(machine.condemned_at, machine.gone_at))
    )
    return (seconds_between(machine.billed_at, up) + ended) * machine.offer.usd_per_hour / 3600


def _shares(start: Micros, end: Micros) -> Iterator[tuple[str, float]]:
    """The days of a time, and what share of it is in each."""
    whole = max(1, end - start)
    at = start
    while True:
        day = datetime.fromtimestamp(at / SECOND, UTC).date()
        midnight = datetime.combine(day + timedelta(days=1), datetime.min.time(), UTC)
        until = min(end, round(midnight.timestamp()) * SECOND)
        yield day.isoformat(), (until - at) / whole if end > start else 1.0
        if until >= end:
            return
        at = until


def _models_by_day(states: Iterable[RunState]) -> dict[Key, Counted]:
    found: defaultdict[Key, Counted] = defaultdict(Counted)
    for state in states:
        for attempt in state.attempts.values():
            if attempt.metered is None:
                continue
            at = attempt.ended_at or attempt.started_at
            day = datetime.fromtimestamp(at / SECOND, UTC).date().isoformat()
            for model, use in attempt.metered.models.items():
                found[day, model].usd += use.usd
                found[day, model].slack_usd += use.unknown_usd
    return found


# -- both ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BillDifference:
    """One day of a run, pool or model: counted, billed, and why they differ."""

    day: str
    subject: str
    counted_usd: float
    billed_usd: float
    why: str
    """Empty: they agree. `unexplained`: nothing explains it."""

    @property
    def usd(self) -> float:
        return self.billed_usd - self.counted_usd


@dataclass(frozen=True)
class Reconciled:
    """All that was compared with one export."""

    source: str
    rows: Sequence[BillDifference] = field(default_factory=list[BillDifference])

    @property
    def counted_usd(self) -> float:
        return sum(row.counted_usd for row in self.rows)

    @property
    def billed_usd(self) -> float:
        return sum(row.billed_usd for row in self.rows)

    @property
    def unexplained_usd(self) -> float:
        return sum(abs(row.usd) for row in self.rows if row.why == "unexplained")


def reconcile(workspace: Workspace, path: Path, run: str | None, month: str | None) -> Reconciled:
    """Hold an export against one run, or against all runs and pools of a month (2026-11)."""
    if (run is None) == (month is None):
        raise RequestError("cost reconcile: name one run, or a month with --month 2026-11")
    if month is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise RequestError(f"--month is {month!r}; write a year and a month, such as 2026-11")
    settings = workspace.config.cost
    states = list(_states(workspace, run))
    metered = [state.plan.metering for state in states if state.plan.metering is not None]
    export = read_export(path, settings, {name: usd for each in metered for name, usd in each.prices.items()})
    if export.of_models:
        counted, bill = _models_by_day(states), _by_model(export.lines, states)
    else:
        counted = _machines_by_day(states, settings, workspace.now())
        bill = _ours(path, export.lines, workspace.home_id, run)
    days = {day for day, _ in counted}
    keys = {*counted, *bill}
    if month is not None:
        keys = {key for key in keys if key[0].startswith(month)}
    elif export.of_models:  # other runs of these days are on the same bill
        keys = {key for key in keys if key[0] in days}
    empty, none = Counted(), list[BillLine]()
    rows = [_difference(key, counted.get(key, empty), bill.get(key, none), export) for key in sorted(keys)]
    return Reconciled(export.source, rows)


def _states(workspace: Workspace, run: str | None) -> Iterator[RunState]:
    store = workspace.records()
    names = [info.name for info in store.streams()] if run is None else [store.stream(run).name]
    for name in names:
        follower = Follower(store, name)
        try:
            follower.poll()
        except JournalForeign:
            continue  # `evalfleet verify` tells what is wrong with it
        yield follower.state


def _ours(path: Path, lines: Sequence[BillLine], home: str, run: str | None) -> dict[Key, list[BillLine]]:
    """The lines of what this home has made, by day and by what it was made for."""
    found: defaultdict[Key, list[BillLine]] = defaultdict(list)
    ours = [line for line in lines if line.tags.get(HOME_TAG) == home.lower()]
    if not ours:
        accounts = ", ".join(sorted({line.account for line in lines if line.account})[:3]) or "unknown"
        raise RequestError(
            f"no line of --export {path} has the tag {HOME_TAG}={home}: it is of another account "
            f"(this one: {accounts}) or period, or was exported without tags"
        )
    for line in ours:
        subject = line.tags.get(POOL_TAG, SHARED)
        if run is None or subject in (run, _plain(run)):
            found[line.day, run or subject].append(line)
    return found


def _plain(name: str) -> str:
    """As labels have names, where they must be plain."""
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())


def _by_model(lines: Sequence[BillLine], states: Sequence[RunState]) -> dict[Key, list[BillLine]]:
    """Lines by the models' names that the meter knows: a vendor's may have a version's date behind them."""
    used = {m for s in states for a in s.attempts.values() if a.metered is not None for m in a.metered.models}
    found: defaultdict[Key, list[BillLine]] = defaultdict(list)
    for line in lines:
        alike = (
            m
            for m in sorted(used, key=len, reverse=True)
            if line.what.startswith(m) or m.startswith(line.what)
        )
        found[line.day, next(alike, line.what)].append(line)
    return found


def _difference(key: Key, counted: Counted, lines: Sequence[BillLine], export: Export) -> BillDifference:
    billed = sum(line.amount for line in lines)
    why = _why(key, counted, billed, lines, export)
    return BillDifference(*key, round(counted.usd, 6), round(billed, 6), why)


def _why(key: Key, counted: Counted, billed: float, lines: Sequence[BillLine], export: Export) -> str:
    day, subject = key
    off = billed - counted.usd
    if abs(off) <= max(LEAST_USD, ALIKE * max(counted.usd, billed)):
        return ""
    if day >= export.last_day and off < 0:
        return f"the export ends on {export.last_day}, and bills come late"
    if any(line.reserved for line in lines) and off < 0:
        return "a reservation or commitment has paid for it"
    if subject == SHARED:
        return "images, snapshots, networks and the like that runs share: see `evalfleet images`"
    if not counted.usd:
        return "another key or program used it" if export.of_models else "no run or pool here had it then"
    if export.of_models:
        known_less = 0 < off <= counted.slack_usd
        return "calls whose cost the meter did not know" if known_less else "unexplained"
    if off < 0 and -off <= counted.slack_usd + LEAST_USD:
        return "counted from the request until the machine was seen to be gone"
    return "unexplained"


def reconcile_table(found: Reconciled) -> str:
    """What was compared, as a table for people."""
    rows = [
        (
            row.day,
            row.subject,
            usd(row.counted_usd),
            usd(row.billed_usd),
            f"{row.usd:+.4f}",
            row.why or "agrees",
        )
        for row in found.rows
    ]
    head = ("day", "what", "counted", "billed", "difference", "why")
    total = f"counted {usd(found.counted_usd)}, billed {usd(found.billed_usd)} by {found.source}"
    lines = table(head, rows, right=("counted", "billed", "difference"))
    return f"{lines}\n\n{total}; unexplained {usd(found.unexplained_usd)}"


def reconcile_document(found: Reconciled) -> ReconcileDocument:
    """`cost reconcile --json`."""
    return {
        "source": found.source,
        "counted_usd": round(found.counted_usd, 6),
        "billed_usd": round(found.billed_usd, 6),
        "unexplained_usd": round(found.unexplained_usd, 6),
        "rows": [
            {
                "day": row.day,
                "what": row.subject,
                "counted_usd": row.counted_usd,
                "billed_usd": row.billed_usd,
                "difference_usd": round(row.usd, 6),
                "why": row.why or None,
            }
            for row in found.rows
        ],
    }
