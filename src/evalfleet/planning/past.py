"""The earlier runs of a home: what their tasks, machines and models took, cost and used.

Figures come from the newest `results.json` files. Only the load of machines comes from journals and samples.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evalfleet.channels.samples import Sample, read_series
from evalfleet.errors import JournalForeign, RequestError
from evalfleet.model import BORROWED, CAUSES, Answered, Cause, Scored, decodable
from evalfleet.views.follow import Follower

if TYPE_CHECKING:
    from evalfleet.journal import Store
    from evalfleet.state import AttemptState, RunState

LATEST = 5
"""The newest runs of a benchmark that count. Older ones may be of another agent."""
LOOKED_AT = 100
FEW_ATTEMPTS = 5
"""Fewer attempts than this show neither what a model costs nor what a domain uses."""
FEW_CALLS = 20
OFTEN = 0.95
"""The share of samples whose use of processors counts. A moment of full load is no need for more of them."""


class EarlierTask(msgspec.Struct, frozen=True):
    """A task of an earlier run, as its `results.json` has it."""

    task_id: str
    origin: str = ""
    domain: str = ""
    model: str | None = None
    status: str = ""
    score: float | None = None
    duration_seconds: float | None = None
    machine_seconds: float | None = None
    attempts: int = 1
    broken_attempts: Mapping[str, int] = {}
    model_usd: float | None = None

    @property
    def own_id(self) -> str:
        """The benchmark's own id."""
        return self.origin or self.task_id

    @property
    def seconds(self) -> float | None:
        """How long the attempt that decided the task took its machine; None if none did."""
        if self.score is None and self.status != "answered":
            return None
        return self.duration_seconds if self.machine_seconds is None else self.machine_seconds

    @property
    def charged(self) -> int:
        """The attempts that broke for a cause which uses up one of the allowed ones."""
        causes = self.broken_attempts.items()
        return sum(count for cause, count in causes if cause in CAUSES and not CAUSES[Cause(cause)].free)


class EarlierMachine(msgspec.Struct, frozen=True):
    """A machine of an earlier run."""

    place: str = ""
    size: str = ""
    spot: bool = False
    requested_at: datetime | None = None
    allocated_at: datetime | None = None
    ready_at: datetime | None = None
    uptime_seconds: float | None = None
    mended_by: Sequence[str] = ()
    cause: str | None = None

    @property
    def ready_s(self) -> float | None:
        """How long it took from its request, or from its start if it queued, until it was ready."""
        start = self.allocated_at or self.requested_at
        if start is None or self.ready_at is None or self.size == BORROWED or self.mended_by:
            return None
        return max(0.0, (self.ready_at - start).total_seconds())


class _Models(msgspec.Struct, frozen=True):
    usd: float = 0.0
    calls: int = 0
    unknown_calls: int = 0


class EarlierRun(msgspec.Struct, frozen=True):
    """The part of a `results.json` that planning needs."""

    benchmark: str
    tasks: tuple[EarlierTask, ...]
    run: str = ""
    model: str | None = None
    machines: tuple[EarlierMachine, ...] = ()
    models: _Models = _Models()


@dataclass(frozen=True)
class Past:
    """The newest runs of one benchmark in one home, newest first."""

    runs: Sequence[EarlierRun] = ()

    def durations(self) -> dict[str, float]:
        """Return the newest known duration of each task, by its id and by the benchmark's own id."""
        durations: dict[str, float] = {}
        for run in self.runs:
            for task in run.tasks:
                if task.seconds is not None:
                    durations.setdefault(task.task_id, task.seconds)
                    durations.setdefault(task.own_id, task.seconds)
        return durations

    def attempt_usd(self, model: str) -> float | None:
        """Return the most that 95 of 100 attempts with this model cost; None if few were metered."""
        costs = sorted(self.attempt_costs(model))
        return costs[int(0.95 * (len(costs) - 1))] if len(costs) >= FEW_ATTEMPTS else None

    def attempt_costs(self, model: str) -> list[float]:
        """Return the mean cost of an attempt at each task that was metered with this model."""
        return [
            task.model_usd / max(1, task.attempts)
            for run in self.runs
            for task in run.tasks
            if task.model_usd is not None and model in (task.model or "", run.model or "")
        ]

    def call_usd(self, model: str) -> float | None:
        """Return the mean cost of a call of this model; None if the cost of few calls is known."""
        models = [run.models for run in self.runs if (run.model or "") == model]
        calls = sum(each.calls - each.unknown_calls for each in models)
        return sum(each.usd for each in models) / calls if calls >= FEW_CALLS else None


def past_of(home: Path, benchmark: str) -> Past:
    """Return the newest runs of the benchmark in this home; an empty past if there are none."""
    return Past(tuple(_latest(home, benchmark)))


def _latest(home: Path, benchmark: str) -> Iterator[EarlierRun]:
    left = LATEST
    paths = [path for path in home.glob("*/results.json") if not path.parent.is_symlink()]  # as `latest` is
    for path in sorted(paths, key=_changed_at, reverse=True)[:LOOKED_AT]:
        if left == 0:
            return
        try:
            run = msgspec.json.decode(path.read_bytes(), type=decodable(EarlierRun))
        except (OSError, msgspec.MsgspecError):
            continue  # the file may be anyone's
        if run.benchmark == benchmark:
            left -= 1
            yield run


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# -- the load of machines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DomainLoad:
    """The use of machines by the attempts at the tasks of one domain."""

    attempts: int
    memory_gb: float
    """The most that any attempt used."""
    cpus: float
    """The most that any attempt used in 95 of 100 samples."""


def loads_of(store: Store | None, past: Past) -> Mapping[str, DomainLoad]:
    """Return the load of each domain in these runs; empty where no machine reported its load."""
    return {} if store is None else domain_loads(store.home, _states(store, past))


def _states(store: Store, past: Past) -> Iterator[RunState]:
    for run in past.runs:
        follower = Follower(store, run.run)
        with suppress(JournalForeign, RequestError):  # a damaged run, or one of another home
            follower.poll()
            yield follower.state


def domain_loads(home: Path, states: Iterable[RunState]) -> Mapping[str, DomainLoad]:
    """Return the load by domain of attempts with a score or an answer, on machines whose size is known."""
    loads: defaultdict[str, list[DomainLoad]] = defaultdict(list)
    for state in states:
        series = functools.cache(functools.partial(read_series, home))
        for attempt in state.attempts.values():
            offer = state.machines[attempt.machine].offer
            if not offer.memory_gb or not offer.cpus or not isinstance(attempt.outcome, Scored | Answered):
                continue
            samples = _during(attempt, series(attempt.machine))
            if samples:
                memory_gb = max(sample.memory for sample in samples) * offer.memory_gb
                busy = sorted(sample.cpu for sample in samples)
                cpus = busy[int(OFTEN * (len(busy) - 1))] * offer.cpus
                loads[state.tasks[attempt.task].task.domain].append(DomainLoad(1, memory_gb, cpus))
    return {
        domain: DomainLoad(len(own), max(load.memory_gb for load in own), max(load.cpus for load in own))
        for domain, own in loads.items()
    }


def _during(attempt: AttemptState, series: Sequence[Sample]) -> Sequence[Sample]:
    ended = attempt.ended_at or attempt.started_at
    return [sample for sample in series if attempt.started_at <= sample.at <= ended]
