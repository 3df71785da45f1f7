"""Runs drawn by chance, to plan by: the engine's own decisions and state, over a queue of what happens next.

The policy decides, `apply` changes the state and `changed_effects` says what must be under way, exactly as in
the engine. But nothing is performed: an effect becomes news at the time that was drawn for it, without an
event loop, a journal or checks, so that a run of 154 tasks takes milliseconds. A test holds these runs
against those of the real engine in the simulated world.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    ControllerStarted,
    Event,
    MachineAllocated,
    MachineCondemned,
    MachineDeleted,
    MachineLeaseSet,
    MachineQueued,
    MachineReady,
    MachineUp,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.model import (
    SECOND,
    Broken,
    Cause,
    MachineId,
    Micros,
    Offer,
    Plan,
    Scored,
    Task,
    after,
    seconds_between,
)
from evalfleet.policy import (
    Allow,
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
)
from evalfleet.policy.decide import decide, next_deadline
from evalfleet.policy.effects import Owner
from evalfleet.state import RunState, accepts, apply

from .loop import EPOCH

SCORED = Scored(1.0, True)
BROKEN = Broken(Cause.RESULT)
LINGER: Micros = SECOND // 20
"""So long artefacts that have come home wait for other news to share a turn with, as in the engine. What
nothing waits for shares the next turn, whenever that comes: in one of its own nothing would be decided."""
TURNS = 1_000_000
"""No run takes so many: one that does would go on for ever."""


class Fate(Protocol):
    """What happens in one run, in seconds. Each answer may be drawn anew."""

    def task_s(self, task: Task, offer: Offer) -> float:
        """How long an attempt at the task takes there."""
        ...

    def machine_s(self, offer: Offer) -> float:
        """How long a machine takes from its request, or from its start if it queues, until it is ready."""
        ...

    def queue_s(self, offer: Offer) -> float:
        """How long a machine waits in the queue of its service."""
        ...

    def evicted_s(self, offer: Offer) -> float:
        """How long after its request its place takes a machine back; infinity if it does not."""
        ...

    def breaks(self) -> bool:
        """Does an attempt break, without anything being wrong with its machine?"""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """How one drawn run went."""

    seconds: float
    """From its start to its last result."""
    machines_usd: float
    attempts: int
    evictions: int
    machines: int
    """How many there were in all."""
    done: bool
    """Whether every task has a score."""


def draw_run(plan: Plan, tasks: Sequence[Task], offers: Sequence[Offer], fate: Fate) -> Drawn:
    """Run the plan once. Offers are tried in their order, as the engine does: the cheapest first."""
    state = _DrawnRun(plan, tasks, offers, fate).run()
    return Drawn(
        last_result_s(state),
        state.closed_usd,
        len(state.attempts),
        sum(machine.cause is Cause.EVICTED for machine in state.machines.values()),
        len(state.machines),
        state.scored == len(tasks),
    )


def last_result_s(state: RunState) -> float:
    """Seconds from a run's start to its last result: what comes after it is clean-up."""
    ends = (attempt.ended_at for attempt in state.attempts.values())
    return seconds_between(state.started_at, max((end for end in ends if end), default=state.last_at))


class _DrawnRun:
    """One run, from its plan to its end."""

    def __init__(self, plan: Plan, tasks: Sequence[Task], offers: Sequence[Offer], fate: Fate) -> None:
        self._offers, self._fate = offers, fate
        self._now: Micros = EPOCH
        self._news: list[tuple[Micros, int, Event]] = []
        self._lingering: list[Event] = []
        self._awaited = False  # something waits for what lingers
        self._count = 0
        self._taken: set[str] = set()
        """Nodes that a machine has, or will have."""
        self._under_way: dict[Owner, tuple[Effect, ...]] = {}
        self._state = RunState()
        for event in (RunPlanned(plan, len(tasks)), TasksPlanned(tuple(tasks)), ControllerStarted()):
            apply(self._state, self._now, event)

    def run(self) -> RunState:
        state = self._state
        for _ in range(TURNS):
            for event in self._take_news():
                if accepts(state, event):
                    apply(state, self._now, event)
            while decided := decide(state, self._now, self._offers):
                for event in decided:
                    apply(state, self._now, event)
            for owner, wanted in changed_effects(state):
                self._sync(owner, wanted)
            if state.ended_at is not None:
                return state
            self._wait()
        raise RuntimeError("a drawn run does not end")

    def _take_news(self) -> list[Event]:
        news, self._lingering, self._awaited = self._lingering, [], False
        while self._news and self._news[0][0] <= self._now:
            news.append(heapq.heappop(self._news)[2])
        return news

    def _wait(self) -> None:
        """Go on to the next moment at which anything happens or is due."""
        due = next_deadline(self._state, self._now)
        times = [] if due is None else [max(due, self._now)]
        if self._news:
            times.append(self._news[0][0])
        if self._awaited:
            times.append(self._now + LINGER)
        if not times:
            raise RuntimeError("nothing is left to happen in a drawn run")
        self._now = min(times)

    def _sync(self, owner: Owner, wanted: tuple[Effect, ...]) -> None:
        """Draw the end of what is new. That of what is no longer wanted is no news when it comes."""
        have = self._under_way.get(owner, ())
        if have != wanted:
            self._under_way[owner] = wanted
            for effect in wanted:
                if effect not in have:
                    self._begin(effect)

    def _begin(self, effect: Effect) -> None:
        state, fate = self._state, self._fate
        match effect:
            case BringUp(machine):
                self._bring_up(machine, state.machines[machine].offer)
            case RunAttempt(attempt):
                known = state.attempts[attempt]
                offer = state.machines[known.machine].offer
                seconds = fate.task_s(state.tasks[known.task].task, offer)
                outcome = BROKEN if fate.breaks() else SCORED
                self._later(seconds, AttemptEnded(attempt, outcome, seconds))
            case Collect(attempt):
                self._lingering.append(AttemptCollected(attempt))
                leaving = state.machines[state.attempts[attempt].machine].phase == "condemned"
                self._awaited |= leaving or not (state.waiting or state.running)
            case TearDown(machine):
                self._tear_down(machine)
            case Extend(machine, expires_at):
                self._later(0.0, MachineLeaseSet(machine, expires_at))
            case Listen() | Mend() | Allow() | EndAttempt() | Stop() | GradeAnswers():
                # no machine falls silent, nobody steers, no call is metered and no answer waits for its grade
                raise RuntimeError(f"nothing in a drawn run leads to {effect}")
            case _:
                assert_never(effect)

    def _bring_up(self, machine: MachineId, offer: Offer) -> None:
        queue_s = 0.0
        if offer.queues:
            queue_s = self._fate.queue_s(offer)
            self._later(0.0, MachineQueued(machine))
            self._later(queue_s, MachineAllocated(machine, after(self._now, queue_s)))
        ready_s = queue_s + self._fate.machine_s(offer)
        self._later(ready_s, MachineUp(machine))
        self._later(ready_s, MachineReady(machine))
        if (evicted_s := self._fate.evicted_s(offer)) < math.inf:
            self._later(
                queue_s + evicted_s, MachineCondemned(machine, "the place took it back", Cause.EVICTED)
            )

    def _tear_down(self, machine: MachineId) -> None:
        self._later(self._state.machines[machine].offer.settle_s, MachineDeleted(machine, self._now))

    def _later(self, seconds: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._news, (self._now + round(seconds * SECOND), self._count, event))
