"""The JSON documents about everything but results: files that other scripts read, pools, machines, images,
prices, plans and notices. As in `documents`, their keys are public.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from evalfleet.model import RunStatus

from .documents import Cost, Rate, RefusedOffer, Shares, TaskResult, Time, WorkerStatus

# -- files that other scripts read -----------------------------------------------------------------


class Aggregated(TypedDict):
    """The file aggregated_results.json."""

    total_tasks: int
    succeeded: int
    failed: int
    success_rate: Rate | None
    tasks: list[TaskResult]
    by_domain: dict[str, Shares]


class WorkerSummary(TypedDict):
    """What came of one machine's tasks."""

    total: int
    succeeded: int
    failed: int
    success_rate: Rate | None


class WorkerResults(TypedDict):
    """The file <machine>_results.json."""

    worker_name: str
    run_id: str
    completed_at: Time | None
    tasks: list[TaskResult]
    summary: WorkerSummary


class LiveWorker(TypedDict):
    """A machine in parallel_live.json."""

    name: str
    status: WorkerStatus
    assigned: int
    completed: int
    current_task: str | None


class Infrastructure(TypedDict):
    """Machines in parallel_live.json, counted."""

    active_nodes: int
    pending_jobs: int
    compute_health: dict[str, dict[str, float]]


class Performance(TypedDict):
    """How tasks do in parallel_live.json."""

    avg_task_duration: float | None
    task_success_rate: float | None
    retry_rate: float | None


class LiveCost(TypedDict):
    """Money in parallel_live.json."""

    current_hourly_rate: float | None
    current_usd: float | None
    estimated_total: float | None


class Live(TypedDict):
    """The file parallel_live.json."""

    status: RunStatus
    pool_id: str
    run: str
    started_at: Time | None
    total_tasks: int
    completed_tasks: int
    failed_tasks: int
    workers: list[LiveWorker]
    infrastructure: Infrastructure
    performance: Performance
    cost: LiveCost


# -- pools, machines, images, prices, plans ----------------------------------------------------------


class PoolCost(TypedDict):
    """What a pool costs."""

    machines_usd: float
    usd_per_hour: float
    stopped_usd_per_month: Annotated[
        float, Meta(description="what disks and addresses cost while all machines are stopped")
    ]
    prices_as_of: str | None


class PoolMachineRow(TypedDict):
    """A machine of a pool."""

    name: str
    id: str
    address: str
    status: str
    run: Annotated[str | None, Meta(description="the run that has it")]
    prepared: Annotated[str | None, Meta(description="the benchmark that it is set up for")]
    good_until: Annotated[Time | None, Meta(description="when what was set up ends, such as its licence")]
    usd_per_hour: float
    cost_usd: float
    delete_refused: Annotated[str | None, Meta(description="why its place does not delete it")]
    failure: Annotated[
        str | None, Meta(description="why it did not start, or stopped although no user asked for it")
    ]
    probe: NotRequired[Annotated[str | None, Meta(description="`ok` or a problem; only with --probe")]]
    screen: NotRequired[
        Annotated[
            str | None, Meta(description="the link that `pool vnc` keeps open; only if it has a screen")
        ]
    ]


class PoolDocument(TypedDict):
    """A pool, as `pool status --json` and others show it."""

    pool: str
    place: str
    workers: Annotated[int, Meta(description="how many machines it shall have")]
    created_at: Time | None
    expires_at: Time | None
    warning: str | None
    cost: PoolCost
    machines: list[PoolMachineRow]
    refusals: list[RefusedOffer]


class BelongingRow(TypedDict):
    """A machine, or what is left of one, as its place tells: `machines --json`, `reap --json`."""

    place: str
    machine: str
    home: str
    owner: str
    is_own: bool
    where: str
    expires_at: Time | None
    parts: list[str]
    why: Annotated[str, Meta(description="why it is to be deleted; empty if it is not")]
    trouble: Annotated[str | None, Meta(description="why it cannot be deleted, and what to do")]


class ImageFacts(TypedDict):
    """An image that a machine was captured as, or a snapshot that somebody made of a machine's disk."""

    image: str
    kind: Literal["image", "snapshot"]
    state: str
    setting: Annotated[str, Meta(description="the line of evalfleet.toml that makes machines from it")]
    regions: list[str]
    gb: float
    usd_per_month: float
    prices_as_of: str | None
    home: str
    owner: str
    parts: list[str]


class ImageRow(ImageFacts):
    """An image at a place: `images --json`."""

    place: str
    is_own: bool


class ImageBelongingRow(ImageRow):
    """An image among the machines of `machines --json`."""

    machine: None
    where: str
    expires_at: None
    why: str


class PoolWithImage(PoolDocument):
    """`pool prepare --capture --json`."""

    image: ImageFacts


class PriceRow(TypedDict):
    """An hour of something in a region."""

    what: str
    region: str
    usd_per_hour: float
    spot_usd_per_hour: NotRequired[float | None]
    estimated: NotRequired[bool]


class PricesDocument(TypedDict):
    """The list prices of one kind of place: `prices --json`."""

    place: str
    as_of: str
    source: str
    prices: list[PriceRow]


class EstimateDocument(TypedDict):
    """What a plan would take and cost."""

    at_once: int
    task_seconds: float
    machine_seconds: float
    machine_basis: str | None
    duration_seconds: float
    machine_hours: float
    usd: float | None
    prices_as_of: str | None
    basis: str
    models_usd_range: NotRequired[list[float]]


class PlanDocument(TypedDict):
    """`run --dry-run --json`."""

    plan: Annotated[dict[str, Any], Meta(description="as the journal would have it")]
    tasks: list[str]
    offers: list[dict[str, Any]]
    creates: Annotated[dict[str, list[dict[str, Any]]], Meta(description="place -> what it would make")]
    estimate: EstimateDocument
    home: str
    warnings: list[str]


class RangeDocument(TypedDict):
    """In which nine of ten simulated runs are, and the middle one."""

    low: float
    middle: float
    high: float


class OptionDocument(TypedDict):
    """One way to run a benchmark, and what comes of it."""

    workers: int
    place: str
    size: str
    region: Annotated[str | None, Meta(description="the cheapest, which is tried first")]
    spot: bool
    stopped_pool: Annotated[bool, Meta(description="on machines that were prepared and stopped")]
    pool: Annotated[str | None, Meta(description="such a pool that there is; one that is not is not chosen")]
    usd_per_hour: float
    prices_as_of: str | None
    seconds: Annotated[RangeDocument, Meta(description="until the last result")]
    machines_usd: RangeDocument
    models_usd: Annotated[RangeDocument | None, Meta(description="null: nothing is known of that")]
    usd: Annotated[RangeDocument, Meta(description="machines, and models where they are known")]
    evictions: Annotated[float, Meta(description="machines that are taken back, on average")]
    unfinished: Annotated[Rate, Meta(description="share of runs that leave a task without a score")]
    quota: Annotated[int | None, Meta(description="how many more such machines can be had; null: unknown")]
    right_sized: Annotated[bool, Meta(description="of the size that earlier runs needed")]
    best: Annotated[bool, Meta(description="no other way is both quicker and cheaper")]


class ForecastBasis(TypedDict):
    """What a forecast rests on."""

    runs: Annotated[int, Meta(description="earlier runs of the benchmark in this home")]
    tasks: Annotated[
        dict[str, int],
        Meta(description="task, other model, domain, benchmark, default or guess -> how many tasks"),
    ]
    machines_known: bool
    models_known: bool


class ForecastDocument(TypedDict):
    """`plan --json`."""

    benchmark: str
    model: str | None
    tasks: int
    options: Annotated[list[OptionDocument], Meta(description="the cheapest first")]
    chosen: Annotated[OptionDocument | None, Meta(description="by --deadline or --budget")]
    command: Annotated[str | None, Meta(description="runs what was chosen")]
    basis: ForecastBasis
    notes: list[str]


class ReconcileRow(TypedDict):
    """One day of a run, pool or model: what was counted, and what was billed."""

    day: str
    what: Annotated[str, Meta(description="a run, a pool, a model, or `shared`")]
    counted_usd: float
    billed_usd: float
    difference_usd: float
    why: Annotated[str | None, Meta(description="null: they agree; `unexplained`: nothing explains it")]


class ReconcileDocument(TypedDict):
    """`cost reconcile --json`."""

    source: Annotated[str, Meta(description="whose export it is")]
    counted_usd: float
    billed_usd: float
    unexplained_usd: float
    rows: list[ReconcileRow]


class NoticeHead(TypedDict):
    """What every notification begins with."""

    event: Annotated[str, Meta(description="run_ended, run_left, reaped or alert")]
    at: Time | None
    host: str
    version: str


class AlertNotice(NoticeHead):
    """What [notify] is told of an alert. Nothing in it was written by an agent."""

    run: str
    rule: str
    severity: str
    subject: Annotated[str, Meta(description="what it is about; a rule tells of each once")]
    machine: Annotated[str | None, Meta(description="its name")]
    attempt: str | None
    act: Annotated[str | None, Meta(description="what is done about it: pause, drain, replace or end")]
    look: Annotated[str, Meta(description="the command to look closer with")]
    link: Annotated[str | None, Meta(description="its page of the dashboard, if [alerts] names that")]
    text: str


class LeftMachine(TypedDict):
    """A machine that a run has left behind."""

    machine: str
    name: str
    place: str


class RunNotice(NoticeHead):
    """What [notify] is told when a run has ended, or its controller gave up."""

    run: str
    benchmark: str
    model: str | None
    started_at: Time | None
    ended_at: Time | None
    total_tasks: int
    scored: int
    broken: int
    unrun: int
    status: str
    success_rate: Rate | None
    reason: str | None
    cost: Cost
    left: list[LeftMachine]
    text: Annotated[str, Meta(description="all of it in one line, as chat rooms show it")]


class ReapNotice(NoticeHead):
    """What [notify] is told when `reap` found something."""

    left: list[BelongingRow]
    problems: list[str]
    text: str


class Detached(TypedDict):
    """`run --detach --json`: where the run goes on."""

    run: str
    pid: int
    home: str


class DeletedRuns(TypedDict):
    """`rm --json`, `gc --json`: what is gone."""

    runs: list[str]
    files_only: Annotated[bool, Meta(description="their scores stay")]
    dry_run: Annotated[bool, Meta(description="they would be deleted, and are not")]


class DeletedPool(TypedDict):
    """`pool delete --json`: what is gone."""

    pool: str
    machines: list[str]


class ExportedRun(TypedDict):
    """`export --json`: where the run was written to."""

    run: str
    path: str
    bytes: int


class NewBenchmark(TypedDict):
    """`init --json`: what was written."""

    benchmark: Annotated[str, Meta(description="the benchmark's file, for `run`")]
    files: list[str]
    fields: Annotated[dict[str, str], Meta(description="what -> the dataset's field; # is the row's number")]


class LogPiece(TypedDict):
    """A piece of an attempt's output, in a line of JSON."""

    attempt: str
    text: str


class AnswerRow(TypedDict):
    """What came of something that was done to a machine of a pool."""

    machine: str
    id: str
    said: str | None
    problem: Annotated[str | None, Meta(description="null if nothing is wrong")]


class TunnelRow(TypedDict):
    """A port of a machine that is reached on this computer."""

    machine: str
    here: Annotated[int, Meta(description="the port of this computer, on 127.0.0.1")]
    there: Annotated[int, Meta(description="the machine's port")]
