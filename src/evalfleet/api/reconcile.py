"""Compare what evalfleet counted for machines with a cloud's bill in the FOCUS format, by day."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.model import BORROWED, SECOND, Micros, Offer, seconds_between
from evalfleet.planning.config import CostSettings
from evalfleet.planning.workspace import Workspace
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
UNEXPLAINED = "unexplained"
COLUMNS = frozenset({"chargeperiodstart", "billedcost", "billingcurrency", "tags"})


# -- what was counted ---------------------------------------------------------------------------------------


@dataclass
class Counted:
    """The dollars that evalfleet counted for one run or pool on one day."""

    usd: float = 0.0
    slack_usd: float = 0.0
    """The part that a cloud may not bill: from a request until the machine ran, and after its deletion."""


Key = tuple[str, str]
"""A day, and a run or pool."""


def _machines_by_day(states: Iterable[RunState], settings: CostSettings, now: Micros) -> dict[Key, Counted]:
    found: defaultdict[Key, Counted] = defaultdict(Counted)
    for state in states:
        for machine in state.machines.values():
            if machine.offer.size == BORROWED or not machine.offer.cost.usd_per_hour:
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
        return offer.cost.idle_usd_per_hour / offer.cost.usd_per_hour
    return 1 - settings.discount


def _slack_usd(machine: MachineState) -> float:
    up = machine.up_at or machine.ready_at or machine.condemned_at or machine.billed_at
    ended = (
        0.0
        if machine.condemned_at is None or machine.gone_at is None
        else max(0.0, seconds_between(machine.condemned_at, machine.gone_at))
    )
    return (seconds_between(machine.billed_at, up) + ended) * machine.offer.cost.usd_per_hour / 3600


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


# -- the bill -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BillLine:
    """One row of a bill, in dollars."""

    day: str
    """As 2026-11-16, in UTC."""
    usd: float
    account: str
    """The subscription or project."""
    tags: Mapping[str, str]
    committed: bool
    """A reservation or commitment has paid for it."""


def read_bill(path: Path, rates: Mapping[str, float]) -> list[BillLine]:
    """Read a bill in the FinOps Open Cost and Usage Specification (FOCUS): CSV, JSON or JSON lines.

    `rates` are the dollars of one unit of each other currency. Raises RequestError.
    """
    try:
        rows = list(_rows(path.read_text("utf-8-sig")))
    except (OSError, UnicodeError, ValueError, csv.Error) as err:
        raise RequestError(f"cannot read --export {path}: {reason(err)}") from None
    if not rows:
        raise RequestError(f"--export {path} has no rows; export a period in which something was billed")
    if missing := sorted(COLUMNS - {name for row in rows[:100] for name in row}):
        raise RequestError(
            f"--export {path} is not a FOCUS export (no column {missing[0]}); Azure Cost Management and "
            "Google Cloud billing export FOCUS, see docs/costs.md"
        )
    lines: list[BillLine] = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(_bill_line(row, rates))
        except _NoRate as err:
            raise RequestError(
                f"--export {path} has amounts in {err}; set the dollars of one: "
                f"[cost] rates = {{{err} = 1.1}} in evalfleet.toml"
            ) from None
        except (ValueError, TypeError, KeyError, OverflowError) as err:
            raise RequestError(f"row {number} of --export {path} is not valid FOCUS: {reason(err)}") from None
    return lines


class _NoRate(Exception):
    """A currency that the settings have no rate for."""


def _rows(text: str) -> Iterator[dict[str, object]]:
    """Yield the rows of CSV, of a JSON list or of JSON lines, with column names in lower case."""
    if not text.lstrip().startswith(("[", "{")):
        for row in csv.DictReader(io.StringIO(text)):
            yield {(name or "").strip().lower(): value for name, value in row.items()}
        return
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    for item in cast("list[object]", data if isinstance(data, list) else [data]):
        if not isinstance(item, dict):
            raise ValueError(f"{str(item)[:40]!r} is not an object")
        yield {name.lower(): value for name, value in cast("dict[str, object]", item).items()}


def _bill_line(row: Mapping[str, object], rates: Mapping[str, float]) -> BillLine:
    currency = str(row["billingcurrency"] or "USD").upper()
    if currency != "USD" and currency not in rates:
        raise _NoRate(currency)
    amount = float(str(row["billedcost"] or 0))
    if not math.isfinite(amount):
        raise ValueError(f"{amount} is not an amount")
    return BillLine(
        day=datetime.fromisoformat(str(row["chargeperiodstart"])[:10]).date().isoformat(),
        usd=amount * rates.get(currency, 1.0),
        account=str(row.get("subaccountid") or "").removeprefix("/subscriptions/"),
        tags=_tags(row.get("tags")),
        committed=bool(row.get("commitmentdiscountid")),
    )


def _tags(value: object) -> dict[str, str]:
    """Read tags from an object or from a list of keys and values, which may be JSON text."""
    try:
        tags: Any = json.loads(value or "{}") if isinstance(value, str) else value
    except ValueError:
        return {}
    if isinstance(tags, list):
        items = cast("list[dict[str, Any]]", tags)
        tags = {str(item["key"]): item["value"] for item in items}
    named = cast("dict[str, Any]", tags) if isinstance(tags, dict) else {}
    return {name.lower(): str(text) for name, text in named.items()}


# -- both ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BillDifference:
    """One day of a run or pool: counted, billed, and why they differ."""

    day: str
    subject: str
    counted_usd: float
    billed_usd: float
    why: str
    """Empty: they agree. `unexplained`: no known reason fits."""

    @property
    def usd(self) -> float:
        return self.billed_usd - self.counted_usd


@dataclass(frozen=True)
class Reconciled:
    """Every day that was compared with one bill."""

    rows: Sequence[BillDifference]

    @property
    def counted_usd(self) -> float:
        return sum(row.counted_usd for row in self.rows)

    @property
    def billed_usd(self) -> float:
        return sum(row.billed_usd for row in self.rows)

    @property
    def unexplained_usd(self) -> float:
        return sum(abs(row.usd) for row in self.rows if row.why == UNEXPLAINED)


def reconcile(workspace: Workspace, path: Path, run: str | None, month: str | None) -> Reconciled:
    """Compare a bill with one run, or with all runs and pools of a month (2026-11)."""
    if (run is None) == (month is None):
        raise RequestError("cost reconcile: name one run, or a month with --month 2026-11")
    if month is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise RequestError(f"--month is {month!r}; write a year and a month, such as 2026-11")
    settings = workspace.config.cost
    states = list(_states(workspace, run))
    lines = read_bill(path, settings.rates)
    counted = _machines_by_day(states, settings, workspace.now())
    bill = _ours(path, lines, workspace.home_id, [state.plan.run for state in states])
    keys = {*counted, *bill}
    keys = {key for key in keys if (key[0].startswith(month) if month is not None else key[1] == run)}
    last_day = max(line.day for line in lines)
    rows = [
        _difference(key, counted.get(key, Counted()), bill.get(key, ()), last_day) for key in sorted(keys)
    ]
    return Reconciled(rows)


def _states(workspace: Workspace, run: str | None) -> Iterator[RunState]:
    store = workspace.records()
    names = [info.name for info in store.streams()] if run is None else [store.stream(run).name]
    for name in names:
        follower = Follower(store, name)
        try:
            follower.poll()
        except JournalForeign:
            continue  # `evalfleet ls --verify` prints what is wrong with it
        yield follower.state


def _ours(
    path: Path, lines: Sequence[BillLine], home: str, names: Sequence[str]
) -> dict[Key, list[BillLine]]:
    """The lines of what this home has made, by day and by what it was made for: runs and pools of these
    names, or others."""
    found: defaultdict[Key, list[BillLine]] = defaultdict(list)
    ours = [line for line in lines if line.tags.get(HOME_TAG) == home.lower()]
    if not ours:
        accounts = ", ".join(sorted({line.account for line in lines if line.account})[:3]) or "unknown"
        raise RequestError(
            f"no line of --export {path} has the tag {HOME_TAG}={home}: it is of another account "
            f"(this one: {accounts}) or period, or was exported without tags"
        )
    subjects = {_plain(name): name for name in names} | {name: name for name in names}
    for line in ours:
        tag = line.tags.get(POOL_TAG, SHARED)
        found[line.day, subjects.get(tag, tag)].append(line)
    return found


def _plain(name: str) -> str:
    """The name as labels have it, where they must be plain."""
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())


def _difference(key: Key, counted: Counted, lines: Sequence[BillLine], last_day: str) -> BillDifference:
    day, subject = key
    billed = sum(line.usd for line in lines)
    why = ""
    if abs(billed - counted.usd) > max(LEAST_USD, ALIKE * max(counted.usd, billed)):
        late = day >= last_day and billed < counted.usd
        why = f"the export ends on {last_day}, and bills come late" if late else _why(subject, counted, lines)
    return BillDifference(day, subject, round(counted.usd, 6), round(billed, 6), why)


def _why(subject: str, counted: Counted, lines: Sequence[BillLine]) -> str:
    less = counted.usd - sum(line.usd for line in lines)
    if less > 0 and any(line.committed for line in lines):
        return "a reservation or commitment has paid for it"
    if subject == SHARED:
        return "images, snapshots, networks and the like that runs share"
    if not counted.usd:
        return "no run or pool of this home used it then"
    if 0 < less <= counted.slack_usd + LEAST_USD:
        return "counted from the request until the machine was seen to be gone"
    return UNEXPLAINED


def reconcile_table(reconciled: Reconciled) -> str:
    """Return the comparison as a table for people."""
    rows = [
        (
            row.day,
            row.subject,
            usd(row.counted_usd),
            usd(row.billed_usd),
            f"{row.usd:+.4f}",
            row.why or "agrees",
        )
        for row in reconciled.rows
    ]
    head = ("day", "what", "counted", "billed", "difference", "why")
    total = f"counted {usd(reconciled.counted_usd)}, billed {usd(reconciled.billed_usd)}"
    lines = table(head, rows, right=("counted", "billed", "difference"))
    return f"{lines}\n\n{total}; unexplained {usd(reconciled.unexplained_usd)}"


def reconcile_document(reconciled: Reconciled) -> ReconcileDocument:
    """Return the document of `cost reconcile --json`."""
    return {
        "source": "FOCUS",
        "counted_usd": round(reconciled.counted_usd, 6),
        "billed_usd": round(reconciled.billed_usd, 6),
        "unexplained_usd": round(reconciled.unexplained_usd, 6),
        "rows": [
            {
                "day": row.day,
                "what": row.subject,
                "counted_usd": row.counted_usd,
                "billed_usd": row.billed_usd,
                "difference_usd": round(row.usd, 6),
                "why": row.why or None,
            }
            for row in reconciled.rows
        ],
    }
