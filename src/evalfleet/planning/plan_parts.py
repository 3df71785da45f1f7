"""What a plan was made of, made again: its benchmark, its places and their settings, in any process."""

from __future__ import annotations

import glob
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.benchmarks.loaded import Appliance, Repeated, ResultWriter
from evalfleet.errors import RequestError
from evalfleet.model import (
    Plan,
    Task,
    decodable,
)
from evalfleet.ports import Benchmark, Bucket, FileBenchmark, HasGuest, Place, PlaceContext
from evalfleet.toml_tables import convert

from .config import (
    Config,
)
from .plugins import benchmark_kind, place_kind
from .sources import (
    PlaceSpec,
)


class BenchmarkOrigin(Struct, frozen=True, omit_defaults=True):
    """Where a benchmark was read, so that it can be read again."""

    name: str
    base: str
    """The folder that relative paths in the settings start from."""
    settings: Mapping[str, Any] = {}
    task_timeout_s: float | None = None
    """The time limit that was given for all tasks, whatever the benchmark says."""


class BenchmarkSpec(Struct, frozen=True, omit_defaults=True):
    """The content of `Plan.benchmark_spec`, from which the benchmark is made again. `secrets` are names."""

    kind: str
    spec: Mapping[str, Any]
    repeat: int = 1
    secrets: tuple[str, ...] = ()
    source: BenchmarkOrigin | None = None
    """Where it was read; a run of an earlier version does not tell."""


def plain(value: object) -> Any:
    """As a journal gives it back, so that a plan equals itself after a restart."""
    return msgspec.json.decode(msgspec.json.encode(value))


def specs_of(plan: Plan) -> dict[str, PlaceSpec]:
    return {name: msgspec.convert(plan.place_specs[name], decodable(PlaceSpec)) for name in plan.places}


KEPT_FILES = ".files"
"""In a run's folder: what its machines get, by digest. No task's folder starts with a dot."""


def benchmark_of(plan: Plan, folder: Path | None = None) -> Benchmark:
    """The plan's benchmark, also in another process than the one that resolved it.

    `folder` is the run's: with it, the benchmark has the files that were kept there when it was planned.
    """
    envelope = msgspec.convert(plan.benchmark_spec, decodable(BenchmarkSpec))
    kind = benchmark_kind(envelope.kind)

    def made_for(model: str) -> Benchmark:
        made = kind.from_spec(envelope.spec, model=model, agent=plan.agent, settings=plan.settings)
        if folder is not None and isinstance(made, FileBenchmark):
            made = made.with_kept(folder / KEPT_FILES)
        return made

    if not plan.models:
        return Repeated.times(made_for(plan.model), envelope.repeat)
    return Repeated({model: made_for(model) for model in plan.models})


def keep_files(plan: Plan, tasks: Sequence[Task], home: Path, folder: Path) -> None:
    """Copy what machines get for these tasks into a run's folder, or link it from another run of the home.

    Raises RequestError if it cannot be copied, or is not what it was when it was planned.
    """
    benchmark = benchmark_of(plan)
    if isinstance(benchmark, FileBenchmark):
        # of `glob`, as `Path.glob` fails when another run is deleted meanwhile
        found = glob.glob(f"[!.]*/{KEPT_FILES}/*", root_dir=home)
        twins = {path.name: path for path in map(home.joinpath, found)}
        benchmark.keep(tasks, folder / KEPT_FILES, twins.get)


def check_files(plan: Plan, tasks: Sequence[Task], folder: Path) -> None:
    """Raises RequestError if a run could not be taken up for want of its files."""
    benchmark = benchmark_of(plan, folder)
    if isinstance(benchmark, FileBenchmark):
        benchmark.check_files(tasks)


def appliance_of(plan: Plan) -> Appliance | None:
    """What can be done by hand with machines that were set up for the plan's benchmark."""
    return benchmark_kind(msgspec.convert(plan.benchmark_spec, decodable(BenchmarkSpec)).kind).appliance


def result_writer_of(plan: Plan) -> ResultWriter | None:
    """How the plan's results are written for its benchmark's own tools. An imported run has no spec."""
    kind = str(plan.benchmark_spec.get("kind") or plan.benchmark)
    try:
        return benchmark_kind(kind).result_writer
    except RequestError:  # of a plug-in that is not there any more
        return None


async def vetted(plan: Plan, secrets: Mapping[str, str]) -> list[str]:
    """What the benchmark finds doubtful now, before money is spent. RequestError for what cannot work."""
    benchmark = benchmark_of(plan)
    each = benchmark.inners if isinstance(benchmark, Repeated) else [benchmark]
    guests = [inner.guest for inner in each if isinstance(inner, HasGuest) and inner.guest is not None]
    checks = [check for guest in guests for check in await guest.examine(secrets, plan.metering)]
    for check in checks:
        if check.verdict == "bad":
            raise RequestError(f"{check.found}; {check.remedy}")
    return [check.found for check in checks if check.verdict == "warn"]


def secret_names(plan: Plan) -> tuple[str, ...]:
    return msgspec.convert(plan.benchmark_spec, decodable(BenchmarkSpec)).secrets


def setup_secrets(plan: Plan) -> tuple[str, ...]:
    """Those without which a machine cannot be set up: not the model's."""
    benchmark = benchmark_of(plan)
    commands = [step.command for step in benchmark.bundle.steps]
    commands += [benchmark.probe] if benchmark.probe is not None else []
    return tuple(dict.fromkeys(name for command in commands for name in command.secrets))


PlaceSettings = Mapping[str, Mapping[str, Any]]


def changed_settings(plan: Plan, config: Config) -> dict[str, dict[str, Any]]:
    """Place -> what evalfleet.toml says now of settings that may change while machines live.

    A plan keeps what it was made with, but who has moved to another network must be let in again. A kind of
    place names such settings in `changeable`. Only the file that the plan was made with is asked.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, spec in specs_of(plan).items():
        told: Mapping[str, Any] = config.places.get(name, {}) if str(config.base) == spec.base else {}
        if told.get("kind", name) == spec.kind:
            keys = place_kind(spec.kind).changeable
            found[name] = {key: told[key] for key in keys if key in told}
    return found


def places_of(plan: Plan, context: PlaceContext, changed: PlaceSettings | None = None) -> dict[str, Place]:
    """The plan's places by name, in order; with settings that have changed since."""
    made: dict[str, Place] = {}
    for name, envelope in specs_of(plan).items():
        kind = place_kind(envelope.kind)
        given = {**envelope.settings, **(changed or {}).get(name, {})}
        settings = convert(given, kind.Settings, f"place {name!r}")
        base, for_pool = Path(envelope.base), not plan.benchmark
        told = replace(context, base=base, for_pool=for_pool, open_bucket=_open_bucket)
        made[name] = kind.make(name, settings, told)
    return made


def _open_bucket(
    url: str,
    environ: Mapping[str, str],
    token: Callable[[], Awaitable[str]] | None = None,
    ca: str = "",
) -> Bucket:
    from evalfleet.mirror import open_bucket  # few places need it

    return open_bucket(url, environ, token, ca)
