"""What a benchmark found, as data and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """A figure and where it should be. `sign` says on which side."""

    value: float
    aim: float
    sign: str

    @property
    def met(self) -> bool:
        match self.sign:
            case "<":
                return self.value < self.aim
            case "<=":
                return self.value <= self.aim
            case _:
                return self.value >= self.aim

    def data(self) -> Figures:
        return {"value": self.value, "aim": self.aim, "met": self.met}


def below(value: float, aim: float) -> Aim:
    return Aim(value, aim, "<")


def at_most(value: float, aim: float) -> Aim:
    return Aim(value, aim, "<=")


def at_least(value: float, aim: float) -> Aim:
    return Aim(value, aim, ">=")


@dataclass(frozen=True)
class Result:
    """Ours in `figures`, others' in `against`; a peer that could not run has an `error` there."""

    bench: str
    figures: Figures
    aims: dict[str, Aim]
    against: Figures = field(default_factory=dict[str, Any])

    def data(self) -> Figures:
        return {
            "bench": self.bench,
            "figures": self.figures,
            "against": self.against,
            "aims": {name: aim.data() for name, aim in self.aims.items()},
        }


def table(title: str, result: Result) -> str:
    """Sections of aligned rows: aims, figures, the others."""
    aims = [
        (name, f"{shown(aim.value)}   aim {aim.sign} {shown(aim.aim)}   {'met' if aim.met else 'MISSED'}")
        for name, aim in result.aims.items()
    ]
    sections = (("aims", aims), ("figures", _rows(result.figures)), ("against", _rows(result.against)))
    lines = [title]
    for name, rows in sections:
        if rows:
            width = max(len(label) for label, _ in rows)
            lines += [f"  {name}", *(f"    {label:<{width}}  {text}" for label, text in rows)]
    return "\n".join(lines) + "\n"


def _rows(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, shown(value)))
    return rows


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(shown, value))
    return str(value)


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits: more would only be noise."""
    return float(f"{value:.{digits}g}")
