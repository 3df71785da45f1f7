"""Configuration + flags -> a frozen, validated plan.

Reads files, and lets benchmarks read what is theirs; has no clock and no chance: time and the home's id are
arguments.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.benchmarks.loaded import Loaded
from evalfleet.benchmarks.selection import Selection, select
from evalfleet.errors import RequestError
from evalfleet.mirror import store_url
from evalfleet.model import (
    NOBODY,
    Isolation,
    Metering,
    Micros,
    Needs,
    Notify,
    Plan,
    ScheduleName,
    Task,
    decodable,
)
from evalfleet.names import check_run_name, default_run_name
from evalfleet.schedules import is_static

from .config import (
    Config,
    config_of,
    env_file_of,
    environment,
    environment_warnings,
    home_of,
    notify_of,
    readable_by_others,
)
from .models import ModelBounds, check_bounds, metering_of, unmetered_keys
from .past import past_of
from .plan_limits import canary_of, limit_doubts, limits_of, verdict_of
from .plan_parts import (
    BenchmarkOrigin,
    BenchmarkSpec,
    benchmark_of,
    plain,
    secret_names,
    setup_secrets,
    specs_of,
)
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
from .secret_values import refuse_shown, secret_values, weak_secrets
from .sources import (
    BenchmarkSource,
    PlaceSource,
    PlaceSpec,
    SettingsSplit,
    benchmark_source,
    give_settings,
    lent_sources,
    place_sources,
    spot_sources,
)
from .values import AUTO


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
    only_reckoned: bool = False,
    earlier: EarlierTasks = nothing_earlier,
) -> Resolved:
    """All that a run needs, checked before anything starts; RequestError says what to change.

    `home`: by default that of the environment and the folder. `facts` tells, last, what it knows: it may have
    to be made for that. `only_setup`: no attempt is run, no task chosen. `secrets_elsewhere`: they need no
    values here. `only_reckoned`: what machines lack is a warning. `earlier` tells the tasks of earlier runs.
    """
    request = with_listed_tasks(_with_all_machines(request, pool), cwd)
    config = config_of(request.options.get("config"), environ, cwd)
    merged = environment(environ, cwd, config, request.options.get("env_file"))
    flags = settle(request, merged, config)
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
    name = check_run_name(chosen) if chosen is not None else default_run_name(loaded.name, now)
    metering, unmetered = _metering(flags, loaded, config, merged, now)
    plan = _plan(name, flags, given, loaded, tasks, lent.run if lent else "", metering, cwd)
    plan, scarce = _with_usual_cost(_within_pool(plan, pool), home)
    _refuse_given_to_setup(plan)
    names = setup_secrets(plan) if only_setup else secret_names(plan)
    secrets = {} if secrets_elsewhere else secret_values(names, merged)
    refuse_shown(flags, secrets)
    doubts = [] if only_setup else limit_doubts(plan, tasks, workers_asked=flags.workers not in (None, AUTO))
    doubts += [*unmetered, *scarce, *weak_secrets(secrets), *readable_by_others(secrets, config, env_file)]
    doubts += [] if pool is None else filter(None, [pool.warning])
    origin = provenance(selection_of(flags, request), tasks, _folder(loaded, source))
    known = facts()
    _refuse_taken(chosen, known)
    doubts += [] if only_setup or pool is not None else _lacking(loaded, only_reckoned)
    return Resolved(
        plan=msgspec.structs.replace(
            plan, settings=given.free, home=known.id, provenance=None if only_setup else origin
        ),
        tasks=weigh(tasks, known.durations(loaded.name)),
        home=home,
        warnings=(*environment_warnings(merged), *loaded.warnings, *selection.warnings, *doubts),
        secrets=secrets,
        environ=merged,
        made_up=chosen is None,
        keep=flags.keep and pool is None,
        notify=notify_of(config, merged),
        right_size=flags.right_size,
    ).named(name if chosen is not None else free_name(name, known.taken))


def _lacking(loaded: Loaded, only_reckoned: bool) -> list[str]:
    """What new machines would lack, as a warning. RequestError, if they are to be made now."""
    if not only_reckoned:
        _refuse_without(loaded.setup_missing)
    return [f"before it can run: {loaded.setup_missing}"] if loaded.setup_missing else []


def _refuse_without(missing: str) -> None:
    if missing:
        raise RequestError(missing)


def _with_usual_cost(plan: Plan, home: Path) -> tuple[Plan, list[str]]:
    """The plan with what attempts at its benchmark have cost before, where a budget is for models, too; and a
    warning if the budget is less than that. RequestError if it is less than one call has cost."""
    budget, task_budget = plan.limits.budget_usd, plan.limits.task_budget_usd
    if plan.metering is None or budget is None:
        return plan, []
    past = past_of(home, plan.benchmark)
    call_usd = past.call_usd(plan.model) or 0.0
    for flag, usd in (("--budget", budget), ("--task-budget", task_budget)):
        if usd is not None and usd < call_usd:
            raise RequestError(
                f"{flag} {usd:g} pays no call of a model: one has cost ${call_usd:.2g} on average in earlier "
                f"runs of {plan.benchmark}; give more"
            )
    usual_usd = past.attempt_usd(plan.model) or None
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


def weigh(tasks: Sequence[Task], durations: Mapping[str, float]) -> tuple[Task, ...]:
    """Tasks with what earlier runs tell of their durations; a repeat weighs what its task does."""

    def weight(task: Task) -> float | None:
        known = durations.get(task.id, durations.get(task.origin or task.id.rpartition("~")[0]))
        return known if known is not None and math.isfinite(known) and known >= 0 else task.weight_s

    return tuple(msgspec.structs.replace(task, weight_s=weight(task)) for task in tasks)


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
        beside = unmetered_keys(found, loaded.secrets) if flags.budget is not None else []
        notes = [f"--budget does not bound what is called with {name}: it is not metered" for name in beside]
        return msgspec.structs.replace(found, containers=loaded.in_containers), notes
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
    cwd: Path,
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
        limits=limits_of(flags, places, canary_of(flags, places), tasks, loaded.setup_s),
        verdict=verdict_of(flags),
        machine_names=f"{given.benchmark.kind.machine_names}-{{n}}",
        model_usd=loaded.model_usd,
        usual_s=loaded.usual_s,
        pool=pool,
        metering=metering,
        store=store_url(flags.store, cwd) if flags.store else "",
        isolation={place.name: isolation_of(loaded, place) for place in places},
    )


def with_needs(spec: Mapping[str, Any], tasks: Sequence[Task], schedule: ScheduleName) -> Mapping[str, Any]:
    """The benchmark's spec. Under a static schedule each machine does for every task, as any may get any."""
    own = [task.needs for task in tasks if task.needs is not None]
    if not own or not is_static(schedule):
        return spec
    needs = functools.reduce(Needs.joined, own, msgspec.convert(spec.get("needs", {}), decodable(Needs)))
    return {**spec, "needs": needs}


def isolation_of(loaded: Loaded, place: PlaceSource) -> Isolation:
    """The benchmark knows best what it needs, then who set the place up. Raises RequestError."""
    wanted: Isolation = loaded.isolation or place.settings.get("isolation") or ""
    if wanted == "container" and not loaded.isolation:
        raise RequestError(
            f"place {place.name!r} has isolation = \"container\", and {loaded.name} has no 'image'; "
            "write one into its file, or --set isolation=user"
        )
    return wanted or place.kind.default_isolation
