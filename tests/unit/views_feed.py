"""A small run made by hand, event by event, for the tests of the views."""

from __future__ import annotations

from evalfleet import events as ev
from evalfleet.model import (
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Collected,
    Cost,
    Limits,
    MachineId,
    Micros,
    Offer,
    Outcome,
    Plan,
    RunStatus,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.state import RunState, apply

START: Micros = 1_767_364_252 * SECOND  # 2026-01-02T14:30:52Z


class Feed:
    """Applies events to a state and keeps them as records, under a clock of its own."""

    def __init__(self, tasks: int, machines: int, usd_per_hour: float = 0.0, ready: bool = True) -> None:
        self.state = RunState()
        self.records: list[ev.Record] = []
        self.now = START
        self.offer = Offer("lab", "big", "east", cost=Cost(usd_per_hour=usd_per_hour))
        plan = Plan("run1", "bench", ("lab",), model="m-1", limits=Limits(workers=machines, attempts=1))
        self.add(ev.RunPlanned(plan, tasks))
        self.add(
            ev.TasksPlanned(
                tuple(Task(TaskId(f"t_{n}"), "even" if n % 2 == 0 else "odd") for n in range(tasks))
            )
        )
        for n in range(1, machines + 1):
            self.machine(n, ready)

    def add(self, event: ev.Event) -> ev.Record:
        record = ev.Record(len(self.records) + 1, 1, self.now, event)
        self.records.append(record)
        apply(self.state, self.now, event)
        return record

    def machine(self, n: int, ready: bool = True) -> MachineId:
        machine = MachineId(f"run1-abc123-{n}")
        expiry = after(self.now, 14_400)
        self.add(ev.MachineRequested(machine, f"worker-{n}", self.offer, expiry))
        if ready:
            self.add(ev.MachineUp(machine, f"10.0.0.{n}"))
            self.add(ev.MachineReady(machine))
        return machine

    def start(self, task: str, machine: int = 1) -> AttemptId:
        attempt = AttemptId(f"{task}.{len(self.state.tasks[TaskId(task)].attempts)}")
        self.add(ev.AttemptStarted(attempt, TaskId(task), MachineId(f"run1-abc123-{machine}")))
        return attempt

    def end(self, attempt: AttemptId, outcome: Outcome, seconds: float = 60.0) -> None:
        self.add(ev.AttemptEnded(attempt, outcome, seconds))
        self.add(ev.AttemptCollected(attempt, Collected(files=1)))

    def attempt(self, task: str, outcome: Outcome, seconds: float = 60.0, machine: int = 1) -> AttemptId:
        attempt = self.start(task, machine)
        self.wait(seconds)
        self.end(attempt, outcome, seconds)
        return attempt

    def wait(self, seconds: float) -> None:
        self.now = after(self.now, seconds)

    def lose(self, machine: int, cause: Cause | None = Cause.EVICTED) -> None:
        self.add(ev.MachineCondemned(MachineId(f"run1-abc123-{machine}"), "the place took it back", cause))

    def finish(self, status: RunStatus = "done") -> None:
        for machine in [*self.state.coming, *self.state.ready]:
            self.add(ev.MachineCondemned(machine, "the run is over"))
        for machine in list(self.state.undeleted):
            self.add(ev.MachineDeleted(machine, self.now))
        self.add(ev.RunEnded(status))


def a_mixed_run() -> Feed:
    """Five tasks: a success, a failure, one broken, one by its time limit, one unrun."""
    feed = Feed(tasks=5, machines=2, usd_per_hour=3.6)
    feed.attempt("t_0", Scored(1.0, True, num_steps=5, cost_usd=0.25, screenshots=("step_0.png",)))
    feed.attempt("t_1", Scored(0.5, error="gave up"), machine=2)
    feed.attempt("t_2", Broken(Cause.RESULT, "=no result.json | was written\n"), machine=2)
    feed.attempt("t_3", Scored(0.0, limit_s=60.0))
    feed.add(ev.StopRequested("user", "asked"))
    feed.finish("stopped")
    return feed
