"""Hangs of managed compute, simulated: seconds until each is noticed, ended, and its task runs elsewhere."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from evalfleet.events import (
    AttemptEnded,
    AttemptStarted,
    MachineAllocated,
    MachineCondemned,
    MachineRequested,
)
from evalfleet.model import Broken, Limits, Micros, Plan, Task, TaskId, after, seconds_between
from evalfleet.sim.scenario import OFFERS, Period, Scenario
from evalfleet.sim.simulate import Simulated, simulate
from evalfleet.sim.world import Faults, Trouble

from .result import Figures, Result, at_most, rounded

TASKS = 13
EIGHT_HOURS_S = 900.0
"""The job that sat in "running" for eight hours, because its container never started, is gone by then."""
BEGINS_S = 400.0
PREPARE_S = 1200.0
"""So long Azure ML may take to prepare a node and pull its image, unless `prepare_s` says otherwise."""


def run(quick: bool) -> Result:
    figures: Figures = {name: _measured(scenario) for name, scenario in hangs().items()}
    worst = figures["running_never_started"]["elsewhere_s"]
    unnoticed = sum(found["scored"] < TASKS for found in figures.values())
    aims = {"eight_hours_s": at_most(worst, EIGHT_HOURS_S), "unnoticed": at_most(unnoticed, 0)}
    return Result("stuck", {**figures, "hangs": len(figures)}, aims)


def hangs() -> dict[str, Scenario]:
    """By what the service says meanwhile."""
    plain = _scenario()
    slow = replace(plain.faults, queue_s=(200_000.0, 200_000.0))
    impatient = structs.replace(OFFERS["service"][0], max_queue_s=600.0)
    pulling = structs.replace(OFFERS["service"][0], start_s=PREPARE_S, boot_s=PREPARE_S)
    tasks = tuple(structs.replace(task, stall_s=600.0) for task in plain.tasks)
    return {
        "running_never_started": replace(plain, troubles=(Trouble("service", never_boots=1.0),)),
        "preparing_for_ever": replace(
            plain, troubles=(Trouble("service", never_boots=1.0),), offers={**OFFERS, "service": (pulling,)}
        ),
        "queued_for_ever": replace(plain, faults=slow, offers={**OFFERS, "service": (impatient,)}),
        "silent_death": replace(plain, troubles=(Trouble("service", away=((BEGINS_S, BEGINS_S + 1),)),)),
        "place_away": replace(plain, troubles=(Trouble("service", away=((BEGINS_S, 100_000.0),)),)),
        "api_away_ten_minutes": replace(plain, api_loss=Period(BEGINS_S, 600.0)),
        "no_output": replace(plain, tasks=tasks, faults=replace(plain.faults, job_hangs=0.1)),
        "machine_hangs": replace(
            plain, plan=_plan(("vms", "service")), faults=replace(plain.faults, hangs_from_boot=1.0)
        ),
    }


def _plan(places: tuple[str, ...]) -> Plan:
    return Plan("stuck", "sim", places, limits=Limits(workers=2), home="abc123", ordered=True)


def _scenario() -> Scenario:
    tasks = tuple(Task(TaskId(f"t_{i:02d}"), "t", timeout_s=1500.0) for i in range(TASKS))
    return Scenario(1, _plan(("service", "vms")), tasks, Faults(queue_s=(0.0, 5.0)))


def _measured(scenario: Scenario) -> Figures:
    """Of the first that hung: until it was given up, and until a task was handed to another machine then."""
    sim = simulate(scenario)
    hang = _first_hang(sim)
    if hang is None:
        return {"noticed_s": None, "elsewhere_s": None, "scored": sim.state.scored}
    begun, noticed, machine = hang
    attempts = sim.state.attempts.values()
    later = [a.started_at for a in attempts if a.started_at >= noticed and a.machine != machine]
    return {
        "noticed_s": rounded(seconds_between(begun, noticed)),
        "elsewhere_s": rounded(seconds_between(begun, min(later))),
        "scored": sim.state.scored,
    }


def _first_hang(sim: Simulated) -> tuple[Micros, Micros, str] | None:
    """When what hung first began to, when it was given up, and its machine. None: nothing had to be."""
    asked: dict[str, Micros] = {}
    away = sim.scenario.troubles[0].away if sim.scenario.troubles else ()
    fell = after(sim.state.started_at, BEGINS_S) if away else 0
    for record in sim.store.read():
        match record.event:
            case MachineRequested(machine):
                asked[machine] = record.at
            case MachineAllocated(machine, started_at):
                asked[machine] = started_at
            case AttemptStarted(attempt):
                asked[attempt] = record.at
            case MachineCondemned(machine, _, cause) if cause is not None:
                return max(asked[machine], fell), record.at, machine
            case AttemptEnded(attempt, outcome) if isinstance(outcome, Broken):
                return asked[attempt], record.at, sim.state.attempts[attempt].machine
            case _:
                pass
    return None
