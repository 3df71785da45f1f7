"""The dead-man switch: a daily time, in UTC, at which Azure deallocates a machine. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

LEAD_S = 31 * 60.0
"""A schedule that is set less than half an hour ahead first acts on the next day."""
FARTHEST_S = 23.5 * 3600.0
"""A time further ahead than a day would come a day early. It is moved on while the machine is in use."""
STOPPING_S = 120.0
"""How long Azure may take to stop it, during which it is billed."""
SHORTEST_S = LEAD_S + 60.0 + STOPPING_S
"""With less time left, a switch that is set now acts too late."""
LEAST_LIFE_S = 40 * 60.0
"""The least that a new machine is given: SHORTEST_S, and some minutes until its deployment has begun."""


def shutdown_at(now: float, expires_s: float) -> float:
    """When a machine with so long to live is stopped: at its expiry, as far as a daily time can say."""
    at = min(now + expires_s, now + FARTHEST_S)
    if at < now + LEAD_S:
        return _minute(now + LEAD_S + 59.0)
    return _minute(at)


def _minute(at: float) -> float:
    return at - at % 60.0


def daily(at: float) -> str:
    """The time of day as the schedule has it: `1930`."""
    return datetime.fromtimestamp(at, UTC).strftime("%H%M")
