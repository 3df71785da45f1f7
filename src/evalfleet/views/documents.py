"""The JSON documents that programs read, as types. Their keys are public: they may be added to.

They are dicts, as `Run.results()` has always given them, whose keys and values type checkers know.
`evalfleet report --schema` prints a JSON schema of each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from evalfleet.model import RunStatus

Time = Annotated[str, Meta(description="UTC, such as 2026-01-02T14:30:52Z")]
Interval = Annotated[list[float], Meta(description="both ends", min_length=2, max_length=2)]
Rate = Annotated[float, Meta(ge=0, le=1)]
AttemptOutcome = Literal["running", "scored", "broken", "answered"]
TaskStatus = Literal["waiting", "running", "scored", "broken", "answered", "unrun"]
WorkerStatus = Literal["creating", "ready", "running", "completed", "failed", "deleted"]

# -- results ---------------------------------------------------------------------------------------


class RunStop(TypedDict):
    """Why a run was stopped."""

    reason: str
    detail: str


class RefusedOffer(TypedDict):
    """An offer that refused machines."""

    place: str
    region: str | None
    size: str
    spot: bool
    usd_per_hour: float
    tries: int
    answer: Annotated[str, Meta(description="what the place said last")]
    blocked: Annotated[str, Meta(description="how much of the place is not asked again")]
    permanent: bool


class CircuitEntry(TypedDict):
    """A place was left for its failures, or taken up again."""

    at: Time
    phase: Annotated[str, Meta(description="`draining`, `open` or `closed`")]
    why: str
    until: Annotated[Time | None, Meta(description="when one machine is tried again")]
    permanent: Annotated[bool, Meta(description="it is not tried again")]


class PlaceUse(TypedDict):
    """What ran at one place."""

    place: str
    machines: int
    failed_machines: Annotated[int, Meta(description="those that were given up for a fault")]
    attempts: int
    scored: Annotated[int, Meta(description="attempts that were scored or answered")]
    broken: int
    machines_usd: float
    circuit: Annotated[str, Meta(description="`closed`, `draining` or `open`: whether it gets machines")]
    changes: Annotated[list[CircuitEntry], Meta(description="when that changed, and why")]


class Steered(TypedDict):
    """What somebody changed of a run while it went on."""

    at: Time
    verb: Literal["pause", "unpause", "set", "end", "drain", "undrain", "restart", "replace", "cancel"]
    by: Annotated[str, Meta(description="user@host")]
    reason: str | None
    what: Annotated[str, Meta(description="all of it, in words")]
    machine: Annotated[str | None, Meta(description="its name; drain without one is of the whole run")]
    attempt: str | None
    workers: int | None
    budget_usd: float | None
    attempts: int | None


class Cost(TypedDict):
    """What a run has cost so far."""

    machines_usd: float | None
    models_usd: Annotated[float | None, Meta(description="null if no attempt told its price")]
    per_task_usd: Annotated[float | None, Meta(description="of machines and models, a scored task")]
    prices_as_of: Annotated[str | None, Meta(description="the oldest price list that this rests on")]
    models_usd_range: NotRequired[
        Annotated[list[float | None], Meta(description="by experience, where attempts told no price")]
    ]


class ModelCost(TypedDict):
    """Metered calls of models, taken together."""

    usd: float
    calls: int
    unknown_calls: Annotated[int, Meta(description="whose tokens, or whose price, nobody knows")]
    unknown_usd: Annotated[float, Meta(description="the most that those can have cost; not in `usd`")]
    tokens: Annotated[dict[str, int], Meta(description="in, cached, cache_write, out, reasoning")]


class ModelCosts(ModelCost):
    """What metered model calls cost, of all attempts: also of those that broke or no longer counted."""

    metered: Annotated[bool, Meta(description="false: nobody counted them, and all figures are 0")]
    priced: Annotated[str | None, Meta(description="where the prices are from")]
    throttled_calls: int
    lost_usd: Annotated[float, Meta(description="the most that attempts on lost machines can have used")]
    retries_usd: Annotated[float, Meta(description="of attempts that did not decide their task")]
    by_model: dict[str, ModelCost]
    by_cause: Annotated[dict[str, float], Meta(description="scored, superseded, or why it broke -> USD")]
    by_domain: dict[str, float]
    by_machine: dict[str, float]
    by_place: dict[str, float]
    unseen: Annotated[list[str], Meta(description="attempts that tell of calls which the meter did not see")]
    untold: Annotated[
        list[str], Meta(description="attempts on lost machines, of whose calls nobody will tell")
    ]


class Figures(TypedDict):
    """Numbers of one name, taken together."""

    count: Annotated[int, Meta(description="how many told one")]
    mean: float
    min: float
    max: float
    total: float


class PassAtK(TypedDict):
    """How likely one of k tries at a task succeeds: the mean over tasks with so many scored repeats."""

    mean: Rate
    ci: Annotated[Interval | None, Meta(description="95%, over tasks")]
    tasks: int


class Shares(TypedDict):
    """Tasks of one domain, or of one model, in figures."""

    total: int
    scored: int
    succeeded: int
    success_rate: Rate | None
    success_rate_ci: Interval | None
    mean_score: float | None
    metrics: Annotated[dict[str, Figures], Meta(description="of scored tasks")]


class ModelShares(Shares):
    """The tasks of one model in figures."""

    pass_at_k: dict[str, PassAtK]


class RepeatedTask(TypedDict):
    """A task with all its repeats by one model."""

    task_id: Annotated[str, Meta(description="the benchmark's own")]
    model: str | None
    domain: str
    total: Annotated[int, Meta(description="how many repeats were planned")]
    scored: int
    broken: int
    succeeded: int
    success_rate: Rate | None
    success_rate_ci: Interval | None
    mean_score: float | None
    pass_at_k: Annotated[dict[str, float], Meta(description="k -> of its scored repeats, unbiased")]


class ToldDetails(TypedDict):
    """What an attempt told of itself beside its score."""

    cost_usd: Annotated[float | None, Meta(description="of the model, as the attempt told")]
    tokens: Annotated[dict[str, int], Meta(description="kind -> how many, as the attempt told")]
    metrics: Annotated[dict[str, float], Meta(description="the benchmark's own numbers")]
    metadata: Annotated[dict[str, Any], Meta(description="whatever else result.json had to keep")]


class OutcomeDetails(ToldDetails):
    """How an attempt or a task ended."""

    success: bool | None
    score: float | None
    num_steps: int | None
    error: str | None
    cause: Annotated[str | None, Meta(description="of what is broken; null if it was scored")]
    screenshots: list[str]
    limit_seconds: Annotated[float | None, Meta(description="the time limit that it was ended by")]


class TaskFacts(OutcomeDetails):
    """A task, by the attempt that decided it, or by the newest one if none did yet."""

    task_id: str
    origin: Annotated[str, Meta(description="the benchmark's own id; `task_id` but for repeats")]
    repeat: Annotated[int | None, Meta(description="which one it is, from 1; null without --repeat")]
    model: str | None
    domain: str
    tags: list[str]
    task_metadata: Annotated[dict[str, Any], Meta(description="what the benchmark's file keeps with it")]
    duration_seconds: float | None
    machine_seconds: Annotated[float | None, Meta(description="how long its machine was taken by it")]
    broken_attempts: Annotated[dict[str, int], Meta(description="cause -> how many attempts it broke")]
    machine_usd: Annotated[float | None, Meta(description="its share of machines, all attempts together")]
    model_usd: Annotated[float | None, Meta(description="metered model calls, all attempts together")]
    machine: str | None
    artifacts: Annotated[str | None, Meta(description="relative to the home")]
    status: TaskStatus


class TaskResult(TaskFacts):
    """A task of a run."""

    attempts: Annotated[int, Meta(description="how many there were")]


class StepRow(TypedDict):
    """One step of an attempt, as far as its trajectory tells."""

    n: int
    at: Time | None
    action: str | None
    ok: bool | None
    screenshot: Annotated[str | None, Meta(description="a file beside the trajectory")]
    x: float | None
    y: float | None
    tokens: int | None
    error: str | None


class AttemptProgress(TypedDict):
    """How far an attempt that runs has come."""

    steps: Annotated[int | None, Meta(description="null where its benchmark tells no steps")]
    step: Annotated[StepRow | None, Meta(description="the newest")]
    idle_seconds: Annotated[float | None, Meta(description="since its last step or line of output")]
    problem: Annotated[str | None, Meta(description="why its trajectory cannot be read")]


class Attempt(OutcomeDetails):
    """One try at a task."""

    attempt: str
    outcome: AttemptOutcome
    machine: str
    machine_id: str
    node: str | None
    started_at: Time | None
    ended_at: Time | None
    duration_seconds: float | None
    machine_usd: float | None
    metered: Annotated[ModelCost | None, Meta(description="its model calls; null where nobody counted them")]
    artifacts: str
    files: Annotated[int | None, Meta(description="how many were collected")]
    problem: Annotated[str | None, Meta(description="why its files are not complete")]
    grades: Annotated[
        list[OutcomeDetails], Meta(description="of an answer, in the order in which they were given")
    ]
    superseded: Annotated[OutcomeDetails | None, Meta(description="what came in when it no longer counted")]
    progress: Annotated[AttemptProgress | None, Meta(description="while it runs, and only in `show`")]
    grader: Annotated[
        str | None, Meta(description="the end of what its score command printed, only in `show`")
    ]


class TaskDetail(TaskFacts):
    """`show RUN TASK --json`: a task with every attempt at it."""

    run: str
    params: dict[str, Any]
    timeout_seconds: float
    decided_by: str | None
    attempts: list[Attempt]


class MachineResult(TypedDict):
    """A machine of a run, also one that is gone."""

    name: str
    id: str
    phase: str
    place: str
    region: str | None
    size: str
    spot: bool
    usd_per_hour: float
    idle_usd_per_hour: float
    priced: str | None
    address: str | None
    requested_at: Time | None
    allocated_at: Annotated[str | None, Meta(description="when it left the queue of its place")]
    ready_at: Time | None
    ended_at: Time | None
    uptime_seconds: float | None
    cost_usd: float | None
    timings: Annotated[dict[str, float], Meta(description="step -> seconds")]
    mended_by: list[str]
    isolation: str | None
    isolation_detail: str | None
    attempts: int
    scored: int
    step: str | None
    cause: str | None
    detail: str | None
    delete_refused: Annotated[str | None, Meta(description="why its place does not delete it")]


class ResultsHead(TypedDict):
    """Which run it is."""

    run: str
    benchmark: str
    model: str | None
    status: RunStatus
    started_at: Time | None
    ended_at: Time | None


class ResultsCounts(TypedDict):
    """A run in figures."""

    total_tasks: Annotated[int, Meta(description="scored + broken + unrun, always")]
    scored: int
    broken: int
    unrun: int
    answered: Annotated[int, Meta(description="not graded yet; they are among the unrun")]
    succeeded: int
    failed: int
    success_rate: Annotated[Rate | None, Meta(description="of scored tasks; strictly, of broken ones too")]
    success_rate_ci: Annotated[Interval | None, Meta(description="95%, Wilson's")]
    mean_score: float | None


class GradedAgain(TypedDict):
    """What the newest grading says of tasks that were graded more than once."""

    tasks: int
    otherwise: Annotated[int, Meta(description="how many of them have another score than at first")]
    succeeded: int
    success_rate: Annotated[Rate | None, Meta(description="of those that got a score again")]


class ResultsBeyond(TypedDict):
    """What the contract does not ask for, and people do."""

    running: int
    places: list[str]
    isolation: list[str]
    workers: int
    duration_seconds: float | None
    attempts: int
    retries: int
    broken_causes: Annotated[dict[str, int], Meta(description="of broken tasks: cause -> how many")]
    strict: Annotated[bool, Meta(description="broken tasks count as not solved")]
    shortfall: Annotated[str | None, Meta(description="why a run that is done does not exit 0")]
    task_seconds: Annotated[dict[str, float | None], Meta(description="p50, p90 and max of scored tasks")]
    stop: RunStop | None
    grading_problem: Annotated[str | None, Meta(description="why answers could not be graded")]
    graded_again: Annotated[GradedAgain | None, Meta(description="what later gradings say; the first counts")]
    controllers: Annotated[int, Meta(description="how many have worked on it, one after another")]
    rerun_of: Annotated[str | None, Meta(description="the run whose tasks this one runs again")]
    refusals: list[RefusedOffer]
    by_place: Annotated[list[PlaceUse], Meta(description="what ran where, and why places were left")]
    paused: Annotated[bool, Meta(description="no attempt starts until its workers are set again")]
    steering: Annotated[list[Steered], Meta(description="what people changed while it went on, in order")]


class ProvenanceDocument(TypedDict):
    """What a run was made of."""

    settings: Annotated[dict[str, str], Meta(description="--set, as far as it is the benchmark's")]
    agent: Annotated[dict[str, str], Meta(description="-A")]
    selection: Annotated[dict[str, Any], Meta(description="the flags that chose its tasks")]
    seed: Annotated[int | None, Meta(description="of a sample; null if all or chosen tasks were run")]
    limits: Annotated[dict[str, Any], Meta(description="as they are now; those that were not set, too")]
    schedule: str
    slots: Annotated[int, Meta(description="attempts at once on a machine")]
    versions: Annotated[dict[str, str], Meta(description="evalfleet, python and system of its planning")]
    digests: Annotated[dict[str, str], Meta(description="of its tasks and of the files put on machines")]
    commit: Annotated[str | None, Meta(description="of the repository with the benchmark's files")]
    uncommitted: Annotated[bool, Meta(description="files differed from that commit")]


class ResultsRepeats(TypedDict):
    """Models and repeats in figures."""

    by_model: Annotated[dict[str, ModelShares], Meta(description="empty unless there are several")]
    by_task: Annotated[list[RepeatedTask], Meta(description="empty unless repeated, or of several models")]
    pass_at_k: Annotated[dict[str, PassAtK], Meta(description="k -> over all; empty without repeats")]


class Results(ResultsHead, ResultsCounts, ResultsRepeats, ResultsBeyond):
    """results.json, `show RUN --json`, and the last line of `run --json`."""

    by_domain: dict[str, Shares]
    causes: Annotated[dict[str, int], Meta(description="of broken attempts: cause -> how many")]
    cost: Cost
    models: ModelCosts
    tasks: list[TaskResult]
    metrics: Annotated[dict[str, Figures], Meta(description="the benchmark's own, of scored tasks")]
    tokens: Annotated[dict[str, Figures], Meta(description="kind -> of all attempts that told")]
    machines: list[MachineResult]
    provenance: ProvenanceDocument


class VerifiedStream(TypedDict):
    """A run or pool in `verify --json`."""

    name: str
    events: Annotated[int | None, Meta(description="how many are as they were written")]
    not_covered: Annotated[int | None, Meta(description="how many are older than the checksums")]
    problem: Annotated[str | None, Meta(description="what was changed, removed or swapped")]


class RunPlannedLine(TypedDict):
    """The event RunPlanned in a line of JSON: the plan in a few words. It is the first line of a run."""

    schema_version: Annotated[int, Meta(description="of the lines; it goes up when one changes its meaning")]
    run: str
    benchmark: str
    model: str
    total: int
    places: list[str]
    workers: int


class TasksPlannedLine(TypedDict):
    """The event TasksPlanned in a line of JSON: tasks are counted, not listed, because they may be many."""

    count: int
