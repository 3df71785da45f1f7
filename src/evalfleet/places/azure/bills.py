"""Exports of Azure Cost Management: what they say of each resource and day. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime

from evalfleet.ports import BillLine

COST = ("costinbillingcurrency", "pretaxcost", "cost")
CURRENCY = ("billingcurrency", "billingcurrencycode", "currency")
DAY = ("date", "usagedatetime", "usagedate")
ACCOUNT = ("subscriptionid", "subscriptionguid")


class AzureBills:
    """Cost details as Cost Management exports them. Their columns differ a little between agreements."""

    source = "Azure Cost Management"

    def reads(self, columns: Collection[str]) -> bool:
        return "metercategory" in columns and any(name in columns for name in COST)

    def line(self, row: Mapping[str, object]) -> BillLine:
        """What one row says; its names are in lower case. Raises ValueError, KeyError."""
        text = {name: str(value or "") for name, value in row.items()}
        return BillLine(
            day=_day(_first(text, DAY)),
            amount=float(_first(text, COST) or 0),
            currency=_first(text, CURRENCY).upper(),
            account=_first(text, ACCOUNT),
            what=text.get("metercategory", ""),
            tags=_tags(text.get("tags", "")),
            reserved=text.get("pricingmodel", "").lower() in ("reservation", "savingsplan"),
        )


def _first(row: Mapping[str, str], names: Collection[str]) -> str:
    return next((row[name] for name in names if row.get(name)), "")


def _day(text: str) -> str:
    """In exports of some agreements the month comes first."""
    form = "%m/%d/%Y" if "/" in text else "%Y-%m-%d"
    return datetime.strptime(text[:10], form).date().isoformat()  # noqa: DTZ007 a day has no time zone


def _tags(text: str) -> dict[str, str]:
    """JSON, of which some exports leave out the braces."""
    text = text.strip()
    try:
        found = json.loads(text if text.startswith("{") else f"{{{text}}}")
    except ValueError:
        return {}
    return {str(key).lower(): str(value) for key, value in found.items()}
