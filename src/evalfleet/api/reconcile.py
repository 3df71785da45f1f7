"""What evalfleet counted, beside what clouds and models' vendors have billed, by day."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.model import SECOND, Micros, Offer, seconds_between
from evalfleet.named_pools.pool_places import SIZE as BORROWED
from evalfleet.planning.config import CostSettings
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import BillLine
from evalfleet.state import MachineState, RunState
from evalfleet.views.follow import Follower
from evalfleet.views.format import table, usd
from evalfleet.views.stats import machine_end, machine_usd

from .bills import NO_PRICE, Export, read_export

if TYPE_CHECKING:
    from evalfleet.views.fleet_documents import ReconcileDocument

HOME_TAG, POOL_TAG = "evalfleet-home", "evalfleet-pool"
"""What places write on all that they make: whose it is, and the run or pool that it was made for."""
SHARED = "shared"
"""What was made for no run or pool alone."""
ALIKE, LEAST_USD = 0.02, 0.01
"""A difference below this share, or this sum, is none."""
UNEXPLAINED = "unexplained"


# -- what was counted ---------------------------------------------------------------------------------------


@dataclass
class Counted:
    """What evalfleet counted for one run, pool or model on one day."""

    usd: float = 0.0
    slack_usd: float = 0.0
    """The part that a cloud may not bill: from a request until the machine ran, and after its deletion."""
    others_usd: float = 0.0
    """What other runs here had of the same model on that day."""


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


def _note_others(counted: Mapping[Key, Counted], everywhere: Mapping[Key, Counted]) -> None:
    for key, own in counted.items():
        own.others_usd = everywhere[key].usd - own.usd


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
        return sum(abs(row.usd) for row in self.rows if row.why == UNEXPLAINED)


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
        if run is not None:  # a vendor's bill is of all runs
            _note_others(counted, _models_by_day(_states(workspace, None)))
    else:
        counted = _machines_by_day(states, settings, workspace.now())
        bill = _ours(path, export.lines, workspace.home_id, [state.plan.run for state in states])
        if run is not None:
            bill = {key: lines for key, lines in bill.items() if key[1] == run}
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


def _by_model(lines: Sequence[BillLine], states: Sequence[RunState]) -> dict[Key, list[BillLine]]:
    """Lines by the models' names that the meter knows, where those are the same models."""
    used = {m for s in states for a in s.attempts.values() if a.metered is not None for m in a.metered.models}
    found: defaultdict[Key, list[BillLine]] = defaultdict(list)
    for line in lines:
        same = (model for model in sorted(used) if same_model(model, line.what))
        found[line.day, next(same, line.what)].append(line)
    return found


def same_model(one: str, other: str) -> bool:
    """Whether two names are one model's. A vendor's bill may say `Claude Haiku 4.5` or have a version's date
    behind the name; `gpt-4o-mini` is another model than `gpt-4o`."""
    short, long = sorted((_letters(one), _letters(other)), key=len)
    return bool(short) and long.startswith(short) and _VERSION.fullmatch(long[len(short) :]) is not None


_VERSION = re.compile(r"(latest|\d{8}|\d{4})?")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())


def _difference(key: Key, counted: Counted, lines: Sequence[BillLine], export: Export) -> BillDifference:
    billed = sum(line.amount for line in lines)
    why = ""
    if not _alike(billed, counted.usd) or key[1].endswith(NO_PRICE):
        of_it = _why_of_models if export.of_models else _why_of_machines
        late = key[0] >= export.last_day and billed < counted.usd
        why = f"the export ends on {export.last_day}, and bills come late" if late else ""
        why = why or of_it(key[1], counted, billed, lines)
    return BillDifference(*key, round(counted.usd, 6), round(billed, 6), why)


def _alike(billed: float, counted: float) -> bool:
    return abs(billed - counted) <= max(LEAST_USD, ALIKE * max(counted, billed))


def _why_of_models(model: str, counted: Counted, billed: float, lines: Sequence[BillLine]) -> str:
    if model.endswith(NO_PRICE):
        return "its tokens cannot be valued: no run here had a price for it"
    if _alike(billed, counted.usd + counted.others_usd):
        return "other runs here used it on that day, too"
    if not counted.usd:
        return "another key or program used it"
    known_less = 0 < billed - counted.usd <= counted.slack_usd
    return "calls whose cost the meter did not know" if known_less else UNEXPLAINED


def _why_of_machines(subject: str, counted: Counted, billed: float, lines: Sequence[BillLine]) -> str:
    less = counted.usd - billed
    if less > 0 and any(line.reserved for line in lines):
        return "a reservation or commitment has paid for it"
    if subject == SHARED:
        return "images, snapshots, networks and the like that runs share: see `evalfleet images`"
    if not counted.usd:
        return "no run or pool here had it then"
    if 0 < less <= counted.slack_usd + LEAST_USD:
        return "counted from the request until the machine was seen to be gone"
    credited = sum(line.credited for line in lines)
    if credited > 0 and _alike(billed + credited, counted.usd):
        return "the cloud has credited something: a discount, a promotion, a free tier"
    return UNEXPLAINED


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
