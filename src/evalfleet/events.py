"""Facts and decisions in the order they became true, and their codec.

Every event is written down before anything acts on it. Fields may be added with defaults; any other
change raises `SCHEMA` and adds an entry to `UPGRADES`, so that an older journal still opens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .errors import JournalForeign, Scope
from .model import (
    NO_LIMIT,
    Allowance,
    AttemptId,
    Cause,
    Collected,
    Grade,
    Isolated,
    Isolation,
    Limits,
    MachineId,
    Metered,
    Micros,
    Offer,
    Outcome,
    Plan,
    RunStatus,
    StopReason,
    Task,
    TaskId,
    decodable,
)

SCHEMA = 3


class _Event(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag=True):
    """Base of events: the class's name is the kind on disk, so a rename is a schema change."""


class RunPlanned(_Event, frozen=True):
    """First in every run's stream. `total` is how many tasks the TasksPlanned after it hold."""

    plan: Plan
    total: int


class TasksPlanned(_Event, frozen=True):
    """Tasks in file order. Written in chunks; all chunks are in the first transaction."""

    tasks: tuple[Task, ...]


class PoolPlanned(_Event, frozen=True):
    """First in every pool's stream: `plan.limits.workers` machines, until `plan.limits.lease_s` is over."""

    plan: Plan


class PoolResized(_Event, frozen=True):
    """Decided: the pool shall have so many machines."""

    workers: int


class ControllerStarted(_Event, frozen=True):
    """A controller took the run (anew): the epoch in the envelope is its fence.

    `zero` is what the zero of its steady clock, in this `boot` of its computer, is in the run's time.
    """

    host: str = ""
    pid: int = 0
    version: str = ""
    boot: str = ""
    zero: Micros = 0


class MachineRequested(_Event, frozen=True):
    """Decided: this machine shall exist."""

    machine: MachineId
    name: str
    offer: Offer
    expires_at: Micros


class MachineQueued(_Event, frozen=True):
    """Its service has accepted the machine and not started it: nothing is billed, and no limit runs.

    It is told again, now and then, when the service says something else about the wait.
    """

    machine: MachineId
    detail: str = ""
    """Its place in the queue, and why it waits, as far as the service tells."""


class MachineAllocated(_Event, frozen=True):
    """Its service started the machine at `started_at`: its expiry, its money and its boot count from then.

    `start` is the service's name for this start. A machine has one: started again, it is given up.
    """

    machine: MachineId
    started_at: Micros
    start: str = ""
    node: str = ""


class MachineUp(_Event, frozen=True):
    """The place says that the machine runs. `timings` are seconds by step, as far as it knows them.

    `host_key`: the public key of its SSH server, for whoever takes the run over from another computer.
    """

    machine: MachineId
    address: str = ""
    node: str = ""
    name: str = ""
    timings: Mapping[str, float] = {}
    host_key: str = ""


class MachineReady(_Event, frozen=True):
    """The machine is set up and probed: it may take attempts. `timings` are seconds by step.

    `address`: where a machine that was mended is found now.
    """

    machine: MachineId
    timings: Mapping[str, float] = {}
    address: str = ""
    isolated: Isolated = Isolated()


class MachineStep(_Event, frozen=True):
    """A step of its set-up has begun, or says how it is going; or its service says how its start is."""

    machine: MachineId
    step: str
    said: str = ""


class MachinePrepared(_Event, frozen=True):
    """A pool's machine was set up for this benchmark; with an empty name, its set-up was undone."""

    machine: MachineId
    benchmark: str
    timings: Mapping[str, float] = {}
    good_until: Micros | None = None
    """When what was set up there is good for nothing any more, if that is known: a licence ends."""
    prefix: str = ""
    """How the names of all the pool's machines begin from now on, if that changes."""


class MachineStopping(_Event, frozen=True):
    """Decided: the machine shall stop. Its disk stays."""

    machine: MachineId
    cause: Cause | None = None
    detail: str = ""
    """Why it failed, if no user asked for the stop."""


class MachineStopped(_Event, frozen=True):
    """The machine runs no more, and is not billed."""

    machine: MachineId


class MachineStarting(_Event, frozen=True):
    """Decided: the machine that was stopped shall run again, after so many seconds: its place bounds how many
    may be asked for in a minute."""

    machine: MachineId
    after_s: float = 0.0


class MachineSilent(_Event, frozen=True):
    """Nothing was heard of the machine since `since`."""

    machine: MachineId
    since: Micros


class MachineHeard(_Event, frozen=True):
    """A silent machine answered again."""

    machine: MachineId


class MachineAnswered(_Event, frozen=True):
    """Asked while another machine was silent, this one answered: it is not our own network."""

    machine: MachineId


class MachineUnreachable(_Event, frozen=True):
    """Its place says that it runs, but it cannot be reached. `step`: how far it came."""

    machine: MachineId
    detail: str
    step: str = ""


class MachineMending(_Event, frozen=True):
    """Decided: the machine shall be mended by this `step` of its place. What ran on it is over."""

    machine: MachineId
    step: str
    detail: str


class MachineExtended(_Event, frozen=True):
    """Decided: the machine may live until `expires_at`."""

    machine: MachineId
    expires_at: Micros


class MachineLeaseSet(_Event, frozen=True):
    """The place has confirmed that it will end the machine at `expires_at`."""

    machine: MachineId
    expires_at: Micros


SERVICE_STEP = "start"
"""The step of a machine that its service has started, and on which our supervisor does not answer yet."""
FORGED = "supervisor"
"""The step of a boot that failed because something else than our supervisor answered."""


class MachineCondemned(_Event, frozen=True):
    """Decided or found: no more work for it, and it shall be deleted.

    No cause: it did nothing wrong (idle, run over, budget). `step` names the step that failed, of its set-up
    or of its boot.
    `scope` and `permanent` say what a provisioning failure blocks besides this machine. `image`: its disk
    becomes an image of this name before it goes.
    """

    machine: MachineId
    detail: str
    cause: Cause | None = None
    step: str = ""
    scope: Scope = "machine"
    permanent: bool = False
    image: str = ""


class MachineDeleteRefused(_Event, frozen=True):
    """Its place refuses to delete it, or cannot: it exists, and costs on. It is asked for again and again."""

    machine: MachineId
    detail: str


class MachineDeleted(_Event, frozen=True):
    """The place shows it no more. `gone_at` is when its billing ended.

    `unseen_s`: a machine that nobody saw leave its queue may have run for so long, and is paid as if it had.
    """

    machine: MachineId
    gone_at: Micros
    unseen_s: float | None = None


class AttemptStarted(_Event, frozen=True):
    """Decided: this attempt shall run on this machine."""

    attempt: AttemptId
    task: TaskId
    machine: MachineId
    allowance: Allowance = NO_LIMIT
    """What its model calls may use, reserved from the budget until it ends."""


class BudgetPassed(_Event, frozen=True):
    """So many percent of the budget are spent, on what has ended."""

    percent: int


class AttemptEnded(_Event, frozen=True):
    """The attempt is over for good, whatever is heard of it later."""

    attempt: AttemptId
    outcome: Outcome
    seconds: float = 0.0
    node: str = ""
    metered: Metered | None = None


class AttemptCollected(_Event, frozen=True):
    """The attempt's artefacts are here, or will never be. A result that came too late is `superseded`.

    `metered`: what its model calls used, if that was not known when it ended.
    """

    attempt: AttemptId
    collected: Collected = Collected()
    superseded: Outcome | None = None
    metered: Metered | None = None


class AttemptGraded(_Event, frozen=True):
    """The benchmark has graded what the attempt left. The first grade of an attempt counts, and stays."""

    attempt: AttemptId
    grade: Grade


class GradingFailed(_Event, frozen=True):
    """The benchmark could not grade, for a reason that is not in the answers. They stay as they are."""

    detail: str


class GradingRequested(_Event, frozen=True):
    """The user asked to grade again what has a score. The new grades are kept beside the first."""

    attempts: tuple[AttemptId, ...]


class TasksReopened(_Event, frozen=True):
    """These broken tasks run again, with a fresh allowance: the user asked for it, or it was decided because
    they broke only at a place whose circuit has opened."""

    tasks: tuple[TaskId, ...]


CircuitPhase = Literal["closed", "draining", "open"]
"""Whether a place shall have machines of a run. `closed`: as many as are wanted. `draining`: no new ones, and
those that are there go once they break an attempt. `open`: those that are there end what they run, and go;
some time later one machine is tried."""


class CircuitChanged(_Event, frozen=True):
    """Decided or found: a place that keeps failing shall have no machines for now, or it shall have some
    again."""

    place: str
    phase: CircuitPhase
    detail: str = ""
    """Why, in a sentence."""
    until: Micros = 0
    """When one machine is tried at a place whose circuit is open."""
    permanent: bool = False
    """It stays open: asking again does not help."""


class NewFiles(Struct, frozen=True, omit_defaults=True):
    """A benchmark that was read again, for the tasks that are left."""

    benchmark_spec: Mapping[str, Any]
    slots: int = 1
    isolation: Mapping[str, Isolation] = {}
    tasks: tuple[Task, ...] = ()
    """Those that are described in another way now."""
    changed: tuple[str, ...] = ()
    """For people: names of files, and of keys of the benchmark's description."""

    def renewed(self, plan: Plan) -> Plan:
        """The plan of a run that goes on with these."""
        spec, slots, isolation = self.benchmark_spec, self.slots, self.isolation
        return msgspec.structs.replace(plan, benchmark_spec=spec, slots=slots, isolation=isolation)


class RunResumed(_Event, frozen=True):
    """The user took up a run that had stopped. The time limit starts anew.

    `new_files`: what is left runs with the benchmark as it was then. No machine is up at that time.
    """

    limits: Limits | None = None
    only: tuple[TaskId, ...] | None = None
    new_files: NewFiles | None = None


class StopRequested(_Event, frozen=True):
    """No task is handed out from now on. `drain`: what runs may end by itself."""

    reason: StopReason
    detail: str = ""
    drain: bool = False
    by: str = ""
    """Who asked for it, if somebody did from outside."""
    why: str = ""
    """In that person's words."""


SteeringVerb = Literal["pause", "unpause", "set", "end", "drain", "undrain", "restart", "replace"]
"""In older journals only: `pause` and `unpause`, now `set` with `workers`, and `restart`, which changes
nothing by itself because a MachineMending follows it."""


class RunSteered(_Event, frozen=True):
    """Somebody changed a live run: what, who, and why."""

    verb: SteeringVerb
    by: str = ""
    why: str = ""
    attempt: AttemptId | None = None
    """The one to `end`."""
    machine: MachineId | None = None
    """The one to `drain`, `undrain` or `replace`."""
    workers: int | None = None
    """What to `set`, and what follows; None: as it is. 0 pauses the run, any other number continues it."""
    budget_usd: float | None = None
    attempts: int | None = None
    release: bool = False
    """The machines of a run that is paused are deleted when their attempts have ended."""


class RunEnded(_Event, frozen=True):
    """Every task is settled or will stay unrun, and no machine is left."""

    status: RunStatus


class Ignored(_Event, frozen=True):
    """An event of a feature that was removed. It changes nothing."""


REMOVED = frozenset({"NodeReleased", "AllowanceWanted", "AllowanceGranted", "AllowanceTold"})
"""Kinds of events that older versions wrote and this one reads as `Ignored`."""

Event = (
    RunPlanned
    | TasksPlanned
    | PoolPlanned
    | PoolResized
    | ControllerStarted
    | MachineRequested
    | MachineQueued
    | MachineAllocated
    | MachineUp
    | MachineReady
    | MachineStep
    | MachinePrepared
    | MachineStopping
    | MachineStopped
    | MachineStarting
    | MachineSilent
    | MachineHeard
    | MachineAnswered
    | MachineUnreachable
    | MachineMending
    | MachineExtended
    | MachineLeaseSet
    | MachineCondemned
    | MachineDeleteRefused
    | MachineDeleted
    | AttemptStarted
    | BudgetPassed
    | AttemptEnded
    | AttemptCollected
    | AttemptGraded
    | GradingFailed
    | GradingRequested
    | TasksReopened
    | CircuitChanged
    | RunResumed
    | StopRequested
    | RunSteered
    | RunEnded
    | Ignored
)


class Record(Struct, frozen=True):
    """The envelope: one event where and when it was written."""

    seq: int
    epoch: int
    at: Micros
    event: Event


Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

_PARTS = {
    "cost": (
        *("usd_per_hour", "billing_step_s", "least_billed_s", "idle_usd_per_hour", "sweep_s", "linger_s"),
        "priced",
    ),
    "life": (
        *("queues", "queue_s", "max_queue_s", "boot_s", "silent_s", "lost_s", "least_life_s", "extendable"),
        *("max_life_s", "teardown_s", "settle_s"),
    ),
}
"""Part of an offer -> the fields that were the offer's own up to schema 2."""


def _with_parts(body: dict[str, Any]) -> dict[str, Any]:
    """Return a MachineRequested of schema 2 with the parts of its offer."""
    offer = dict(body["offer"])
    for part, names in _PARTS.items():
        offer[part] = {name: offer.pop(name) for name in names if name in offer}
    return {**body, "offer": offer}


UPGRADES: dict[tuple[int, str], Upgrade] = {(2, "MachineRequested"): _with_parts}
"""(schema, kind) -> how a body of that schema becomes one of the next. Absent: it is unchanged.

Schema 2 brought new kinds only (MachineQueued, MachineAllocated, MachineDeleteRefused, AttemptGraded,
GradingFailed, GradingRequested, BudgetPassed, RunSteered, CircuitChanged) and a new outcome (Answered), and
limits of silence moved from the plan to the offers: bodies of schema 1 are read as
they are. Schema 3 has offers in three parts.
"""

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(decodable(Event))


def kind_of(event: Event) -> str:
    return type(event).__name__


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(body: bytes, schema: int = SCHEMA) -> Event:
    """The event in `body`, written under `schema`. Raises JournalForeign when it cannot be read."""
    try:
        event: Event = _decoder.decode(body if schema == SCHEMA else upgrade(body, schema))
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        if _is_removed(body):
            return Ignored()
        raise JournalForeign(f"the journal holds an event that cannot be read ({err})") from err
    return event


def _is_removed(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=decodable(_Kind)).kind in REMOVED
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


class _Kind(Struct):
    kind: str


def upgrade(
    body: bytes,
    schema: int,
    target: int = SCHEMA,
    upgrades: Mapping[tuple[int, str], Upgrade] = UPGRADES,
) -> bytes:
    """`body` of an older `schema`, lifted step by step to `target`."""
    if schema > target:
        raise JournalForeign(
            f"the journal was written by a newer evalfleet (schema {schema}, this one reads up to {target}): "
            "upgrade evalfleet"
        )
    if not any(schema <= step < target for step, _ in upgrades):
        return body
    loose: dict[str, Any] = msgspec.json.decode(body)
    for step in range(schema, target):
        lift = upgrades.get((step, loose["kind"]))
        loose = lift(loose) if lift else loose
    return _encoder.encode(loose)
