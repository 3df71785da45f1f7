"""Machines that say nothing: whether it is they or our own network, and how long to wait."""

from __future__ import annotations

from evalfleet.model import Micros, after
from evalfleet.state import RunState


def silence_ends(state: RunState) -> Micros | None:
    """When the machine that was silent first is given up.

    Soon, if another one was heard after its silence was noticed. If none was, it is probably our own
    network: then we wait much longer, and once one machine answers again the others get time to do the same.
    """
    first = next(iter(state.silent), None)
    if first is None:
        return None
    limits, since = state.limits, state.machines[first].silent_since or 0
    at_last = after(since, limits.fleet_lost_s)
    if not proven_online(state, since):
        return at_last
    return min(at_last, after(max(since, state.stirred_at), limits.lost_s))


def proven_online(state: RunState, since: Micros) -> bool:
    """Was a machine heard after another one's silence, which began at `since`, was noticed?"""
    return state.heard_at > after(since, state.limits.silent_s)
