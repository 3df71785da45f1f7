"""Aligned plain text tables, for `ls`, `show`, `logs` and `places`."""

from __future__ import annotations

from collections.abc import Sequence

from .format import cells, clean, pad

_GAP = 2
_NARROWEST = 8


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Columns as wide as what is in them. Those named in `right` are aligned to the right.

    None is shown as `-`. With a `width`, the widest columns are cut until each line fits. Lines have no
    trailing spaces; no newline at the end.
    """
    lines = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(cells(line[column]) for line in lines) for column in range(len(head))]
    if width is not None:
        widths = _narrowed(widths, width - _GAP * (len(head) - 1))
    to_right = [name in right for name in head]
    return "\n".join(_line(line, widths, to_right) for line in lines)


def pairs(rows: Sequence[tuple[str, object]], indent: str = "") -> str:
    """`name  value` lines, the values aligned."""
    widest = max((cells(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{pad(name, widest)}  {_text(value)}" for name, value in rows)


def _text(cell: object) -> str:
    return "-" if cell is None else clean(str(cell))


def _line(line: Sequence[str], widths: Sequence[int], to_right: Sequence[bool]) -> str:
    parts = [pad(text, width, right) for text, width, right in zip(line, widths, to_right, strict=True)]
    return (" " * _GAP).join(parts).rstrip()


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Take from the widest, one column at a time, so that short ones stay whole."""
    widths = list(widths)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widest = widths.index(max(widths))
        second = max((w for w in widths if w < widths[widest]), default=_NARROWEST)
        over = sum(widths) - room
        widths[widest] = max(widths[widest] - over, min(second, widths[widest] - 1), _NARROWEST)
    return widths
