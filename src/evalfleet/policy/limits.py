"""Money and time: what a run may use up, held also if the controller dies.

Every machine carries an expiry that its place enforces, and the budget is reserved up to it. So the
sum of what has been paid and of what all machines can still cost never passes the budget, whoever
crashes: there is no moment at which spending must be noticed in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalfleet.cost import affordable_s, reserved_usd
from evalfleet.events import Event, MachineCondemned, MachineExtended, StopRequested
from evalfleet.model import Cause, Micros, Offer, Task, after, seconds_between
from evalfleet.state import MachineState, RunState

from .allowances import free_usd, kept_back_usd

LAST_CALL_S = 0.05
"""A machine whose remaining time is this short, beside what its deletion takes, is ended."""

SHARED_LEASE_S = 3600.0

PLAN_MARGIN = 1.5
"""A machine whose life cannot be extended is asked for so many times as long as is planned."""
TELLING_PROOFS = 10
"""So many tasks that ended tell how long the others will take."""


def stop_in_time(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    limit = state.limits.max_duration_s
    if limit is None or now < after(state.started_at, limit):
        return []
    if state.stop is not None and not state.stop.drain:
        return []
    return [StopRequested("time", f"the time limit of {limit:g} s is over")]


def grant_s(state: RunState, now: Micros, offer: Offer, sharers: int) -> float:
    """How long a new machine may live from now, if `sharers` of its kind share the free money.

    It is 0 if not even one machine could be paid for as long as its place may let it run. A machine that
    waits in a queue gets this time from its start on: what it can cost is the same.
    """
    seconds = min(first_lease_s(state, offer), _time_left_s(state, now))
    if state.limits.budget_usd is None:
        return seconds
    life = offer.life
    least_s = life.least_life_s if life.extendable else max(life.least_life_s, any_task_s(state, offer))
    paid_s = affordable_s(offer, _free_for_machines(state) / _payable(state, offer, sharers, least_s))
    return min(seconds, paid_s) if paid_s >= least_s else 0.0


def _payable(state: RunState, offer: Offer, sharers: int, least_s: float) -> int:
    """How many such machines the free money pays for, if each has the shortest life that it can have."""
    least_usd = reserved_usd(offer, 0, after(0, least_s))
    many = sharers if least_usd <= 0 else min(sharers, int(_free_for_machines(state) / least_usd))
    return max(1, many)


def first_lease_s(state: RunState, offer: Offer) -> float:
    """What a new machine is given to live.

    If no more can be had later, it must do for any task, and is as long as the rest of the run is planned to
    take, with a margin, where that is known: a shorter one would mean another machine in mid-run, and a
    longer one money that is held, or lost if nobody is there to delete the machine.
    """
    lease_s = _lease_s(state)
    if not offer.life.extendable:
        planned_s, needed_s = _planned_s(state), any_task_s(state, offer)
        lease_s = max(lease_s, needed_s) if planned_s is None else needed_s + PLAN_MARGIN * planned_s
    return lease_s if offer.life.max_life_s is None else min(lease_s, offer.life.max_life_s)


def _planned_s(state: RunState) -> float | None:
    """How long the tasks that are left will keep the workers busy, as tasks took here, else in earlier runs.

    None if neither tells.
    """
    if state.proofs >= TELLING_PROOFS:
        mean_s = state.proof_seconds / state.proofs
    elif state.weighed:
        mean_s = state.weights_s / state.weighed
    else:
        return None
    left = state.counts["waiting"] + state.counts["running"]
    return mean_s * math.ceil(left / max(1, state.limits.workers * state.plan.slots))


def worthwhile(state: RunState, offer: Offer, seconds: float) -> bool:
    """Is a machine that may live for so long worth asking for?

    One whose life has an end must have time for any of the tasks after the slowest boot: so a machine that is
    let go because nothing fits any more was of use before, and asking for the next one leads somewhere.
    """
    life_s = offer.life.max_life_s if offer.life.extendable else seconds
    enough = life_s is None or life_s >= any_task_s(state, offer)
    return enough and seconds >= 2 * offer.life.teardown_s + LAST_CALL_S


def any_task_s(state: RunState, offer: Offer) -> float:
    """How long a machine must live to be of use for any task, however slowly it boots."""
    limits = state.limits
    return limits.boot_limit_s(offer) + state.longest_s + limits.grace_s + offer.life.teardown_s + LAST_CALL_S


def outlives(state: RunState, now: Micros, task: Task, machine: MachineState) -> bool:
    """Could the task still run when the machine ends, whose life cannot be made long enough?"""
    offer = machine.offer
    if not offer.bounded:
        return False
    end = machine.expires_at
    if offer.life.extendable and offer.life.max_life_s is not None:
        end = after(machine.billed_at, offer.life.max_life_s)
    return after(now, task.limit_s + state.limits.grace_s) > after(end, -offer.life.teardown_s)


def renew_or_end(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Extend the machine whose time is nearly up, as far as money and time allow, or end it."""
    if not state.deadlines or state.deadlines[0].at > now:
        return []
    machine = state.machines[state.deadlines[0].machine]
    if now >= machine.ends_at:  # nobody was here, so its place has ended it, and it is paid until then
        return [MachineCondemned(machine.id, "it had expired", Cause.MACHINE_LOST)]
    expires_at = max(machine.expires_at, _renewed(state, now, machine))
    if seconds_between(now, expires_at) <= machine.offer.life.teardown_s + LAST_CALL_S:
        return [MachineCondemned(machine.id, _why_ended(state, now, machine))]
    return [MachineExtended(machine.id, expires_at)]


def _renewed(state: RunState, now: Micros, machine: MachineState) -> Micros:
    offer = machine.offer
    if not offer.life.extendable:
        return machine.expires_at
    wanted = _affordable(state, machine, after(now, min(_lease_s(state), _time_left_s(state, now))))
    if offer.life.max_life_s is not None:
        wanted = min(wanted, after(machine.billed_at, offer.life.max_life_s))
    # a switch that is set anew cannot act sooner: better the time that it has
    return wanted if seconds_between(now, wanted) >= offer.life.least_life_s else machine.expires_at


def _affordable(state: RunState, machine: MachineState, wanted: Micros) -> Micros:
    if state.limits.budget_usd is None:
        return wanted
    held = reserved_usd(machine.offer, machine.billed_at, machine.ends_at)
    share = held + max(0.0, _free_for_machines(state)) / max(1, state.live)
    affordable = affordable_s(machine.offer, share)
    return min(wanted, after(machine.billed_at, min(affordable, 1e9)))


def never_long_enough(state: RunState, offer: Offer) -> bool:
    """Do machines of this offer live too short for the longest task, whatever time and money there is?"""
    return not worthwhile(state, offer, first_lease_s(state, offer))


def time_is_short(state: RunState, now: Micros, offer: Offer) -> bool:
    """Is it the run's time limit that leaves a new machine too little time?"""
    seconds = min(first_lease_s(state, offer), _time_left_s(state, now))
    return not worthwhile(state, offer, seconds) and worthwhile(state, offer, first_lease_s(state, offer))


def _time_left_s(state: RunState, now: Micros) -> float:
    if state.limits.max_duration_s is None:
        return math.inf
    return seconds_between(now, after(state.started_at, state.limits.max_duration_s))


def _free_for_machines(state: RunState) -> float:
    return free_usd(state) - kept_back_usd(state)


def _lease_s(state: RunState) -> float:
    """Where models are paid of the same budget, machines do not hold hours of it that they may not need."""
    shared = state.plan.metering is not None and state.limits.budget_usd is not None
    return min(state.limits.lease_s, SHARED_LEASE_S) if shared else state.limits.lease_s


def _why_ended(state: RunState, now: Micros, machine: MachineState) -> str:
    if _time_left_s(state, now) < state.limits.lease_s:
        return "the run's time limit is near"
    longest_s = machine.offer.life.max_life_s
    at_most = longest_s is not None and machine.expires_at >= after(machine.billed_at, longest_s)
    if at_most or not machine.offer.life.extendable:
        return "its place lets it live no longer"
    return "the budget pays it no longer"
