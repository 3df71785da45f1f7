"""What would be billed: by machine, disk and address, to the second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MeterKind = Literal["vm", "disk", "address", "image"]


@dataclass
class Span:
    """One stretch that is billed. `end` None: it still is."""

    kind: MeterKind
    id: str
    sku: str
    location: str
    spot: bool
    start: float
    end: float | None = None

    def seconds(self, now: float, since: float = 0.0) -> float:
        """Billed so far; only what came after `since`."""
        return max(0.0, (now if self.end is None else self.end) - max(self.start, since))


class Meters:
    """`now` is given by who calls, since the meters have no clock."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[tuple[MeterKind, str], Span] = {}

    def start(
        self, kind: MeterKind, id: str, sku: str, location: str, now: float, *, spot: bool = False
    ) -> None:
        """Does nothing if it runs."""
        if (kind, id.lower()) not in self._open:
            span = self._open[kind, id.lower()] = Span(kind, id, sku, location, spot, now)
            self.spans.append(span)

    def stop(self, kind: MeterKind, id: str, now: float) -> None:
        """Does nothing if it does not run."""
        span = self._open.pop((kind, id.lower()), None)
        if span is not None:
            span.end = now

    def running(self) -> list[Span]:
        return list(self._open.values())

    def of(self, kind: MeterKind, id: str = "") -> Iterable[Span]:
        return [each for each in self.spans if each.kind == kind and id.lower() in ("", each.id.lower())]

    def seconds(self, kind: MeterKind, now: float, *, id: str = "", since: float = 0.0) -> float:
        return sum(span.seconds(now, since) for span in self.of(kind, id))

    def latest_s(self, kind: MeterKind, now: float, since: float) -> float:
        """How long after `since` the one was billed that was billed longest."""
        return max((span.seconds(now, since) for span in self.of(kind)), default=0.0)
