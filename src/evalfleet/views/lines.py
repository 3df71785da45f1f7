"""A run in lines: as a log, as a commentary without a terminal, or one JSON object an event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

from evalfleet.events import (
    ControllerStarted,
    Event,
    NewFiles,
    Record,
    RunPlanned,
    RunResumed,
    TasksPlanned,
)
from evalfleet.model import Micros, seconds_between
from evalfleet.state import RunState

from .format import clean, clock_time, duration, iso, local, percent, plural
from .notable import Notice, notices, together
from .stats import eta_s, rate

LINES_PER_S = 2.0
BURST = 20.0
SUMMARY_S = 5.0
OLD_S = 10.0


class PlainLines:
    """One line for each notable thing, as long as they are few; when they are many, a summary now and then.

    Has the methods of a Display. Who begins to follow in the middle is told where the run stands, not its
    whole history.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        """`write` gets one line at a time, without its end."""
        self._write = write
        self._begun = False
        self._tokens = BURST
        self._at: Micros = 0
        self._held: list[Notice] = []
        self._summary_at: Micros = 0

    def update(self, state: RunState, now: Micros, records: Sequence[Record] = ()) -> None:
        """`records`: what became part of the state since the last update."""
        self._refill(now)
        if not self._begun and records:
            self._begun = True
            records = self._catch_up(state, now, records)
        lines = list(notices(state, records))
        settled = state.scored + state.broken - sum(line.settles for line in lines)
        for line in lines:
            settled += line.settles
            self._tell(line, f"[{settled}/{state.total}] " if line.outcome is not None else "")
        if self._held and seconds_between(self._summary_at, now) >= SUMMARY_S:
            self._summarise(state, now)

    def close(self, state: RunState | None = None, now: Micros = 0) -> None:
        """Say what was held back."""
        if self._held and state is not None:
            self._summarise(state, now or state.last_at)

    def _catch_up(self, state: RunState, now: Micros, records: Sequence[Record]) -> list[Record]:
        self._write(_line(state.planned_at, start_line(state)))
        if state.attempts:
            self._write(_line(now, progress_line(state, now)))
        begun = max((r.seq for r in records if isinstance(r.event, ControllerStarted)), default=0)
        return [r for r in records if r.seq > begun and seconds_between(r.at, now) < OLD_S]

    def _refill(self, now: Micros) -> None:
        if self._at:
            self._tokens = min(BURST, self._tokens + LINES_PER_S * max(0.0, seconds_between(self._at, now)))
        self._at = now

    def _tell(self, line: Notice, prefix: str) -> None:
        always = line.kind in ("start", "end")
        if not always and (self._held or self._tokens < 1):
            if not self._held:
                self._summary_at = self._at
            self._held.append(line)
            return
        self._tokens -= not always
        self._write(_line(line.at, prefix + line.text))

    def _summarise(self, state: RunState, now: Micros) -> None:
        self._write(_line(now, f"{together(self._held)}; {progress_line(state, now)}"))
        self._held.clear()
        self._summary_at = now


def _line(at: Micros, text: str) -> str:
    return f"{clock_time(at)} {text}"


def start_line(state: RunState) -> str:
    plan = state.plan
    who = f"{plan.benchmark} with {plan.model}" if plan.model else plan.benchmark
    return (
        f"{plan.run}: {plural(state.total, 'task')} of {who} on {', '.join(plan.places)}, "
        f"up to {plural(state.limits.workers, 'machine')}"
    )


def progress_line(state: RunState, now: Micros) -> str:
    """Where the run stands, in one line."""
    parts = [f"{state.scored + state.broken:,} of {state.total:,} settled"]
    if state.answered:
        parts.append(f"{state.answered:,} answered")
    if state.broken:
        parts.append(f"{state.broken:,} broken")
    parts.append(f"pass rate {percent(rate(state.succeeded, state.scored))}")
    left_s = eta_s(state, now)
    if left_s and state.stop is None:
        parts.append(f"about {duration(left_s)} left")
    return ", ".join(parts)


# -- JSON ------------------------------------------------------------------------------------------

INSTANTS = ("expires_at", "gone_at", "good_until", "since")


SCHEMA_VERSION = 1
"""Of the stream of events. It goes up when a key or a kind of event changes its meaning, or goes away; it
stays when some are added."""


def event_document(record: Record) -> dict[str, Any]:
    """One record as programs read it: `seq`, `at`, `kind`, and the event's own fields.

    Instants are ISO times. Tasks are counted, not listed: there may be a hundred thousand.
    """
    body = _body(record.event)
    loose: dict[str, Any] = {"seq": record.seq, "at": iso(record.at), "kind": body.pop("kind"), **body}
    for name in INSTANTS:
        if name in loose:
            loose[name] = iso(loose[name])
    return loose


def json_line(record: Record) -> str:
    """One record as a JSON object in a line."""
    return msgspec.json.encode(event_document(record)).decode()


def json_lines(records: Iterable[Record]) -> Iterator[str]:
    return map(json_line, records)


def _body(event: Event) -> dict[str, Any]:
    match event:
        case TasksPlanned(tasks):
            return {"kind": "TasksPlanned", "count": len(tasks)}
        case RunPlanned(plan, total):
            shown: dict[str, Any]
            shown = {"run": plan.run, "benchmark": plan.benchmark, "model": plan.model, "total": total}
            shown |= {"places": plan.places, "workers": plan.limits.workers}
            return {"kind": "RunPlanned", "schema_version": SCHEMA_VERSION, **shown}
        case RunResumed(new_files=NewFiles() as new):
            shown = msgspec.to_builtins(msgspec.structs.replace(event, new_files=None))
            return {**shown, "new_files": {"changed": new.changed, "tasks": [task.id for task in new.tasks]}}
        case _:
            loose: dict[str, Any] = msgspec.to_builtins(event)
            return loose


WORDS = ("error", "detail", "metadata", "measured", "said")
"""Keys of outcomes, and of what machines say, whose values an agent can have written."""


def _empty(value: Any) -> Any:
    """What is said, without a word; whether anything was said at all may be known."""
    return "" if isinstance(value, str) else dict[str, Any]() if isinstance(value, dict) else value


def without_content(document: Any) -> Any:
    """The document with what agents say left empty: its reader may be a model that must not listen to it."""
    if isinstance(document, dict):
        parts = cast("dict[str, Any]", document)
        return {
            key: _empty(value) if key in WORDS else without_content(value) for key, value in parts.items()
        }
    if isinstance(document, list):
        return [without_content(value) for value in cast("list[object]", document)]
    return document


class JsonLines:
    """Has the methods of a Display; writes each record as a line. `content`: with what agents say."""

    def __init__(self, write: Callable[[str], object], content: bool = True) -> None:
        self._write = write
        self._content = content

    def update(self, state: RunState, now: Micros, records: Sequence[Record] = ()) -> None:
        for line in json_lines(records):
            if not self._content:
                line = msgspec.json.encode(without_content(msgspec.json.decode(line))).decode()
            self._write(line)

    def close(self, state: RunState | None = None, now: Micros = 0) -> None:
        """There is nothing to end."""


MOST, MOST_OF_ONE = 400, 4000


def event_line(record: Record, most: int = MOST) -> str:
    """When, what, and its fields as `name=value`, cut at so many characters."""
    event = record.event
    if isinstance(event, RunPlanned):
        fields: dict[str, Any] = {
            "run": event.plan.run,
            "benchmark": event.plan.benchmark,
            "tasks": event.total,
        }
    else:
        fields = {
            name: _instant(value) if name in (*INSTANTS, "started_at") else value
            for name, value in _body(event).items()
            if name not in ("kind", "boot", "zero")  # the last two are for the next controller's clock alone
        }
    words = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    return f"{_instant(record.at)} {type(event).__name__} {clean(words, most)}".rstrip()


def _instant(at: Micros | None) -> str | None:
    """Here, to the millisecond: `2026-01-02T15:30:52.125+01:00`."""
    return None if at is None else local(at).isoformat(timespec="milliseconds")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        inner = ",".join(f"{name}:{_value(part)}" for name, part in parts.items())
        return "{" + inner + "}"
    return str(value)
