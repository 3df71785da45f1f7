"""Model money and tokens: what an attempt's metered calls may use is granted before they use it.

Whatever crashes, the meter on a machine lets calls begin only within what was granted: spending passes the
budget by no more than the calls that are under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from evalfleet.events import AllowanceGranted, BudgetPassed, Event, StopRequested
from evalfleet.model import NO_LIMIT, Allowance, AttemptId, Micros, Offer
from evalfleet.state import Purse, RunState

LEARNED_FROM = 5
"""So many attempts must have told what they used before the next ones are given what most of them needed."""
MOST = 0.95
FIRST_SHARES = 8
"""Before that, each slot is given this part of its share at a time."""
LEAST = 0.1
"""An attempt is not begun with less than this part of what it should have."""
SMALLEST = 0.001
"""No allowance is smaller than this part of the whole: asking for more takes a moment, too."""
FEW_CALLS = 20
TOLD_AT = (50, 80)
"""Percent of the budget."""


def free_usd(state: RunState) -> float:
    """What neither machines nor model calls have used, or may use."""
    machines = state.closed_usd + state.reserved_usd
    return (state.limits.budget_usd or 0.0) - machines - state.model_usd.taken


def kept_back_usd(state: RunState) -> float:
    """What machines must leave of the free money: without any for its model, one is of no use."""
    if state.plan.metering is None or state.limits.budget_usd is None:
        return 0.0
    idle = state.plan.slots * (state.live + 1) - state.running
    return max(0.0, min(_step_usd(state) * max(1, idle), free_usd(state) / 2))


def first_allowance(state: RunState) -> Allowance | None:
    """What a new attempt's calls may use. None: too little is left to begin one."""
    if state.plan.metering is None:
        return NO_LIMIT
    usd = tokens = None
    if state.limits.budget_usd is not None:
        step, free = _step_usd(state), free_usd(state)
        if free < LEAST * step:
            return None
        usd = min(step, free)
    if state.limits.max_tokens is not None:
        step, free = _step_tokens(state), _free_tokens(state)
        if free < max(1.0, LEAST * step):
            return None
        tokens = int(min(max(step, 1.0), free))
    return Allowance(usd, tokens)


def _free_tokens(state: RunState) -> float:
    return (state.limits.max_tokens or 0) - state.model_tokens.taken


def _step_usd(state: RunState) -> float:
    if state.limits.task_budget_usd is not None:
        return state.limits.task_budget_usd
    return _step(state, state.model_usd, state.limits.budget_usd or 0.0)


def _step_tokens(state: RunState) -> float:
    return _step(state, state.model_tokens, state.limits.max_tokens or 0)


def _step(state: RunState, purse: Purse, whole: float) -> float:
    """What most attempts were content with; while that is not known, a part of what each could have."""
    if len(purse.each) >= LEARNED_FROM:
        return max(purse.each[int(MOST * (len(purse.each) - 1))], SMALLEST * whole)
    if purse is state.model_usd and state.plan.attempt_usd is not None:
        return min(whole, max(state.plan.attempt_usd, SMALLEST * whole))
    return whole / max(1, min(FIRST_SHARES * state.plan.slots * state.limits.workers, state.total))


def heed_wants(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Grant more to an attempt that asks for it. If there is no more, it waits for what others leave; when
    all of them wait, the one that has used least is refused: it is not worth a score, and so it has none."""
    for attempt in state.wanting:
        more = _more(state, attempt)
        if more is not None:
            return [AllowanceGranted(attempt, more)]
    if not state.wanting or len(state.wanting) < state.running:
        return []
    least = min(state.wanting, key=lambda each: (_used_usd(state, each), each))
    return [AllowanceGranted(least, state.attempts[least].allowance, _why_refused(state))]


def _used_usd(state: RunState, attempt: AttemptId) -> float:
    used = state.attempts[attempt].wanting
    return 0.0 if used is None else used.used_usd


def _more(state: RunState, attempt: AttemptId) -> Allowance | None:
    known = state.attempts[attempt]
    used, allowed = known.wanting, known.allowance
    if used is None:
        return None
    usd, tokens = allowed.usd, allowed.tokens
    if usd is not None and used.used_usd >= usd:
        free = free_usd(state) - (used.used_usd - usd)  # what was under way when the allowance was used up
        if free <= LEAST * LEAST * _step_usd(state):
            return None
        usd = used.used_usd + min(_step_usd(state), free)
    if tokens is not None and used.used_tokens >= tokens:
        left = _free_tokens(state) - (used.used_tokens - tokens)
        if left < 1:
            return None
        tokens = int(used.used_tokens + min(max(_step_tokens(state), 1.0), left))
    return Allowance(usd, tokens)


def _why_refused(state: RunState) -> str:
    limits = state.limits
    if limits.max_tokens is not None and _free_tokens(state) < 1:
        return f"the {limits.max_tokens} tokens of --max-tokens are used up"
    return f"the budget of ${limits.budget_usd:g} is used up"


def stop_without_money(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Once calls were refused, or no attempt can be begun: hand out nothing more. What runs may end."""
    if state.stop is not None or state.plan.metering is None:
        return []
    if state.model_refused:
        return [StopRequested("budget", state.model_refused, drain=True)]
    if state.waiting and not state.running and not state.uncollected and first_allowance(state) is None:
        return [StopRequested("budget", _why_refused(state), drain=True)]
    return []


def tell_how_much(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Half of the budget is a good moment to look at a run."""
    budget = state.limits.budget_usd
    if state.plan.metering is None or budget is None:
        return []
    spent = state.closed_usd + state.model_usd.spent + state.model_usd.lost
    passed = max((mark for mark in TOLD_AT if spent >= budget * mark / 100), default=0)
    return [BudgetPassed(passed)] if passed > state.budget_told else []


def at_once(state: RunState) -> int | None:
    """How many attempts may run at once, so that no machine is paid to wait for a model's limit."""
    metering = state.plan.metering
    if metering is None:
        return None
    most = [metering.concurrency] if metering.concurrency is not None else []
    if state.throttled_at is not None:
        most.append(int(state.throttled_at))
    minutes = state.metered_seconds / 60
    if state.metered_calls >= FEW_CALLS and minutes > 0:
        if metering.rpm is not None:
            most.append(int(metering.rpm * minutes / state.metered_calls))
        tokens = state.model_tokens.spent
        if metering.tpm is not None and tokens > 0:
            most.append(int(metering.tpm * minutes / tokens))
    return max(1, min(most)) if most else None
