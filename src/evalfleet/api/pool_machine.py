"""One machine of a pool: what is needed to work on it, and what is done there."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evalfleet.clock import WallClock
from evalfleet.errors import FleetError, MachineMute, PlaceError, RequestError
from evalfleet.events import MachineExtended, MachineLeaseSet, MachinePrepared
from evalfleet.journal import Holds, SqliteJournal
from evalfleet.model import AttemptId, Job, Micros, Offer, after, seconds_between
from evalfleet.named_pools import PoolView, fence_of, machine_of
from evalfleet.ports import (
    Benchmark,
    Channel,
    Extendable,
    Fence,
    HasGuest,
    HostChannel,
    Mendable,
    Place,
    Stoppable,
)
from evalfleet.state import MachineState

LIST_TASKS_S = 600.0


@dataclass(frozen=True)
class ActionResult:
    """What came of something done to a machine."""

    machine: MachineState
    problem: str = ""
    """What is wrong; empty if nothing is."""
    said: str = ""
    """What there is to say if nothing is wrong."""


@dataclass(frozen=True)
class PoolMachine:
    """One machine, and all that is needed to work on it."""

    machine: MachineState
    place: Place
    fence: Fence
    channel: Channel
    journal: SqliteJournal


Work = Callable[[PoolMachine], Awaitable[None]]


def running_in(view: PoolView) -> list[MachineState]:
    now = WallClock().now()
    return [machine for machine in view.machines if view.standing(machine, now) in ("ready", "held")]


async def prolong(
    machine: MachineState, place: Place, journal: SqliteJournal, expires_s: float
) -> ActionResult:
    """One that is stopped is told when it starts."""
    clock = WallClock()
    until = after(clock.now(), expires_s)
    if machine.phase != "stopped":
        if not isinstance(place, Extendable):
            why = f"{place.name} cannot move the end of a machine that runs"
            anew = "; stopped and started again, it has a new one" if isinstance(place, Stoppable) else ""
            return ActionResult(machine, why + anew)
        try:
            await place.extend(machine.id, expires_s)
        except PlaceError as err:
            return ActionResult(machine, str(err))
    await journal.append(
        clock.now(), [MachineExtended(machine.id, until), MachineLeaseSet(machine.id, until)]
    )
    return ActionResult(machine)


async def work_at(
    work: Work, machine: MachineState, place: Place, holds: Holds, journal: SqliteJournal
) -> ActionResult:
    """Do the work on a machine of the pool, and tell what went wrong, if anything."""
    fence = fence_of(holds, machine.id, Fence(holds.pool, journal.epoch, machine.offer.life.silent_s))
    channel = place.channel(machine_of(machine), fence)
    try:
        await work(PoolMachine(machine, place, fence, channel, journal))
    except (FleetError, OSError) as err:
        return ActionResult(machine, str(err))
    finally:
        await channel.close()
    return ActionResult(machine)


async def set_up_no_more(site: PoolMachine) -> None:
    """Who comes next sets it up from the start."""
    if isinstance(site.channel, HostChannel):
        await site.channel.forget_set_up()
    await site.journal.append(WallClock().now(), [MachinePrepared(site.machine.id, "")])


async def learn_tasks(site: PoolMachine, benchmark: Benchmark, home: Path) -> Micros | None:
    """Keep the list of tasks that the prepared machine tells, if the benchmark has it told.

    Returns when its set-up ends, if that is known. Raises RequestError if the machine tells none.
    """
    guest = benchmark.guest if isinstance(benchmark, HasGuest) else None
    if guest is None:
        return None
    job = Job(
        AttemptId(f"tasks-{os.urandom(6).hex()}"), guest.list_tasks, LIST_TASKS_S, benchmark.bundle.digest
    )
    await site.channel.start(job)
    ended = await site.channel.ended(job.id)
    site.channel.forget(job.id)
    if ended.result is None:
        raise RequestError(f"it tells no list of tasks: {ended.detail.strip() or ended.reason}")
    guest.keep_tasks(ended.result, home)
    return guest.good_until(ended.result)


async def restart(site: PoolMachine) -> None:
    machine, place = site.machine, site.place
    left_s = seconds_between(WallClock().now(), machine.expires_at)
    if isinstance(place, Mendable) and machine.offer.mends:  # to stop it could cost us its place there
        await _mend(place, machine, left_s)
    elif isinstance(place, Stoppable):
        await place.stop(machine.id)
        await place.create(machine.id, machine.offer, left_s)
    else:
        raise PlaceError(f"machines of {place.name} cannot be stopped and started again", transient=False)
    anew = site.place.channel(machine_of(machine), site.fence)  # what led there before may have been closed
    try:
        await anew.probe(None)
    finally:
        await anew.close()


async def _mend(place: Mendable, machine: MachineState, left_s: float) -> None:
    """The mildest way after which it can be reached."""
    *milder, last = machine.offer.mends
    for step in milder:
        with suppress(MachineMute):
            return await place.mend(machine.id, step, left_s)
    await place.mend(machine.id, last, left_s)


def check_life(offers: Sequence[Offer], expires_s: float) -> None:
    """A place may be unable to end a machine by itself so soon. Raises RequestError."""
    least = min(offers, key=lambda offer: offer.life.least_life_s, default=None)
    if least is not None and expires_s < least.life.least_life_s:
        minutes = f"{least.life.least_life_s / 60:.0f}m"
        raise RequestError(
            f"--expires is {expires_s / 60:.0f} minutes, and {least.place} cannot end a machine by itself "
            f"before {minutes}: say {minutes} or more (`evalfleet pool stop` and `pool delete` act at once)"
        )
