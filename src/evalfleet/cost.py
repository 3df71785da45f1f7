"""What machines cost: billed by the step, from the request to the end. Pure."""

from __future__ import annotations

import math

from .model import Micros, Offer, after, seconds_between


def billed_usd(offer: Offer, start: Micros, end: Micros) -> float:
    """The price of one machine from `start` to `end`, each begun billing step counted whole, and never less
    than what its place bills for any machine."""
    least = after(start, offer.cost.least_billed_s) if end > start else start
    return _usd(offer, offer.cost.usd_per_hour, start, max(end, least))


def lingering_usd(offer: Offer) -> float:
    """The most that the idle node of one machine costs after the machine is gone."""
    return _usd(offer, offer.cost.idle_usd_per_hour, 0, after(0, offer.cost.linger_s))


def idle_usd(offer: Offer, start: Micros, end: Micros) -> float:
    """The same of one that is stopped: its disk and its address stay."""
    return _usd(offer, offer.cost.idle_usd_per_hour, start, end)


def _usd(offer: Offer, usd_per_hour: float, start: Micros, end: Micros) -> float:
    steps = math.ceil(max(0.0, seconds_between(start, end)) / offer.cost.billing_step_s)
    return steps * offer.cost.billing_step_s * usd_per_hour / 3600


def sweep_usd(offer: Offer) -> float:
    """What is kept back for a machine that nobody deletes at its expiry."""
    return offer.cost.sweep_s * offer.cost.idle_usd_per_hour / 3600


def reserved_usd(offer: Offer, start: Micros, end: Micros) -> float:
    """The most that a machine can cost whose place ends it at `end`, if it is swept in time."""
    return billed_usd(offer, start, end) + sweep_usd(offer)


def affordable_s(offer: Offer, usd: float) -> float:
    """For how long `usd` pays one machine, in whole billing steps."""
    if offer.cost.usd_per_hour <= 0:
        return math.inf
    step_usd = offer.cost.billing_step_s * offer.cost.usd_per_hour / 3600
    # a hair of tolerance, or 0.3 / 0.1 would buy two steps instead of three
    seconds = math.floor((usd - sweep_usd(offer)) / step_usd + 1e-9) * offer.cost.billing_step_s
    return seconds if seconds >= offer.cost.least_billed_s else 0.0
