"""JSON as Azure speaks it: objects and lists that may be missing."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]


def table(value: object) -> Json:
    """An object; an empty one if there is none."""
    return cast("Json", value) if isinstance(value, dict) else {}


def rows(value: object) -> list[Json]:
    return [table(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


def tags_in(shown: Json) -> dict[str, str]:
    """Names in lower case: Azure does not tell them apart by case, and may change it."""
    return {key.lower(): str(value) for key, value in table(shown.get("tags")).items()}
