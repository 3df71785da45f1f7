"""List prices of places: which are in force in this home, and fetching newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalfleet.errors import RequestError
from evalfleet.planning.plugins import known, place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Priced, PriceTable


@dataclass(frozen=True)
class Listed:
    """The prices of one kind of place, and which of them (what, region) our places would use."""

    kind: str
    table: PriceTable
    wanted: frozenset[tuple[str, str]]


def prices() -> list[Listed]:
    """Of every kind of place that has prices. Nothing is asked."""
    home = Workspace.here().home
    return [
        Listed(name, kind.prices(home), frozenset(kind.wanted(_tables(name))))
        for name, kind in _kinds().items()
    ]


def update(today: str, source: str | None) -> None:
    """Raises PlaceError, RequestError; then the prices are what they were."""
    home = Workspace.here().home
    for name, kind in _kinds().items():
        kind.update_prices(home, _tables(name), source or kind.price_source, today)


def _kinds() -> dict[str, Priced]:
    found: dict[str, Priced] = {}
    for name in known("place"):
        try:
            kind: object = place_kind(name)
        except RequestError:
            continue  # a plug-in that cannot be imported has no prices, either
        if isinstance(kind, Priced):
            found[name] = kind
    return found


def _tables(kind: str) -> list[Mapping[str, Any]]:
    """The settings of our places of this kind."""
    places = Workspace.here().config.places
    return [table for name, table in places.items() if table.get("kind", name) == kind]
