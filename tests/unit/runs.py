"""A run as data, for tests: tell it what happened, see what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    Event,
    MachineCondemned,
    MachineDeleted,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunPlanned,
    StopRequested,
    TasksPlanned,
)
from evalfleet.model import (
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Cost,
    Limits,
    MachineId,
    Micros,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.policy import decide
from evalfleet.state import MachineState, RunState, TaskState, accepts, apply

E = TypeVar("E", bound=Event)

FREE = Offer("here", "process")
PRICED = Offer("cloud", "D4", cost=Cost(usd_per_hour=3600.0, billing_step_s=1.0))  # a dollar a second


def tasks_of(count: int, **fields: Any) -> tuple[Task, ...]:
    return tuple(Task(TaskId(f"t{i}"), **fields) for i in range(count))


class Run:
    """The engine's turn without an engine: apply, then decide until there is nothing left to decide."""

    def __init__(
        self,
        tasks: int | Sequence[Task] = 4,
        offers: Sequence[Offer] = (FREE,),
        *,
        schedule: Any = "dynamic",
        slots: int = 1,
        places: tuple[str, ...] = ("local",),
        ordered: bool = False,
        **limits: Any,
    ) -> None:
        self.now: Micros = 1000 * SECOND
        self.offers = offers
        self.state = RunState()
        self.log: list[Event] = []
        planned = tasks_of(tasks) if isinstance(tasks, int) else tuple(tasks)
        how: dict[str, Any] = {"schedule": schedule, "slots": slots, "ordered": ordered}
        plan = Plan("r", "b", places, limits=Limits(**limits), home="h", **how)
        self._apply(RunPlanned(plan, len(planned)))
        self._apply(TasksPlanned(planned))

    def _apply(self, event: Event) -> None:
        apply(self.state, self.now, event)
        self.log.append(event)

    def tell(self, *events: Event) -> list[Event]:
        """What happened, and what is decided then."""
        for event in events:
            if accepts(self.state, event):
                self._apply(event)
        return self.turn()

    def turn(self) -> list[Event]:
        decided: list[Event] = []
        while step := decide(self.state, self.now, self.offers):
            assert len(decided) < 10_000, "decisions without end"
            for event in step:
                self._apply(event)
            decided += step
        return decided

    def wait(self, seconds: float) -> list[Event]:
        self.now = after(self.now, seconds)
        return self.turn()

    # -- what happens to machines and attempts ---------------------------------------------------

    def ready(self, *machines: str) -> list[Event]:
        """These, or all that are coming, come up and are set up."""
        ids = [MachineId(m) for m in machines] or list(self.state.coming)
        up = [MachineUp(m) for m in ids]
        return self.tell(*up, *(MachineReady(m) for m in ids))

    def score(self, attempt: str, score: float = 1.0) -> list[Event]:
        return self.tell(AttemptEnded(AttemptId(attempt), Scored(score, score == 1.0)), _collected(attempt))

    def breaks(self, attempt: str, cause: Cause = Cause.RESULT) -> list[Event]:
        return self.tell(AttemptEnded(AttemptId(attempt), Broken(cause)), _collected(attempt))

    def lose(self, machine: str, cause: Cause | None = Cause.MACHINE_LOST, step: str = "") -> list[Event]:
        return self.tell(MachineCondemned(MachineId(machine), "told by the test", cause, step))

    def gone(self, machine: str) -> list[Event]:
        """Its artefacts are home or never will be, and the place shows it no more."""
        known = self.machine(machine)
        return self.tell(
            *(AttemptCollected(a) for a in known.uncollected), MachineDeleted(known.id, self.now)
        )

    # -- what is asked -------------------------------------------------------------------------

    def task(self, task: str) -> TaskState:
        return self.state.tasks[TaskId(task)]

    def machine(self, machine: str) -> MachineState:
        return self.state.machines[MachineId(machine)]

    def open(self) -> dict[str, str]:
        """Attempts under way -> the machine they are on."""
        return {a.id: a.machine for a in self.state.attempts.values() if a.outcome is None}

    @property
    def stop(self) -> StopRequested:
        assert self.state.stop is not None
        return self.state.stop


def _collected(attempt: str) -> AttemptCollected:
    return AttemptCollected(AttemptId(attempt))


def of(kind: type[E], events: Sequence[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def started(events: Sequence[Event]) -> list[tuple[str, str]]:
    return [(event.attempt, event.machine) for event in of(AttemptStarted, events)]


def requested(events: Sequence[Event]) -> list[MachineRequested]:
    return of(MachineRequested, events)


def condemned(events: Sequence[Event]) -> list[str]:
    return [event.machine for event in of(MachineCondemned, events)]
