"""Configuration + flags -> a frozen, validated plan; and from a plan, its benchmark and places again.

Reads files, and lets benchmarks read what is theirs; has no clock and no chance: time and the home's id are
arguments.
"""

from __future__ import annotations

import functools
import getpass
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.benchmarks.loaded import Appliance, Loaded, Repeated, ResultWriter
from evalfleet.benchmarks.selection import Selection, select
from evalfleet.channels.secrecy import is_maskable
from evalfleet.errors import RequestError
from evalfleet.mirror import open_objects, store_url
from evalfleet.model import (
    NOBODY,
    Isolation,
    Limits,
    Metering,
    Micros,
    Needs,
    Notify,
    Plan,
    ScheduleName,
    Task,
    Verdict,
)
from evalfleet.names import check_run_name, default_run_name, hint
from evalfleet.ports import Benchmark, Examined, FileBenchmark, Place, PlaceContext
from evalfleet.schedules import is_dealt
from evalfleet.toml_tables import convert, expand

from .config import (
    Config,
    env_file_of,
    environment,
    environment_warnings,
    find_config,
    home_of,
    load_config,
    notify_of,
    readable_by_others,
)
from .history import known_attempt_usd, known_call_usd
from .models import ModelBounds, check_bounds, metering_of
from .plugins import benchmark_kind, place_kind
from .provenance import provenance, selection_of
from .request import (
    EarlierTasks,
    Flags,
    RunRequest,
    earlier_tasks,
    nothing_earlier,
    settle,
    with_listed_tasks,
)
from .sources import (
    BenchmarkSource,
    PlaceSource,
    PlaceSpec,
    SettingsSplit,
    benchmark_source,
    give_settings,
    lent_sources,
    place_settings,
    place_sources,
    spot_sources,
)
from .values import AUTO


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


@dataclass(frozen=True)
class HomeFacts:
    """What a home knows that a plan depends on."""

    id: str = ""
    taken: Collection[str] = ()
    """The names of all runs and pools that it has."""
    durations: Callable[[str], Mapping[str, float]] = lambda benchmark: {}
    """Benchmark -> seconds by task id, as earlier runs took."""


@dataclass(frozen=True)
class LentPool:
    """The pool that a run is to borrow its machines from."""

    plan: Plan
    machines: int = 1
    """How many it has: a run has as many workers, unless it is asked to have fewer."""
    warning: str = ""


@dataclass(frozen=True)
class Resolved:
    """A request, resolved: the plan of a run, its tasks, and what is needed to start it."""

    plan: Plan
    tasks: tuple[Task, ...]
    home: Path
    warnings: tuple[str, ...]
    secrets: Mapping[str, str] = field(repr=False)
    """Values, for channels and places alone."""
    environ: Mapping[str, str] = field(repr=False)
    """With values of secrets, too."""
    made_up: bool = False
    """Nobody chose the run's name, so that another one does as well."""
    keep: bool = False
    """Its machines shall stay, as the pool that the plan names."""
    notify: Notify = NOBODY
    cap_usd: float | None = None
    """What its owner may spend a month, if somebody has said."""
    right_size: bool = False
    """Its machines shall have the size that earlier runs needed."""

    @property
    def needs(self) -> Needs:
        """What machines must have."""
        return self.plan.needs or benchmark_of(self.plan).needs

    @property
    def borrowed(self) -> str:
        """The pool whose machines are borrowed; empty if the run makes its own."""
        return "" if self.keep else self.plan.pool

    def named(self, name: str) -> Resolved:
        """The same run under another name."""
        pool = kept_pool(name) if self.keep else self.plan.pool
        return replace(self, plan=msgspec.structs.replace(self.plan, run=name, pool=pool))


def kept_pool(run: str) -> str:
    """The pool that a run with --keep makes and leaves."""
    return f"{run}-pool"


def free_name(name: str, taken: Collection[str]) -> str:
    """A made-up name must not collide with that of a run started in the same second."""
    candidates = (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


def resolve(
    request: RunRequest,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    now: Micros,
    home: Path | None = None,
    facts: Callable[[], HomeFacts] = HomeFacts,
    pool: LentPool | None = None,
    only_setup: bool = False,
    secrets_elsewhere: bool = False,
    earlier: EarlierTasks = nothing_earlier,
) -> Resolved:
    """All that a run needs, checked before anything starts; RequestError says what to change.

    `home` is by default the one that the environment and the folder say. `facts` is asked last for what the
    home knows, because one may have to be made for that. `only_setup`: no attempt will be run, so no tasks
    are chosen. `secrets_elsewhere`: secrets need no values here. `earlier` tells the tasks of earlier runs.
    """
    request = with_listed_tasks(_with_all_machines(request, pool), cwd)
    config = _config(request.options.get("config"), environ, cwd)
    merged = environment(environ, cwd, config, request.options.get("env_file"))
    flags, owner, cap_usd = _owned(settle(request, merged, config), config, merged)
    source = benchmark_source(request.benchmark, config, cwd)
    lent = None if pool is None else pool.plan
    home = home or home_of(environ, cwd)
    declaring = source.load(home) if source.kind.declares_settings else None
    declared = () if declaring is None else tuple(declaring.settings)
    given = _given(flags, source, config, lent, declared, spot_asked=bool(request.options.get("spot")))
    loaded = declaring or given.benchmark.load(home)
    if request.options.get("oracle"):
        loaded, flags = _oracle(loaded, flags)
    if not only_setup:
        _refuse_without(loaded.tasks_missing)
    env_file = _checked(env_file_of(request.options.get("env_file"), environ, cwd), loaded)
    among = None if only_setup else earlier_tasks(request, earlier)
    selection = Selection(()) if only_setup else _selected(flags, loaded, among)
    tasks = _limited(loaded.settled(selection.tasks), flags.task_timeout)
    chosen = request.options.get("name")
    name = default_run_name(loaded.name, now) if chosen is None else check_run_name(chosen)
    metering, unmetered = _metering(flags, loaded, config, merged, now)
    store = store_url(flags.store, cwd) if flags.store else ""
    plan = _plan(name, flags, given, loaded, tasks, "" if lent is None else lent.run, metering, store)
    plan, scarce = _with_usual_cost(_within_pool(plan, pool), home)
    _refuse_given_to_setup(plan)
    names = setup_secrets(plan) if only_setup else secret_names(plan)
    secrets = {} if secrets_elsewhere else secret_values(names, merged)
    _refuse_shown(flags, secrets)
    doubts = [] if only_setup else _doubts(plan, tasks, workers_asked=flags.workers not in (None, AUTO))
    doubts += [*unmetered, *scarce, *_weak_secrets(secrets), *readable_by_others(secrets, config, env_file)]
    doubts += _doubts_of(pool)
    origin = provenance(selection_of(flags, request), tasks, _folder(loaded, source))
    known = facts()
    _refuse_taken(chosen, known)
    if not only_setup and pool is None:
        _refuse_without(loaded.setup_missing)
    return Resolved(
        plan=msgspec.structs.replace(
            plan, settings=given.free, home=known.id, owner=owner, provenance=None if only_setup else origin
        ),
        tasks=weigh(tasks, known.durations(loaded.name)),
        home=home,
        warnings=(*environment_warnings(merged), *loaded.warnings, *selection.warnings, *doubts),
        secrets=secrets,
        environ=merged,
        made_up=chosen is None,
        keep=flags.keep and pool is None,
        notify=notify_of(config, merged),
        cap_usd=cap_usd,
        right_size=flags.right_size,
    ).named(name if chosen is not None else free_name(name, known.taken))


def _doubts_of(pool: LentPool | None) -> tuple[str, ...]:
    return (pool.warning,) if pool is not None and pool.warning else ()


def _refuse_without(missing: str) -> None:
    if missing:
        raise RequestError(missing)


def _with_usual_cost(plan: Plan, home: Path) -> tuple[Plan, list[str]]:
    """The plan with what attempts at its benchmark have cost before, where a budget is for models, too; and a
    warning if the budget is less than that. RequestError if it is less than one call has cost."""
    budget, task_budget = plan.limits.budget_usd, plan.limits.task_budget_usd
    if plan.metering is None or budget is None:
        return plan, []
    call_usd = known_call_usd(home, plan.benchmark, plan.model) or 0.0
    for flag, usd in (("--budget", budget), ("--task-budget", task_budget)):
        if usd is not None and usd < call_usd:
            raise RequestError(
                f"{flag} {usd:g} pays no call of a model: one has cost ${call_usd:.2g} on average in earlier "
                f"runs of {plan.benchmark}; give more"
            )
    usual_usd = known_attempt_usd(home, plan.benchmark, plan.model) or None
    doubts: list[str] = []
    if usual_usd is not None and budget < usual_usd:
        seen = f"attempts at {plan.benchmark} have cost up to ${usual_usd:.2g} in earlier runs"
        doubts.append(f"--budget {budget:g} may not pay one task: {seen}")
    return msgspec.structs.replace(plan, attempt_usd=usual_usd), doubts


def _with_all_machines(request: RunRequest, pool: LentPool | None) -> RunRequest:
    """The request, with as many workers as the pool has machines, unless it says how many."""
    if pool is None:
        return request
    return request.but(workers=request.options.get("workers", max(1, pool.machines)))


def _within_pool(plan: Plan, pool: LentPool | None) -> Plan:
    """The plan, with no more workers than the pool has machines where it is left to us how many those are."""
    if pool is None or not plan.limits.auto:
        return plan
    most = min(plan.limits.workers, max(1, pool.machines))
    return msgspec.structs.replace(plan, limits=msgspec.structs.replace(plan.limits, workers=most))


def _refuse_taken(chosen: str | None, known: HomeFacts) -> None:
    if chosen is not None and chosen in known.taken:
        raise RequestError(f"the name {chosen!r} is taken; choose another with --name")


def _owned(flags: Flags, config: Config, environ: Mapping[str, str]) -> tuple[Flags, str, float | None]:
    """Flags with a budget of no more than a month's, who starts the run, and what they may spend a month;
    nobody where `[owners]` says nothing."""
    if not config.owners:
        return flags, "", None
    owner = environ.get("EVALFLEET_OWNER") or getpass.getuser()
    cap_usd = config.owners.get(owner, config.owners.get("*"))
    if cap_usd is None:
        known = hint(owner, config.owners)
        raise RequestError(f"{config.path}: [owners] does not name {owner!r} ($EVALFLEET_OWNER); {known}")
    capped = msgspec.structs.replace(flags, budget=min(cap_usd, flags.budget or cap_usd))
    return capped, owner, cap_usd


def _oracle(loaded: Loaded, flags: Flags) -> tuple[Loaded, Flags]:
    """The benchmark's own solutions, of which none may fail. RequestError if it has none."""
    if loaded.oracle is None:
        raise RequestError(
            f"--oracle: benchmark {loaded.name!r} has no solutions of its own; "
            "write the command that solves a task as 'solution' into its file"
        )
    strict = flags.fail_under if flags.fail_under is not None else 1.0
    return loaded.oracle, msgspec.structs.replace(flags, fail_under=strict)


def _given(
    flags: Flags,
    source: BenchmarkSource,
    config: Config,
    pool: Plan | None,
    declared: Sequence[str],
    *,
    spot_asked: bool,
) -> SettingsSplit:
    if pool is None:
        places = place_sources(flags.on, config)
        if flags.spot:
            places = spot_sources(places, strict=spot_asked)
        return give_settings(flags.set, source, places, declared)
    lent = lent_sources(specs_of(pool))
    return msgspec.structs.replace(give_settings(flags.set, source, (), declared), places=lent)


def specs_of(plan: Plan) -> dict[str, PlaceSpec]:
    return {name: msgspec.convert(plan.place_specs[name], PlaceSpec) for name in plan.places}


EXPIRES_S = 14 * 86_400.0
PREFIX = "worker"
"""What a pool's machines are called, unless somebody says otherwise or knows what they are for."""


class PoolRequest(Struct, frozen=True, kw_only=True):
    """What `evalfleet pool create` was given. Names of machines start with `prefix`."""

    name: str
    on: str = "local"
    workers: int | None = None
    """None: all machines of a place that lists them, else one."""
    expires_s: float = EXPIRES_S
    prefix: str = PREFIX
    settings: Mapping[str, str] = {}
    config: str | None = None


def resolve_pool(
    request: PoolRequest, *, environ: Mapping[str, str], cwd: Path, home_id: str
) -> tuple[Plan, dict[str, str]]:
    """A pool's plan, and the environment that its places may read. RequestError says what to change."""
    config = _config(request.config, environ, cwd)
    merged = environment(environ, cwd, config)
    sources = place_sources((request.on,), config)
    if len(sources) > 1:
        names = " or ".join(source.name for source in sources)
        raise RequestError(
            f"--on {request.on} names {len(sources)} places, and a pool is at one: --on {names}"
        )
    (place,) = place_settings(request.settings, sources)
    plan = Plan(
        run=check_run_name(request.name),
        benchmark="",
        places=(place.name,),
        place_specs=plain({place.name: PlaceSpec(place.kind_name, str(place.base), place.settings)}),
        limits=Limits(workers=request.workers or place.listed or 1, lease_s=request.expires_s),
        home=home_id,
        machine_names=check_run_name(request.prefix),
    )
    return plan, merged


KEPT_FILES = ".files"
"""In a run's folder: what its machines get, by digest. No task's folder starts with a dot."""


def benchmark_of(plan: Plan, folder: Path | None = None) -> Benchmark:
    """The plan's benchmark, also in another process than the one that resolved it.

    `folder` is the run's: with it, the benchmark has the files that were kept there when it was planned.
    """
    envelope = msgspec.convert(plan.benchmark_spec, BenchmarkSpec)
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
        twins = {path.name: path for path in home.glob(f"[!.]*/{KEPT_FILES}/*")}
        benchmark.keep(tasks, folder / KEPT_FILES, twins.get)


def check_files(plan: Plan, tasks: Sequence[Task], folder: Path) -> None:
    """Raises RequestError if a run could not be taken up for want of its files."""
    benchmark = benchmark_of(plan, folder)
    if isinstance(benchmark, FileBenchmark):
        benchmark.check_files(tasks)


def appliance_of(plan: Plan) -> Appliance | None:
    """What can be done by hand with machines that were set up for the plan's benchmark."""
    return benchmark_kind(msgspec.convert(plan.benchmark_spec, BenchmarkSpec).kind).appliance


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
    examined = [inner for inner in each if isinstance(inner, Examined)]
    checks = [check for inner in examined for check in await inner.examine(secrets)]
    for check in checks:
        if check.verdict == "bad":
            raise RequestError(f"{check.found}; {check.remedy}")
    return [check.found for check in checks if check.verdict == "warn"]


def secret_names(plan: Plan) -> tuple[str, ...]:
    return msgspec.convert(plan.benchmark_spec, BenchmarkSpec).secrets


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
    context = replace(context, open_objects=open_objects)
    for name, envelope in specs_of(plan).items():
        kind = place_kind(envelope.kind)
        given = {**envelope.settings, **(changed or {}).get(name, {})}
        settings = convert(given, kind.Settings, f"place {name!r}")
        made[name] = kind.make(
            name, settings, replace(context, base=Path(envelope.base), for_pool=not plan.benchmark)
        )
    return made


def secret_values(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """RequestError names all that are missing or empty."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise RequestError(
            f"the benchmark needs {', '.join(missing)}; set {'it' if len(missing) == 1 else 'them'} in the "
            "environment, in .env beside evalfleet.toml, or in a file given with --env-file"
        )
    return {name: environ[name] for name in names}


CHANCE = 8
"""A value shorter than this may be part of another word."""


def _refuse_shown(flags: Flags, secrets: Mapping[str, str]) -> None:
    """A secret's value must not be in the plan: that is in the journal, and on command lines."""
    given = {f"-A {key}": value for key, value in flags.agent.items()}
    given |= {f"--set {key}": value for key, value in flags.set.items()} | {"--model": ",".join(flags.model)}
    for name, value in secrets.items():
        by_chance = not is_maskable(value) or len(value) < CHANCE
        shown = next((flag for flag, text in given.items() if value in text), None)
        if shown is not None and (not by_chance or given[shown] == value):
            raise RequestError(
                f"{shown} holds the value of {name}, which would be kept in the journal; leave it out: "
                f"the task's command finds it in ${name}"
            )


def _weak_secrets(secrets: Mapping[str, str]) -> list[str]:
    return [
        f"the value of {name} is so short or common that it is not masked in logs and artefacts"
        for name, value in secrets.items()
        if not is_maskable(value)
    ]


def weigh(tasks: Sequence[Task], durations: Mapping[str, float]) -> tuple[Task, ...]:
    """Tasks with what earlier runs tell of their durations; a repeat weighs what its task does."""

    def weight(task: Task) -> float | None:
        known = durations.get(task.id, durations.get(task.origin or task.id.rpartition("~")[0]))
        return known if known is not None and math.isfinite(known) and known >= 0 else task.weight_s

    return tuple(msgspec.structs.replace(task, weight_s=weight(task)) for task in tasks)


def _config(given: str | Path | None, environ: Mapping[str, str], cwd: Path) -> Config:
    return load_config(cwd / expand(given) if given else find_config(cwd, environ), cwd)


def _checked(env_file: Path | None, loaded: Loaded) -> Path | None:
    """The same file. Raises RequestError if machines would get it."""
    real = None if env_file is None else Path(os.path.realpath(env_file))
    for file in loaded.files:
        if real is not None and real.is_relative_to(os.path.realpath(file)):
            raise RequestError(
                f"--env-file {env_file} would be uploaded with the benchmark's files; move it out of {file}"
            )
    return env_file


def _selected(flags: Flags, loaded: Loaded, among: Collection[str] | None) -> Selection:
    if among is not None and (strange := sorted(set(among) - {task.id for task in loaded.tasks})):
        raise RequestError(
            f"--from: benchmark {loaded.name!r} has no task {strange[0]!r}, which that run has; "
            "name a run of this benchmark"
        )
    return select(
        loaded.tasks,
        first=flags.first,
        sample=flags.tasks,
        seed=flags.seed,
        ids=flags.task,
        domains=flags.domain,
        tags=flags.tag,
        exclude=flags.exclude,
        among=among,
        repeat=flags.repeat,
        models=flags.model,
    )


def _folder(loaded: Loaded, source: BenchmarkSource) -> Path:
    """Where the benchmark's own files are, as far as can be told."""
    return Path(str(loaded.spec.get("root") or source.base))


def _limited(tasks: tuple[Task, ...], timeout_s: float | None) -> tuple[Task, ...]:
    if timeout_s is None:
        return tasks
    return tuple(msgspec.structs.replace(task, timeout_s=timeout_s) for task in tasks)


def _metering(
    flags: Flags, loaded: Loaded, config: Config, environ: Mapping[str, str], now: Micros
) -> tuple[Metering | None, list[str]]:
    """How model calls are metered, if they are; and what to tell the user about that."""
    where = f"{config.path}: [model]" if config.model is not None else "the benchmark"
    asked = config.model is not None or bool(loaded.model_keys)
    if asked and loaded.unmeterable:
        found, why = None, loaded.unmeterable
    else:
        found = metering_of(
            config.model,
            loaded.model_keys,
            loaded.secrets,
            environ,
            urls=loaded.model_urls,
            where=where,
            now=now,
            keep_calls=flags.keep_calls,
        )
        why = "nobody has said which secret is a model's key: see [model] in the docs"
    if found is not None:
        bounds = ModelBounds(flags.budget, flags.task_budget, flags.max_tokens)
        check_bounds(bounds, found, flags.model, tuple(config.model.prices) if config.model else ())
        return msgspec.structs.replace(found, containers=loaded.in_containers), []
    for flag, value in (("--task-budget", flags.task_budget), ("--max-tokens", flags.max_tokens)):
        if value is not None:
            raise RequestError(f"{flag} needs models to be metered, and {why}")
    if flags.budget is None and not asked and not flags.keep_calls:
        return None, []
    return None, [f"models are not metered, so that --budget bounds machines alone: {why}"]


def _refuse_given_to_setup(plan: Plan) -> None:
    """What set-up gets may be left on the machine, and an attempt would find it there."""
    if plan.metering is None:
        return
    given = set(setup_secrets(plan))
    for api in plan.metering.apis:
        if api.secret in given:
            raise RequestError(
                f"{api.secret} is a model's key, and metered: set-up cannot have it; take it from there"
            )


def _plan(
    name: str,
    flags: Flags,
    given: SettingsSplit,
    loaded: Loaded,
    tasks: Sequence[Task],
    pool: str,
    metering: Metering | None,
    store: str,
) -> Plan:
    places = given.places
    source, spec = given.benchmark, with_needs(loaded.spec, tasks, flags.schedule)
    origin = BenchmarkOrigin(source.name, str(source.base), source.settings, flags.task_timeout)
    keys = () if metering is None else (api.secret for api in metering.apis)
    secrets = tuple(dict.fromkeys((*loaded.secrets, *keys)))
    envelope = BenchmarkSpec(source.kind_name, spec, flags.repeat, secrets, origin)
    specs = {place.name: PlaceSpec(place.kind_name, str(place.base), place.settings) for place in places}
    return Plan(
        run=name,
        benchmark=loaded.name,
        places=tuple(place.name for place in places),
        ordered=len(places) > 1 and not flags.mix,
        benchmark_spec=plain(envelope),
        place_specs=plain(specs),
        model=", ".join(flags.model),
        models=flags.model if len(flags.model) > 1 else (),
        agent=flags.agent,
        schedule=flags.schedule,
        slots=loaded.slots,
        limits=_limits(flags, places, _canary(flags, places, pool), tasks, loaded.setup_s),
        verdict=_verdict(flags),
        machine_names=f"{given.benchmark.kind.machine_names}-{{n}}",
        model_usd=loaded.model_usd,
        pool=pool,
        metering=metering,
        store=store,
        isolation={place.name: isolation_of(loaded, place) for place in places},
    )


def with_needs(spec: Mapping[str, Any], tasks: Sequence[Task], schedule: ScheduleName) -> Mapping[str, Any]:
    """The benchmark's spec. Under a static schedule each machine does for every task, as any may get any."""
    own = [task.needs for task in tasks if task.needs is not None]
    if not own or not is_dealt(schedule):
        return spec
    needs = functools.reduce(Needs.joined, own, msgspec.convert(spec.get("needs", {}), Needs))
    return {**spec, "needs": needs}


def isolation_of(loaded: Loaded, place: PlaceSource) -> Isolation:
    """The benchmark knows best what it needs, then who set the place up. Raises RequestError."""
    wanted: Isolation = loaded.isolation or place.settings.get("isolation") or ""
    if wanted == "container" and not loaded.isolation:
        raise RequestError(
            f"place {place.name!r} has isolation = \"container\", and {loaded.name} has no 'image'; "
            "write one into its file, or --set isolation=user"
        )
    return wanted or getattr(place.kind, "default_isolation", "auto")


def _canary(flags: Flags, places: Sequence[PlaceSource], pool: str) -> int:
    """Attempts that must end before more machines are made; a pool's are there, and prepared."""
    if flags.canary is not None:
        return flags.canary
    return 0 if pool else max(place.default_canary for place in places)


def plain(value: object) -> Any:
    """As a journal gives it back, so that a plan equals itself after a restart."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _limits(
    flags: Flags, places: Sequence[PlaceSource], canary: int, tasks: Sequence[Task], setup_s: float
) -> Limits:
    longest = max((task.timeout_s + task.ready_s for task in tasks), default=0.0)
    return Limits(
        workers=_workers(flags, places, len(tasks)),
        auto=flags.workers == AUTO,
        attempts=flags.attempts,
        attempts_ceiling=max(Limits().attempts_ceiling, flags.attempts),
        canary=canary,
        budget_usd=flags.budget,
        task_budget_usd=flags.task_budget,
        max_tokens=flags.max_tokens,
        max_duration_s=flags.max_duration,
        deadline_s=flags.deadline,
        boot_timeout_s=Limits().boot_timeout_s + setup_s,
        # A laptop may sleep through a task: the host must not give it up before the task's own limit.
        lease_s=max(Limits().lease_s, 2 * longest + 600),
    )


AUTO_MOST = 100
"""With `--workers auto` there are no more machines than this at once."""


def _workers(flags: Flags, places: Sequence[PlaceSource], tasks: int) -> int:
    """How many machines there may be at once. Raises RequestError."""
    listed = sum(place.listed for place in places)
    if flags.workers != AUTO:
        return flags.workers or listed or 1
    if flags.deadline is None and flags.budget is None:
        raise RequestError("--workers auto needs something to choose by: a --deadline, a --budget or both")
    if is_dealt(flags.schedule):
        raise RequestError(
            f"--workers auto: --schedule {flags.schedule} must know how many workers there are"
        )
    return max(1, min(tasks, listed or AUTO_MOST))


def _verdict(flags: Flags) -> Verdict:
    return msgspec.structs.replace(flags.allow_broken, fail_under=flags.fail_under, strict=flags.strict)


def _doubts(plan: Plan, tasks: Sequence[Task], *, workers_asked: bool) -> list[str]:
    doubts: list[str] = []
    longest = max(task.timeout_s for task in tasks)
    limit, useful = plan.limits.max_duration_s, math.ceil(len(tasks) / plan.slots)
    if limit is not None and limit < longest:
        doubts.append(f"--max-duration of {limit:g} s is shorter than a task's time limit of {longest:g} s")
    if workers_asked and plan.limits.workers > useful and not plan.pool:  # a pool is as large as it is
        many = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
        doubts.append(f"--workers {plan.limits.workers} is more than {many} can use; {useful} will do")
    return doubts
