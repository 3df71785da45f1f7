"""How a run went, as an exit code."""

from __future__ import annotations

from evalfleet.model import Verdict
from evalfleet.state import RunState

DONE = 0
NOT_AS_ASKED = 1
LIMIT_REACHED = 3
REFUSED = 4
INTERRUPTED = 130


def exit_code(state: RunState) -> int:
    """See the command line's contract: 0 as asked, 1 not so, 3 limits, 4 refused, 130 interrupted."""
    if state.ended_at is None:
        return INTERRUPTED
    if state.stop is None or state.status == "done":
        return DONE if as_asked(state, state.plan.verdict) else NOT_AS_ASKED
    if state.status == "failed":
        return REFUSED
    by_limit = state.stop.reason in ("budget", "time")
    return LIMIT_REACHED if by_limit else INTERRUPTED


def as_asked(state: RunState, verdict: Verdict) -> bool:
    """Few enough broken, and enough of the scored ones solved."""
    allowed = verdict.allow_broken * state.total if verdict.allow_broken_is_share else verdict.allow_broken
    if state.broken > allowed:
        return False
    if verdict.fail_under is None:
        return True
    return state.scored > 0 and state.succeeded / state.scored >= verdict.fail_under
