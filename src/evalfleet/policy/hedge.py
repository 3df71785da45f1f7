"""Hedging: one or two machines more are asked for while others take much longer to come than is usual.

Machines are hedged, never scores. Whichever is ready first works, and one too many is let go before it
has begun a task. An attempt is never raced by another one: whichever ended first would bias the scores.
"""

from __future__ import annotations

from itertools import islice

from evalfleet.model import Micros, after
from evalfleet.state import RunState

from .pace import machine_s

MOST = 2
SLOW = 2.0
"""A machine that takes so many times as long as is usual is slow."""
LEAST_S = 30.0
"""One is not slow before it has taken so much longer than is usual."""


def allowed(state: RunState, now: Micros) -> int:
    """How many machines there may be at once: the workers, and one for each slow machine while any of those
    is missing."""
    hedged = len(state.ready) < state.limits.workers and sum(at <= now for at in slow_at(state))
    return state.limits.workers + hedged


def slow_at(state: RunState) -> list[Micros]:
    """When the machines that were asked for first, and are not there yet, count as slow; of two at most.

    Only of machines that are made for money, and where any machine does for any task.
    """
    usual_s = machine_s(state)
    if usual_s is None or not state.coming or state.dealt or len(state.kinds) > 1:
        return []
    first = (state.machines[machine] for machine in islice(state.coming, MOST))
    slow_s = max(SLOW * usual_s, usual_s + LEAST_S)
    return [
        after(each.billed_at, slow_s) for each in first if each.offer.usd_per_hour > 0 and not each.unstarted
    ]
