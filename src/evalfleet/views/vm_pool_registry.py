"""`vm_pool_registry.json`: the machines of a run or a pool, in the schema that other tools know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from evalfleet import events as ev
from evalfleet.files import alone_in, replace, to_json
from evalfleet.model import Broken, MachineId, Micros, Plan
from evalfleet.state import MachineState, RunState

from .format import clean, iso, stamp
from .stats import current_task

if TYPE_CHECKING:
    from .documents import WorkerStatus

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
            **self._fields.of_worker(state.plan, machine.prepared, ready=machine.phase == "ready"),
            "assigned_tasks": list(dict.fromkeys(self._assigned.get(machine.id, ()))),
            "completed_tasks": self._completed.get(machine.id, []),
            "current_task": current_task(state, machine.id),
            "error": clean(machine.detail) if machine.cause is not None else None,
            "created_at": iso(machine.requested_at),
            "updated_at": iso(self._updated.get(machine.id, machine.requested_at)),
        }


def _host(address: str) -> str | None:
    """Of `[user@]host[:port]`; a folder is on this computer."""
    if address.startswith("/"):
        return "127.0.0.1"
    host = address.rpartition("@")[2]
    return (host if host.count(":") > 1 else host.partition(":")[0]) or None


def lend(pool: Path, document: Document) -> None:
    """Show in the pool's own file what a run does with the machines that it has borrowed."""
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


def _show_lent(worker: dict[str, Any], lent: Document) -> None:
    """As its run shows it. Once the run has given it back, what the run did stays until the next one."""
    back = lent["status"] in ("completed", "deleted", "failed")
    if back and lent["updated_at"].rstrip("Z") < worker["updated_at"].rstrip("Z"):
        return  # another run has it by now, or the pool itself
    kept = {key: worker[key] for key in ("name", "ip", "created_at")}
    worker.update({**lent, **kept, "status": "ready" if back else lent["status"]})
