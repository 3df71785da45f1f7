"""What the command line prints as JSON beside results, for any program; and the schema of every document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from evalfleet.benchmarks.benchmark_file import BenchmarkFile
from evalfleet.benchmarks.tasks import TaskLine
from evalfleet.errors import RequestError
from evalfleet.events import Event
from evalfleet.model import MachineId, Micros
from evalfleet.named_pools import PoolView
from evalfleet.names import hint
from evalfleet.planning.plugins import PlugIn
from evalfleet.ports import Check, Image
from evalfleet.state import MachineState
from evalfleet.views.compare import Comparison
from evalfleet.views.documents import Results, RunPlannedLine, TaskDetail, TasksPlannedLine, VerifiedStream
from evalfleet.views.fleet_documents import (
    Aggregated,
    AnswerRow,
    BelongingRow,
    DeletedPool,
    DeletedRuns,
    Detached,
    ExportedRun,
    ForecastDocument,
    ImageBelongingRow,
    ImageFacts,
    ImageRow,
    Live,
    LogPiece,
    NewBenchmark,
    PlanDocument,
    PoolDocument,
    PoolMachineRow,
    PricesDocument,
    ReapNotice,
    ReconcileDocument,
    RunNotice,
    TunnelRow,
    WorkerResults,
)
from evalfleet.views.format import iso
from evalfleet.views.lines import INSTANTS, SCHEMA_VERSION
from evalfleet.views.notable import refusals
from evalfleet.views.results import RunSummary
from evalfleet.views.stats import (
    hourly_usd,
    machine_hourly_usd,
    machine_usd,
    machines_usd,
    prices_as_of,
    stopped_monthly_usd,
)

from .home import Usage
from .places import FoundBelonging, FoundImage, Listed
from .pool_machine import ActionResult

# -- documents -------------------------------------------------------------------------------------


def pool_document(
    view: PoolView,
    now: Micros,
    answers: Sequence[ActionResult] | None = None,
    screens: Mapping[MachineId, str] | None = None,
) -> PoolDocument:
    """A pool as it is now; with `answers`, what its machines said when they were asked; with `screens`, the
    links to those."""
    return {
        "pool": view.name,
        "place": ", ".join(view.state.plan.places),
        "workers": view.state.limits.workers,
        "created_at": iso(view.state.planned_at),
        "expires_at": iso(view.expires_at),
        "warning": view.warning(now) or None,
        "cost": {
            "machines_usd": round(machines_usd(view.state, now), 6),
            "usd_per_hour": round(hourly_usd(view.state, now), 6),
            "stopped_usd_per_month": round(stopped_monthly_usd(view.state), 2),
            "prices_as_of": prices_as_of(view.state),
        },
        "machines": [_pool_machine(view, machine, now, answers, screens) for machine in view.machines],
        "refusals": refusals(view.state),
    }


def _pool_machine(
    view: PoolView,
    machine: MachineState,
    now: Micros,
    answers: Sequence[ActionResult] | None,
    screens: Mapping[MachineId, str] | None,
) -> PoolMachineRow:
    row: PoolMachineRow = {
        "name": machine.name,
        "id": machine.id,
        "address": machine.address,
        "status": view.standing(machine, now),
        "run": view.holder(machine.id, now),
        "prepared": machine.prepared or None,
        "good_until": iso(machine.good_until),
        "usd_per_hour": machine_hourly_usd(machine, now),
        "cost_usd": round(machine_usd(machine, now), 6),
        "delete_refused": machine.delete_refused or None,
        "failure": machine.detail if machine in view.failed else None,
    }
    if answers is not None:
        found = [answer for answer in answers if answer.machine.id == machine.id]
        row["probe"] = None if not found else found[0].problem or "ok"
    if screens is not None:
        row["screen"] = screens.get(machine.id)
    return row


def answer_row(answer: ActionResult) -> AnswerRow:
    """What came of something that was done to a machine."""
    return {
        "machine": answer.machine.name,
        "id": answer.machine.id,
        "said": answer.said or None,
        "problem": answer.problem or None,
    }


def belonging_row(found: FoundBelonging) -> BelongingRow:
    belonging = found.belonging
    return {
        "place": found.place,
        "machine": belonging.machine,
        "home": belonging.home,
        "owner": belonging.owner,
        "is_own": found.is_own,
        "where": belonging.where,
        "expires_at": iso(belonging.expires_at),
        "parts": list(belonging.parts),
        "why": found.why,
        "trouble": found.trouble or None,
    }


def image_facts(image: Image) -> ImageFacts:
    return {
        "image": image.name,
        "kind": image.kind,
        "state": image.state,
        "setting": image.setting,
        "regions": list(image.regions),
        "gb": image.gb,
        "usd_per_month": image.usd_per_month,
        "prices_as_of": image.prices_as_of or None,
        "home": image.home,
        "owner": image.owner,
        "parts": list(image.parts),
    }


def image_row(found: FoundImage) -> ImageRow:
    return {"place": found.place, "is_own": found.is_own, **image_facts(found.image)}


def image_belonging_row(found: FoundImage) -> ImageBelongingRow:
    """With what a machine's has, so that whoever looks for what is left sees it."""
    where = ", ".join(found.image.regions)
    return {**image_row(found), "machine": None, "where": where, "expires_at": None, "why": ""}


def prices_documents(listed: Listed) -> list[PricesDocument]:
    """One for each kind of place."""
    table = msgspec.to_builtins(listed.table)
    return [cast("PricesDocument", {"place": kind, **table}) for kind in listed.kinds]


# -- schemas ---------------------------------------------------------------------------------------

DOCUMENTS: Mapping[str, tuple[Any, str]] = {
    "results": (Results, "results.json, `show RUN --json`"),
    "task": (TaskDetail, "`show RUN TASK --json`"),
    "runs": (list[RunSummary], "`ls --json`"),
    "comparisons": (list[Comparison], "`compare RUN RUN --json`"),
    "verify": (list[VerifiedStream], "`ls --verify --json`"),
    "usage": (list[Usage], "`ls --size --json`"),
    "deleted": (DeletedRuns, "`gc --json`"),
    "exported": (ExportedRun, "`export --json`"),
    "new-benchmark": (NewBenchmark, "`init --json`"),
    "log": (LogPiece, "a line of `logs RUN TASK --json` and of `watch RUN TASK --json`"),
    "events": (None, "a line of `watch --json` and of `run --json`: all but the last, which is the results"),
    "live": (Live, "parallel_live.json"),
    "aggregated": (Aggregated, "aggregated_results.json"),
    "worker": (WorkerResults, "MACHINE_results.json"),
    "plan": (PlanDocument, "`run --dry-run --json`"),
    "forecast": (ForecastDocument, "`plan --json`"),
    "reconcile": (ReconcileDocument, "`cost reconcile --json`"),
    "detached": (Detached, "`run --detach --json`"),
    "pool": (PoolDocument, "`pool status --json`, and of the verbs that change a pool"),
    "deleted-pool": (DeletedPool, "`pool delete --json`"),
    "pools": (list[PoolDocument], "`pool ls --json`"),
    "answers": (list[AnswerRow], "of verbs that do something to a pool's machines: `pool do --json`, ..."),
    "tunnels": (list[TunnelRow], "`pool tunnel --json`, `pool vnc --json`"),
    "machines": (None, "`machines --json`, `reap --json`"),
    "images": (list[ImageRow], "`machines --images --json`"),
    "doctor": (dict[str, list[Check]], "`doctor --json`"),
    "prices": (list[PricesDocument], "`prices --json`"),
    "run-notice": (RunNotice, "what [notify] is told of a run"),
    "reap-notice": (ReapNotice, "what [notify] is told of `reap`"),
    "places": (list[PlugIn], "`places --json`, `benchmarks --json`"),
    "benchmark": (BenchmarkFile, "a benchmark file, for editors: its first line `#:schema PATH` names it"),
}
"""Name -> the type, and where such a document is had."""


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a document. Raises RequestError for one that there is not."""
    if name not in DOCUMENTS:
        raise RequestError(f"there is no document {name!r}; {hint(name, DOCUMENTS)}")
    if name == "events":
        return _events()
    if name == "benchmark":
        return _benchmark_file()
    if name == "machines":
        (rows, components) = msgspec.json.schema_components(
            (BelongingRow, ImageBelongingRow), ref_template="#/$defs/{name}"
        )
        found: dict[str, Any] = {"type": "array", "items": {"anyOf": list(rows)}, "$defs": components}
    else:
        found = msgspec.json.schema(DOCUMENTS[name][0])
    return {"$schema": DIALECT, "title": name, **_plain(found)}


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _benchmark_file() -> dict[str, Any]:
    """Tasks in the file are tables with the keys of a task, which are checked one by one when it is read."""
    (file, task), components = msgspec.json.schema_components(
        (BenchmarkFile, TaskLine), ref_template="#/$defs/{name}"
    )
    found = _plain(components)
    for option in found["BenchmarkFile"]["properties"]["tasks"]["anyOf"]:
        if option.get("type") == "array":
            option["items"] = task
    return {"$schema": DIALECT, "title": "benchmark", **file, "$defs": found}


def _events() -> dict[str, Any]:
    """Every event with its number and time before its own fields; instants are times as people write them."""
    kinds = [kind for kind in get_args(Event) if kind.__name__ not in ("RunPlanned", "TasksPlanned")]
    lines = (RunPlannedLine, TasksPlannedLine)
    refs, components = msgspec.json.schema_components((*kinds, *lines), ref_template="#/$defs/{name}")
    time = {"type": ["string", "null"], "description": "UTC, such as 2026-01-02T14:30:52Z"}
    for kind, ref in zip((*kinds, *lines), refs, strict=True):
        event = components[ref["$ref"].rpartition("/")[2]]
        named = kind.__name__.removesuffix("Line")
        fields = {key: time if key in INSTANTS else value for key, value in event["properties"].items()}
        fields.pop("kind", None)
        event["properties"] = {
            "seq": {"type": "integer"},
            "at": time,
            "kind": {"enum": [named]},
            **fields,
        }
        required = [key for key in event.get("required", ()) if key != "kind"]
        event["required"] = ["seq", "at", "kind", *required]
    title = f"a line of the stream of events, version {SCHEMA_VERSION}"
    return {"$schema": DIALECT, "title": title, "anyOf": list(refs), "$defs": _plain(components)}


def _plain(value: Any) -> Any:
    """The value as JSON has it: msgspec gives tuples and sets for some."""
    return json.loads(msgspec.json.encode(value))
