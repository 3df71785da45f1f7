"""JSON as Azure speaks it: objects and lists that may be missing."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]


def table(value: object) -> Json:
    """An object; an empty one if there is none."""
    return cast("Json", value) if isinstance(value, dict) else {}


def rows(value: object) -> list[Json]:
    """The objects of a list; none if there is no list."""
    return [table(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


def tags_in(shown: Json) -> dict[str, str]:
    """The tags of a resource, with names in lower case: Azure ignores their case, and may change it."""
    return {key.lower(): str(value) for key, value in table(shown.get("tags")).items()}
