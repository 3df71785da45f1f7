"""The second step of planning: the benchmark, the places and the earlier runs that a plan is decided from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evalfleet.benchmarks.loaded import Loaded
from evalfleet.errors import RequestError
from evalfleet.model import Plan

from .config import Config
from .past import DomainLoad, Past, past_of
from .plan_parts import specs_of
from .request import EarlierTasks, Flags, Options, earlier_tasks, nothing_earlier
from .sources import (
    BenchmarkSource,
    PlaceSource,
    SettingsSplit,
    benchmark_source,
    give_settings,
    lent_sources,
    place_sources,
    spot_sources,
)


@dataclass(frozen=True)
class LentPool:
    """The pool that a run is to borrow its machines from."""

    plan: Plan
    machines: int = 1
    """How many it has: a run has as many workers, unless it is asked to have fewer."""
    warning: str = ""


@dataclass(frozen=True)
class HomeFacts:
    """The facts of a home that a plan depends on. Each is looked up when it is needed."""

    names: Callable[[], tuple[str, Collection[str]]] = lambda: ("", ())
    """Its id, and the names of its runs and pools. The home may have to be created for that."""
    tasks: EarlierTasks = nothing_earlier
    loads: Callable[[Past], Mapping[str, DomainLoad]] = lambda past: {}
    """Earlier runs -> the use of their machines, by domain."""
    pool: LentPool | None = None


@dataclass(frozen=True)
class Inputs:
    """Everything that a plan is decided from beside the options."""

    benchmark: Loaded
    source: BenchmarkSource
    places: tuple[PlaceSource, ...]
    settings: Mapping[str, str]
    """Those of `--set` that the benchmark gets."""
    among: Collection[str] | None
    """The tasks to choose from; None: all of the benchmark."""
    past: Past
    loads: Mapping[str, DomainLoad]
    """The use of machines in earlier runs, where machines shall have the right size."""
    pool: LentPool | None
    names: Callable[[], tuple[str, Collection[str]]]


def load(options: Options, home: HomeFacts) -> Inputs:
    """Load the benchmark, its places and its earlier runs. RequestError says what to change."""
    request, flags = options.request, options.flags
    source = benchmark_source(request.benchmark, options.config, options.cwd)
    declaring = source.load(options.home) if source.kind.declares_settings else None
    declared = () if declaring is None else tuple(declaring.settings)
    spot_asked = bool(request.options.get("spot"))
    given = _given(flags, source, options.config, home.pool, declared, spot_asked=spot_asked)
    benchmark = declaring or given.benchmark.load(options.home)
    if request.options.get("oracle"):
        benchmark = _oracle(benchmark)
    _refuse_uploaded(options.env_file, benchmark)
    if options.purpose == "setup":
        among, past = None, Past()
    else:
        if benchmark.tasks_missing:
            raise RequestError(benchmark.tasks_missing)
        among, past = earlier_tasks(request, home.tasks), past_of(options.home, benchmark.name)
    loads: Mapping[str, DomainLoad] = home.loads(past) if flags.right_size else {}
    return Inputs(
        benchmark, given.benchmark, given.places, given.free, among, past, loads, home.pool, home.names
    )


def _oracle(benchmark: Loaded) -> Loaded:
    """Return the benchmark's own solutions. Raises RequestError if it has none."""
    if benchmark.oracle is None:
        raise RequestError(
            f"--oracle: benchmark {benchmark.name!r} has no solutions of its own; "
            "write the command that solves a task as 'solution' into its file"
        )
    return benchmark.oracle


def _given(
    flags: Flags,
    source: BenchmarkSource,
    config: Config,
    pool: LentPool | None,
    declared: Sequence[str],
    *,
    spot_asked: bool,
) -> SettingsSplit:
    if pool is None:
        places = place_sources(flags.on, config)
        if flags.spot:
            places = spot_sources(places, strict=spot_asked)
        return give_settings(flags.set, source, places, declared)
    lent = lent_sources(specs_of(pool.plan))
    return msgspec.structs.replace(give_settings(flags.set, source, (), declared), places=lent)


def _refuse_uploaded(env_file: Path | None, benchmark: Loaded) -> None:
    """Raises RequestError if machines would get the file of secrets."""
    real = None if env_file is None else Path(os.path.realpath(env_file))
    for file in benchmark.files:
        if real is not None and real.is_relative_to(os.path.realpath(file)):
            raise RequestError(
                f"--env-file {env_file} would be uploaded with the benchmark's files; move it out of {file}"
            )
