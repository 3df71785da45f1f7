"""Ways in which managed compute hangs, as scenarios of the simulator."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from evalfleet.model import Limits, Plan, Task, TaskId
from sim.scenario import OFFERS, Period, Scenario
from sim.world import Faults, Trouble

TASKS = 13
BEGINS_S = 400.0
PREPARE_S = 1200.0
"""So long Azure ML may take to prepare a node and pull its image, unless `prepare_s` says otherwise."""


def hangs() -> dict[str, Scenario]:
    """By what the service says meanwhile."""
    plain = _scenario()
    slow = replace(plain.faults, queue_s=(200_000.0, 200_000.0))
    impatient = structs.replace(
        OFFERS["service"][0], life=structs.replace(OFFERS["service"][0].life, max_queue_s=600.0)
    )
    pulling = structs.replace(
        OFFERS["service"][0], life=structs.replace(OFFERS["service"][0].life, boot_s=PREPARE_S)
    )
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
