"""What to do next, and what must be under way: pure functions of the state.

No clock, no I/O, no randomness: time and offers are arguments, ids are counters.
"""

from .decide import POOL, RUN, Rules, decide, next_deadline
from .effects import (
    BringUp,
    Collect,
    Effect,
    EndAttempt,
    Extend,
    GradeAnswers,
    Listen,
    Mend,
    RunAttempt,
    Stop,
    TearDown,
    changed_effects,
    effects,
)
from .silence import proven_online

__all__ = [
    "POOL",
    "RUN",
    "BringUp",
    "Collect",
    "Effect",
    "EndAttempt",
    "Extend",
    "GradeAnswers",
    "Listen",
    "Mend",
    "Rules",
    "RunAttempt",
    "Stop",
    "TearDown",
    "changed_effects",
    "decide",
    "effects",
    "next_deadline",
    "proven_online",
]
