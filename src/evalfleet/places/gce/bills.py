"""Exports of Google Cloud's billing to BigQuery: what they say of each resource and day. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, cast

from evalfleet.ports import BillLine


class GoogleBills:
    """Rows of the (detailed) usage cost table: as JSON, or as CSV whose columns are called `project.id`.

    In CSV, `labels` and `credits` are JSON.
    """

    source = "Google Cloud billing"

    def reads(self, columns: Collection[str]) -> bool:
        return "usage_start_time" in columns and "cost" in columns

    def line(self, row: Mapping[str, object]) -> BillLine:
        """What one row says. Credits, such as those for committed use, are negative, and count."""
        credits = _list(row.get("credits"))
        credited = -sum(float(each.get("amount") or 0) for each in credits)
        kinds = {str(each.get("type", "")) for each in credits}
        labels = {str(each.get("key")): str(each.get("value")) for each in _list(row.get("labels"))}
        return BillLine(
            day=str(row["usage_start_time"])[:10],
            amount=float(str(row["cost"] or 0)) - credited,
            currency=str(row.get("currency") or "").upper(),
            account=str(_inner(row, "project", "id")),
            what=str(_inner(row, "sku", "description")),
            tags=labels,
            reserved=any(kind.startswith(("COMMITTED_USAGE", "FEE_UTILIZATION")) for kind in kinds),
            credited=credited,
        )


def _inner(row: Mapping[str, object], name: str, key: str) -> object:
    found = row.get(name)
    return (
        cast("dict[str, Any]", found).get(key, "")
        if isinstance(found, dict)
        else row.get(f"{name}.{key}", "")
    )


def _list(value: object) -> list[dict[str, Any]]:
    found = json.loads(value) if isinstance(value, str) and value.strip() else value
    return cast("list[dict[str, Any]]", found) if isinstance(found, list) else []
