"""Model money and tokens: an attempt's allowance is fixed and reserved before the attempt begins.

The meter on a machine refuses calls beyond the allowance, whatever crashes. So spending passes the budget by
no more than the calls that are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from evalfleet.events import BudgetPassed, Event, StopRequested
from evalfleet.model import NO_LIMIT, Allowance, Micros, Offer, TaskId
from evalfleet.state import Purse, RunState

LOOK_AHEAD = 16
"""Number of due retries that are weighed against each other.

More than the attempts a task may have, so that not all of them can be machines it broke on.
"""
KNOWN_FROM = 5
"""After this many attempts their mean use is taken as known."""
USUAL = 2.0
"""An attempt usually needs at most this many times the mean."""
FOR_MODELS = 0.5
"""The part of the money left that attempts get where machines cost money, too."""
MORE = 1.5
"""A task whose attempt used up its allowance is tried again with at least this many times as much."""
LEAST = 0.1
"""The last attempt is not begun with less than this part of what it should have."""
NOTHING = Allowance(0.0, 0)
FEW_CALLS = 20
REPORTED_AT = (50, 80)
"""Percent of the budget."""


def free_usd(state: RunState) -> float:
    """Return what is neither paid nor reserved."""
    return (state.limits.budget_usd or 0.0) - state.spend.taken_usd


def kept_back_usd(state: RunState) -> float:
    """Return what machines must leave of the free money: one without money for its models is of no use."""
    if state.plan.metering is None or state.limits.budget_usd is None:
        return 0.0
    models, free = state.spend.models, free_usd(state)
    each = state.limits.task_budget_usd or _usual(state, models) or _share(state, models, free)
    idle = state.plan.slots * (state.live + 1) - state.running
    return max(0.0, min(each * max(1, idle), free / 2))


def allowance_for(state: RunState, task: TaskId | None = None) -> Allowance | None:
    """Return what a new attempt may use, or None if too little is free to begin one.

    `task`: one that was tried before. None is any task that waits for its first attempt.
    """
    limits, spend = state.limits, state.spend
    if state.plan.metering is None or (limits.budget_usd is None and limits.max_tokens is None):
        return NO_LIMIT
    before = NOTHING if task is None else _used_up(state, task)
    usd = tokens = None
    if limits.budget_usd is not None:
        usd = _allowed(state, spend.models, free_usd(state), limits.task_budget_usd, before.usd or 0.0)
        if usd is None:
            return None
    if limits.max_tokens is not None:
        free = limits.max_tokens - spend.tokens.taken
        some = _allowed(state, spend.tokens, free, None, before.tokens or 0)
        if some is None or some < 1:
            return None
        tokens = int(some)
    return Allowance(usd, tokens)


def _allowed(state: RunState, purse: Purse, free: float, fixed: float | None, used_up: float) -> float | None:
    """Return a share of what is left, or None if that is not free.

    `used_up`: an allowance of an earlier attempt that was too small.
    """
    usual = _usual(state, purse)
    least = fixed or max(_share(state, purse, free), usual)
    wanted = fixed or max(least, MORE * used_up)
    enough = min(wanted, max(usual or wanted / 2, MORE * used_up))
    if not state.running:  # alike for all tasks: one that fits no machine here must not hold up the others
        enough = LEAST * least
    return min(wanted, free) if free > 0 and free >= enough else None


def _share(state: RunState, purse: Purse, free: float) -> float:
    """Return an equal share of what is left for each attempt that can run at once."""
    most = at_once(state) or state.plan.slots * state.limits.workers
    sharers = max(1, min(most, state.plan.slots * state.limits.workers, state.waiting + state.running))
    halved = purse is state.spend.models and state.spend.machines.reserved > 0
    return (free + purse.reserved) * (FOR_MODELS if halved else 1.0) / sharers


def _usual(state: RunState, purse: Purse) -> float:
    """Return what an attempt usually needs at most, by this run or else by earlier ones. 0: unknown."""
    if state.spend.attempts >= KNOWN_FROM:
        return USUAL * purse.spent / state.spend.attempts
    return (state.plan.attempt_usd or 0.0) if purse is state.spend.models else 0.0


def needs_more(state: RunState, task: TaskId) -> bool:
    """Return True if an attempt at the task has used up its allowance."""
    return state.plan.metering is not None and _used_up(state, task) != NOTHING


def _used_up(state: RunState, task: TaskId) -> Allowance:
    """Return the largest allowance that an attempt at the task has used up."""
    usd, tokens = 0.0, 0
    for attempt in map(state.attempts.__getitem__, state.tasks[task].attempts):
        used, allowed = attempt.metered, attempt.allowance
        if used is None or not used.refused:
            continue
        if allowed.usd is not None and used.used_usd >= allowed.usd:
            usd = max(usd, allowed.usd)
        if allowed.tokens is not None and used.used_tokens >= allowed.tokens:
            tokens = max(tokens, allowed.tokens)
    return Allowance(usd, tokens)


def stop_without_money(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Stop once nothing runs and no attempt can be begun."""
    if state.stop is not None or state.plan.metering is None or not state.waiting:
        return []
    if state.running or state.uncollected:
        return []
    retries = (task for _, _, task in islice(state.retries, LOOK_AHEAD))
    fresh = [None] if state.waiting > len(state.retries) else []
    if any(allowance_for(state, task) is not None for task in (*fresh, *retries)):
        return []
    return [StopRequested("budget", _why_stopped(state), drain=True)]


def _why_stopped(state: RunState) -> str:
    limits, free = state.limits, free_usd(state)
    if limits.budget_usd is not None and (limits.max_tokens is None or free <= 0):
        left = f"${free:.2g} is left" if free > 0 else "nothing is left"
        return f"the budget of ${limits.budget_usd:g} does not pay another attempt: {left}"
    tokens = max(0, int((limits.max_tokens or 0) - state.spend.tokens.taken))
    return f"--max-tokens {limits.max_tokens} is too little for another attempt: {tokens} are left"


def report_share_spent(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Record when half of the budget is spent, and most of it."""
    budget = state.limits.budget_usd
    if state.plan.metering is None or budget is None:
        return []
    passed = max((mark for mark in REPORTED_AT if state.spend.spent_usd >= budget * mark / 100), default=0)
    return [BudgetPassed(passed)] if passed > state.spend.percent_reported else []


def at_once(state: RunState) -> int | None:
    """Return how many attempts may run at once, so that no machine is paid to wait for a model's limit."""
    metering, spend = state.plan.metering, state.spend
    if metering is None:
        return None
    most = [metering.concurrency] if metering.concurrency is not None else []
    minutes = spend.seconds / 60
    if spend.calls >= FEW_CALLS and minutes > 0:
        if metering.rpm is not None:
            most.append(int(metering.rpm * minutes / spend.calls))
        if metering.tpm is not None and spend.tokens.spent > 0:
            most.append(int(metering.tpm * minutes / spend.tokens.spent))
    return max(1, min(most)) if most else None
