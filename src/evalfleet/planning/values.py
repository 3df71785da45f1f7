"""Durations, money, shares and counts as people write them. `where` names the flag or key in errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

from evalfleet.errors import RequestError
from evalfleet.model import ScheduleName, Verdict
from evalfleet.names import hint

MAX_DURATION_S = 365 * 86400.0
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")


def parse_duration(value: Any, where: str) -> float:
    """Seconds of '2h', '90m', '45s', '1h30m', '2d' or '3600'."""
    text = _text(value)
    seconds = math.nan
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        parts = re.findall(r"([\d.]+)([dhms])", text)
        units = "".join(unit for _, unit in parts)
        if units == "".join(unit for unit in _UNITS if unit in units):  # each once, the larger first
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= MAX_DURATION_S:
        raise _wrong(where, value, "a duration above 0 such as 45s, 90m, 1h30m or 3600 (seconds)")
    return seconds


def parse_usd(value: Any, where: str) -> float:
    """Dollars of '$5', '5' or 5.25."""
    text = _text(value).removeprefix("$").strip()
    amount = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < amount < 1e9:
        raise _wrong(where, value, "dollars above 0 such as 5, 2.50 or '$5'")
    return amount


def parse_share(value: Any, where: str) -> float:
    """0 to 1 of '0.4' or '40%'."""
    text = _text(value)
    share = _percent(text) if text.endswith("%") else float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= share <= 1:
        raise _wrong(where, value, "a rate from 0 to 1, or a percentage such as 40%")
    return share


def parse_allow_broken(value: Any, where: str) -> Verdict:
    """How many tasks may be broken: a count 'N' or a share 'P%'."""
    text = _text(value)
    share = _percent(text) if text.endswith("%") else math.nan
    if 0 <= share <= 1:
        return Verdict(allow_broken=share, allow_broken_is_share=True)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise _wrong(where, value, "a whole number of tasks such as 3, or a percentage such as 5%")
    return Verdict(allow_broken=float(text))


def parse_count(value: Any, where: str, low: int, high: int) -> int:
    text = _text(value)
    count = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if count is None or not low <= count <= high:
        raise _wrong(where, value, f"a whole number from {low} to {high}")
    return count


AUTO: Literal["auto"] = "auto"


def parse_workers(value: Any, where: str) -> int | Literal["auto"]:
    if value == AUTO:
        return AUTO
    if not re.fullmatch(r"-?[0-9]+", _text(value)):
        raise _wrong(where, value, "a whole number from 1 to 10000, or auto")
    return parse_count(value, where, 1, 10_000)


def parse_switch(value: Any, where: str) -> bool:
    text = str(value).strip().lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise _wrong(where, value, "true or false")
    return text in ("1", "true", "yes", "on")


def parse_line(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _wrong(where, value, "one line of text")
    return value.strip()


def parse_names(value: Any, where: str) -> tuple[str, ...]:
    """Names, each once: 'a,b' or a list."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise _wrong(where, value, "names such as 'a,b' or a list of them")
    items = cast("Iterable[Any]", parts)
    return tuple(dict.fromkeys(name for name in (parse_line(item, where) for item in items) if name))


def parse_schedule(value: Any, where: str) -> ScheduleName:
    options: tuple[ScheduleName, ...] = get_args(ScheduleName)
    for option in options:
        if value == option:
            return option
    raise _wrong(where, value, f"one of {', '.join(options)}")


def parse_table(value: Any, where: str) -> dict[str, str]:
    """KEY -> VALUE as text, of a TOML table or a mapping."""
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a table such as {temperature = 0}")
    table: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
    return {str(key): as_text(item, f"{where}.{key}") for key, item in table.items()}


def parse_pairs(pairs: Iterable[str], flag: str) -> dict[str, str]:
    """KEY=VALUE arguments; a later one of the same key wins."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            # What stands there may be a secret typed in the wrong place: it is not shown.
            raise RequestError(f"{flag} must be followed by KEY=VALUE; one of them has no key or no '='")
        found[key.strip()] = value
    return found


def as_text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise _wrong(where, value, "a string, a number, true or false")


def choose(name: str, options: Mapping[str, Any], where: str, what: str) -> Any:
    """The option of this name; RequestError with the nearest ones."""
    if name not in options:
        raise RequestError(f"{where}: {what} {name!r} is unknown; {hint(name, options)}")
    return options[name]


def _text(value: Any) -> str:
    return "" if isinstance(value, bool) else str(value).strip()


def _percent(text: str) -> float:
    number = text.removesuffix("%").strip()
    return float(number) / 100 if _NUMBER.fullmatch(number) else math.nan


def _wrong(where: str, value: Any, fix: str) -> RequestError:
    shown = repr(value[:80]) if isinstance(value, str) else repr(value)[:80]
    return RequestError(f"{where} is {shown}; write {fix}")
