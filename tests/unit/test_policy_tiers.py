"""Several places: their order, and what becomes of one that keeps failing."""

from __future__ import annotations

from evalfleet.model import Offer, Plan
from evalfleet.policy.tiers import in_order

DEAR, CHEAP, FIRST = Offer("a", "large", "", 3.0), Offer("b", "small", "", 1.0), Offer("a", "small", "", 2.0)


def test_offers_come_in_the_order_of_their_places_then_by_price_unless_they_are_mixed() -> None:
    ordered = Plan("r", "b", ("a", "b"), ordered=True)
    assert in_order(ordered, [CHEAP, DEAR, FIRST]) == [FIRST, DEAR, CHEAP]
    assert in_order(Plan("r", "b", ("a", "b")), [DEAR, CHEAP, FIRST]) == [CHEAP, FIRST, DEAR]
