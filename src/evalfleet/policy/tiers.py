"""Several places: in which order they are asked for machines, and what becomes of one that keeps failing."""

from __future__ import annotations

from collections.abc import Iterable

from evalfleet.model import Offer, Plan


def in_order(plan: Plan, offers: Iterable[Offer]) -> list[Offer]:
    """The offers, the one to take first in front: by the order of their places if the plan has one, then by
    price. At equal prices the order of the place stands: it may know which region to try next."""
    if not plan.ordered:
        return sorted(offers, key=lambda offer: offer.usd_per_hour)
    tier = {place: n for n, place in enumerate(plan.places)}
    return sorted(offers, key=lambda offer: (tier.get(offer.place, len(tier)), offer.usd_per_hour))
