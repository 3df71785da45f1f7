"""What clients ask of any cloud, and what they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One request, its token checked. `base`: scheme and host as the client wrote them."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Any = field(default_factory=dict[str, Any])
    base: str = "https://localhost"

    def asks(self, option: str) -> str:
        """A query option, whatever its case; empty if absent."""
        wanted = option.lower()
        return next((value for key, value in self.query.items() if key.lower() == wanted), "")


@dataclass(frozen=True)
class Answer:
    """What is answered: JSON, a text, or the bytes of a file."""

    status: int = 200
    body: Json | list[Json] | str | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
