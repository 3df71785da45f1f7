"""The last step of planning: options and inputs -> a frozen plan, which nothing changes afterwards.

It has no clock and no chance: time and the home's id are arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
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
    Limits,
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

from .config import Config, environment_warnings, notify_of, readable_by_others
from .load import Inputs
from .models import ModelBounds, check_bounds, metering_of, unmetered_keys
from .past import Past
from .plan_limits import canary_of, limit_doubts, limits_of, verdict_of
from .plan_parts import BenchmarkOrigin, BenchmarkSpec, benchmark_of, plain, secret_names, setup_secrets
from .provenance import provenance, selection_of
from .request import Flags, Options
from .right_size import right_sized
from .secret_values import refuse_shown, secret_values, weak_secrets
from .sources import BenchmarkSource, PlaceSource, PlaceSpec
from .values import AUTO


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
    """Return a made-up name that no run has which was started in the same second."""
    candidates = (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


def decide(options: Options, inputs: Inputs, now: Micros) -> Resolved:
    """Decide the plan of a run. RequestError says what to change."""
    request, benchmark, pool = options.request, inputs.benchmark, inputs.pool
    setup = options.purpose == "setup"
    flags = _settled(options, inputs)
    selection = Selection(()) if setup else _selected(flags, benchmark, inputs.among)
    tasks = _limited(benchmark.settled(selection.tasks), flags.task_timeout)
    chosen = request.options.get("name")
    name = check_run_name(chosen) if chosen is not None else default_run_name(benchmark.name, now)
    metering, unmetered = _metering(flags, benchmark, options.config, options.environ, now)
    limits = _limits(flags, inputs, tasks)
    plan = _plan(name, flags, inputs, tasks, limits, metering, options.cwd)
    attempt_usd, scarce = _usual_cost(plan, inputs.past)
    _refuse_given_to_setup(plan)
    names = setup_secrets(plan) if setup else secret_names(plan)
    elsewhere = options.purpose in ("elsewhere", "forecast")
    secrets = {} if elsewhere else secret_values(names, options.environ)
    refuse_shown(flags, secrets)
    doubts = [] if setup else limit_doubts(plan, tasks, workers_asked=flags.workers not in (None, AUTO))
    doubts += [*unmetered, *scarce, *weak_secrets(secrets)]
    doubts += readable_by_others(secrets, options.config, options.env_file)
    doubts += [] if pool is None else filter(None, [pool.warning])
    origin = provenance(selection_of(flags, request), tasks, _folder(benchmark, inputs.source))
    home_id, taken = inputs.names()
    if chosen is not None and chosen in taken:
        raise RequestError(f"the name {chosen!r} is taken; choose another with --name")
    doubts += [] if setup or pool is not None else _lacking(options, benchmark)
    needs, tasks, unsized = _sized(flags, inputs, plan, tasks)
    return Resolved(
        plan=msgspec.structs.replace(
            plan, home=home_id, needs=needs, attempt_usd=attempt_usd, provenance=None if setup else origin
        ),
        tasks=weigh(tasks, inputs.past.durations()),
        home=options.home,
        warnings=(
            *environment_warnings(options.environ),
            *benchmark.warnings,
            *selection.warnings,
            *doubts,
            *unsized,
        ),
        secrets=secrets,
        environ=options.environ,
        made_up=chosen is None,
        keep=flags.keep and pool is None,
        notify=notify_of(options.config, options.environ),
    ).named(name if chosen is not None else free_name(name, taken))


def _settled(options: Options, inputs: Inputs) -> Flags:
    """Return the flags with what the pool and the benchmark's own solutions leave no choice of."""
    flags, request, pool = options.flags, options.request, inputs.pool
    if pool is not None and "workers" not in request.options:
        flags = msgspec.structs.replace(flags, workers=max(1, pool.machines))
    if request.options.get("oracle") and flags.fail_under is None:
        flags = msgspec.structs.replace(flags, fail_under=1.0)  # none of its solutions may fail
    return flags


def _limits(flags: Flags, inputs: Inputs, tasks: Sequence[Task]) -> Limits:
    """Return the limits, with no more workers than the pool has machines where nobody has said how many."""
    places, pool = inputs.places, inputs.pool
    limits = limits_of(flags, places, canary_of(flags, places), tasks, inputs.benchmark.setup_s)
    if pool is None or not limits.auto:
        return limits
    return msgspec.structs.replace(limits, workers=min(limits.workers, max(1, pool.machines)))


def _lacking(options: Options, benchmark: Loaded) -> list[str]:
    """Return what new machines would lack, as a warning. RequestError, if they are to be made now."""
    if benchmark.setup_missing and options.purpose != "forecast":
        raise RequestError(benchmark.setup_missing)
    return [f"before it can run: {benchmark.setup_missing}"] if benchmark.setup_missing else []


def _usual_cost(plan: Plan, past: Past) -> tuple[float | None, list[str]]:
    """Return the most that attempts usually cost, where a budget is for models, too, and a warning if the
    budget is less than that. RequestError if it is less than one call has cost."""
    budget, task_budget = plan.limits.budget_usd, plan.limits.task_budget_usd
    if plan.metering is None or budget is None:
        return None, []
    call_usd = past.call_usd(plan.model) or 0.0
    for flag, usd in (("--budget", budget), ("--task-budget", task_budget)):
        if usd is not None and usd < call_usd:
            raise RequestError(
                f"{flag} {usd:g} pays no call of a model: one has cost ${call_usd:.2g} on average in earlier "
                f"runs of {plan.benchmark}; give more"
            )
    usual_usd = past.attempt_usd(plan.model) or None
    if usual_usd is None or budget >= usual_usd:
        return usual_usd, []
    shown = f"attempts at {plan.benchmark} have cost up to ${usual_usd:.2g} in earlier runs"
    return usual_usd, [f"--budget {budget:g} may not pay one task: {shown}"]


def _sized(
    flags: Flags, inputs: Inputs, plan: Plan, tasks: tuple[Task, ...]
) -> tuple[Needs | None, tuple[Task, ...], list[str]]:
    """Return what machines must have by what earlier runs used, if that is asked for and known."""
    if not flags.right_size or not tasks:
        return None, tasks, []
    if inputs.pool is not None:
        raise RequestError("--right-size: the machines of a pool have the size they have: leave it out")
    needs, tasks = right_sized(plan, tasks, inputs.loads)
    if needs is not None:
        return needs, tasks, []
    why = "earlier runs tell nothing else" if inputs.loads else "no earlier run here told what its tasks used"
    return None, tasks, [f"--right-size: machines are as {plan.benchmark} says, {why}"]


def weigh(tasks: Sequence[Task], durations: Mapping[str, float]) -> tuple[Task, ...]:
    """Tasks with what earlier runs tell of their durations; a repeat weighs what its task does."""

    def weight(task: Task) -> float | None:
        known = durations.get(task.id, durations.get(task.origin or task.id.rpartition("~")[0]))
        return known if known is not None and math.isfinite(known) and known >= 0 else task.weight_s

    return tuple(msgspec.structs.replace(task, weight_s=weight(task)) for task in tasks)


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
    inputs: Inputs,
    tasks: Sequence[Task],
    limits: Limits,
    metering: Metering | None,
    cwd: Path,
) -> Plan:
    """Return the plan as far as it depends neither on the home nor on earlier runs."""
    places, loaded, source = inputs.places, inputs.benchmark, inputs.source
    spec = with_needs(loaded.spec, tasks, flags.schedule)
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
        settings=inputs.settings,
        agent=flags.agent,
        schedule=flags.schedule,
        slots=loaded.slots,
        limits=limits,
        verdict=verdict_of(flags),
        machine_names=f"{source.kind.machine_names}-{{n}}",
        model_usd=loaded.model_usd,
        usual_s=loaded.usual_s,
        pool="" if inputs.pool is None else inputs.pool.plan.run,
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
