"""How fast a run goes, and how many machines are worth having at that pace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from evalfleet.model import Micros, Offer, after, seconds_between
from evalfleet.state import RunState

from .allowances import free_usd

TELLING_PROOFS = 5
"""So many tasks that ended tell more of the others than earlier runs do."""
MINUTE_S = 62.0
"""As places count it, with what calls may take to arrive there."""
MARGIN = 0.85
"""Machines are chosen to be done in this part of the time, and for this part of the money, that there is."""


def task_s(state: RunState) -> float | None:
    """How long a task takes on average, as this run tells, else earlier ones. None: neither does."""
    if state.proofs >= TELLING_PROOFS or (state.proofs and not state.weighed):
        return state.proof_seconds / state.proofs
    return state.weights_s / state.weighed if state.weighed else None


def machine_s(state: RunState) -> float | None:
    """Return how long a machine of this run took until it was ready. None: none is ready yet."""
    return state.boot_seconds / state.boots if state.boots else None


def turn_at(state: RunState, area: str) -> Micros:
    """When its place lets us ask for another machine there; 0: whenever we like."""
    asked = state.asked_at.get(area)
    return _next_turn(asked) if asked else 0


def _next_turn(asked: deque[Micros]) -> Micros:
    return after(asked[0], MINUTE_S) if len(asked) == asked.maxlen else 0


def turns(state: RunState, now: Micros, offers: Iterable[Offer]) -> Iterator[Micros]:
    """When its place lets us ask for a machine of each of these offers, one after another."""
    asked = {area: asked.copy() for area, asked in state.asked_at.items()}
    for offer in offers:
        if offer.creates_a_minute is None:
            yield now
            continue
        area = asked.setdefault(offer.area_key, deque(maxlen=offer.creates_a_minute))
        area.append(max(now, _next_turn(area)))
        yield area[-1]


def comes_too_late(state: RunState, now: Micros) -> bool:
    """Would a machine that is asked for now finish no task before the others have finished all?

    That is an estimate, by the mean of all tasks: one that waits because another takes much longer than that
    gets its machine after all, once the fleet has been as it is for as long as a machine and a task take.
    """
    working, coming = len(state.ready) - len(state.silent), len(state.coming)
    if working <= 0:
        return False
    task, boot = task_s(state), machine_s(state)
    if task is None or boot is None or now >= after(state.fleet_changed_at, boot + task):
        return False
    work_s = task * (state.waiting + state.running / 2) / state.plan.slots
    others_end_s = (work_s + coming * boot) / (working + coming)
    return boot + task > others_end_s


def reconsidered_at(state: RunState) -> Micros | None:
    """When a machine that would have come too late is asked for nevertheless."""
    task, boot = task_s(state), machine_s(state)
    return None if task is None or boot is None else after(state.fleet_changed_at, boot + task)


def workers(state: RunState, now: Micros, offers: Sequence[Offer]) -> int:
    """How many machines may work at once: as many as somebody said, or, where that is left to us, as few as
    meet the deadline, or as many as the budget pays. Until a task tells how long it takes, that is one.
    """
    limits = state.limits
    if not limits.auto:
        return limits.workers
    task, boot = task_s(state), machine_s(state) or 0.0
    if task is None:
        return 1
    work_s = task * (state.waiting + state.running / 2) / state.plan.slots
    most = min(limits.workers, _payable(state, offers, work_s, boot + task))
    if limits.deadline_s is None:
        return most
    left_s = MARGIN * seconds_between(now, after(state.started_at, limits.deadline_s))
    # the last task of a machine ends early or late by half a task, and a new one works only once it is there
    usable_s = left_s - task / 2
    missing_s = work_s - state.live * usable_s
    if missing_s <= 0:
        return min(most, max(1, math.ceil(work_s / usable_s)))
    boot += _turns_s(offers, missing_s / max(task, usable_s - boot)) / 2  # of all of them, on average
    if usable_s <= boot:
        return most
    return min(most, state.live + math.ceil(missing_s / (usable_s - boot)))


def _turns_s(offers: Sequence[Offer], machines: float) -> float:
    """How long the last of so many machines waits until its place lets us ask for it."""
    most = next((offer.creates_a_minute for offer in offers), None)
    return 0.0 if most is None else MINUTE_S * (math.ceil(machines / most) - 1)


def _payable(state: RunState, offers: Sequence[Offer], work_s: float, each_s: float) -> int:
    """How many machines the budget pays, if each costs its boot and half a task at either end beside its
    share of the work."""
    price = min((offer.cost.usd_per_hour for offer in offers), default=0.0) / 3600
    if state.limits.budget_usd is None or price <= 0:
        return state.limits.workers
    spare_s = MARGIN * (free_usd(state) + state.spend.machines.reserved) / price - work_s
    return max(1, int(spare_s / each_s))
