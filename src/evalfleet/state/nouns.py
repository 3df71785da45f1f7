"""The state's nouns: tasks, attempts, machines, and the run with its indexes."""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal, TypeVar

from msgspec import Struct, field, structs

from evalfleet import events as ev
from evalfleet.cost import billed_usd, idle_usd
from evalfleet.errors import Scope
from evalfleet.model import (
    NO_LIMIT,
    NOT_SAID,
    Allowance,
    AttemptId,
    Broken,
    Cause,
    Collected,
    Grade,
    Isolated,
    Limits,
    MachineId,
    Metered,
    Micros,
    Needs,
    Offer,
    Outcome,
    Plan,
    RunStatus,
    Task,
    TaskId,
    after,
)

TaskStatus = Literal["waiting", "running", "answered", "scored", "broken", "held"]
MachinePhase = Literal[
    "requested",
    "queued",
    "allocated",
    "up",
    "ready",
    "mending",
    "stopping",
    "stopped",
    "condemned",
    "deleted",
]
QueueEntry = tuple[float, int, TaskId]
K = TypeVar("K")


class Counts(dict[K, int]):
    """How many there are of each; none of what was never counted. A Counter takes five times as long to
    change, and these change with every attempt."""

    def __missing__(self, _: K) -> int:
        return 0


class TaskState(Struct, eq=False, gc=False):
    """One task, and what has become of it.

    Like an attempt, it refers to nothing that refers to it: there may be very many, and no collector need
    look at them.
    """

    task: Task
    index: int  # its place in the plan
    lane: int  # the queue of fresh tasks that it waits in
    rank: float = 0.0  # of the tasks that wait, that of the lowest rank goes first
    status: TaskStatus = "waiting"
    attempts: list[AttemptId] = []
    used: int = 0  # attempts that count against its limit, since it was opened or reopened
    tries: int = 0  # all attempts since then
    broken_on: tuple[MachineId, ...] = ()  # another one is tried next
    lost: bool = False  # a machine that ran it was lost, and that was forgiven
    not_before: Micros = 0  # a retry waits until then
    retrying: bool = False  # it waits among the retries, not among the fresh tasks
    outcome: Outcome | None = None
    decided_by: AttemptId | None = None  # the attempt whose outcome it is

    @property
    def entry(self) -> QueueEntry:
        """Its place in the queue: the schedule's rank, then the order of the file."""
        return (self.rank, self.index, self.task.id)


class AttemptState(Struct, eq=False, gc=False):
    """One try at a task on one machine."""

    id: AttemptId
    task: TaskId
    machine: MachineId
    started_at: Micros
    ended_at: Micros | None = None
    outcome: Outcome | None = None
    seconds: float = 0.0
    node: str = ""  # the computer that it ran on, where that has a name of its own
    collected: Collected | None = None  # what came home of its artefacts
    superseded: Outcome | None = None  # what it said after the task was decided without it
    metered: Metered | None = None  # what its model calls used, once that is known
    allowance: Allowance = NO_LIMIT  # what they may use, fixed when it began
    grades: tuple[Grade, ...] = ()  # the first one counts
    ending: ev.RunSteered | None = None  # who asked to end it, and why


class MachineState(Struct, eq=False):
    """One machine of the run or the pool, from its request to its end."""

    id: MachineId
    name: str  # what people call it
    offer: Offer
    requested_at: Micros  # one that was stopped is asked for anew
    expires_at: Micros  # of one that waits in a queue: as if it had started when it was requested
    lease_set: Micros  # the expiry that its place was last told
    renew_at: Micros  # when it is to be decided whether it lives longer
    billed_at: Micros  # since when it is billed in full: since its request, or its start if it queued
    phase: MachinePhase = "requested"
    lane: int = -1  # of the fresh task that it took last; a static schedule gives it the others there, too
    queued_at: Micros | None = None
    allocated_at: Micros | None = None  # when its service started it
    start: str = ""  # the service's name for that
    address: str = ""
    node: str = ""
    host_key: str = ""  # of its SSH server, the public one, where its place knows it
    up_at: Micros | None = None
    ready_at: Micros | None = None
    condemned_at: Micros | None = None
    stopped_at: Micros | None = None  # since when only what is left of it is billed: disk, address
    gone_at: Micros | None = None
    timings: dict[str, float] = {}
    prepared: str = ""  # the benchmark that a pool's machine was set up for
    set_up: dict[str, None] = {}  # what tasks that ran on it had it set up with for themselves
    good_until: Micros | None = None  # of what was set up there
    setting_up: tuple[str, str] = ("", "")  # the step, and what it says
    step_since: Micros = 0  # when that step began
    closed_usd: float = 0.0  # what it cost until it was stopped or deleted
    open: dict[AttemptId, None] = {}  # attempts that run on it
    uncollected: dict[AttemptId, None] = {}  # artefacts to fetch
    attempts: int = 0
    scored: int = 0
    streak: int = 0  # how many attempts broke on it in a row
    streak_mark: int = 0  # how many had scored in the run when that began
    silent_since: Micros | None = None
    mends: list[str] = []  # each step is tried once in its life
    mending_since: Micros | None = None
    cause: Cause | None = None  # why it was given up, if it was not let go
    detail: str = ""
    step: str = ""  # the step of its set-up that failed
    kept: bool = False  # a pool's, and was ready once: its disk may hold work, so a failure only stops it
    image: str = ""  # what its disk becomes before it goes
    delete_refused: str = ""  # why it is still there although it shall be deleted
    isolated: Isolated = NOT_SAID  # how attempts are kept apart on it
    steered: ev.RunSteered | None = None  # who asked to drain or replace it, and why

    @property
    def ends_at(self) -> Micros:
        """When its place ends it, if nobody does: at its expiry, or as soon after as the place can."""
        return max(self.expires_at, after(self.billed_at, self.offer.life.least_life_s))

    @property
    def unstarted(self) -> bool:
        """Is it a machine of a service that nobody has seen start? Nothing is billed, and no time runs."""
        return self.offer.life.queues and self.allocated_at is None

    def open_usd(self, now: Micros) -> float:
        """What it has cost by `now` that is not in `closed_usd`."""
        if self.phase == "deleted" or self.unstarted:
            return 0.0
        if self.stopped_at is not None:
            return idle_usd(self.offer, self.stopped_at, now)
        off = min(now, self.ends_at)
        offer = self.offer
        if self.up_at is None and self.cause is Cause.PROVISIONING:  # it was refused: no minimum is billed
            offer = structs.replace(offer, cost=structs.replace(offer.cost, least_billed_s=0.0))
        return billed_usd(offer, self.billed_at, off) + idle_usd(offer, off, now)


class Deadline(Struct):
    """When a machine's life must be looked at again. Stale ones are dropped when they surface."""

    at: Micros
    machine: MachineId

    def __lt__(self, other: Deadline) -> bool:
        return (self.at, self.machine) < (other.at, other.machine)


class PlaceHearing(Struct, eq=False):
    """How the machines of one place are heard.

    `shared`: all of them by way of one service, so that it may be silent while other places are heard.
    """

    shared: bool
    silent: dict[MachineId, None] = {}
    heard_at: Micros = 0  # if it is shared: when a machine of this place was last heard
    stirred_at: Micros = 0  # when a long silence of all of them last ended


class Block(Struct):
    """An offer, or several, that refused us at `at`: until when, how often in a row, and what was said."""

    at: Micros
    until: Micros
    failures: int
    permanent: bool
    detail: str


RECENT = 10
"""So many of the newest outcomes tell how a place does."""


class Circuit(Struct, eq=False):
    """How one place has done, of late and in all, and whether it shall have more machines."""

    phase: ev.CircuitPhase = "closed"
    detail: str = ""  # why it is so
    until: Micros = 0  # when an open one is tried by one machine
    permanent: bool = False  # it stays open
    opened: int = 0  # how often it opened since it was last closed
    probe: MachineId | None = None  # the one machine by which an open one is tried
    probe_failed: str = ""  # how that went wrong
    probe_worked: int = 0  # attempts that worked on it
    machines: dict[MachineId, None] = {}  # that take, or will take, work
    most: int = 0  # how many those were at once, at most
    owed: int = 0  # so many of them it lost to other places when it opened, and may have again
    recent: list[bool] = []  # of the newest outcomes of machines and attempts: did it fail?
    outcomes: int = 0
    failures: int = 0
    never_ready: int = 0  # machines that failed before they were ready, since one was
    wasted_s: float = 0.0  # what those took until they were given up
    failed_machines: int = 0
    proofs: int = 0  # attempts that were scored or answered
    failing_since: Micros = 0  # when the first of the failures in `recent` was
    last_failure: str = ""
    refused: str = ""  # why the place refuses us for good
    gave_up: dict[TaskId, None] = {}  # tasks that broke for good, and broke nowhere else
    history: list[tuple[Micros, ev.CircuitChanged]] = []


class Refusal(Struct):
    """What came of asking for machines of one offer: how often it refused, and what it said last."""

    offer: Offer
    tries: int
    detail: str
    scope: Scope
    permanent: bool


class Purse(Struct, eq=False):
    """The use of one thing that is limited: dollars for machines, dollars for models, or tokens."""

    spent: float = 0.0  # by machines that are stopped or deleted, or by attempts that ended
    lost: float = 0.0  # the allowances of ended attempts whose use is unknown; not in `spent`
    reserved: float = 0.0  # the most that what goes on can still use

    @property
    def taken(self) -> float:
        return self.spent + self.lost + self.reserved


class Spend(Struct, eq=False):
    """What a run has paid, and what it has reserved."""

    machines: Purse = field(default_factory=Purse)  # dollars, reserved up to each machine's expiry
    models: Purse = field(default_factory=Purse)  # dollars, reserved by allowances of attempts
    tokens: Purse = field(default_factory=Purse)
    attempts: int = 0  # ended attempts whose model calls are counted
    calls: int = 0  # of those
    seconds: float = 0.0  # of those
    percent_reported: int = 0  # the share of the budget that BudgetPassed reported last

    @property
    def spent_usd(self) -> float:
        return self.machines.spent + self.models.spent + self.models.lost

    @property
    def taken_usd(self) -> float:
        """Return what is paid, or can be used by what is under way without another decision."""
        return self.machines.taken + self.models.taken


class RunState(Struct, eq=False):
    """A run, or a pool, as its events have made it, with an index for every question that policy asks."""

    plan: Plan = field(default_factory=lambda: Plan(run="", benchmark=""))
    limits: Limits = field(default_factory=Limits)
    total: int = 0
    planned_at: Micros = 0
    started_at: Micros = 0
    last_at: Micros = 0
    events: int = 0
    controllers: int = 0
    controller: ev.ControllerStarted = field(default_factory=ev.ControllerStarted)  # the last one
    stop: ev.StopRequested | None = None
    paused: ev.RunSteered | None = None  # nothing is handed out for now
    steered: list[
        tuple[Micros, ev.RunSteered | ev.StopRequested]
    ] = []  # what people changed from outside, in order
    status: RunStatus = "running"
    ended_at: Micros | None = None

    tasks: dict[TaskId, TaskState] = {}
    attempts: dict[AttemptId, AttemptState] = {}
    machines: dict[MachineId, MachineState] = {}

    # what waits: fresh tasks by lane, and retries by time. A static schedule has a lane for each worker, a
    # dynamic one for each kind of machine that tasks need: `kinds` are their own needs, and their lane
    kinds: dict[Needs | None, int] = field(default_factory=lambda: {None: 0})
    unsettled: Counts[Needs | None] = field(default_factory=Counts[Needs | None])  # tasks that wait or run
    fresh: list[list[QueueEntry]] = []
    queues: bool = True  # False: whoever folds only looks, so fresh tasks are counted, and not put in order
    retries: list[tuple[Micros, int, TaskId]] = []
    counts: Counts[str] = field(default_factory=Counts[str])  # tasks by their status

    # machines by what policy asks of them; dicts, because sets have no order to reproduce
    coming: dict[MachineId, None] = {}  # asked for, not ready yet
    ready: dict[MachineId, None] = {}
    audible: dict[MachineId, None] = {}  # ready, not silent
    idle: dict[MachineId, None] = {}  # with a free slot
    silent: dict[MachineId, None] = {}
    suspects: dict[MachineId, None] = {}  # broke all of late
    mending: dict[MachineId, None] = {}
    unreachable: dict[MachineId, None] = {}  # to be decided about
    draining: dict[MachineId, None] = {}  # takes no more work
    kept_out: dict[tuple[str, str], ev.RunSteered] = {}  # drained lent machines, by place and name
    replacing: dict[MachineId, None] = {}  # an alert asked for it
    lines: dict[str, PlaceHearing] = {}  # by place
    heard_at: Micros = 0  # when a machine last gave proof that we reach machines
    orphans: dict[AttemptId, None] = {}  # their machine is given up
    undeleted: dict[MachineId, None] = {}
    deadlines: list[Deadline] = []
    live_by_offer: Counter[str] = field(default_factory=Counter[str])
    asked_at: dict[str, deque[Micros]] = {}
    """By area: when machines were asked for last, as many as its place allows in a minute."""
    blocks: dict[str, Block] = {}
    evictions: Counter[str] = field(default_factory=Counter[str])  # by offer
    forged: Counter[str] = field(default_factory=Counter[str])
    """By offer: machines on which something else answered from the start, since one that was ours."""
    refusals: dict[str, Refusal] = {}
    circuits: dict[str, Circuit] = {}  # by place
    shaky: dict[str, None] = {}  # places about which something may be to decide

    spend: Spend = field(default_factory=Spend)

    longest_s: float = 0.0  # of all tasks: how long the longest may take
    weighed: int = 0  # tasks whose duration is expected, and the sum of that
    weights_s: float = 0.0
    boots: int = 0  # machines that have become ready, and how long that took them together
    boot_seconds: float = 0.0
    fleet_changed_at: Micros = 0  # when a machine became ready, or was given up, for the last time

    # what reports and the stop rules count
    succeeded: int = 0
    proofs: int = 0  # attempts that were scored or answered: their machines work
    proof_seconds: float = 0.0
    causes: Counter[str] = field(default_factory=Counter[str])
    first_broken: Counter[str] = field(default_factory=Counter[str])
    canary_breaks: list[str] = []
    """Why attempts broke, by causes that are not free, before as many scored as the canary has to."""
    same_failures: Counter[str] = field(default_factory=Counter[str])
    last_failure: str = ""
    uncollected: int = 0

    # what is to be graded again, and why grading was given up
    regrading: dict[AttemptId, None] = {}
    grading_problem: str = ""

    # what changed since the engine last looked: only their effects are compared anew
    touched_machines: dict[MachineId, None] = {}
    touched_attempts: dict[AttemptId, None] = {}

    @property
    def scored(self) -> int:
        return self.counts["scored"]

    @property
    def broken(self) -> int:
        return self.counts["broken"]

    @property
    def answered(self) -> int:
        return self.counts["answered"]

    @property
    def waiting(self) -> int:
        return self.counts["waiting"]

    @property
    def running(self) -> int:
        return self.counts["running"]

    def kind(self, task: Task) -> Needs | None:
        """What the task needs of its own, if machines are chosen by that."""
        return task.needs if task.needs in self.kinds else None

    def last_heard(self, line: PlaceHearing) -> Micros:
        """When a machine last gave proof that those of this place can be reached."""
        return line.heard_at if line.shared else self.heard_at

    @property
    def live(self) -> int:
        """Machines that take or will take work."""
        return len(self.coming) + len(self.ready)


def is_ungraded(state: RunState, attempt: AttemptState) -> bool:
    """Is it the answer of a task that waits for its grade?"""
    known = state.tasks[attempt.task]
    return known.status == "answered" and known.decided_by == attempt.id


def is_ungradable(known: TaskState) -> bool:
    """Is the task broken only because the grader failed on its answer? That can be graded again."""
    broken = known.outcome
    return known.status == "broken" and isinstance(broken, Broken) and broken.cause is Cause.GRADING
