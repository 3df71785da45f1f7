"""Imported results as events: what a fleet would have recorded, had it been there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from evalfleet.benchmarks.past_results import PastResult, ResultFolder
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
    RunEnded,
    RunPlanned,
    TasksPlanned,
    TasksReopened,
)
from evalfleet.model import (
    IMPORTED,
    SECOND,
    AttemptId,
    Collected,
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
from evalfleet.names import attempt_id, machine_id

from .runs import CHUNK

Dated = tuple[Micros, Event]


@dataclass(frozen=True)
class PastAttempt:
    """One try at a task, as its files tell it."""

    folder: ResultFolder
    result: PastResult

    @property
    def is_scored(self) -> bool:
        return isinstance(self.result.outcome, Scored)

    @property
    def began_s(self) -> float:
        return self.result.began_s or 0.0


def plan_of(run: str, benchmark: str, home_id: str, tries: Mapping[TaskId, Sequence[PastAttempt]]) -> Plan:
    """The plan that a run with these results would have had."""
    folder = next(iter(tries.values()))[0].folder
    return Plan(
        run=run,
        benchmark=benchmark,
        places=(IMPORTED,),
        model=folder.model,
        settings={key: value for key, value in folder.settings if value},
        home=home_id,
    )


def numbered(task: TaskId, tries: Sequence[PastAttempt]) -> list[tuple[AttemptId, PastAttempt]]:
    """An attempt is called after its trial, where trials are numbers and each was one try."""
    trials = [past.folder.trial for past in tries]
    plain = all(trial.isdecimal() and str(int(trial)) == trial for trial in trials)
    named = plain and len(set(trials)) == len(trials)
    numbers = [int(trial) for trial in trials] if named else range(len(tries))
    return [(attempt_id(task, number), past) for number, past in zip(numbers, tries, strict=True)]


class History:
    """Tries at tasks, as the events that a fleet would have recorded.

    A machine had one attempt at a time: where times overlap (clocks in whole seconds, copied files), an
    attempt is moved behind the one before it, and where they overlap by much, it had another machine.
    """

    OVERLAP = 5 * SECOND

    def __init__(
        self,
        plan: Plan,
        tries: Mapping[TaskId, Sequence[PastAttempt]],
        collected: Mapping[AttemptId, Collected],
        now: Micros,
    ) -> None:
        self._plan = plan
        self._tries = tries
        self._collected = collected
        self._now = now
        self._begun: set[TaskId] = set()
        self._free: dict[MachineId, Micros] = {}
        self._workers: dict[str, list[MachineId]] = {}
        self._events: list[Dated] = []

    def events(self) -> list[Dated]:
        """In order of time."""
        order = [
            (self._since(past.began_s), task, n)
            for task, some in self._tries.items()
            for n, past in enumerate(some)
        ]
        settled: dict[TaskId, Micros] = {}
        waiting: dict[TaskId, list[tuple[AttemptId, PastAttempt]]] = {
            task: numbered(task, some) for task, some in self._tries.items()
        }
        for began, task, _ in sorted(order):
            attempt, past = waiting[task].pop(0)
            settled[task] = self._attempt(task, attempt, past, max(began, settled.get(task, 0)))
        began, ended = min(at for at, _ in self._events), max(at for at, _ in self._events)
        for machine, free in self._free.items():
            self._events.append((free, MachineCondemned(machine, "the results were imported")))
            self._events.append((free, MachineDeleted(machine, free)))
        return [
            *self._head(began),
            *sorted(self._events, key=lambda dated: dated[0]),
            (ended, RunEnded("done")),
        ]

    def _head(self, at: Micros) -> list[Dated]:
        tasks = tuple(Task(task, some[0].folder.domain) for task, some in self._tries.items())
        chunks = [TasksPlanned(tasks[n : n + CHUNK]) for n in range(0, len(tasks), CHUNK)]
        limits = Limits(workers=len(self._free), attempts=1, attempts_ceiling=1)
        plan = structs.replace(self._plan, limits=limits)
        return [(at, RunPlanned(plan, len(tasks))), *((at, chunk) for chunk in chunks)]

    def _attempt(self, task: TaskId, attempt: AttemptId, past: PastAttempt, earliest: Micros) -> Micros:
        machine = self._machine(past.folder.worker, earliest)
        began = max(earliest, self._free[machine])
        seconds = past.result.seconds or 0.0
        ended = min(self._now, after(began, seconds))
        self._free[machine] = ended
        if task in self._begun:
            self._events.append((began, TasksReopened((task,))))
        self._begun.add(task)
        self._events += [
            (began, AttemptStarted(attempt, task, machine)),
            (ended, AttemptEnded(attempt, past.result.outcome, seconds)),
            (ended, AttemptCollected(attempt, self._collected[attempt])),
        ]
        return ended

    def _machine(self, worker: str, at: Micros) -> MachineId:
        its = self._workers.setdefault(worker, [])
        for machine in its:
            if self._free[machine] <= at + self.OVERLAP:
                return machine
        machine = machine_id(self._plan.run, self._plan.home, len(self._free) + 1)
        name = worker if not its else f"{worker}-{len(its) + 1}"
        lane = len(self._free)
        its.append(machine)
        self._free[machine] = at
        self._events += [
            (at, MachineRequested(machine, name, lane, Offer(IMPORTED, "worker"), self._now)),
            (at, MachineUp(machine)),
            (at, MachineReady(machine)),
        ]
        return machine

    def _since(self, seconds: float) -> Micros:
        return min(self._now, max(0, round(seconds * SECOND)))
