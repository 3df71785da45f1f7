"""What was promised of runs, and whether it came so.

A run that is started where earlier ones tell something keeps in its plan what was expected of it. Of other
runs, it is said afterwards what would have been: it rests on runs that had ended before it began, and on
nothing that came later. So plans can be judged of any home, also of runs that nobody planned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.model import IMPORTED, Offer, Plan, Promise, Task
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import specs_of
from evalfleet.planning.plugins import place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.policy.tiers import in_order
from evalfleet.sim.chances import Chances
from evalfleet.sim.forecast import DRAWS, Option, OptionDraws, Range, forecasts
from evalfleet.sim.montecarlo import last_result_s
from evalfleet.state import RunState
from evalfleet.views.follow import Follower
from evalfleet.views.format import percent, table, usd, whole_duration
from evalfleet.views.stats import machines_usd

from .estimate import allowed_setup_s
from .experience import LATEST, chances_of, experience_of, gathered
from .home import list_runs
from .plan_table import range_document, span
from .planner import guessed_machine_s, job_of

if TYPE_CHECKING:
    from evalfleet.views.fleet_documents import ReviewDocument, ReviewRow

TIME_DIGITS, MONEY_DIGITS = 3, 6
"""To a millisecond and a millionth of a dollar ranges are kept, and what came is held against them. What is
shown to people is rounded further, and decides nothing."""
PROMISED_ATTEMPTS = 4000
"""So many attempts are drawn for a promise, which takes half a second."""
FEWEST_DRAWS = 20


def with_promise(workspace: Workspace, resolved: Resolved, offers: Sequence[Offer]) -> Resolved:
    """The run with what is expected of it, if earlier runs here, or the benchmark, tell what tasks take."""
    plan, tasks = resolved.plan, tuple(resolved.tasks)
    if not offers:
        return resolved
    experience = experience_of(workspace, plan.benchmark, tasks=PROMISED_ATTEMPTS)
    chances = chances_of(
        experience,
        tasks,
        offers,
        model=plan.model,
        model_range=plan.model_usd,
        usual_s=plan.usual_s,
        machine_s=_guesses(plan),
    )
    if chances.guessed or "default" in chances.bases:
        return resolved  # what no run here has shown is no promise
    draws = max(FEWEST_DRAWS, min(DRAWS, PROMISED_ATTEMPTS // len(tasks)))
    forecast = forecasts([_job(plan, tasks, offers, chances)], draws)[0]
    promise = Promise(
        forecast.seconds.rounded(TIME_DIGITS),
        forecast.machines_usd.rounded(MONEY_DIGITS),
        chances.runs,
        round(_machine_s(chances, offers[0], plan.limits.workers), 3),
    )
    rates = {offer.key: math.prod(chances.evictions_an_hour(offer)) for offer in offers if offer.spot}
    known = {key: round(rate, 4) for key, rate in rates.items() if key in chances.spot}
    return replace(resolved, plan=msgspec.structs.replace(plan, promise=promise, evictions_an_hour=known))


def _job(plan: Plan, tasks: tuple[Task, ...], offers: Sequence[Offer], chances: Chances) -> OptionDraws:
    """The run as it is asked for. Where the number of machines is left to us, the policy chooses it in each
    drawn run by the deadline and the budget that there are."""
    limits = plan.limits
    if not limits.auto:
        return job_of(plan, tasks, Option(limits.workers, tuple(offers)), chances)
    work_s = sum(seconds for seconds, _ in chances.tasks.values()) / plan.slots
    likely = limits.workers if limits.deadline_s is None else math.ceil(work_s / max(1.0, limits.deadline_s))
    job = job_of(plan, tasks, Option(max(1, min(limits.workers, likely)), tuple(offers)), chances)
    chosen = msgspec.structs.replace(
        job.plan.limits,
        workers=limits.workers,
        auto=True,
        deadline_s=limits.deadline_s,
        budget_usd=limits.budget_usd,
    )
    return replace(job, plan=msgspec.structs.replace(job.plan, limits=chosen))


def _machine_s(chances: Chances, offer: Offer, machines: int) -> float:
    times = chances.machines[offer.key]
    return median(times.own) * math.exp(times.middle(machines))


def broken_promise(plan: Plan) -> str:
    """Why a run that is about to start will probably not be done by its deadline; empty if it will."""
    promise, deadline_s = plan.promise, plan.limits.deadline_s
    if promise is None or deadline_s is None or promise.seconds[1] <= deadline_s:
        return ""
    low, middle, high = map(whole_duration, promise.seconds)
    return (
        f"--deadline {whole_duration(deadline_s)}: it will take about {middle} (90%: {span(low, high)}); "
        "`evalfleet plan` shows which ways are quicker"
    )


@dataclass(frozen=True)
class Reviewed:
    """A run, and what would have been said of it."""

    run: str
    benchmark: str
    tasks: int
    workers: int
    earlier_runs: int
    """How many runs the plan rests on."""
    promised: bool
    """Whether it is what was said when the run was started, and not only what would have been."""
    seconds: Range
    took_s: float
    machines_usd: Range
    cost_usd: float

    @property
    def in_time_range(self) -> bool:
        return self.seconds.low <= self.took_s <= self.seconds.high

    @property
    def in_cost_range(self) -> bool:
        return self.machines_usd.low <= self.cost_usd <= self.machines_usd.high


def review(workspace: Workspace, benchmark: str | None = None, draws: int = DRAWS) -> list[Reviewed]:
    """All runs of the home, or of a benchmark, that ended by themselves, the newest first."""
    found: list[Reviewed] = []
    for states in _by_benchmark(workspace, benchmark):
        judged = [state for state in states if _is_fair(state)]
        found += [held(state, state.plan.promise) for state in judged if state.plan.promise is not None]
        others = [state for state in judged if state.plan.promise is None]
        jobs = [_planned(state, states) for state in others]
        for state, job, forecast in zip(others, jobs, forecasts(jobs, draws), strict=True):
            said = Promise(forecast.seconds, forecast.machines_usd, job.chances.runs)
            found.append(held(state, said))
    if not found:
        raise RequestError("no run here has ended by itself yet; there is nothing to hold a plan against")
    return sorted(found, key=lambda each: each.run)


def held(state: RunState, promise: Promise) -> Reviewed:
    """The run beside what was said of it."""
    return Reviewed(
        state.plan.run,
        state.plan.benchmark,
        len(state.tasks),
        state.plan.limits.workers,
        promise.earlier_runs,
        state.plan.promise is not None,
        Range(*promise.seconds).rounded(TIME_DIGITS),
        round(last_result_s(state), TIME_DIGITS),
        Range(*promise.machines_usd).rounded(MONEY_DIGITS),
        round(machines_usd(state, state.last_at), MONEY_DIGITS),
    )


def _by_benchmark(workspace: Workspace, benchmark: str | None) -> Iterator[list[RunState]]:
    """The runs of each benchmark, in the order in which they were started."""
    if workspace.records_if_any() is None:
        return
    store = workspace.records()
    states: defaultdict[str, list[RunState]] = defaultdict(list)
    for summary in list_runs(workspace, benchmark=benchmark):
        follower = Follower(store, summary.run)
        try:
            follower.poll()
        except JournalForeign:
            continue
        states[summary.benchmark].append(follower.state)
    for each in states.values():
        yield sorted(each, key=lambda state: state.planned_at)


def _is_fair(state: RunState) -> bool:
    """Nobody stopped, resumed, steered or imported it: then it took what it took."""
    untouched = state.started_at == state.planned_at and not state.steered and state.stop is None
    return untouched and state.status == "done" and bool(state.machines) and IMPORTED not in state.plan.places


def _planned(state: RunState, states: Sequence[RunState]) -> OptionDraws:
    earlier = [each for each in states if each.ended_at is not None and each.ended_at <= state.planned_at]
    offers = {machine.offer.key: machine.offer for machine in state.machines.values()}
    best_first = tuple(in_order(state.plan, offers.values()))
    tasks = tuple(known.task for known in state.tasks.values())
    chances = chances_of(
        gathered(earlier[-LATEST:]),
        tasks,
        best_first,
        model=state.plan.model,
        model_range=state.plan.model_usd,
        usual_s=state.plan.usual_s,
        machine_s=_guesses(state.plan),
    )
    return job_of(state.plan, tasks, Option(state.plan.limits.workers, best_first), chances)


def _guesses(plan: Plan) -> dict[str, tuple[float, float]]:
    setup_s = allowed_setup_s(plan)
    boots = {name: getattr(place_kind(spec.kind), "machine_s", 0.0) for name, spec in specs_of(plan).items()}
    return {name: guessed_machine_s(boot_s, setup_s) for name, boot_s in boots.items()}


def review_table(rows: Sequence[Reviewed]) -> str:
    """The review as a table for people."""
    head = (
        "run",
        "tasks",
        "workers",
        "earlier",
        "said",
        "time, 90%",
        "took",
        "",
        "machines, 90%",
        "cost",
        "",
    )
    lines = [
        (
            each.run,
            each.tasks,
            each.workers,
            each.earlier_runs,
            "before" if each.promised else "now",
            span(whole_duration(each.seconds.low), whole_duration(each.seconds.high)),
            whole_duration(each.took_s),
            "" if each.in_time_range else "outside",
            span(usd(each.machines_usd.low), usd(each.machines_usd.high)),
            usd(each.cost_usd),
            "" if each.in_cost_range else "outside",
        )
        for each in rows
    ]
    shares = [_share(each.in_time_range for each in rows), _share(each.in_cost_range for each in rows)]
    told = f"inside the 90% range: {percent(shares[0])} of times, {percent(shares[1])} of costs"
    return f"{table(head, lines, right=('tasks', 'workers', 'earlier'))}\n\n{told}"


def _share(values: Iterator[bool]) -> float:
    known = list(values)
    return sum(known) / len(known)


def review_document(rows: Sequence[Reviewed]) -> ReviewDocument:
    """`plan --review --json`."""
    return {
        "runs": [_row(each) for each in rows],
        "times_inside": round(_share(each.in_time_range for each in rows), 4),
        "costs_inside": round(_share(each.in_cost_range for each in rows), 4),
    }


def _row(each: Reviewed) -> ReviewRow:
    return {
        "run": each.run,
        "benchmark": each.benchmark,
        "tasks": each.tasks,
        "workers": each.workers,
        "earlier_runs": each.earlier_runs,
        "promised": each.promised,
        "seconds": range_document(each.seconds, TIME_DIGITS),
        "took_seconds": each.took_s,
        "machines_usd": range_document(each.machines_usd, MONEY_DIGITS),
        "cost_usd": each.cost_usd,
        "inside": each.in_time_range,
    }
