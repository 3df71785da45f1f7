"""Reads trajectories: what agents write down of their steps.

Two shapes are known. A file of lines, one JSON object a step, with the names that agents' harnesses use for
the same things; and ATIF, one JSON document with `steps`, as Harbor's agents write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from evalfleet.model import Step, Trajectory

MOST_BYTES = 64 << 20
LONGEST = 2000
HIGHEST = 1e15
LATEST = 1e11
"""Seconds since 1970: in the year 5138."""
_COMPACT = re.compile(r"(\d{8})@(\d{6})\d*")
_N = ("n", "step_num", "step", "step_id", "index")
_AT = ("at", "action_timestamp", "timestamp", "time")
_ACTION = ("action", "act", "command", "message")
_SCREENSHOT = ("screenshot", "screenshot_file", "image")
_ERROR = ("error", "Error", "exception")


def read_steps(data: bytes) -> Trajectory:
    """The steps in a trajectory, or in its first part: a last line that is not complete is left out."""
    if len(data) > MOST_BYTES:
        return Trajectory(problem=f"the trajectory has more than {MOST_BYTES >> 20} MB")
    document = _object(data)
    if document is not None and isinstance(document.get("steps"), list):
        return Trajectory(tuple(_of_atif(document["steps"])))
    steps: list[Step] = []
    problem = ""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        fields = _object(line) if line.strip() else None
        if fields is not None:
            steps.append(_of_line(fields, len(steps)))
        elif line.strip() and number < len(lines):
            problem = problem or f"line {number} of the trajectory is no JSON object"
    return Trajectory(tuple(steps), problem)


def _object(data: bytes) -> Mapping[str, Any] | None:
    try:
        found: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else None


def _of_line(fields: Mapping[str, Any], count: int) -> Step:
    n = _first(fields, _N)
    ok = fields.get("ok", fields.get("success"))
    return Step(
        n=n if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1_000_000_000 else count,
        at=_time(_first(fields, _AT)),
        action=_text(_first(fields, _ACTION)),
        ok=ok if isinstance(ok, bool) else None,
        screenshot=_text(_first(fields, _SCREENSHOT)),
        x=_number(fields.get("x")),
        y=_number(fields.get("y")),
        tokens=_whole(fields.get("tokens")),
        error=_text(_first(fields, _ERROR)),
    )


def _of_atif(steps: Sequence[Any]) -> Iterator[Step]:
    """What the agent did; what the user and the system said is no step of it."""
    for number, raw in enumerate(steps, start=1):
        if not isinstance(raw, dict) or cast("dict[str, Any]", raw).get("source", "agent") != "agent":
            continue
        fields = cast("dict[str, Any]", raw)
        n = _whole(fields.get("step_id"))
        yield Step(
            n=number if n is None else n,
            at=_time(fields.get("timestamp")),
            action=_calls(fields.get("tool_calls")) or _text(fields.get("message")),
            tokens=_tokens(fields.get("metrics")),
            error=_text(fields.get("error")),
        )


def _calls(calls: Any) -> str:
    """`name(argument=value, ...)` for each tool that was called."""
    words: list[str] = []
    for call in cast("list[object]", calls) if isinstance(calls, list) else ():
        if isinstance(call, dict):
            given = cast("dict[str, Any]", call)
            arguments: Any = given.get("arguments")
            pairs = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
            inside = ", ".join(f"{key}={_text(value)}" for key, value in pairs.items())
            words.append(f"{_text(given.get('function_name'))}({inside})")
    return "; ".join(words)[:LONGEST]


def _tokens(metrics: Any) -> int | None:
    if not isinstance(metrics, dict):
        return None
    given = cast("dict[str, Any]", metrics)
    told = [_whole(given.get(key)) for key in ("prompt_tokens", "completion_tokens")]
    counted = [count for count in told if count is not None]
    return sum(counted) if counted else None


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode("utf-8", "replace")
    return text[:LONGEST]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and abs(value) < HIGHEST else None  # False for nan, too


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < HIGHEST else None


def _time(value: Any) -> float | None:
    """Seconds since 1970 of a number, of ISO 8601, or of 20260102@143052; a zone that is not said is UTC."""
    seconds = _number(value) if isinstance(value, int | float) else _told(value)
    return None if seconds is None or not 0 < seconds < LATEST else seconds


def _told(value: Any) -> float | None:
    if not isinstance(value, str):
        return None
    compact = _COMPACT.fullmatch(value)
    text = f"{compact[1]}T{compact[2]}" if compact else value.replace("Z", "+00:00")
    try:
        told = datetime.fromisoformat(text)
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
