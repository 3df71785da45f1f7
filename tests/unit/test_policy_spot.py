"""Which spot machines are taken first: the cloud's word of them, and what earlier runs lost there."""

from __future__ import annotations

from msgspec import structs

from evalfleet.model import Offer, Plan
from evalfleet.policy.spot import EVICTED_EVERY_H, evictions_an_hour, expected_usd
from evalfleet.policy.tiers import in_order

EAST = Offer("cloud", "D4", "east", usd_per_hour=0.100, spot=True)
WEST = Offer("cloud", "D4", "west", usd_per_hour=0.103, spot=True)
DEAR = Offer("cloud", "D4", "east", usd_per_hour=0.36)
PLAN = Plan("r", "b", ("cloud",))


def scored(offer: Offer, placement: str) -> Offer:
    return structs.replace(offer, placement=placement)


def test_of_spot_offers_at_nearly_one_price_the_one_that_is_likely_to_stay_goes_first() -> None:
    assert in_order(PLAN, [DEAR, WEST, EAST]) == [EAST, WEST, DEAR], "by price, where nobody tells more"
    low, high = scored(EAST, "low"), scored(WEST, "high")
    assert in_order(PLAN, [low, high, DEAR]) == [high, low, DEAR]


def test_a_much_cheaper_one_is_taken_also_if_it_is_unlikely_to_stay() -> None:
    cheap = structs.replace(scored(EAST, "low"), usd_per_hour=0.05)
    assert in_order(PLAN, [scored(WEST, "high"), cheap]) == [cheap, scored(WEST, "high")]


def test_what_earlier_runs_saw_counts_more_than_the_clouds_word() -> None:
    plan = structs.replace(PLAN, evictions_an_hour={EAST.key: 2.0})
    assert evictions_an_hour(plan, scored(EAST, "high")) == 2.0
    assert evictions_an_hour(plan, scored(WEST, "low")) == 3 / EVICTED_EVERY_H
    assert evictions_an_hour(plan, WEST) is None
    assert evictions_an_hour(plan, DEAR) == 0.0
    assert in_order(plan, [scored(EAST, "high"), WEST]) == [WEST, scored(EAST, "high")]


def test_a_score_that_nobody_knows_changes_nothing() -> None:
    strange = scored(EAST, "datanotfoundorstale")
    assert expected_usd(PLAN, strange) == expected_usd(PLAN, EAST)
