"""How facts are written for people: times, money, shares, tables, and text that others gave us. Pure."""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from evalfleet.model import SECOND, Micros

if TYPE_CHECKING:
    from .documents import Cost

_LATEST: Micros = 221_845_392_000 * SECOND


def iso(at: Micros | None) -> str | None:
    """`2026-01-02T14:30:52.125Z`; whole seconds without a fraction."""
    if at is None:
        return None
    text = f"{_utc(at):%Y-%m-%dT%H:%M:%S}"
    millis = at % SECOND // 1000
    return f"{text}.{millis:03d}Z" if millis else f"{text}Z"


def _utc(at: Micros) -> datetime:
    """The instant, or the nearest from 1970 to 9000: a record may hold any number, and is shown."""
    return datetime.fromtimestamp(min(max(at, 0), _LATEST) / SECOND, UTC)


def stamp(at: Micros) -> str:
    """`20260102_143052`, as pool ids have it."""
    return f"{_utc(at):%Y%m%d_%H%M%S}"


def local_time(instant: str | None) -> str | None:
    """An instant of a document (`...Z`) as people here read it: `2026-01-02 15:30:52+01:00`."""
    if instant is None:
        return None
    return datetime.fromisoformat(instant).astimezone().isoformat(" ", "seconds")


def local(at: Micros) -> datetime:
    """The time here, with its offset."""
    return _utc(at).astimezone()


def clock_time(at: Micros) -> str:
    """The time of day here, for people: `14:30:52`."""
    return f"{local(at):%H:%M:%S}"


def duration(seconds: float | None) -> str:
    """`4.2s`, `37s`, `3m12s`, `27h10m`: as exact as one cares."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    return whole_duration(seconds)


def whole_duration(seconds: float) -> str:
    """The same without tenths, for what is shown again each second."""
    minutes, rest = divmod(int(max(0.0, seconds) + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def models_usd(cost: Cost) -> str:
    """What the models cost, as a results document tells it; unknown, with what experience says beside it."""
    told = usd(cost["models_usd"])
    if (span := cost.get("models_usd_range")) is None:
        return told
    known = f"{told} and some" if cost["models_usd"] is not None else told
    return f"{known}, by experience {usd(span[0])} to {usd(span[1])}"


def usd(amount: float | None) -> str:
    """`$1,204.50`; more digits where cents would say nothing."""
    if amount is None:
        return "unknown"
    if 0 < abs(amount) < 0.1:
        return f"${amount:.4f}" if abs(amount) >= 0.00005 else "under $0.0001"
    return f"${amount:,.2f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def interval(ci: tuple[float, float] | list[float] | None) -> str:
    """`33.1% to 48.7%`."""
    return "-" if ci is None else f"{percent(ci[0])} to {percent(ci[1])}"


def counted(counts: Mapping[str, int]) -> str:
    """`evicted 3, timeout 1`: most frequent first."""
    ranked = sorted(((n, name) for name, n in counts.items() if n), key=lambda pair: (-pair[0], pair[1]))
    return ", ".join(f"{name.replace('_', ' ')} {n:,}" for n, name in ranked)


def number(value: float) -> str:
    """`0.833`, `12`, `1,204.5`: three digits after the point where there are any."""
    if abs(value) >= 1e15:
        return f"{value:g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}" if abs(value) < 1 else f"{value:,.3f}"


def named_numbers(numbers: Mapping[str, float]) -> str:
    """`latency 1.2, tests_passed 12`."""
    return ", ".join(f"{name} {number(value)}" for name, value in numbers.items())


def plural(n: int, noun: str) -> str:
    if n == 1:
        return f"1 {noun}"
    ends_in_ies = noun.endswith("y") and noun[-2:-1] not in "aeiou"
    return f"{n:,} {noun[:-1]}ies" if ends_in_ies else f"{n:,} {noun}s"


def clean(text: str, limit: int = 300) -> str:
    """One line without control characters: names and details come from agents and machines."""
    kept = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    line = " ".join(kept.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


_SHOWN = {
    **{code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\n\r\t"},
    **{code: f"\\x{code:02x}" for code in range(128, 160)},
    **{
        code: f"\\u{code:04x}"
        for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    },
}


def visible(text: str) -> str:
    """The text with control characters as `cat -v` shows them, and those that turn the direction of writing
    as escapes: an agent's output must not command the reader's terminal, nor look like what it is not."""
    return text.translate(_SHOWN)


def cells(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(_cell(c) for c in text)


def _cell(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int) -> str:
    """The text in at most `width` columns, with `..` where something is left out."""
    if cells(text) <= width:
        return text
    kept, used, room = "", 0, max(0, width - 2)
    for char in text:
        if used + _cell(char) > room:
            break
        kept += char
        used += _cell(char)
    return (kept + "..")[: max(0, width)]


def fit_id(text: str, width: int) -> str:
    """Fit as `fit` does, but cut in the middle: ids often begin alike, and differ at their end."""
    if cells(text) <= width or width < 8 or not text.isascii():
        return fit(text, width)
    end = (width - 2) // 2
    return f"{text[: width - 2 - end]}..{text[-end:]}"


def pad(text: str, width: int, right: bool = False) -> str:
    """The text in exactly `width` columns."""
    short = fit(text, width)
    gap = " " * (width - cells(short))
    return gap + short if right else short + gap


_GAP = 2
_NARROWEST = 8


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
    longest: int = 300,
    style: Callable[[str, str], str] | None = None,
    optional: Sequence[str] = (),
) -> str:
    """Columns as wide as what is in them. Those named in `right` are aligned to the right.

    None is shown as `-`. With a `width`, and at a terminal, columns named in `optional` are left out, the
    first one first, and then the widest are cut, until each line fits. A cell has at most `longest`
    characters. Lines have no trailing spaces; no newline at the end. `style` tells the style of a cell by its
    column and text.
    """
    lines = [list(head), *([_text(cell, longest) for cell in row] for row in rows)]
    widths = [max(cells(line[column]) for line in lines) for column in range(len(head))]
    room = _room(width)
    if room is not None:
        for name in optional:
            if sum(widths) + _GAP * (len(widths) - 1) > room:
                column = lines[0].index(name)
                lines = [[*line[:column], *line[column + 1 :]] for line in lines]
                del widths[column]
        widths = _narrowed(widths, room - _GAP * (len(widths) - 1))
    to_right = [name in right for name in lines[0]]
    drawn = [_line(lines[0], widths, to_right)]
    for line in lines[1:]:
        styles = [style(name, cell) if style else "" for name, cell in zip(lines[0], line, strict=True)]
        drawn.append(_line(line, widths, to_right, styles))
    return "\n".join(drawn)


def _room(width: int | None) -> int | None:
    """Return the number of columns that a line may take. A terminal cuts or folds longer ones."""
    if not sys.stdout.isatty():
        return width
    terminal = shutil.get_terminal_size().columns
    return terminal if width is None else min(width, terminal)


def pairs(rows: Sequence[tuple[str, object]], indent: str = "") -> str:
    """`name  value` lines, the values aligned."""
    widest = max((cells(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{pad(name, widest)}  {_text(value)}" for name, value in rows)


def _text(cell: object, longest: int = 300) -> str:
    return "-" if cell is None else clean(str(cell), longest)


def _line(
    line: Sequence[str], widths: Sequence[int], to_right: Sequence[bool], styles: Sequence[str] = ()
) -> str:
    parts = [pad(text, width, right) for text, width, right in zip(line, widths, to_right, strict=True)]
    parts[-1] = parts[-1].rstrip()
    if any(styles):
        parts = [painted(part, style) for part, style in zip(parts, styles, strict=True)]
    return (" " * _GAP).join(parts).rstrip()


_CODES = {"good": 32, "bad": 31, "warn": 33, "busy": 36}
"""Style -> the colour that terminals give it."""


def painted(text: str, style: str) -> str:
    """The text in the colour of a style, for a terminal; as it is if it has none."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and text.strip() else text


def outcome_style(outcome: str) -> str:
    """The style of an outcome as it is told to people: `pass`, `fail (0.5)`, `broken: model`."""
    return {"pass": "good", "fail": "bad", "broken": "warn"}.get(outcome.partition(" ")[0].rstrip(":"), "")


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Take from the widest, one column at a time, so that short ones stay whole."""
    widths = list(widths)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widest = widths.index(max(widths))
        second = max((w for w in widths if w < widths[widest]), default=_NARROWEST)
        over = sum(widths) - room
        widths[widest] = max(widths[widest] - over, min(second, widths[widest] - 1), _NARROWEST)
    return widths


def user_of(by: str) -> str:
    """Return the user of `user@host`: a report for others does not name the computer."""
    return by.partition("@")[0]


def url_part(text: str) -> str:
    """Return a part of a dashboard's URL. Browsers take `.` and `..` for folders: `~` stands before them."""
    return quote(re.sub(r"^(~*\.\.?)\Z", r"~\1", text), safe="!~*'()")
