"""A run's benchmark, read again: what is left of the run goes on with the files as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.benchmarks.loaded import Loaded
from evalfleet.channels.resident import contents_of
from evalfleet.errors import RequestError
from evalfleet.events import NewFiles
from evalfleet.model import Bundle, Plan, Task, decodable

from .plan import isolation_of, with_needs
from .plan_parts import BenchmarkOrigin, BenchmarkSpec, benchmark_of, keep_files, plain, specs_of
from .plugins import benchmark_kind
from .sources import BenchmarkSource, lent_sources

OF_THE_RUN = frozenset({"id", "origin", "repeat", "weight_s"})
"""What a task has from the run, and not from the benchmark."""
ALWAYS_ANOTHER = frozenset({"digest", "score_digest"})


def read_again(plan: Plan, left: Sequence[Task], home: Path, folder: Path) -> NewFiles | None:
    """The plan's benchmark as it is now, its files kept in the run's folder; None if nothing has changed.

    `left` are the tasks that are not settled. Raises RequestError if they cannot go on with it.
    """
    new, tasks = _read(plan, left, home)
    if not _differs(plan, new):
        return None
    renewed = new.renewed(plan)
    keep_files(renewed, tasks, home, folder)
    return msgspec.structs.replace(new, changed=tuple(_changes(plan, renewed, folder)))


def has_changed(plan: Plan, left: Sequence[Task], home: Path) -> bool:
    """Has the plan's benchmark changed in a way that these tasks could go on with? Keeps nothing."""
    try:
        return _differs(plan, _read(plan, left, home)[0])
    except (RequestError, OSError):  # it is gone, or another one by now: the run has its own copy
        return False


def _differs(plan: Plan, new: NewFiles) -> bool:
    return bool(new.tasks) or new.benchmark_spec != plan.benchmark_spec


def _read(plan: Plan, left: Sequence[Task], home: Path) -> tuple[NewFiles, tuple[Task, ...]]:
    envelope = msgspec.convert(plan.benchmark_spec, decodable(BenchmarkSpec))
    if envelope.source is None:
        raise RequestError(
            f"run {plan.run!r} was planned by an earlier evalfleet, which did not write down where its "
            "benchmark is: start a new run"
        )
    loaded = _load(envelope, envelope.source, home)
    if loaded.oracle is not None and loaded.oracle.name == plan.benchmark:
        loaded = loaded.oracle  # the run tests the benchmark by its own solutions
    if loaded.name != plan.benchmark:
        raise RequestError(
            f"the benchmark of run {plan.run!r} is called {loaded.name!r} now, and was {plan.benchmark!r}: "
            "start a new run"
        )
    tasks = tuple(_renewed(plan, left, loaded, envelope.source.task_timeout_s))
    needs = with_needs(loaded.spec, tasks, plan.schedule)
    spec = msgspec.structs.replace(envelope, spec=needs, secrets=loaded.secrets)
    new = NewFiles(
        benchmark_spec=plain(spec),
        slots=loaded.slots,
        isolation={place.name: isolation_of(loaded, place) for place in lent_sources(specs_of(plan))},
        tasks=tuple(task for task, old in zip(tasks, left, strict=True) if task != old),
    )
    return new, tasks


def _load(envelope: BenchmarkSpec, source: BenchmarkOrigin, home: Path) -> Loaded:
    kind = benchmark_kind(envelope.kind)
    where = f"benchmark {source.name!r}"
    found = BenchmarkSource(source.name, envelope.kind, kind, source.settings, Path(source.base), where)
    return found.load(home)


def _renewed(plan: Plan, left: Sequence[Task], loaded: Loaded, timeout_s: float | None) -> Iterator[Task]:
    """Each task as the benchmark describes it now. What the run knows of it stays."""
    described: dict[str, Task] = {task.id: task for task in loaded.tasks}
    for task in left:
        new = described.get(task.id) or described.get(task.origin or task.id.rpartition("~")[0])
        if new is None:
            raise RequestError(
                f"task {task.id!r} of run {plan.run!r} is not in its benchmark any more: put it back, or "
                "start a new run"
            )
        theirs = {name: getattr(new, name) for name in Task.__struct_fields__ if name not in OF_THE_RUN}
        if timeout_s is not None:
            theirs["timeout_s"] = timeout_s
        yield msgspec.structs.replace(task, **theirs)


def _changes(old: Plan, new: Plan, folder: Path) -> Iterator[str]:
    """The files that differ, then the keys of the benchmark's own description that do."""
    before, now = (_contents(plan, folder) for plan in (old, new))
    yield from sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    specs: list[Mapping[str, Any]] = [plan.benchmark_spec["spec"] for plan in (old, new)]
    keys = sorted({*specs[0], *specs[1]} - ALWAYS_ANOTHER)
    yield from (f"key {key!r}" for key in keys if specs[0].get(key) != specs[1].get(key))


def _contents(plan: Plan, folder: Path) -> dict[str, Any]:
    try:
        bundle = benchmark_of(plan, folder).bundle
    except RequestError:  # of a run that keeps no files, or whose files were changed
        bundle = Bundle()
    return dict(contents_of(bundle))
