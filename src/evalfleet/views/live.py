"""`parallel_live.json`, `vm_pool_registry.json`, and the scribe that keeps files of a live run current."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from evalfleet import events as ev
from evalfleet.channels.samples import read_loads
from evalfleet.errors import JournalError
from evalfleet.files import alone_in, changed_at, point, points_to, replace, to_json
from evalfleet.model import Broken, MachineId, Micros, Plan, seconds_between
from evalfleet.names import safe_name
from evalfleet.state import MachineState, RunState

from .follow import EventSource, Follower
from .format import clean, iso, stamp
from .results import results
from .stats import (
    current_task,
    estimated_usd,
    hourly_usd,
    judged,
    lane_share,
    machines_usd,
    mean_seconds,
    rate,
    retries,
)
from .tasks import aggregated, by_machine

if TYPE_CHECKING:
    from .documents import WorkerStatus
    from .fleet_documents import Live, LiveWorker, Performance

REGISTRY = "vm_pool_registry.json"

Document = dict[str, Any]
"""The file is in another program's schema, to which kinds of places and benchmarks add keys of their own."""


def worker_status(machine: MachineState) -> WorkerStatus:
    """In the words of the files other tools read."""
    if machine.phase in ("requested", "queued", "allocated", "up", "mending"):
        return "creating"
    if machine.phase == "ready":
        return "running" if machine.open else "ready"
    if machine.cause is not None:
        return "failed"
    return "deleted" if machine.phase == "deleted" else "completed"


class Fields(Protocol):
    """What places and benchmarks say of themselves, beside what is said of any machine."""

    def of_pool(self, plan: Plan) -> Mapping[str, object]: ...

    def of_worker(self, plan: Plan, prepared: str, *, ready: bool) -> Mapping[str, object]: ...


class NoFields:
    """Places and benchmarks that say nothing of themselves."""

    def of_pool(self, plan: Plan) -> Mapping[str, object]:
        return {}

    def of_worker(self, plan: Plan, prepared: str, *, ready: bool) -> Mapping[str, object]:
        return {}


class Registrar:
    """Knows which tasks each machine was given, from the records it is told of."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._assigned: dict[MachineId, list[str]] = {}
        self._completed: dict[MachineId, list[str]] = {}
        self._where: dict[str, tuple[MachineId, str]] = {}
        self._updated: dict[MachineId, Micros] = {}

    def note(self, records: Iterable[ev.Record]) -> None:
        for record in records:
            match record.event:
                case ev.AttemptStarted(attempt, task, machine):
                    self._where[attempt] = machine, task
                    self._assigned.setdefault(machine, []).append(task)
                    self._updated[machine] = record.at
                case ev.AttemptEnded(attempt, outcome):
                    where, which = self._where.pop(attempt)
                    if not isinstance(outcome, Broken):
                        self._completed.setdefault(where, []).append(which)
                    self._updated[where] = record.at
                case event:
                    about: MachineId | None = getattr(event, "machine", None)
                    if about is not None:
                        self._updated[about] = record.at

    def document(self, state: RunState) -> Document:
        machines = list(state.machines.values())
        first = machines[0].offer if machines else None
        return {
            "pool_id": stamp(state.planned_at),
            "created_at": iso(state.planned_at),
            **self._fields.of_pool(state.plan),
            "location": first.region if first else "",
            "vm_size": first.size if first else "",
            "workers": [self._worker(state, machine) for machine in machines],
            "total_tasks": state.total,
            "completed_tasks": state.scored,
            "failed_tasks": state.broken,
        }

    def _worker(self, state: RunState, machine: MachineState) -> Document:
        return {
            "name": machine.name,
            "ip": _host(machine.address),
            "status": worker_status(machine),
            **self._fields.of_worker(state.plan, machine.prepared, ready=_is_set_up(state, machine)),
            "assigned_tasks": list(dict.fromkeys(self._assigned.get(machine.id, ()))),
            "completed_tasks": self._completed.get(machine.id, []),
            "current_task": current_task(state, machine.id),
            "error": clean(machine.detail) if machine.cause is not None else None,
            "created_at": iso(machine.requested_at),
            "updated_at": iso(self._updated.get(machine.id, machine.requested_at)),
        }


def _is_set_up(state: RunState, machine: MachineState) -> bool:
    """Return True if the benchmark can run there. A pool's machine stays so when its run gives it back."""
    given_back = bool(state.plan.pool) and machine.ready_at is not None and machine.cause is None
    return machine.phase == "ready" or given_back


def _host(address: str) -> str | None:
    """The host of `[user@]host[:port]`; a folder is on this computer."""
    if address.startswith("/"):
        return "127.0.0.1"
    host = address.rpartition("@")[2]
    return (host if host.count(":") > 1 else host.partition(":")[0]) or None


def lend(pool: Path, document: Document) -> None:
    """Show in the pool's own file what a run does with the machines that it has borrowed.

    The run's document learns from that file what its machines are, and that those it gave back exist.
    """
    path = pool / REGISTRY
    with alone_in(pool):
        try:
            shown = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (FileNotFoundError, msgspec.DecodeError):
            return
        lent = {worker["name"]: worker for worker in document["workers"]}
        for worker in shown["workers"]:
            if (now := lent.get(worker["name"])) is not None:
                _show_lent(worker, now)
        shown.update({key: document[key] for key in ("total_tasks", "completed_tasks", "failed_tasks")})
        replace(path, to_json(shown))
    document.update({key: shown[key] for key in ("location", "vm_size")})
    for worker in document["workers"]:
        if worker["status"] in ("completed", "deleted"):
            worker["status"] = "ready"


def _show_lent(worker: dict[str, Any], lent: Document) -> None:
    """Show a lent machine as its run does. What the run did stays there until the next run."""
    back = lent["status"] in ("completed", "deleted", "failed")
    if back and lent["updated_at"].rstrip("Z") < worker["updated_at"].rstrip("Z"):
        return  # another run has it by now, or the pool itself
    kept = {key: worker[key] for key in ("name", "ip", "created_at")}
    worker.update({**lent, **kept, "status": "ready" if back else lent["status"]})


# -- parallel_live.json -------------------------------------------------------------------------------------

LIVE = "parallel_live.json"
RESULTS = "results.json"
AGGREGATED = "aggregated_results.json"
LATEST = "latest"

OLD_S = 0.5
"""A live file that is older is written anew at the next tick, so that none is ever a second old."""

Health = Mapping[MachineId, Mapping[str, float]]


# -- the document ----------------------------------------------------------------------------------


def live(state: RunState, now: Micros, health: Health | None = None) -> Live:
    """`parallel_live.json`. Costs time proportional to the number of machines, not of tasks."""
    return {
        "status": state.status,
        "pool_id": stamp(state.planned_at),
        "run": state.plan.run,
        "started_at": iso(state.planned_at),
        "total_tasks": state.total,
        "completed_tasks": state.scored,
        "failed_tasks": state.broken,
        "workers": [_worker(state, machine) for machine in state.machines.values()],
        "infrastructure": {
            "active_nodes": len(state.ready),
            "pending_jobs": state.waiting if state.ended_at is None else 0,
            "compute_health": {state.machines[m].name: dict(sample) for m, sample in (health or {}).items()},
        },
        "performance": _performance(state),
        "cost": {
            "current_hourly_rate": _rounded(hourly_usd(state, now)),
            "current_usd": _rounded(machines_usd(state, now)),
            "estimated_total": _rounded(estimated_usd(state, now)),
        },
    }


def _performance(state: RunState) -> Performance:
    begun = len(state.attempts)
    return {
        "avg_task_duration": _rounded(mean_seconds(state)),
        "task_success_rate": _rounded(rate(state.succeeded, judged(state))),
        "retry_rate": _rounded(retries(state) / begun) if begun else 0.0,
    }


def _worker(state: RunState, machine: MachineState) -> LiveWorker:
    return {
        "name": machine.name,
        "status": worker_status(machine),
        "assigned": _assigned(state, machine),
        "completed": machine.scored,
        "current_task": current_task(state, machine.id),
    }


def _assigned(state: RunState, machine: MachineState) -> int:
    """A static schedule's share, while the machine works on it; else what was started there."""
    if machine.phase in ("condemned", "deleted"):
        return machine.attempts
    share = lane_share(state.plan.schedule, machine.lane, state.total, len(state.fresh))
    return max(share, machine.attempts)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# -- samples ---------------------------------------------------------------------------------------


def read_health(home: Path, machines: Iterable[MachineId]) -> dict[MachineId, dict[str, float]]:
    """The newest samples of these machines, where there are any that can be read."""
    return {
        machine: {"cpu": newest.cpu, "memory": newest.memory, "disk": newest.disk}
        for machine, newest in read_loads(home, machines).items()
    }


# -- the scribe ------------------------------------------------------------------------------------


class _Pace:
    """Lets something happen at most every `least_s`, and at most a small share of the time."""

    def __init__(self, least_s: float, share: float) -> None:
        self._least_s = least_s
        self._factor = 1 / share
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def took(self, since: float) -> None:
        """`since`: when it began, by the monotonic clock."""
        end = time.monotonic()
        self._next = end + max(self._least_s, self._factor * (end - since))


class Scribe:
    """Keeps the run's files current: `tick` about twice a second, `close` once, from one thread.

    Never raises for what goes wrong with a file or with reading the journal: these files serve others, and
    a full disk must not take the run down. `problem()` tells it, once.
    """

    def __init__(
        self,
        home: Path,
        store: EventSource,
        run: str,
        clock: Callable[[], Micros] = lambda: time.time_ns() // 1000,
        is_newest: Callable[[], bool] = lambda: True,
        fields: Fields | None = None,
    ) -> None:
        self._home = home
        self._is_newest = is_newest
        self._folder = home / safe_name(run)
        self._run = run
        self._clock = clock
        self._follower = Follower(store, run)
        self._live_at: Micros | None = None
        self._latest = False
        self._health: dict[MachineId, dict[str, float]] = {}
        self._health_pace = _Pace(1.0, share=0.05)
        self._results_pace = _Pace(5.0, share=0.05)
        self._registrar = Registrar(fields or NoFields())
        self._registry_pace = _Pace(1.0, share=0.05)
        self._registry_is_old = False
        self._lent_stamp: int | None = None
        self._results_seq = 0
        self._problem: str | None = None
        self._told: set[str] = set()

    @property
    def state(self) -> RunState:
        """The state as of the last tick. For looking only, and only from the thread that ticks."""
        return self._follower.state

    def tick(self) -> None:
        """Bring the files up to date, as far as it is time for that."""
        changed = self._poll()
        if not self._follower.seq:
            return
        now = self._clock()
        old = self._live_at is None or abs(seconds_between(self._live_at, now)) >= OLD_S
        ended = self.state.ended_at is not None
        if changed or (old and not ended):
            self._guarded(lambda: self._write_live(now))
        self._registry_is_old = self._registry_is_old or changed or self._pool_has_written()
        if self._registry_is_old and (ended or self._registry_pace.due()):
            self._guarded(self._write_registry)
        if self._follower.seq > self._results_seq and (ended or self._results_pace.due()):
            self._guarded(lambda: self._write_results(now, final=ended))

    def close(self) -> None:
        """Write what is true now, whether the run has ended or is merely left. May be repeated."""
        self._poll()
        if self._follower.seq:
            now = self._clock()
            self._guarded(lambda: self._write_live(now))
            self._guarded(self._write_registry)
            if self._follower.seq > self._results_seq or self.state.ended_at is None:
                self._guarded(lambda: self._write_results(now, final=True))

    def problem(self) -> str | None:
        """What went wrong since the last call, if it was not told before."""
        found, self._problem = self._problem, None
        if found is None or found in self._told:
            return None
        self._told.add(found)
        return found

    def _poll(self) -> bool:
        try:
            records = self._follower.poll()
            self._registrar.note(records)
            return bool(records)
        except JournalError as err:
            self._problem = f"the live files are not up to date: {err}"
            return False

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as err:
            where = clean(str(err.filename2 or err.filename or self._folder))
            why = (err.strerror or str(err)).lower()
            self._problem = f"{where} cannot be written ({why}); the run goes on"

    def _write_live(self, now: Micros) -> None:
        self._live_at = now  # also when it fails: a full disk is not to be tried again at once
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sample()
        content = to_json(live(self.state, now, self._health))
        replace(self._folder / LIVE, content)
        if self._is_latest():
            replace(self._home / LIVE, content)

    def _write_registry(self) -> None:
        begun = time.monotonic()
        self._registry_is_old = False
        document = self._registrar.document(self.state)
        if self.state.plan.pool:
            lend(self._pool_folder, document)
            self._lent_stamp = changed_at(self._pool_folder / REGISTRY)
        content = to_json(document)
        replace(self._folder / REGISTRY, content)
        if self._is_newest():
            replace(self._home / REGISTRY, content)
        self._registry_pace.took(begun)

    @property
    def _pool_folder(self) -> Path:
        return self._home / safe_name(self.state.plan.pool)

    def _pool_has_written(self) -> bool:
        """Has the pool, or another run, written over what we told in the pool's own file?"""
        lent, stamp = bool(self.state.plan.pool), self._lent_stamp
        return lent and stamp is not None and changed_at(self._pool_folder / REGISTRY) != stamp

    def _sample(self) -> None:
        if self._health_pace.due():
            begun = time.monotonic()
            self._health = read_health(self._home, self.state.ready)
            self._health_pace.took(begun)

    def _is_latest(self) -> bool:
        """The home's files are the newest run's: whoever starts takes `latest`, and nobody takes it back."""
        if not self._latest:
            point(self._home / LATEST, self._run)
            self._latest = True
        return points_to(self._home / LATEST) == self._run

    def _write_results(self, now: Micros, final: bool) -> None:
        begun, seq = time.monotonic(), self._follower.seq
        try:
            document = results(self.state, self._folder, now)
            replace(self._folder / RESULTS, to_json(document))
            replace(self._folder / AGGREGATED, to_json(aggregated(document)))
            if final:
                for name, its in by_machine(document).items():
                    replace(self._folder / name, to_json(its))
        finally:
            self._results_pace.took(begun)
        self._results_seq = seq


class PoolScribe(Scribe):
    """Keeps a pool's file current. It has no tasks, so there is nothing else to write."""

    def tick(self) -> None:
        if self._poll() and self._follower.seq:
            self._guarded(self._write_registry)

    def close(self) -> None:
        self._poll()
        self._guarded(self._write_registry)

    def _write_registry(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = to_json(self._registrar.document(self.state))
        with alone_in(self._folder):
            replace(self._folder / REGISTRY, content)
        if self._is_newest():
            replace(self._home / REGISTRY, content)
