"""Decisions: events that the controller makes true by writing them down."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalfleet.events import Event
from evalfleet.model import Micros, Offer, TaskId, after
from evalfleet.state import RunState

from . import allowances, finish, health, limits, pace, pool, scale, schedule, silence, tiers

Rule = Callable[[RunState, Micros, Sequence[Offer]], list[Event]]

RULES: tuple[Rule, ...] = (
    health.end_orphans,
    limits.stop_in_time,
    allowances.stop_without_money,
    allowances.report_share_spent,
    tiers.judge,
    health.stop_when_hopeless,
    health.heed_silence,
    health.mend,
    health.condemn_suspects,
    limits.renew_or_end,
    finish.wind_down,
    health.let_go_drained,
    health.replace,
    scale.trim,
    tiers.make_room,
    schedule.hand_out,
    schedule.let_go_short_lived,
    schedule.let_go_unfit,
    scale.request,
    scale.release,
    finish.finish,
)
"""In order of urgency. Each looks only at what the state has indexed for it."""

FOR_TROUBLE: frozenset[Rule] = frozenset(
    {
        health.end_orphans,
        allowances.stop_without_money,
        allowances.report_share_spent,
        tiers.judge,
        health.heed_silence,
        health.mend,
        health.condemn_suspects,
        finish.wind_down,
        health.let_go_drained,
        health.replace,
        tiers.make_room,
    }
)
"""Rules that find nothing while all is calm, as it nearly always is: then they need not be asked."""
CALM_RULES = tuple(rule for rule in RULES if rule not in FOR_TROUBLE)


def is_calm(state: RunState) -> bool:
    """Is nothing wrong with any machine or place, no model metered, and has nobody asked for anything?"""
    asked = state.stop or state.draining or state.replacing
    wrong = state.orphans or state.silent or state.unreachable or state.suspects or state.shaky
    return not (asked or wrong or state.plan.metering)


def decide(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """The next decisions, of one kind at a time: apply them and ask again until there are none."""
    if state.ended_at is not None:
        return []
    for rule in CALM_RULES if is_calm(state) else RULES:
        if decided := rule(state, now, offers):
            return decided
    return []


def next_deadline(state: RunState, now: Micros) -> Micros | None:
    """When to decide again if nothing happens before."""
    times: list[Micros] = []
    if state.deadlines:
        times.append(state.deadlines[0].at)
    if (given_up_at := silence.silence_ends(state)) is not None:
        times.append(given_up_at)
    if state.limits.max_duration_s is not None and state.stop is None:
        times.append(after(state.started_at, state.limits.max_duration_s))
    if state.waiting and state.stop is None:
        later = bisect_right(state.retries, (now, len(state.tasks), TaskId("")))
        if later < len(state.retries):
            times.append(state.retries[later][0])
        if state.blocks:
            times.extend(b.until for b in state.blocks.values() if not b.permanent and b.until > now)
        if state.shaky:
            times.extend(c.until for c in map(state.circuits.__getitem__, state.shaky) if c.until > now)
        if state.asked_at and state.live < state.limits.workers:
            times.extend(at for at in (pace.turn_at(state, area) for area in state.asked_at) if at > now)
        if state.live < state.limits.workers and pace.comes_too_late(state, now):
            times.append(pace.reconsidered_at(state) or now)
    return min(times, default=None)


@dataclass(frozen=True)
class Rules:
    """The decisions of one kind of stream, a run or a pool, and when there is nothing left to decide."""

    decide: Callable[[RunState, Micros, Sequence[Offer]], list[Event]]
    next_deadline: Callable[[RunState, Micros], Micros | None]
    settled: Callable[[RunState], bool]


def _ended(state: RunState) -> bool:
    return state.ended_at is not None


RUN = Rules(decide, next_deadline, _ended)
POOL = Rules(pool.decide, pool.next_deadline, pool.settled)
