"""What spot machines cost in the end: their place takes some back, and the work on those is lost."""

from __future__ import annotations

from collections.abc import Mapping

from evalfleet.model import Offer, Plan

EVICTED_EVERY_H = 20.0
"""How long a spot machine lasts on average, where nobody knows better."""
PLACEMENT: Mapping[str, float] = {"high": 0.5, "medium": 1.0, "low": 3.0}
"""By the cloud's placement score: so many times as often as usual machines are taken back. It is a guess, as
clouds do not say how often that is."""
LOST_H = 0.5
"""An eviction loses half a task, and the boot and set-up of another machine: about so many hours, before any
task has told more."""


def evictions_an_hour(plan: Plan, offer: Offer) -> float | None:
    """How often machines of the offer are taken back, as earlier runs tell, else the cloud. None: neither
    does."""
    if not offer.spot:
        return 0.0
    learned = plan.evictions_an_hour.get(offer.key)
    if learned is not None or offer.placement not in PLACEMENT:
        return learned
    return PLACEMENT[offer.placement] / EVICTED_EVERY_H


def expected_usd(plan: Plan, offer: Offer, lost_h: float = LOST_H) -> float:
    """What an hour of work costs there, if each eviction loses so many hours."""
    rate = evictions_an_hour(plan, offer)
    usual = 1 / EVICTED_EVERY_H if offer.spot else 0.0
    return offer.usd_per_hour * (1 + (usual if rate is None else rate) * lost_h)
