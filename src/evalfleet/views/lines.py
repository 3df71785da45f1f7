"""A journal as a log: one line an event, with everything in it that fits."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from evalfleet.events import Record, RunPlanned, TasksPlanned

from .format import clean, iso

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
    elif isinstance(event, TasksPlanned):
        fields = {"count": len(event.tasks)}
    else:
        fields = msgspec.to_builtins(event)
        fields.pop("kind", None)
    words = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    return f"{iso(record.at)} {type(event).__name__} {clean(words, most)}".rstrip()


def _value(value: Any) -> str:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        inner = ",".join(f"{name}:{_value(part)}" for name, part in parts.items())
        return "{" + inner + "}"
    return str(value)
