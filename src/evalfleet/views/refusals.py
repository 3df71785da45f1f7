"""Offers that refused machines, in words: what was tried, answered, and is not asked again. Pure."""

from __future__ import annotations

from typing import Any

from evalfleet.state import Refusal, RunState

from .format import clean
from .text_table import table

Document = dict[str, Any]


def refusals(state: RunState) -> list[Document]:
    """One entry an offer, in the order in which they first refused."""
    return [_entry(each) for each in state.refusals.values()]


def _entry(refusal: Refusal) -> Document:
    offer = refusal.offer
    return {
        "place": offer.place,
        "region": offer.region or None,
        "size": offer.size,
        "spot": offer.spot,
        "usd_per_hour": offer.usd_per_hour,
        "tries": refusal.tries,
        "answer": clean(refusal.detail),
        "blocked": _blocked(refusal),
        "permanent": refusal.permanent,
    }


def _blocked(refusal: Refusal) -> str:
    """How much of the place is not asked again."""
    offer = refusal.offer
    area = offer.area or offer.region
    match refusal.scope:
        case "place":
            return f"all of {offer.place}"
        case "region" if area:
            return area
        case "family" if offer.family:
            return " in ".join(word for word in (offer.family, area) if word)
        case _:
            return " in ".join(word for word in (offer.size, offer.region) if word)


def refusals_table(entries: list[Document]) -> str:
    """Empty if nothing was refused."""
    if not entries:
        return ""
    rows = [
        (
            " ".join(filter(None, (each["place"], each["region"], each["size"], "spot" * each["spot"]))),
            each["tries"],
            each["blocked"] + ("" if each["permanent"] else ", for a while"),
            each["answer"],
        )
        for each in entries
    ]
    return table(("offer", "tried", "not asked again", "answer"), rows, right=("tried",))
