"""Which decisions an engine makes, and when it has nothing left to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalfleet.events import Event
from evalfleet.model import Micros, Offer
from evalfleet.state import RunState

from . import pool
from .decide import decide, next_deadline


@dataclass(frozen=True)
class Rules:
    decide: Callable[[RunState, Micros, Sequence[Offer]], list[Event]]
    next_deadline: Callable[[RunState, Micros], Micros | None]
    settled: Callable[[RunState], bool]


def _ended(state: RunState) -> bool:
    return state.ended_at is not None


RUN = Rules(decide, next_deadline, _ended)
POOL = Rules(pool.decide, pool.next_deadline, pool.settled)
