"""One picture of a run in a terminal: a pure function of state, time and size.

Made of plain pieces of text with a style's name each, so that it needs no library and tests can read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from evalfleet.model import AttemptId, MachineId, Micros, seconds_between
from evalfleet.state import MachineState, RunState

from .format import (
    cells,
    clean,
    clock_time,
    counted,
    fit,
    fit_id,
    interval,
    pad,
    percent,
    usd,
    whole_duration,
)
from .notable import Notice, by_whom, left_places
from .progress import Progress
from .stats import (
    at_risk,
    current_task,
    estimated_usd,
    eta_range_s,
    eta_s,
    hourly_usd,
    judged,
    machine_usd,
    machines_usd,
    per_minute,
    rate,
    tally,
    wilson,
)

Piece = tuple[str, str]
"""Text, and the name of its style: a key of STYLES."""
Row = list[Piece]

STYLES = {
    "": "",
    "title": "bold",
    "dim": "dim",
    "good": "green",
    "bad": "red",
    "busy": "cyan",
    "warn": "yellow",
}

_UNICODE = {"good": "█", "bad": "▓", "warn": "▚", "busy": "▒", "dim": "░"}
_ASCII = {"good": "#", "bad": "x", "warn": "!", "busy": "=", "dim": "."}


@dataclass(frozen=True, slots=True)
class FrameSize:
    width: int = 80
    height: int = 24


def frame(
    state: RunState,
    now: Micros,
    size: FrameSize,
    events: Sequence[Notice] = (),
    ascii_only: bool = False,
    progress: Mapping[AttemptId, Progress] | None = None,
) -> list[Row]:
    """The rows, none wider than the terminal, and fewer than it has lines."""
    shown = min(now, state.ended_at) if state.ended_at is not None else now
    whole = max(1, size.width - 1)  # a full last column makes some terminals wrap
    width = min(whole, WIDEST)
    head = [_title(state, shown), _bar(state, width, ascii_only), *_numbers(state, shown)]
    room = max(1, size.height - 1 - len(head))
    news = [_news(line) for line in events[-min(5, max(0, (room - 5) // 3)) :]] if room >= 8 else []
    room -= len(news) + 2 if news else 1
    machines = _machines(state, shown, width, room, progress or {})
    rows = [_fitted(row, width) for row in (*head, *([[], *machines] if machines else []))]
    rows += [_fitted(row, whole) for row in ([[], *news] if news else [])]
    return rows[: max(1, size.height - 1)]


def as_text(rows: Sequence[Row]) -> str:
    return "\n".join("".join(text for text, _ in row).rstrip() for row in rows)


def _fitted(row: Row, width: int) -> Row:
    """Cut at the right edge; _GAP pushes what follows it there."""
    fixed = sum(cells(text) for text, _ in row if text != _GAP)
    kept: Row = []
    left = width
    for text, style in row:
        whole = " " * max(1, width - fixed) if text == _GAP else text
        part = fit(whole, left)
        kept.append((part, style))
        left -= cells(part)
        if part != whole:
            break
    return kept


_GAP = "\0gap"
LEAST_FOR_COST = 70
"""Narrower than this, a machine's line has no room for what it costs."""
WIDEST = 120
"""Wider than this, the eye loses the line."""


# -- the run ---------------------------------------------------------------------------------------


def _title(state: RunState, now: Micros) -> Row:
    plan = state.plan
    who = f"{plan.benchmark}, {plan.model}" if plan.model else plan.benchmark
    elapsed = whole_duration(seconds_between(state.started_at, now))
    what = f"  {clean(who)} on {', '.join(plan.places)}"
    doing: str = state.status
    if state.ended_at is None and (state.stop is not None or state.paused is not None):
        doing = "stopping" if state.stop is not None else "paused"
    row: Row = [(clean(plan.run), "title"), (what, "dim"), (_GAP, "")]
    style = {"running": "busy", "done": "good"}.get(doing, "warn")
    return [*row, (doing, style), (f" {elapsed}", "")]


def _bar(state: RunState, width: int, ascii_only: bool) -> Row:
    settled = state.scored + state.broken
    total = max(1, state.total)
    label = f" {settled:,}/{state.total:,} {100 * settled // total:3d}%"
    room = max(10, width - len(label))
    failed = state.scored - state.succeeded
    parts = [("good", state.succeeded), ("bad", failed), ("warn", state.broken)]
    parts.append(("busy", state.answered + state.running))
    chars = _ASCII if ascii_only else _UNICODE
    row: Row = []
    upto = drawn = 0
    for style, count in parts:
        upto += count
        # Whatever there is of a kind shows, however little, or 3 broken of 100,000 would be invisible.
        end = min(room, max(upto * room // total, drawn + (count > 0)))
        row.append((chars[style] * (end - drawn), style))
        drawn = end
    return [*row, (chars["dim"] * (room - drawn), "dim"), (label, "")]


def _numbers(state: RunState, now: Micros) -> list[Row]:
    failed = state.scored - state.succeeded
    counts: Row = [(f"{state.succeeded:,} pass", "good"), ("  ", "")]
    counts.append((f"{failed:,} fail", "bad" if failed else "dim"))
    if state.answered:
        counts += [("  ", ""), (f"{state.answered:,} answered", "busy")]
    counts += [("  ", ""), (f"{state.broken:,} broken", "warn" if state.broken else "dim")]
    counts += [("  ", ""), (f"{state.running:,} running", "busy" if state.running else "dim")]
    counts += [("  ", ""), (f"{state.waiting:,} {'waiting' if state.ended_at is None else 'unrun'}", "dim")]
    if state.counts["held"]:
        counts += [("  ", ""), (f"{state.counts['held']:,} left out", "dim")]
    rows = [counts, _success(state)]
    if state.ended_at is None:
        rows.append(_pace(state, now))
    spent = machines_usd(state, now)
    if spent or hourly_usd(state, now) or state.spend.models.spent or state.limits.budget_usd:
        rows.append(_cost(state, now, spent))
    if state.ended_at is None:
        rows += [[("at risk          ", ""), (told, "warn")] for told in at_risk(state, now)]
    if state.causes:
        rows.append([("broken attempts  ", ""), (counted(state.causes), "warn")])
    if state.ended_at is None:
        rows += [[("places           ", ""), (told, "warn")] for told in left_places(state)]
    if state.paused is not None and state.stop is None and state.ended_at is None:
        workers = state.limits.workers
        go_on = f"; `evalfleet set {clean(state.plan.run)} --workers {workers}` continues it"
        rows.append([("paused          ", ""), (by_whom(state.paused) + go_on, "warn")])
    if state.stop is not None and state.stop.detail:
        again = "; Ctrl-C again leaves at once" if state.stop.drain and state.running else ""
        why = clean(state.stop.detail) + by_whom(state.stop) + again
        rows.append([("stopped          ", ""), (why, "warn")])
    return rows


def _success(state: RunState) -> Row:
    scored = judged(state)
    share = rate(state.succeeded, scored)
    if share is None:
        return [("pass rate        ", ""), ("nothing scored", "dim")]
    first = next(iter(state.tasks.values()), None)
    if first is not None and first.task.origin:  # repeats of a task belong together: all are looked at
        shown = interval(tally(state.tasks.values(), state.plan.verdict.strict).ci)
    else:
        shown = interval(wilson(state.succeeded, scored))
    return [
        ("pass rate        ", ""),
        (percent(share), "title"),
        (f"  ({state.succeeded:,} of {scored:,}; 95% interval {shown})", "dim"),
    ]


def _pace(state: RunState, now: Micros) -> Row:
    row: Row = [("pace             ", "")]
    speed = per_minute(state, now)
    row.append((_speed(speed) if speed else "no task scored lately", "" if speed else "dim"))
    left_s = eta_s(state, now)
    if left_s == 0.0 and state.ended_at is None:
        row.append((", machines are being deleted", ""))
    elif left_s is not None:
        row.append((f", about {whole_duration(left_s)} left", ""))
        if left_s and (likely := eta_range_s(state, now)) is not None:
            row.append((f" ({whole_duration(likely[0])} to {whole_duration(likely[1])})", "dim"))
    return row


def _cost(state: RunState, now: Micros, spent: float) -> Row:
    models, budget = state.spend.models.spent + state.spend.models.lost, state.limits.budget_usd
    row: Row = [("cost             ", ""), (usd(spent + models), "")]
    if budget is not None:
        share = (spent + models) / budget
        row.append((f" of {usd(budget)} ({percent(share)})", "warn" if share >= NEARLY_SPENT else ""))
    if models:
        row.append((f", {usd(models)} for models", "dim"))
    if state.ended_at is not None:
        return row
    if (total := estimated_usd(state, now)) is not None:
        row.append((f", about {usd(total)} in all", "dim"))
    row.append((f", {usd(hourly_usd(state, now))} an hour", "dim"))
    return row


NEARLY_SPENT = 0.8


def _speed(per_minute: float) -> str:
    return f"{per_minute:,.1f} a minute" if per_minute >= 1 else f"{60 * per_minute:.1f} an hour"


# -- machines --------------------------------------------------------------------------------------


def _machines(
    state: RunState, now: Micros, width: int, room: int, progress: Mapping[AttemptId, Progress]
) -> list[Row]:
    """A line for each, in the order of creation so that none jumps; the last one sums up the rest.

    Where not all have room, those in trouble are among those that do.
    """
    all_of_them = list(state.undeleted)
    if room < 1 or not all_of_them:
        return []
    fits = all_of_them
    if len(all_of_them) > room:
        bad = [machine for machine in all_of_them if doing(state.machines[machine])[1] == "bad"]
        chosen = set(bad[: (room - 1) // 2])
        chosen.update(islice((m for m in all_of_them if m not in chosen), room - 1 - len(chosen)))
        fits = [machine for machine in all_of_them if machine in chosen]
    names = max((cells(clean(state.machines[m].name)) for m in fits), default=0)
    rows = [_machine(state, m, now, width, min(names, 24), progress) for m in fits]
    if len(fits) < len(all_of_them):
        shown = set(fits)
        rest = Counter(doing(state.machines[m])[0] for m in all_of_them if m not in shown)
        said = ", ".join(f"{n:,} {what}" for what, n in rest.most_common())
        more = f"and {rest.total():,} more: " if fits else f"{rest.total():,} machines: "
        rows.append([(("... " if fits else "") + more + said, "dim")])
    return rows


def doing(machine: MachineState) -> Piece:
    """What the machine does, in a word, and the style of that."""
    if machine.phase == "queued":
        return "queued", "dim"
    if machine.phase in ("requested", "allocated"):
        return "booting", "warn"
    if machine.phase == "up":
        return "preparing", "warn"
    if machine.phase == "mending":
        return machine.mends[-1], "bad"
    if machine.phase == "condemned":
        if machine.delete_refused:
            return "undeleted", "bad"
        return "leaving", "dim" if machine.cause is None else "bad"
    if machine.silent_since is not None:
        return "silent", "bad"
    if machine.steered is not None and machine.steered.verb == "drain":
        return "draining", "warn"
    return ("running", "busy") if machine.open else ("idle", "dim")


def _machine(
    state: RunState,
    machine: MachineId,
    now: Micros,
    width: int,
    names: int,
    progress: Mapping[AttemptId, Progress],
) -> Row:
    known = state.machines[machine]
    what, style = doing(known)
    task = current_task(state, machine)
    more = f" +{len(known.open) - 1}" if len(known.open) > 1 else ""
    inside = _inside(known, progress)
    told = f"  {inside}" if inside else f"  {known.scored:,} scored of {known.attempts:,}"
    cost = usd(spent) if width >= LEAST_FOR_COST and (spent := machine_usd(known, now)) else ""
    room = min(44, max(8, width - names - 2 - 10 - 9 - 20 - (9 if cost else 0)))
    about = fit_id(clean(task), room - len(more)) + more if task else _why(known)
    return [
        (pad(clean(known.name), names) + "  ", ""),
        (pad(what, 10), style),
        (pad(about, room), "" if task else "dim"),
        (pad(_since(state, known, now), 9, right=True), ""),
        (pad(told, 20) if cost else told, "dim"),
        (pad(cost, 9, right=True) if cost else "", "dim"),
    ]


IDLE_S = 10.0
"""Who has been heard of since is not idle."""


def _inside(machine: MachineState, progress: Mapping[AttemptId, Progress]) -> str:
    """The step of what runs there, and for how long nothing came of it."""
    attempt = next(iter(machine.open), None)
    known = progress.get(attempt) if attempt is not None else None
    if known is None:
        return ""
    parts = [f"step {known.count}"] if known.count is not None else []
    if known.idle_s is not None and known.idle_s >= IDLE_S:
        parts.append(f"idle {whole_duration(known.idle_s)}")
    return " ".join(parts)


def _why(machine: MachineState) -> str:
    if machine.phase in ("condemned", "mending"):
        return clean(machine.delete_refused or machine.detail)
    if machine.phase in ("allocated", "up") and (step := machine.setting_up[0]):
        return clean(": ".join(filter(None, (step, machine.setting_up[1]))))
    if machine.phase in ("requested", "queued", "allocated", "up"):
        offer = machine.offer
        where = "/".join(part for part in (offer.place, offer.region, offer.size) if part)
        return clean(machine.detail) or where if machine.phase == "queued" else where
    return ""


def _since(state: RunState, machine: MachineState, now: Micros) -> str:
    """How long it has been doing what it does."""
    attempt = next(iter(machine.open), None)
    if machine.phase == "condemned":
        began = machine.condemned_at
    elif attempt is not None:
        began = state.attempts[attempt].started_at
    else:
        began = {
            "requested": machine.requested_at,
            "queued": machine.requested_at,
            "allocated": machine.allocated_at,
            "up": machine.up_at,
            "mending": machine.mending_since,
        }.get(machine.phase)
    return "" if began is None else whole_duration(seconds_between(began, now))


def _news(line: Notice) -> Row:
    style = "good" if line.good else "warn" if line.kind == "trouble" else ""
    return [(f"{clock_time(line.at)} ", "dim"), (line.text, "" if style == "good" else style)]
