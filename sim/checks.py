"""The invariants, checked on a finished simulation. Numbers are those of docs/architecture.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from evalfleet.benchmarks.results import outcome_of
from evalfleet.cost import billed_usd, idle_usd
from evalfleet.events import AttemptStarted, MachineAllocated, MachineRequested
from evalfleet.model import Cause, MachineId, Micros, Scored, after
from evalfleet.policy import effects
from evalfleet.policy.effects import THE_RUN
from evalfleet.state import MachineState

from . import ledger
from .scenario import Scenario, draw
from .simulate import Parts, Simulated, simulate
from .world import Bill

Check = Callable[[Simulated], Iterator[str]]


def violations(sim: Simulated) -> list[str]:
    """Everything that must not be, in words. Empty: all invariants hold."""
    return [*sim.world.violations, *(found for check in CHECKS for found in check(sim))]


def every_task_is_accounted_for(sim: Simulated) -> Iterator[str]:
    """1: scored once, broken after its allowed attempts or as an answer that cannot be graded, or unrun
    because the run was stopped.
    """
    if set(sim.state.tasks) != {task.id for task in sim.scenario.tasks}:
        yield "planned tasks and tasks of the journal differ"
    if sim.scenario.abandoned:
        return
    if sim.state.ended_at is None:
        yield "the run did not end"
    allowed = ledger.fewest_attempts(sim.state)
    for task, known in sim.state.tasks.items():
        if known.status == "broken":
            spent = known.used >= allowed or known.tries >= sim.state.limits.attempts_ceiling
            if not spent and not ledger.was_ungradable(sim.state, known):
                yield f"{task} was given up after {known.used} attempts"
        elif known.status == "held" and sim.scenario.resumes:
            continue  # the user asked for others
        elif known.status == "answered":
            yield from ledger.may_stay_ungraded(sim.state, known)
        elif known.status != "scored" and sim.state.stop is None:
            yield f"{task} is {known.status} although nobody stopped the run"
        elif known.status == "running":
            yield f"{task} is still running after the end"


def one_score_a_task(sim: Simulated) -> Iterator[str]:
    """2: never overwritten, attempts kept, each started and ended at most once."""
    records = list(sim.store.read())
    yield from ledger.started_and_scored_once(records, sim.state)
    known = {record.event.attempt for record in records if isinstance(record.event, AttemptStarted)}
    for attempt in sim.world.started:
        if attempt not in known:
            yield f"{attempt} ran but the journal does not know it"


def no_score_is_forged(sim: Simulated) -> Iterator[str]:
    """A machine that lies may do so about its own attempts: all others have the score that they got."""
    for attempt in sim.state.attempts.values():
        if attempt.machine in sim.world.liars or not isinstance(attempt.outcome, Scored):
            continue
        ended = sim.world.ended.get(attempt.id)
        task = sim.state.tasks[attempt.task].task
        if ended is None or outcome_of(task, ended, healthy=True) != attempt.outcome:
            yield f"{attempt.id} has a score that it did not get"


def machines_have_what_tasks_need(sim: Simulated) -> Iterator[str]:
    """A task with needs of its own runs only where they are met."""
    for attempt in sim.state.attempts.values():
        needs = sim.state.tasks[attempt.task].task.needs
        if needs is not None and not sim.state.machines[attempt.machine].offer.has.covers(needs):
            yield f"{attempt.id} ran on {attempt.machine}, which has not what it needs"


def nothing_left_behind(sim: Simulated) -> Iterator[str]:
    """4: no machine when the run has ended; by its expiry in any case."""
    for machine in sim.world.machines.values():
        if not sim.scenario.abandoned:
            yield f"{machine.id} was left behind"
        elif machine.meter.end is None:
            yield f"{machine.id} outlived its expiry"
    for meter in sim.world.meters:
        if meter.end is not None and meter.end > after(meter.expires_at, meter.off_s):
            yield f"{meter.machine} was billed past its expiry"


def one_writer_at_a_time(sim: Simulated) -> Iterator[str]:
    """5: epochs never go back, and neither does time."""
    yield from ledger.one_writer_at_a_time(list(sim.store.read()))


def within_limits(sim: Simulated) -> Iterator[str]:
    """7: neither the budget nor the time limit is passed by more than one billing step.

    What is left of machines that nobody deleted costs on: a budget covers `sweep_s` of that, the journal all.
    Where a place cannot end a machine soon, or starts it late, one that nobody ends may outlive the time
    limit. What passed while no clock counted it (a reboot, with a wall clock that went back) no controller
    can know of.
    """
    limits, meters, untold_s = sim.state.limits, sim.world.meters, sim.world.untold_s
    machines = machines_usd(sim)
    one_step, spent = machines.one_step, machines.spent + machines.late
    untold_usd = one_step if untold_s else 0.0
    if limits.budget_usd is not None and machines.spent > limits.budget_usd + one_step + 1e-9:
        yield f"spent ${spent:.4f} of a budget of ${limits.budget_usd:g}"
    booked, unswept = sim.state.spend.machines.spent, sum(map(_unswept, sim.state.machines.values()))
    if limits.budget_usd is not None and booked - unswept > limits.budget_usd + one_step + 1e-9:
        yield f"the journal accounts for ${booked:.4f} of a budget of ${limits.budget_usd:g}"
    # a machine that its place ended begins one more step than the journal knows of
    begun = sum(m.offer.cost.billing_step_s * m.offer.cost.idle_usd_per_hour / 3600 for m in meters)
    # and so does one that was made anew, by a call that arrived after its deletion
    again = [later for n, later in enumerate(meters) if any(later.machine == m.machine for m in meters[:n])]
    begun += sum(m.offer.cost.billing_step_s * m.offer.cost.usd_per_hour / 3600 for m in again)
    if not sim.scenario.abandoned and spent > booked + begun + untold_usd + 1e-9:
        yield f"the places billed ${spent:.4f} but the journal accounts for ${booked:.4f}"
    if limits.max_duration_s is not None:
        end = after(sim.state.started_at, limits.max_duration_s + untold_s)
        for meter in (m for m in meters if m.offer.cost.usd_per_hour > 0):
            last = max(end, after(meter.start, meter.offer.life.least_life_s))
            if meter.offer.life.queues:
                last = max(last, meter.expires_at)
            if meter.end is not None and meter.end > after(last, meter.offer.cost.billing_step_s):
                yield f"{meter.machine} was billed past the run's time limit"


class MachinesUsd(NamedTuple):
    """What a run's machines cost in truth: what its budget covers, and what was left too `late` to be.

    `one_step`: what their billing steps are worth, and the time that no controller could know of.
    """

    spent: float
    late: float
    one_step: float


def machines_usd(sim: Simulated) -> MachinesUsd:
    meters, untold_s = sim.world.meters, sim.world.untold_s
    spent = sum(billed_usd(m.offer, m.start, m.end or m.expires_at) + _idle(m) for m in meters)
    late = sum(_idle(m, m.offer.cost.sweep_s) for m in meters)
    one_step = sum(
        (m.offer.cost.billing_step_s + untold_s) * m.offer.cost.usd_per_hour / 3600 for m in meters
    )
    return MachinesUsd(spent - late, late, one_step)


def _idle(meter: Bill, since_s: float = 0.0) -> float:
    """What was left of a machine cost, from so long after its end on."""
    end = meter.end or meter.expires_at
    return idle_usd(meter.offer, after(end, since_s), meter.swept or end)


def _unswept(machine: MachineState) -> float:
    """What the journal counts of that beyond what a budget covers."""
    covered = after(machine.ends_at, machine.offer.cost.sweep_s)
    return idle_usd(machine.offer, covered, machine.gone_at or covered)


def effects_are_kept_current(sim: Simulated) -> Iterator[str]:
    """An ended run needs nothing; what the state marks as changed covers all that must be under way."""
    if not sim.scenario.abandoned:
        yield from ledger.nothing_under_way(sim.state)
    touched = {*sim.state.touched_machines, *sim.state.touched_attempts}
    if missing := set(effects(sim.state)) - touched - {THE_RUN}:
        yield f"effects that no change announced: {missing}"


def causes_are_told(sim: Simulated) -> Iterator[str]:
    """A broken attempt says why, and a cancelled one only counts when the run let go of its machine."""
    yield from ledger.causes_are_told(sim.state)


def artefacts_come_home(sim: Simulated) -> Iterator[str]:
    """Those of scored attempts, unless their machine was given up, or lies."""
    yield from ledger.artefacts_come_home(list(sim.store.read()), sim.state, sim.world.liars)


def healthy_machines_are_kept(sim: Simulated) -> Iterator[str]:
    """In a world whose machines do not fail none is given up, also not when our own network is down.

    Those that lie may be, and take no other with them. So may those that expired, of which no controller can
    know if time has passed untold, and those that an alert replaced.
    """
    if not sim.scenario.faults.calm or sim.scenario.nap is not None or sim.scenario.troubles:
        return
    bills = sim.world.meters if sim.world.untold_s else ()
    expired = {bill.machine for bill in bills if bill.end is not None and bill.end >= bill.expires_at}
    for machine in sim.state.machines.values():
        if machine.id in sim.world.liars or machine.id in expired or machine.steered is not None:
            continue
        if machine.mends and machine.cause is not Cause.MACHINE_LOST:  # one that expired is silent, too
            yield f"{machine.id} was mended ({', '.join(machine.mends)}) although it was well"
        if machine.cause in (Cause.CONNECTION, Cause.STUCK, Cause.SETUP, Cause.READINESS):
            yield f"{machine.id} was given up ({machine.cause}: {machine.detail}) although it was well"


def nothing_waits_for_repairs(sim: Simulated) -> Iterator[str]:
    """What ran on a machine that is mended is over at once, and each step is tried once in its life."""
    records = list(sim.store.read())
    yield from ledger.nothing_waits_for_repairs(records)
    for machine in sim.state.machines.values():
        if len(set(machine.mends)) != len(machine.mends):
            yield f"{machine.id} was mended by {machine.mends}"


def no_task_outlives_its_machine(sim: Simulated) -> Iterator[str]:
    """Where a life cannot be extended, what is handed out may take all its time before the machine ends."""
    ends: dict[MachineId, Micros] = {}
    lives: dict[MachineId, Micros] = {}
    for record in sim.store.read():
        match record.event:
            case MachineRequested(machine, _, offer, expires_at):
                if sim.scenario.offers[offer.place][0].life.extendable:
                    continue
                if offer.life.queues:
                    lives[machine] = expires_at - record.at
                else:
                    ends[machine] = expires_at
            case MachineAllocated(machine, started_at) if machine in lives:
                ends[machine] = started_at + lives[machine]
            case AttemptStarted(attempt, task, machine) if machine in ends:
                if after(record.at, sim.state.tasks[task].task.limit_s) > ends[machine]:
                    yield f"{attempt} was handed to {machine}, which it could outlive"
            case _:
                pass


CHECKS: tuple[Check, ...] = (
    every_task_is_accounted_for,
    one_score_a_task,
    no_score_is_forged,
    machines_have_what_tasks_need,
    nothing_left_behind,
    one_writer_at_a_time,
    within_limits,
    effects_are_kept_current,
    causes_are_told,
    artefacts_come_home,
    healthy_machines_are_kept,
    nothing_waits_for_repairs,
    no_task_outlives_its_machine,
)


@dataclass(frozen=True, slots=True)
class SeedsReport:
    """What many seeds came to. `failures`: seed -> what was violated. `digest` covers every journal, byte for
    byte."""

    seeds: int
    events: int
    attempts: int
    machines: int
    crashes: int
    refusals: int
    virtual_hours: float
    digest: str
    failures: dict[int, list[str]]


def run_seeds(
    seeds: Iterable[int],
    parts: Parts | None = None,
    on_seed: Callable[[int, list[str]], None] | None = None,
    scenario: Callable[[int], Scenario] = draw,
) -> SeedsReport:
    events = attempts = machines = crashes = refusals = count = 0
    hours = 0.0
    digest = hashlib.sha256()
    failures: dict[int, list[str]] = {}
    for seed in seeds:
        found, sim = check_seed(seed, parts, scenario)
        if found:
            failures[seed] = found
        if on_seed is not None:
            on_seed(seed, found)
        count += 1
        if sim is None:
            continue
        events += len(sim.store.rows)
        attempts += len(sim.state.attempts)
        machines += len(sim.state.machines)
        crashes += sim.crashes
        refusals += sim.world.refusals
        hours += sim.virtual_s / 3600
        digest.update(sim.store.digest().encode())
    return SeedsReport(
        count, events, attempts, machines, crashes, refusals, hours, digest.hexdigest()[:12], failures
    )


def check_seed(
    seed: int, parts: Parts | None = None, scenario: Callable[[int], Scenario] = draw
) -> tuple[list[str], Simulated | None]:
    """What one seed violates. An engine that falls over is a violation like any other."""
    try:
        sim = simulate(scenario(seed), parts)
    except Exception as err:  # whatever a planted or real bug throws
        return [f"{type(err).__name__}: {err}"], None
    return violations(sim), sim
