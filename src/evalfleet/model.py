"""The nouns of evalfleet, as frozen data. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from threading import Lock
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeVar

from msgspec import Meta, Struct, field
from msgspec.json import Decoder

TaskId = NewType("TaskId", str)
MachineId = NewType("MachineId", str)
AttemptId = NewType("AttemptId", str)
Micros = int
"""An instant: UTC, in whole microseconds. Durations are float seconds and say so (`_s`)."""

SECOND: Micros = 1_000_000


def after(at: Micros, seconds: float) -> Micros:
    """The instant `seconds` after `at`."""
    return at + round(seconds * SECOND)


def seconds_between(start: Micros, end: Micros) -> float:
    return (end - start) / SECOND


T = TypeVar("T")
_learnt: set[Any] = set()
_learning = Lock()


def decodable(kind: T) -> T:
    """The same type, which msgspec may decode into from any thread now.

    It learns what a struct is made of when that is first asked for. If another thread asks meanwhile, the
    process ends by a segmentation fault.
    """
    if kind not in _learnt:
        with _learning:
            Decoder(kind)
            _learnt.add(kind)
    return kind


class Cause(StrEnum):
    """Why an attempt, or a machine, says nothing about the agent. A closed set: reports count it."""

    PROVISIONING = "provisioning"
    BOOT = "boot"
    SETUP = "setup"
    READINESS = "readiness"
    CONNECTION = "connection"
    STUCK = "stuck"
    TIMEOUT = "timeout"
    EVICTED = "evicted"
    MACHINE_LOST = "machine_lost"
    MODEL = "model"
    RESULT = "result"
    GRADING = "grading"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class CauseTraits(NamedTuple):
    """What follows from a cause."""

    free: bool = False
    """It uses up none of the task's allowed attempts, if its place or the controller itself saw it.

    What a machine says, or a file on it, may be the task's own doing: see `Broken.counts`.
    """
    systematic: bool = True
    """When it kept one machine from becoming ready, the next may fare alike: several of them stop the run."""
    unreachable: bool = False
    """Nothing can be fetched from a machine that was given up for it."""
    declarable: bool = False
    """A benchmark may say it of an attempt, in `result.json`."""


CAUSES = {
    Cause.PROVISIONING: CauseTraits(free=True, unreachable=True),
    Cause.BOOT: CauseTraits(free=True, unreachable=True),
    Cause.SETUP: CauseTraits(declarable=True),
    Cause.READINESS: CauseTraits(declarable=True),
    Cause.CONNECTION: CauseTraits(free=True, systematic=False, unreachable=True),
    Cause.STUCK: CauseTraits(declarable=True),
    Cause.TIMEOUT: CauseTraits(),
    Cause.EVICTED: CauseTraits(free=True, systematic=False),
    Cause.MACHINE_LOST: CauseTraits(free=True, systematic=False, unreachable=True),
    Cause.MODEL: CauseTraits(declarable=True),
    Cause.RESULT: CauseTraits(),
    Cause.GRADING: CauseTraits(),
    Cause.CANCELLED: CauseTraits(free=True),
    Cause.INTERNAL: CauseTraits(declarable=True),
}
"""All of them: whoever adds a cause says here what follows from it."""


class Task(Struct, frozen=True, omit_defaults=True, gc=False):
    """One unit that gets a score."""

    id: TaskId
    domain: str = ""
    """What kind of task it is, in the benchmark's words; reports count by it."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the benchmark's command is given of it."""
    timeout_s: float = 3600.0
    """How long an attempt at it may take."""
    weight_s: float | None = None
    """Its expected duration, when earlier runs tell."""
    stall_s: float = 0.0
    """An attempt that writes nothing for so long is stuck; 0: it may be silent."""
    ready_s: float = 0.0
    """How much longer than the limit its command may live, for a benchmark whose command gets the machine
    ready before the task and keeps the limit itself."""
    origin: str = ""
    """The benchmark's own id of it, where a run has several of one task: one for each model and repeat."""
    repeat: int = 0
    """Which repeat it is, from 1; 0: its task is run once."""
    model: str = ""
    """The model that it is run with, where a run has several."""
    needs: Needs | None = None
    """What it needs beyond what the benchmark does: it runs only on machines that have it."""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What people want to know of it later; no command sees it."""
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its benchmark keeps with it, for itself alone."""
    set_up: str = ""
    """What a machine is set up with for it alone, an image or files, by name: a machine that has had a task
    with the same one is given it first."""

    @property
    def limit_s(self) -> float:
        """How long its command may live."""
        return self.timeout_s + self.ready_s


class Needs(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a machine must have to run a benchmark's tasks."""

    cpus: int = 1
    memory_gb: float = 0.0
    disk_gb: float = 0.0
    nested_virtualization: bool = False
    gpus: int = 0
    strict: bool = True
    """False: machines are made so, but hosts that have less are tried, too."""

    def joined(self, other: Needs) -> Needs:
        """What a machine must have that does for both."""
        return Needs(
            max(self.cpus, other.cpus),
            max(self.memory_gb, other.memory_gb),
            max(self.disk_gb, other.disk_gb),
            self.nested_virtualization or other.nested_virtualization,
            max(self.gpus, other.gpus),
            self.strict and other.strict,
        )

    def shared(self, other: Needs) -> Needs:
        """What both ask for at least."""
        return Needs(
            min(self.cpus, other.cpus),
            min(self.memory_gb, other.memory_gb),
            min(self.disk_gb, other.disk_gb),
            self.nested_virtualization and other.nested_virtualization,
            min(self.gpus, other.gpus),
            self.strict and other.strict,
        )

    def covers(self, other: Needs) -> bool:
        """Does a machine that has this do for the other, too?"""
        return (
            self.cpus >= other.cpus
            and self.memory_gb >= other.memory_gb
            and self.disk_gb >= other.disk_gb
            and self.nested_virtualization >= other.nested_virtualization
            and self.gpus >= other.gpus
        )

    def in_words(self) -> str:
        """What is asked for beyond an ordinary machine: "2 GPUs, 64 GB of memory"; empty if nothing is."""
        asked = (
            f"{self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else "",
            f"{self.cpus} CPUs" if self.cpus > 1 else "",
            f"{self.memory_gb:g} GB of memory" if self.memory_gb else "",
            f"{self.disk_gb:g} GB of disk" if self.disk_gb else "",
            "nested virtualization" if self.nested_virtualization else "",
        )
        return ", ".join(filter(None, asked))


class Cost(Struct, frozen=True, omit_defaults=True):
    """What a machine of an offer costs."""

    usd_per_hour: float = 0.0
    billing_step_s: float = 1.0
    """Each begun step is billed as a whole."""
    least_billed_s: float = 0.0
    """A machine that lives shorter is billed for so long."""
    idle_usd_per_hour: float = 0.0
    """The part of the price that goes on while a machine is stopped, and after its expiry, until it is
    deleted: disks, addresses."""
    sweep_s: float = 0.0
    """For how long after the expiry a budget pays `idle_usd_per_hour`."""
    linger_s: float = 0.0
    """Seconds for which its service may bill the idle node of a machine that is gone. All are counted."""
    priced: str = ""
    """The date of the price, or where else it is from."""


class Lifetime(Struct, frozen=True, omit_defaults=True):
    """How a machine of an offer comes, lives and goes."""

    queues: bool = False
    """It is a job of a service and waits there; its life and its billing begin when it starts."""
    queue_s: float | None = None
    """How long it is expected to wait there; None: nobody can tell."""
    max_queue_s: float | None = None
    """How long it may wait there before it is given up; None: for ever."""
    boot_s: float | None = None
    """How long it may take from its start until it can be reached; None: `Limits` says, and ten minutes for a
    job of a service."""
    silent_s: float = 8.0
    """After how long without a word its channel gives up. It is alike in all offers of one place."""
    lost_s: float = 12.0
    """How long it may be silent in all before it is given up, while others that are reached in the same way
    are heard. It is alike in all offers of one place."""
    least_life_s: float = 0.0
    """The place cannot be told to end it sooner."""
    extendable: bool = True
    """Its life can be made longer, in all up to `max_life_s`."""
    max_life_s: float | None = None
    teardown_s: float = 0.0
    """How long a delete may take to end the billing."""
    settle_s: float = 0.0
    """How far apart two looks must be before it is believed gone: a create may land after a delete."""


class Offer(Struct, frozen=True, omit_defaults=True):
    """A size in a region that satisfies a benchmark's needs: what it is, what it costs, how long it lives."""

    place: str
    size: str
    region: str = ""
    spot: bool = False
    """The place may take its machines back at any time."""
    capacity: int | None = None
    """How many machines of it can be had at once (lent hosts, a quota of jobs); None: nobody knows."""
    area: str = ""
    """What a refusal of the whole region is about, where `region` says more than that."""
    family: str = ""
    """Offers of one family in one area share a quota."""
    has: Needs = Needs()
    """What its machines have at least, as far as anybody asked for it: tasks may need more than others."""
    cpus: int = 0
    """How many processors its machines have; 0: nobody can tell."""
    memory_gb: float = 0.0
    """The same, of memory."""
    mends: tuple[str, ...] = ()
    """What the place can do to a machine that runs but cannot be reached, the mildest first."""
    creates_a_minute: int | None = None
    """How many machines its place lets us ask for in a minute, of all offers of one area together; None: as
    many as we like. It is alike in all of them."""
    lent: bool = False
    """Its machines are computers that exist before and after. One that was drained is not taken again."""
    without: tuple[str, ...] = ()
    """Names of drained machines. `create` must not take them."""
    cost: Cost = Cost()
    life: Lifetime = Lifetime()

    @property
    def bounded(self) -> bool:
        """Has the life of its machines an end that cannot be moved?"""
        return not self.life.extendable or self.life.max_life_s is not None

    @property
    def key(self) -> str:
        return f"{self.place}/{self.region}/{self.size}{'/spot' if self.spot else ''}"

    @property
    def area_key(self) -> str:
        """What it shares limits with: all offers of its place in its area."""
        return f"{self.place}/{self.area or self.region}"


class Command(Struct, frozen=True, omit_defaults=True):
    """A program and its arguments. Secrets are names; only a channel ever sees their values."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: tuple[str, ...] = ()


WANTS_FILE = 75
"""A set-up step ends with this exit code to be sent its file; then it is run again."""
FAILS_EVERYWHERE = 78
"""A set-up step ends with this exit code if it would fail on any machine; its last line says why."""
FAILS_FOR_NOW = 69
"""A set-up step ends with this exit code if it may succeed on another machine; its last line says why."""


class LargeFile(Struct, frozen=True):
    """A file of gigabytes that a machine may need, sent in parts: those that are there are not sent again."""

    name: str
    """What it is called on the machine; it changes with the contents. Part N is `../NAME-N.part/part`."""
    path: str
    """Where it is here."""
    bytes: int
    part_bytes: int


class KeptFiles(Struct, frozen=True):
    """Files of gigabytes that machines fetch from a storage of their place, where they are put once."""

    label: str
    """What they are, for people."""
    name: str
    """The digest of all contents: other contents have another name."""
    paths: Mapping[str, str]
    """Name -> where it is here."""
    digests: Mapping[str, str]
    """Name -> SHA-256 of its contents."""
    variable: str
    """By this, which is a secret, the step that asks for them learns the address of each, as JSON."""


class SetupStep(Struct, frozen=True, omit_defaults=True):
    """One command that must succeed before a machine takes work."""

    name: str
    command: Command
    timeout_s: float = 3600.0
    file: LargeFile | None = None
    """What it is sent if it asks for it (`WANTS_FILE`)."""
    kept: KeptFiles | None = None
    """What it is told the address of if it asks for it."""


class Bundle(Struct, frozen=True, omit_defaults=True):
    """What every machine gets once: files and set-up steps."""

    digest: str = ""
    """Over the files' contents and the steps; a machine prepared with it is not prepared again."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name on the machine -> path here."""
    steps: tuple[SetupStep, ...] = ()


Isolation = Literal["", "auto", "user", "container", "none", "own"]
"""How attempts are kept apart on a machine. `user`: each is a user of its own. `container`: each is in one of
its benchmark's image. `own`: the benchmark sees to it by itself. `auto`: as users where that can be had.
Empty: nobody has said."""


class Isolated(Struct, frozen=True, omit_defaults=True):
    """How attempts are kept apart on one machine, and what that means there, or why they are not."""

    kind: Isolation = ""
    detail: str = ""


NOT_SAID = Isolated()


class ModelApi(Struct, frozen=True, omit_defaults=True):
    """An API of models that metered calls go on to: a vendor's, or a gateway to several."""

    name: str
    url: str
    secret: str
    """The name of the secret that is its key. No attempt sees the value."""
    header: str
    """In which header of a call the key goes."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """What a metered command finds in its environment; `{url}` and `{key}` are the meter's and its own."""


class Metering(Struct, frozen=True, omit_defaults=True):
    """How a run's model calls are metered: they go through a process on the machine that counts them."""

    apis: tuple[ModelApi, ...]
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """US dollars for a token, by model and kind of token: `in`, `cached`, `cache_write`, `out`."""
    priced: str = ""
    """Where the prices are from, and of when."""
    keep_calls: bool = False
    """Keep what was asked and answered, too, as files of the attempt."""
    concurrency: int | None = None
    """At most so many attempts at once, over all machines."""
    rpm: float | None = None
    """The models' limit of calls a minute, over all machines."""
    tpm: float | None = None
    """The models' limit of tokens a minute, over all machines."""
    most_out: int | None = None
    """Tokens that a call puts out at most where it does not say: what it can have cost if nobody tells."""
    containers: bool = False
    """Calls come from containers with a network of their own: the meter listens there, too."""
    same_errors: int | None = None
    """How often the same error of a model may come before it ends an attempt. None: the meter's own limit."""
    port: int | None = None
    """Where the meter listens on a machine. None: at any port that is free."""
    paths: tuple[str, ...] = ()
    """Paths of the models' APIs that are passed on beside the known ones, each with all below it."""
    renames_max_tokens: bool = False
    """Calls of chat completions are passed on with `max_completion_tokens` in place of `max_tokens`."""


Spent = Annotated[float, Meta(ge=0.0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=10**15)]


class ModelUse(Struct, frozen=True, omit_defaults=True):
    """The calls of one model."""

    calls: Count = 0
    usd: Spent = 0.0
    unknown: Count = 0
    """Calls whose tokens, or whose price, nobody knows."""
    tokens: Mapping[str, Count] = field(default_factory=dict[str, int])
    unknown_usd: Spent = 0.0
    """The most that those can have cost; not in `usd`."""


class Metered(Struct, frozen=True, omit_defaults=True):
    """What the meter saw of an attempt's model calls."""

    usd: Spent = 0.0
    calls: Count = 0
    unknown: Count = 0
    """Calls whose tokens, or whose model's price, nobody knows."""
    throttled: Count = 0
    tokens: Mapping[str, Count] = field(default_factory=dict[str, int])
    """By kind. `in` includes `cached` and `cache_write`, `out` includes `reasoning`."""
    models: Mapping[str, ModelUse] = field(default_factory=dict[str, ModelUse])
    refused: str = ""
    """Why a call was refused: the allowance that is used up."""
    wedged: str = ""
    """The error that came again and again, for which the attempt was ended."""
    unknown_usd: Spent = 0.0
    """The most that the unknown calls can have cost, reckoned from what they asked; not in `usd`."""
    unknown_tokens: Count = 0
    """The most tokens that the unknown calls can have used; not in `tokens`."""

    def plus(self, other: Metered | None) -> Metered:
        """Both together: an attempt's, and its score command's."""
        if other is None:
            return self
        models = dict(self.models)
        for name, use in other.models.items():
            mine = models.get(name, ModelUse())
            sums = (mine.calls + use.calls, mine.usd + use.usd, mine.unknown + use.unknown)
            unknown_usd = mine.unknown_usd + use.unknown_usd
            models[name] = ModelUse(*sums, _added(mine.tokens, use.tokens), unknown_usd)
        return Metered(
            self.usd + other.usd,
            self.calls + other.calls,
            self.unknown + other.unknown,
            self.throttled + other.throttled,
            _added(self.tokens, other.tokens),
            models,
            self.refused or other.refused,
            self.wedged or other.wedged,
            self.unknown_usd + other.unknown_usd,
            self.unknown_tokens + other.unknown_tokens,
        )

    @property
    def used_usd(self) -> float:
        """What a budget must count: what calls of unknown cost can have cost, too."""
        return self.usd + self.unknown_usd

    @property
    def used_tokens(self) -> int:
        """The tokens of input and output together, with those that unknown calls can have used."""
        return self.tokens.get("in", 0) + self.tokens.get("out", 0) + self.unknown_tokens


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


class Allowance(Struct, frozen=True, omit_defaults=True):
    """What an attempt's metered calls may use in all. None: as much as they like."""

    usd: float | None = None
    tokens: int | None = None


NO_LIMIT = Allowance()


class Job(Struct, frozen=True, omit_defaults=True):
    """A command to run detached on a machine under a name of the caller's choice."""

    id: AttemptId
    command: Command
    timeout_s: float
    bundle: str = ""
    """The digest of the bundle whose files it finds in its working directory."""
    lease_s: float = 0.0
    """The machine ends it when no controller was heard for so long; 0: never."""
    log_cap_bytes: int = 50_000_000
    """More of its output than this is cut out of the middle."""
    stall_s: float = 0.0
    """It is stuck, and ended, when it writes nothing for so long; 0: it may be silent."""
    isolation: Isolation = ""
    graded: bool = False
    """Another job will grade what this one leaves, its working directory too."""
    grades: str = ""
    """The job whose work this one grades: its files are shown to this one, read-only if that can be had."""
    score_bundle: str = ""
    """More files for a job that grades; no other job sees them where jobs are isolated."""
    task_bundle: str = ""
    """More files, those of the job's task; they hide what the bundle has by the same names."""
    metering: Metering | None = None
    """How its model calls are metered. None: nobody counts them."""
    allowance: Allowance = NO_LIMIT
    """What its metered calls may use in all."""


class Scorer(Struct, frozen=True, omit_defaults=True):
    """A command that scores what an attempt left, once all of that has ended."""

    command: Command
    bundle: Bundle = Bundle()
    """Files for it alone; it has no steps."""
    timeout_s: float = 600.0


class Machine(Struct, frozen=True, omit_defaults=True):
    """A machine that exists now, as its place says."""

    id: MachineId
    phase: Literal["queued", "pending", "up", "gone", "evicted"]
    """`queued`: a service has accepted it and not started it yet. `pending`: it is on its way up."""
    address: str = ""
    node: str = ""
    """The computer that it runs on, where that has a name of its own."""
    name: str = ""
    """What people call it, if its place knows better than we."""
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by step of how it came up, one after the other, if its place has seen it. What they leave of
    the time until it was up was its boot. A step within another one is called `<other>.<step>`."""
    start: str = ""
    """The name of its start, if a service may start it again by itself: another name means another start, and
    nothing of what ran there before is left."""
    ran_s: float | None = None
    """How long it has run by now, or had when it ended, in all its starts; None where nothing queues."""
    detail: str = ""
    """Why it still waits, or how it ended, in the words of its place."""
    step: str = ""
    """What it is at while it is pending, if its place can tell: `pull`, where it fetches an image."""
    host_key: str = ""
    """The public key of its SSH server, if its place has learned it from the cloud: whoever takes the run
    over from another computer must know it, and has no better way to."""


EndReason = Literal[
    "exited",
    "timed_out",
    "stalled",
    "stopped",
    "lost",
    "evicted",
    "lease",
    "failed_to_start",
    "model",
    "budget",
    "unmetered",
]
"""`model`: its model calls failed alike again and again. `budget`: they were refused for want of money.
`unmetered`: the meter of its machine was gone."""


class Ended(Struct, frozen=True, omit_defaults=True):
    """How a job ended, as its host (or service) tells it."""

    reason: EndReason
    exit_code: int | None = None
    seconds: float = 0.0
    """How long it took."""
    result: bytes | None = None
    """Its result.json, unparsed; None if it left none."""
    node: str = ""
    """The computer that it ran on, where that has a name of its own."""
    detail: str = ""
    """What else there is to say about it, for people."""
    unusable: str = ""
    """Why its result.json was not brought; it ends the sentence "result.json ..."."""
    metered: Metered | None = None
    """What its model calls used; None if nobody counted them."""


class Collected(Struct, frozen=True, omit_defaults=True, gc=False):
    """What came back of an attempt's artefacts."""

    files: int = 0
    bytes: int = 0
    left_out: int = 0
    """Files that were not brought; `left_out.json` beside the others names them."""
    problem: str = ""
    """What somebody should know about it, in a sentence."""


class Piece(Struct, frozen=True):
    """A piece of a file that is followed while a job writes it."""

    offset: int
    """Where it begins in the file."""
    data: bytes
    """Its bytes, with the values of secrets masked."""
    next: int
    """Where the next piece begins: who follows the file from there misses nothing and sees nothing twice."""
    at_end: bool = False
    """There was no more when it was read."""


class Step(Struct, frozen=True, omit_defaults=True):
    """One thing that an agent did in its attempt, as far as its trajectory tells."""

    n: int
    at: float | None = None
    """Seconds since 1970."""
    action: str = ""
    ok: bool | None = None
    screenshot: str = ""
    """A file beside the trajectory."""
    x: float | None = None
    y: float | None = None
    tokens: int | None = None
    error: str = ""


class Trajectory(NamedTuple):
    """The steps of an attempt, and what of the file could not be read, if anything."""

    steps: tuple[Step, ...] = ()
    problem: str = ""


class NewestStep(Struct, frozen=True, omit_defaults=True):
    """How far an attempt that runs has come, as its controller last saw."""

    seen_at: Micros
    count: int = 0
    step: Step | None = None
    problem: str = ""
    """Why its trajectory cannot be read, or not all of it."""


class Measured(Struct, frozen=True, omit_defaults=True):
    """What an attempt tells of itself beside its score, its steps and its cost."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name -> number, in the benchmark's own words."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Kind -> how many the model took: `in`, `out`, `cached`, ...; `total` if it told no kinds."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else is to be kept with it."""


class Scored(Struct, frozen=True, tag="scored", omit_defaults=True, gc=False):
    """An outcome that says something about the agent. A score of 0 is one, too, and is never tried again."""

    score: float
    success: bool = False
    """Whether the task counts as passed."""
    num_steps: int | None = None
    cost_usd: float | None = None
    """What the benchmark says that its model cost."""
    error: str | None = None
    """Why the agent failed, if the benchmark tells."""
    screenshots: tuple[str, ...] = ()
    """Files among its artefacts."""
    limit_s: float | None = None
    """The time limit that ended it, if one did: an agent that is out of time is scored."""
    seconds: float | None = None
    """How long the task itself took, where the benchmark tells that apart from getting ready."""
    measured: Measured | None = None


class Broken(Struct, frozen=True, tag="broken", omit_defaults=True, gc=False):
    """An outcome that says nothing about the agent: the task is tried again."""

    cause: Cause
    detail: str = ""
    cost_usd: float | None = None
    """What its model cost: that is spent all the same."""
    counts: bool = False
    """It uses up an attempt whatever its cause, because the task may have brought it about."""
    measured: Measured | None = None

    @property
    def is_free(self) -> bool:
        """Does it use up none of the task's allowed attempts?"""
        return CAUSES[self.cause].free and not self.counts


class Answered(Struct, frozen=True, tag="answered", omit_defaults=True):
    """An answer that the agent has submitted and nobody has graded yet.

    It proves that the machine works, but is no score: the benchmark grades what the attempt left, after the
    last task. The task is not tried again.
    """

    num_steps: int | None = None
    cost_usd: float | None = None
    screenshots: tuple[str, ...] = ()
    seconds: float | None = None
    """How long the task itself took, where the benchmark tells that apart from getting ready."""
    measured: Measured | None = None


Grade = Scored | Broken
"""What an answer is worth. Broken: it cannot be graded."""
Outcome = Scored | Broken | Answered

ScheduleName = Literal["dynamic", "fifo", "longest-first", "round-robin", "slices"]
StopReason = Literal["user", "budget", "time", "refused", "store"]
RunStatus = Literal["running", "done", "stopped", "failed"]


BORROWED = "pool"
"""The size of machines that a run borrowed from a pool, in its own journal."""
IMPORTED = "imported"
"""The place of runs that another program made: they have ended, and cannot be taken up."""


BOOT_TIMEOUT_S = 1800.0


class Limits(Struct, frozen=True, omit_defaults=True):
    """The bounds of a run, all of them data: policy reads them, nothing else does."""

    workers: int = 1
    """How many machines may work at once."""
    attempts: int = 3
    """How often a task may be tried, attempts that broke for a free cause not counted."""
    attempts_ceiling: int = 10
    """How often a task may be tried in all."""
    canary: int = 0
    """So many attempts must be scored or answered on the first machine before others are created."""
    budget_usd: float | None = None
    task_budget_usd: float | None = None
    """What the metered model calls of one attempt may cost; None: a share of what is left."""
    max_tokens: int | None = None
    """Of all metered model calls together, input and output."""
    max_duration_s: float | None = None
    deadline_s: float | None = None
    """When the run should be done. Nothing is stopped for it: it is told when it will not be."""
    auto: bool = False
    """Of the workers, only as many shall work as the deadline needs, or the budget pays."""
    boot_timeout_s: float = BOOT_TIMEOUT_S
    """How long a machine may take from its request, or from its start if it queues, until it is ready."""
    mend_s: float = 900.0
    """How long one step of mending a machine may take."""
    fleet_lost_s: float = 600.0
    """How long a machine may be silent while no other is heard, either: it may be our own network."""
    lease_s: float = 14_400.0
    """Machines end attempts when no controller was heard for so long."""
    grace_s: float = 30.0
    """How long after its limit an attempt is waited for."""
    retry_base_s: float = 1.0
    """How long a task waits before its second retry, and twice as long each further time. The first one, on
    another machine, does not wait."""
    retry_cap_s: float = 60.0
    """The longest such wait."""
    machine_streak: int = 3
    """A machine that breaks so many attempts in a row while others score is given up."""
    same_failure_machines: int = 3
    """The run stops when so many machines failed alike before they were ready."""
    first_attempts_alike: int = 10
    """The run stops when its first attempts broke alike, so many of them, and none scored."""
    offer_tries: int = 3
    """How often an offer may refuse before it counts as refused for good."""
    outage_tries: int = 24
    """How often a place that answers nothing for now is asked, further and further apart: for three hours."""

    def boot_limit_s(self, offer: Offer) -> float:
        """How long a machine of this offer may take until it is ready; its set-up has its own time in it."""
        if offer.life.boot_s is None:
            return self.boot_timeout_s
        return offer.life.boot_s + max(0.0, self.boot_timeout_s - BOOT_TIMEOUT_S)


class Verdict(Struct, frozen=True, omit_defaults=True):
    """The conditions under which a finished run exits with 0."""

    allow_broken: float = 0.0
    """How many tasks may be broken: a count, or a share of all tasks below 1."""
    allow_broken_is_share: bool = False
    fail_under: float | None = None
    """The least rate of passed tasks."""
    strict: bool = False
    """A broken task is a failed one: it is in the denominator of every rate."""


class Provenance(Struct, frozen=True, omit_defaults=True):
    """What a run was made of, for whoever wants to repeat it or doubts it."""

    selection: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The flags that chose its tasks, with the seed of a sample."""
    tasks_digest: str = ""
    """Of its tasks, their parameters and their limits."""
    commit: str = ""
    """Of the git repository that the benchmark's files are in."""
    uncommitted: bool = False
    """Files of that repository differed from the commit."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of evalfleet, Python and the operating system where it was planned."""


class Plan(Struct, frozen=True, omit_defaults=True):
    """A run, resolved: everything needed to run it or to take it up again, and no secret."""

    run: str
    """The name of the run, or of the pool whose plan it is."""
    benchmark: str
    """Its name; empty in a pool's own plan."""
    places: tuple[str, ...] = ("local",)
    benchmark_spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the benchmark is made of again."""
    place_specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Place -> what it is made of again."""
    model: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings of `--set` that are passed on to the benchmark's command."""
    agent: Mapping[str, str] = field(default_factory=dict[str, str])
    """What `-A` gives to the agent."""
    schedule: ScheduleName = "dynamic"
    slots: int = 1
    """How many attempts a machine runs at once."""
    limits: Limits = Limits()
    verdict: Verdict = Verdict()
    pool: str = ""
    """The named pool that lends its machines; empty: it has machines of its own."""
    home: str = ""
    """The id of the home that it is planned in."""
    machine_names: str = "worker-{n}"
    """What its machines are called."""
    model_usd: tuple[float, float] | None = None
    """What the model of a task may cost at least and at most, if that is known only by experience."""
    usual_s: Mapping[str, float] = {}
    """Domain -> the seconds that a task of it usually takes, as the benchmark says; "" is every other one."""
    metering: Metering | None = None
    """How its model calls are metered. None: they are not."""
    attempt_usd: float | None = None
    """What model calls cost in 95 of 100 attempts of earlier runs at most, if there were some."""
    isolation: Mapping[str, Isolation] = field(default_factory=dict[str, Isolation])
    """Place -> how attempts shall be kept apart on its machines."""
    models: tuple[str, ...] = ()
    """The models under test, where there are several; `model` then names them all, for people."""
    rerun_of: str = ""
    """The run whose tasks this one runs again."""
    provenance: Provenance | None = None
    store: str = ""
    """The URL of the object store that has a copy of the run; empty: none has."""
    ordered: bool = False
    """Machines come from the first place that has some to give; else from the cheapest, as always in plans of
    earlier versions."""
    needs: Needs | None = None
    """What machines must have, by what earlier runs used; None: what the benchmark says."""


Severity = Literal["info", "warning", "critical"]


class AlertRule(Struct, frozen=True, forbid_unknown_fields=True):
    """When something is told, and what is done then. A rule looks at those of its fields that it needs."""

    severity: Severity = "warning"
    on: bool = True
    after_s: float = 0.0
    """How long it must have been so."""
    share: float = 0.0
    """Of 1: above which share it is too much."""
    factor: float = 0.0
    """How many times the usual is too much."""
    count: int = 0
    """How often is too often."""
    act: Literal["", "auto", "pause", "drain", "replace", "end"] = ""
    """What is done beside telling: to the run, to the machine, or to the attempt that it is about; `auto`: to
    a service's machine, what its rule thinks right."""


class Alerting(Struct, frozen=True):
    """The rules that evalfleet.toml changes, by name."""

    cool_down_s: float = 1800.0
    """What was over and is so again is told again after this time."""
    rules: Mapping[str, AlertRule] = field(default_factory=dict[str, AlertRule])
    dashboard: str = ""
    """The address of the dashboard, for links in alerts; empty: they have none."""


class Notify(Struct, frozen=True):
    """Who is told how runs went: a program, a webhook, Apprise's addresses. It is false if nobody is."""

    command: tuple[str, ...] = ()
    """The program and its arguments."""
    webhook: str = ""
    """An address, which is a secret: whoever knows it can write there."""
    apprise: tuple[str, ...] = ()
    """Addresses as Apprise writes them, which are secrets, too."""
    alerting: Alerting | None = None
    """The rules by which they are told while a run goes on; None: only its end is told."""

    def __bool__(self) -> bool:
        return bool(self.command or self.webhook or self.apprise)

    def __repr__(self) -> str:
        hidden = ("..." if self.webhook else "", len(self.apprise))
        return f"Notify(command={self.command!r}, webhook={hidden[0]!r}, apprise={hidden[1]} addresses)"


NOBODY = Notify()
