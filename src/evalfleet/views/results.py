"""The results of a run as one document: `results.json`, `show --json`, and what reports are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, structs

from evalfleet.errors import RequestError
from evalfleet.model import (
    Answered,
    Broken,
    Grade,
    Micros,
    Outcome,
    Plan,
    Provenance,
    Scored,
    Task,
    TaskId,
    seconds_between,
)
from evalfleet.names import artefacts_folder, hint
from evalfleet.state import AttemptState, MachineState, RunState, TaskState

from .format import iso
from .model_costs import model_cost, model_costs, task_model_usd
from .notable import by_place, refusals, steering
from .stats import (
    Tally,
    attempt_usd,
    by_domain,
    machine_end,
    machine_usd,
    machines_usd,
    percentile,
    prices_as_of,
    tally,
)
from .summary import NOT_AS_ASKED, exit_code, shortfall
from .tasks import by_task, figures, metrics_by_domain, pass_at_k

if TYPE_CHECKING:  # types that only type checkers need: `ls` is quicker without them
    from .documents import (
        Attempt,
        AttemptOutcome,
        Cost,
        Figures,
        GradedAgain,
        MachineResult,
        ModelShares,
        OutcomeDetails,
        ProvenanceDocument,
        Results,
        ResultsBeyond,
        ResultsCounts,
        ResultsHead,
        ResultsRepeats,
        Shares,
        TaskDetail,
        TaskFacts,
        TaskResult,
        TaskStatus,
        ToldDetails,
    )


def results(state: RunState, run_dir: Path, now: Micros | None = None) -> Results:
    """All there is to say about the run at `now` (by default: when its last event was recorded).

    `scored + broken + unrun = total_tasks` always: while the run goes on, what is not settled is unrun, and
    so is what is `answered` and not graded yet.
    Costs time proportional to the number of tasks.
    """
    at = state.last_at if now is None else max(now, state.last_at)
    strict = state.plan.verdict.strict
    whole = tally(state.tasks.values(), strict)
    tasks = [_task(state, known, run_dir.name, at) for known in state.tasks.values()]
    metrics = metrics_by_domain(tasks)
    return {
        **_head(state),
        **_counts(state, whole),
        "by_domain": {
            domain: _shares(part, metrics.get(domain, {}))
            for domain, part in by_domain(state.tasks.values(), strict).items()
        },
        **_by_repeats(state, tasks),
        "causes": {str(cause): n for cause, n in state.causes.most_common()},
        "cost": run_cost(state, at),
        "models": model_costs(state),
        "tasks": tasks,
        "metrics": figures(task["metrics"] for task in tasks if task["success"] is not None),
        "tokens": figures(map(_tokens, state.attempts.values())),
        **_beyond(state, at),
        "machines": [machine_entry(machine, at) for machine in state.machines.values()],
        "provenance": provenance(state),
    }


def _by_repeats(state: RunState, tasks: Sequence[TaskResult]) -> ResultsRepeats:
    strict = state.plan.verdict.strict
    repeated = by_task(tasks, strict) if any(known.task.origin for known in state.tasks.values()) else []
    models: dict[str, ModelShares] = {}
    for model in state.plan.models:
        own = [task for task in tasks if task["model"] == model]
        part = tally((known for known in state.tasks.values() if known.task.model == model), strict)
        metrics = figures(task["metrics"] for task in own if task["success"] is not None)
        at_k = pass_at_k([each for each in repeated if each["model"] == model], strict)
        models[model] = {**_shares(part, metrics), "pass_at_k": at_k}
    return {"by_model": models, "by_task": repeated, "pass_at_k": pass_at_k(repeated, strict)}


def provenance(state: RunState) -> ProvenanceDocument:
    plan, made = state.plan, state.plan.provenance or Provenance()
    spec: Mapping[str, Any] = plan.benchmark_spec.get("spec") or {}
    digests = {
        "tasks": made.tasks_digest,
        "files": spec.get("digest"),
        "score_files": spec.get("score_digest"),
    }
    return {
        "settings": {**spec.get("settings", {}), **plan.settings},
        "agent": dict(plan.agent),
        "selection": dict(made.selection),
        "seed": made.selection.get("seed"),
        "limits": structs.asdict(state.limits),
        "schedule": plan.schedule,
        "slots": plan.slots,
        "versions": dict(made.versions),
        "digests": {name: str(digest) for name, digest in digests.items() if digest},
        "commit": made.commit or None,
        "uncommitted": made.uncommitted,
    }


class RunSummary(Struct, frozen=True):
    """A run in the few figures that `ls` shows. The store keeps it, so that a list folds no journals."""

    VERSION: ClassVar[int] = 4
    """To be raised when a field changes: what was kept before is then computed anew."""

    run: str
    benchmark: str = ""
    model: str | None = None
    status: str = "running"
    """As in the results; `left`: it is not over, and nobody works on it; `damaged`: it cannot be read."""
    total_tasks: int = 0
    scored: int = 0
    broken: int = 0
    unrun: int = 0
    answered: int = 0
    success_rate: float | None = None
    mean_score: float | None = None
    started_at: str | None = None
    ended_at: str | None = None
    duration_seconds: float | None = None
    machines_usd: float | None = None
    models_usd: float | None = None
    places: tuple[str, ...] = ()
    budget_usd: float | None = None
    events: int = 0
    """How many events it was made of."""
    agent: str | None = None
    succeeded: int = 0
    running: int = 0
    success_rate_ci: tuple[float, float] | None = None
    """95%."""
    machines_up: int = 0
    """Machines that were not deleted yet: they cost more from minute to minute, whoever works on it."""


def summarised(state: RunState, now: Micros) -> RunSummary:
    """The run as of its last event; as of now while it has machines."""
    at = now if state.undeleted else state.last_at
    whole = tally(state.tasks.values(), state.plan.verdict.strict)
    cost = run_cost(state, at)
    return RunSummary(
        **_head(state),
        total_tasks=state.total,
        scored=state.scored,
        broken=state.broken,
        unrun=state.total - state.scored - state.broken,
        answered=state.answered,
        success_rate=_rounded(whole.success_rate),
        mean_score=_rounded(whole.mean_score),
        duration_seconds=_duration(state, at),
        machines_usd=cost["machines_usd"],
        models_usd=cost["models_usd"],
        places=state.plan.places,
        budget_usd=state.limits.budget_usd,
        events=state.events,
        agent=agent_of(state.plan),
        succeeded=whole.succeeded,
        running=state.running,
        success_rate_ci=None if whole.ci is None else (round(whole.ci[0], 6), round(whole.ci[1], 6)),
        machines_up=len(state.undeleted),
    )


def agent_of(plan: Plan) -> str | None:
    """The agent's name, where the plan has one."""
    spec: Mapping[str, Any] = plan.benchmark_spec.get("spec") or {}
    settings: Mapping[str, Any] = spec.get("settings", {})
    named: object = plan.agent.get("name") or plan.settings.get("agent") or settings.get("agent")
    return str(named) if named else None


def _duration(state: RunState, now: Micros) -> float | None:
    return _rounded(seconds_between(state.planned_at, now if state.ended_at is None else state.ended_at))


def _head(state: RunState) -> ResultsHead:
    return {
        "run": state.plan.run,
        "benchmark": state.plan.benchmark,
        "model": state.plan.model or None,
        "status": state.status,
        "started_at": iso(state.planned_at),
        "ended_at": iso(state.ended_at),
    }


def _counts(state: RunState, whole: Tally) -> ResultsCounts:
    return {
        "total_tasks": state.total,
        "scored": state.scored,
        "broken": state.broken,
        "unrun": state.total - state.scored - state.broken,
        "answered": state.answered,
        "succeeded": whole.succeeded,
        "failed": whole.judged - whole.succeeded,
        "success_rate": _rounded(whole.success_rate),
        "success_rate_ci": _ci(whole),
        "mean_score": _rounded(whole.mean_score),
    }


def _shares(part: Tally, metrics: dict[str, Figures]) -> Shares:
    return {
        "total": part.total,
        "scored": part.scored,
        "succeeded": part.succeeded,
        "success_rate": _rounded(part.success_rate),
        "success_rate_ci": _ci(part),
        "mean_score": _rounded(part.mean_score),
        "metrics": metrics,
    }


def _ci(part: Tally) -> list[float] | None:
    return [round(end, 6) for end in part.ci] if part.ci else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def run_cost(state: RunState, now: Micros) -> Cost:
    machines = machines_usd(state, now)
    prices = [
        price for attempt in state.attempts.values() if (price := attempt_model_usd(attempt)) is not None
    ]
    models = sum(prices) if prices else None  # a sum of nothing is no price
    each = (machines + (models or 0.0)) / state.scored if state.scored else None
    cost: Cost = {
        "machines_usd": _rounded(machines),
        "models_usd": _rounded(models),
        "per_task_usd": _rounded(each),
        "prices_as_of": prices_as_of(state),
    }
    if state.plan.model_usd is not None and (unpriced := _unpriced(state)):
        cost["models_usd_range"] = [
            _rounded((models or 0.0) + unpriced * usd) for usd in state.plan.model_usd
        ]
    return cost


def _unpriced(state: RunState) -> int:
    """Attempts that asked a model, as far as we know, and did not tell what that cost."""
    ended = (attempt for attempt in state.attempts.values() if attempt.outcome is not None)
    return sum(attempt_model_usd(attempt) is None for attempt in ended)


def attempt_model_usd(attempt: AttemptState) -> float | None:
    """What its model cost, as the meter saw it, else as it told itself: money spent on attempts that broke,
    or came too late, is spent."""
    if attempt.metered is not None:
        return attempt.metered.usd
    if attempt.superseded is None and not attempt.grades:  # nearly all: there may be very many
        return None if attempt.outcome is None else attempt.outcome.cost_usd
    told = (outcome.cost_usd for outcome in _outcomes(attempt))
    return next((usd for usd in told if usd is not None), None)


def _tokens(attempt: AttemptState) -> Mapping[str, int]:
    if attempt.superseded is None and not attempt.grades:  # nearly all
        measured = None if attempt.outcome is None else attempt.outcome.measured
        return {} if measured is None else measured.tokens
    told = (outcome.measured.tokens for outcome in _outcomes(attempt) if outcome.measured is not None)
    return next((tokens for tokens in told if tokens), dict[str, int]())


def _outcomes(attempt: AttemptState) -> list[Outcome]:
    outcomes = (attempt.outcome, attempt.superseded, *attempt.grades)
    return [outcome for outcome in outcomes if outcome is not None]


def _beyond(state: RunState, now: Micros) -> ResultsBeyond:
    """What the contract does not ask for, and people do."""
    scored = [a.seconds for a in state.attempts.values() if isinstance(a.outcome, Scored | Answered)]
    shares = {"p50": 0.5, "p90": 0.9, "max": 1.0}
    begun = sum(1 for known in state.tasks.values() if known.attempts)
    broken = Counter(str(t.outcome.cause) for t in state.tasks.values() if isinstance(t.outcome, Broken))
    stop = state.stop
    return {
        "running": state.running,
        "places": list(state.plan.places),
        "isolation": isolations(state),
        "workers": state.limits.workers,
        "duration_seconds": _duration(state, now),
        "attempts": len(state.attempts),
        "retries": len(state.attempts) - begun,
        "broken_causes": dict(broken.most_common()),
        "strict": state.plan.verdict.strict,
        "shortfall": shortfall(state, state.plan.verdict) if exit_code(state) == NOT_AS_ASKED else None,
        "task_seconds": {name: _rounded(percentile(scored, share)) for name, share in shares.items()},
        "stop": None if stop is None else {"reason": stop.reason, "detail": stop.detail},
        "grading_problem": state.grading_problem or None,
        "graded_again": _graded_again(state),
        "controllers": state.controllers,
        "rerun_of": state.plan.rerun_of or None,
        "refusals": refusals(state),
        "by_place": by_place(state, now),
        "paused": state.paused is not None and state.ended_at is None,
        "steering": steering(state),
    }


def _graded_again(state: RunState) -> GradedAgain | None:
    pairs: list[tuple[Outcome | None, Grade]] = []
    for known in state.tasks.values():
        attempt = state.attempts[known.decided_by] if known.decided_by else None
        if attempt is None:
            continue
        later = attempt.grades[1:] if isinstance(attempt.outcome, Answered) else attempt.grades
        if later:
            pairs.append((known.outcome, later[-1]))
    if not pairs:
        return None
    scores = [(first, grade) for first, grade in pairs if isinstance(grade, Scored)]
    succeeded = sum(grade.success for _, grade in scores)
    return {
        "tasks": len(pairs),
        "otherwise": sum(getattr(first, "score", None) != grade.score for first, grade in scores),
        "succeeded": succeeded,
        "success_rate": _rounded(succeeded / len(scores)) if scores else None,
    }


def isolations(state: RunState) -> list[str]:
    """How attempts were kept apart: more than one where machines differ."""
    kinds = (machine.isolated.kind or "none" for machine in state.machines.values() if machine.attempts)
    return sorted(set(kinds))


# -- tasks -----------------------------------------------------------------------------------------


def artefacts_path(run: str, task: str, attempt: str) -> str:
    """Where an attempt's artefacts are, relative to the home."""
    return f"{run}/{artefacts_folder(task, attempt)}/"


def task_status(state: RunState, known: TaskState) -> TaskStatus:
    """`unrun`: not settled, and nothing will change that unless the run is taken up again."""
    if known.status in ("scored", "broken", "answered"):
        return known.status
    return "unrun" if state.ended_at is not None or known.status == "held" else known.status


def _task(state: RunState, known: TaskState, run: str, now: Micros) -> TaskResult:
    """`machine`, `duration_seconds` and `artifacts` are of the attempt that decided; else of the newest."""
    attempts = [state.attempts[attempt] for attempt in known.attempts]
    attempt = attempts[-1] if attempts else None
    if known.decided_by is not None:
        attempt = state.attempts[known.decided_by]
    return {
        "task_id": known.task.id,
        "domain": known.task.domain,
        **_verdict(known.outcome, _answer(attempt)),
        "duration_seconds": attempt_seconds(attempt),
        "machine_seconds": _machine_seconds(attempt),
        "attempts": len(known.attempts),
        "broken_attempts": _broken_attempts(attempts),
        "machine_usd": _rounded(sum([attempt_usd(state, each, now) for each in attempts])),
        "model_usd": task_model_usd(attempts),
        "machine": None if attempt is None else state.machines[attempt.machine].name,
        "artifacts": None if attempt is None else artefacts_path(run, known.task.id, attempt.id),
        "status": task_status(state, known),
        "origin": origin_of(state.plan, known.task),
        "repeat": known.task.repeat or None,
        "model": known.task.model or state.plan.model or None,
        "tags": list(known.task.tags),
        "task_metadata": dict(known.task.metadata),
    }


def origin_of(plan: Plan, task: Task) -> str:
    """The benchmark's own id of a task. Of repeats that earlier versions planned, their own id tells it."""
    if task.origin or plan.benchmark_spec.get("repeat", 1) == 1:
        return task.origin or task.id
    return task.id.rpartition("~")[0] or task.id


def _broken_attempts(attempts: Sequence[AttemptState]) -> dict[str, int]:
    """Cause -> how many attempts at one task it broke: those before its score, or all."""
    causes = [str(each.outcome.cause) for each in attempts if isinstance(each.outcome, Broken)]
    return dict(Counter(causes)) if causes else {}


def _answer(attempt: AttemptState | None) -> Answered | None:
    outcome = None if attempt is None else attempt.outcome
    return outcome if isinstance(outcome, Answered) else None


def _verdict(outcome: Outcome | None, answer: Answered | None = None) -> OutcomeDetails:
    """An outcome as data. Of an answer that was graded, the answer tells the steps and the screenshots."""
    scored = outcome if isinstance(outcome, Scored) else None
    told = answer or scored
    broken = outcome if isinstance(outcome, Broken) else None
    return {
        "success": None if scored is None else scored.success,
        "score": None if scored is None else scored.score,
        "num_steps": None if told is None else told.num_steps,
        "error": scored.error if scored else broken.detail or None if broken else None,
        "cause": None if broken is None else str(broken.cause),
        "screenshots": [] if told is None else list(told.screenshots),
        "limit_seconds": None if scored is None else scored.limit_s,
        **_measured([each for each in (answer, outcome) if each is not None]),
    }


def _measured(outcomes: Sequence[Outcome]) -> ToldDetails:
    """What outcomes of one attempt tell of it; of what several tell, the last counts."""
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    cost_usd, tokens = None, dict[str, int]()
    for outcome in outcomes:
        cost_usd = cost_usd if outcome.cost_usd is None else outcome.cost_usd
        if outcome.measured is not None:
            tokens = {**tokens, **outcome.measured.tokens}
            metrics |= outcome.measured.metrics
            metadata |= outcome.measured.metadata
    return {"cost_usd": cost_usd, "tokens": tokens, "metrics": metrics, "metadata": metadata}


def attempt_seconds(attempt: AttemptState | None) -> float | None:
    """What the machine measured; where it could not tell, by our own clock."""
    if attempt is None or attempt.ended_at is None:
        return None
    measured = attempt.seconds or seconds_between(attempt.started_at, attempt.ended_at)
    return _rounded(measured)


def _machine_seconds(attempt: AttemptState | None) -> float | None:
    """Return how long an attempt took its machine, with all that came before and after its task."""
    if attempt is None or attempt.ended_at is None:
        return None
    return _rounded(seconds_between(attempt.started_at, attempt.ended_at))


def task_detail(state: RunState, task: TaskId) -> TaskDetail:
    """`show RUN TASK`: the task and every attempt at it. Raises RequestError for an unknown task."""
    known = state.tasks.get(task)
    if known is None:
        raise RequestError(f"run {state.plan.run!r} has no task {task!r}; {hint(task, state.tasks)}")
    facts: TaskFacts = _task(state, known, state.plan.run, state.last_at)
    return {
        "run": state.plan.run,
        **facts,
        "params": dict(known.task.params),
        "timeout_seconds": known.task.timeout_s,
        "decided_by": known.decided_by,
        "attempts": [attempt_entry(state, state.attempts[a]) for a in known.attempts],
    }


_OUTCOMES: dict[type, AttemptOutcome] = {
    type(None): "running",
    Scored: "scored",
    Broken: "broken",
    Answered: "answered",
}


def attempt_entry(state: RunState, attempt: AttemptState) -> Attempt:
    outcome, collected = attempt.outcome, attempt.collected
    return {
        "attempt": attempt.id,
        "outcome": _OUTCOMES[type(outcome)],
        "machine": state.machines[attempt.machine].name,
        "machine_id": attempt.machine,
        "node": attempt.node or state.machines[attempt.machine].node or None,
        "started_at": iso(attempt.started_at),
        "ended_at": iso(attempt.ended_at),
        "duration_seconds": attempt_seconds(attempt),
        "machine_usd": _rounded(attempt_usd(state, attempt, state.last_at)),
        "metered": None if attempt.metered is None else model_cost(attempt.metered),
        **_verdict(outcome, _answer(attempt)),
        "grades": [_verdict(grade) for grade in attempt.grades],
        "artifacts": artefacts_path(state.plan.run, attempt.task, attempt.id),
        "files": None if collected is None else collected.files,
        "problem": None if collected is None else collected.problem or None,
        "superseded": None if attempt.superseded is None else _verdict(attempt.superseded),
        "progress": None,
        "grader": None,
    }


# -- machines --------------------------------------------------------------------------------------


def machine_entry(machine: MachineState, now: Micros) -> MachineResult:
    ended = machine_end(machine, now)
    return {
        "name": machine.name,
        "id": machine.id,
        "phase": machine.phase,
        "place": machine.offer.place,
        "region": machine.offer.region or None,
        "size": machine.offer.size,
        "spot": machine.offer.spot,
        "usd_per_hour": machine.offer.cost.usd_per_hour,
        "idle_usd_per_hour": machine.offer.cost.idle_usd_per_hour,
        "priced": machine.offer.cost.priced or None,
        "address": machine.address or None,
        "requested_at": iso(machine.requested_at),
        "allocated_at": iso(machine.allocated_at),
        "ready_at": iso(machine.ready_at),
        "ended_at": iso(machine.gone_at),
        "uptime_seconds": _rounded(seconds_between(machine.billed_at, ended)),
        "cost_usd": _rounded(machine_usd(machine, now)),
        "timings": {step: round(seconds, 3) for step, seconds in machine.timings.items()},
        "mended_by": list(machine.mends),
        "isolation": machine.isolated.kind or None,
        "isolation_detail": machine.isolated.detail or None,
        "attempts": machine.attempts,
        "scored": machine.scored,
        "step": machine.step or None,
        "cause": None if machine.cause is None else str(machine.cause),
        "detail": machine.detail or None,
        "delete_refused": machine.delete_refused or None,
    }
