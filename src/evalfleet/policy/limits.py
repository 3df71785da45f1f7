"""Money and time: what a run may use up, held also if the controller dies.

Every machine carries an expiry that its place enforces, and the budget is reserved up to it. So the
sum of what has been paid and of what all machines can still cost never passes the budget, whoever
crashes: there is no moment at which spending must be noticed in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from evalfleet.cost import affordable_s, reserved_usd
from evalfleet.events import Event, MachineCondemned, MachineExtended, StopRequested
from evalfleet.model import Cause, Micros, Offer, after, seconds_between
from evalfleet.state import MachineState, RunState

LAST_CALL_S = 0.05
"""A machine whose remaining time is this short, beside what its deletion takes, is ended."""


def stop_in_time(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    limit = state.limits.max_duration_s
    if limit is None or now < after(state.started_at, limit):
        return []
    if state.stop is not None and not state.stop.drain:
        return []
    return [StopRequested("time", f"the time limit of {limit:g} s is over")]


def grant_s(state: RunState, now: Micros, offer: Offer, sharers: int) -> float:
    """How long a new machine may live from now, if `sharers` of its kind share the free money.

    Nothing, if not even one could be paid for as long as its place may let it run.
    """
    seconds = min(state.limits.lease_s, _time_left_s(state, now))
    if state.limits.budget_usd is None:
        return seconds
    paid_s = affordable_s(offer, _free_usd(state) / _payable(state, offer, sharers))
    return min(seconds, paid_s) if paid_s >= offer.least_life_s else 0.0


def _payable(state: RunState, offer: Offer, sharers: int) -> int:
    """For how many of them the free money lasts, each for the shortest life that it can have."""
    least_usd = reserved_usd(offer, 0, after(0, offer.least_life_s))
    many = sharers if least_usd <= 0 else min(sharers, int(_free_usd(state) / least_usd))
    return max(1, many)


def worthwhile(offer: Offer, seconds: float) -> bool:
    """Is a machine that may live for so long worth asking for?"""
    return seconds >= 2 * offer.teardown_s + LAST_CALL_S


def renew_or_end(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Extend the machine whose time is nearly up, as far as money and time allow, or end it."""
    if not state.deadlines or state.deadlines[0].at > now:
        return []
    machine = state.machines[state.deadlines[0].machine]
    if now >= machine.ends_at:  # nobody was here, so its place has ended it, and it is paid until then
        return [MachineCondemned(machine.id, "it had expired", Cause.MACHINE_LOST)]
    expires_at = max(machine.expires_at, _renewed(state, now, machine))
    if seconds_between(now, expires_at) <= machine.offer.teardown_s + LAST_CALL_S:
        return [MachineCondemned(machine.id, _why_ended(state, now))]
    return [MachineExtended(machine.id, expires_at)]


def _renewed(state: RunState, now: Micros, machine: MachineState) -> Micros:
    wanted = _affordable(state, machine, after(now, min(state.limits.lease_s, _time_left_s(state, now))))
    # a switch that is set anew cannot act sooner: better the time that it has
    return wanted if seconds_between(now, wanted) >= machine.offer.least_life_s else machine.expires_at


def _affordable(state: RunState, machine: MachineState, wanted: Micros) -> Micros:
    if state.limits.budget_usd is None:
        return wanted
    held = reserved_usd(machine.offer, machine.requested_at, machine.ends_at)
    share = held + max(0.0, _free_usd(state)) / max(1, state.live)
    affordable = affordable_s(machine.offer, share)
    return min(wanted, after(machine.requested_at, min(affordable, 1e9)))


def _time_left_s(state: RunState, now: Micros) -> float:
    if state.limits.max_duration_s is None:
        return state.limits.lease_s
    return seconds_between(now, after(state.started_at, state.limits.max_duration_s))


def _free_usd(state: RunState) -> float:
    return (state.limits.budget_usd or 0.0) - state.closed_usd - state.reserved_usd


def _why_ended(state: RunState, now: Micros) -> str:
    if _time_left_s(state, now) < state.limits.lease_s:
        return "the run's time limit is near"
    return "the budget pays it no longer"
