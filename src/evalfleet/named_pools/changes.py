"""What verbs change in a pool, decided when nobody else can change it any more. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalfleet.errors import RequestError
from evalfleet.events import (
    Event,
    MachineCondemned,
    MachineExtended,
    MachineLeaseSet,
    MachineStarting,
    MachineStopped,
    MachineStopping,
    PoolPlanned,
    PoolResized,
    StopRequested,
)
from evalfleet.model import MachineId, Micros, Plan, after, seconds_between
from evalfleet.policy.pace import turns
from evalfleet.state import MachineState

from .view import PoolView


@dataclass(frozen=True)
class Change:
    """Events to record, and the machines that the pool must have to itself for that."""

    events: Sequence[Event] = ()
    holds: Sequence[MachineId] = ()


def in_use(view: PoolView) -> PoolView:
    """Raises RequestError if its deletion has begun."""
    if problem := view.leaving:
        raise RequestError(problem)
    return view


def made_anew(view: PoolView, now: Micros, plan: Plan) -> Change:
    """In the stream of the pool that had its name before, so that no machine's id comes again."""
    if view.state.ended_at is None:
        raise RequestError(f"the name {view.name!r} is taken by a pool; choose another")
    return Change([PoolPlanned(plan)])


def deleted(view: PoolView, now: Micros) -> Change:
    return Change([StopRequested("user", "deleted")], [machine.id for machine in view.machines])


def resized(view: PoolView, now: Micros, workers: int) -> Change:
    """If there are too many machines, those that no run has go, the newest first."""
    here = [machine for machine in in_use(view).machines if machine.phase != "condemned"]
    free = [machine.id for machine in reversed(here) if view.holder(machine.id, now) is None]
    surplus = max(0, len(here) - workers)
    if surplus > len(free):
        runs = sorted({run for machine in here if (run := view.holder(machine.id, now)) is not None})
        held = f"{len(here) - len(free)} are held by {', '.join(runs)}"
        raise RequestError(f"pool {view.name!r} cannot have {workers}: {held}")
    going = free[:surplus]
    less = [MachineCondemned(machine, "the pool was made smaller") for machine in going]
    return Change([PoolResized(workers), *less], going)


def captured(view: PoolView, machine: MachineId, image: str) -> Sequence[Event]:
    """It goes, and nothing takes its place by itself. Begun before, it only goes on."""
    if in_use(view).state.machines[machine].phase == "condemned":
        return ()
    fewer = max(0, view.state.limits.workers - 1)
    return (PoolResized(fewer), MachineCondemned(machine, f"captured as image {image}", image=image))


def stopped(view: PoolView, now: Micros) -> Change:
    running = [machine.id for machine in in_use(view).machines if machine.phase in ("ready", "mending")]
    return Change([MachineStopping(machine) for machine in running], running)


def started(view: PoolView, now: Micros) -> Change:
    """Asking anew for as many as before makes those that are missing, whatever was refused earlier.

    No more are started in a minute than their place allows.
    """
    down = [
        machine
        for machine in in_use(view).machines
        if view.standing(machine, now) in ("stopped", "expired") and view.holder(machine.id, now) is None
    ]
    events: list[Event] = [PoolResized(view.state.limits.workers)]
    starts = turns(view.state, now, [machine.offer for machine in down])
    for machine, at in zip(down, starts, strict=True):
        events += _start_again(machine, now, at, view.state.limits.lease_s)
    return Change(events, [machine.id for machine in down])


def replaced(view: PoolView, now: Micros) -> Change:
    """Machines that did not start are deleted, and others are made."""
    failed = [machine.id for machine in in_use(view).failed]
    gone = [MachineCondemned(machine, "replaced: it did not start") for machine in failed]
    return Change([PoolResized(view.state.limits.workers), *gone], failed)


def _start_again(machine: MachineState, now: Micros, at: Micros, lease_s: float) -> list[Event]:
    """One that has expired is off, and gets a new life; one that was stopped goes on with its own."""
    id = machine.id
    events: list[Event] = [MachineStopping(id), MachineStopped(id)] if machine.phase == "ready" else []
    events.append(MachineStarting(id, seconds_between(now, at)))
    if now >= machine.expires_at:
        until = after(at, lease_s)
        events += [MachineExtended(id, until), MachineLeaseSet(id, until)]
    return events
