"""What to do next with a pool: have its machines, or let them all go. A pool changes only when it is asked
to."""

from __future__ import annotations

from collections.abc import Sequence

from evalfleet.events import Event, MachineCondemned, MachineRequested, MachineStopping, RunEnded
from evalfleet.model import Micros, Offer, after
from evalfleet.names import machine_id
from evalfleet.state import MachineState, RunState, scopes

from .health import mend_or_give_up
from .limits import first_lease_s
from .pace import turn_at
from .scale import best_offers, nameless

ALONE = "{prefix}-vm"
MANY = "{prefix}-{n}"


def decide(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """The next decisions, of one kind at a time."""
    if state.ended_at is not None:
        return []
    if _is_deleted(state):
        return _let_go(state) or _end(state)
    return _mend(state) or _request(state, now, offers)


def _mend(state: RunState) -> list[Event]:
    """A pool may have one machine, and what is on its disk is worth a try: there need not be another."""
    decided: list[Event] = []
    for machine in (state.machines[machine] for machine in state.unreachable):
        event = mend_or_give_up(machine, True)
        decided.append(given_up(machine, event) if isinstance(event, MachineCondemned) else event)
    return decided


def given_up(machine: MachineState, why: MachineCondemned) -> MachineCondemned | MachineStopping:
    """Return what a failure of the machine leads to: it is deleted, or, if it is kept, only stopped."""
    return MachineStopping(machine.id, why.cause, why.detail) if machine.kept else why


def _request(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    offer = next(iter(best_offers(state, now, offers)), None)
    if offer is None or not _lacks_machines(state):
        return []
    if now < turn_at(state, offer.area_key):
        return []
    n = len(state.machines) + 1
    machine = machine_id(state.plan.run, state.plan.home, n)
    expires_at = after(now, first_lease_s(state, offer))
    name = nameless(state, offer, n) if offer.lent else _name(state)
    return [MachineRequested(machine, name, offer, expires_at)]


def _lacks_machines(state: RunState) -> bool:
    """Is it to have more, and is there hope that the next one will work?"""
    hopeless = state.same_failures.total() >= state.limits.same_failure_machines
    return not hopeless and present(state) < state.limits.workers


def _name(state: RunState) -> str:
    """The first name that no machine has. The one machine of a pool of one has a name without a number."""
    prefix = state.plan.machine_names
    taken = {machine.name for machine in _staying(state)}
    alone = ALONE.format(prefix=prefix)
    if not taken and state.limits.workers == 1:
        return alone
    numbers = range(2 if alone in taken else 1, len(taken) + 3)
    return next(name for n in numbers if (name := MANY.format(prefix=prefix, n=n)) not in taken)


def present(state: RunState) -> int:
    """Machines that the pool has or will have, stopped ones too."""
    return len(_staying(state))


def _staying(state: RunState) -> list[MachineState]:
    known = (state.machines[machine] for machine in state.undeleted)
    return [machine for machine in known if machine.phase != "condemned"]


def _is_deleted(state: RunState) -> bool:
    """Has the user deleted the pool? A place that refuses us for now takes nothing from it."""
    return state.stop is not None and state.stop.reason == "user"


def _let_go(state: RunState) -> list[Event]:
    staying = [m for m in state.undeleted if state.machines[m].phase != "condemned"]
    return [MachineCondemned(machine, "the pool was deleted") for machine in staying]


def _end(state: RunState) -> list[Event]:
    return [] if state.undeleted else [RunEnded("done")]


def settled(state: RunState) -> bool:
    """Is nothing under way? A pool that got fewer machines than it asked for goes on with those."""
    if state.ended_at is not None or _is_deleted(state):
        return state.ended_at is not None
    resting = all(state.machines[m].phase in ("ready", "stopped") for m in state.undeleted)
    return resting and awaited_area(state) is None


def awaited_area(state: RunState) -> str | None:
    """Where another machine is to be asked for once its place lets us; None: no more are to be.

    What was refused is not asked for again until somebody wants it.
    """
    if state.stop is not None or not state.machines or not _lacks_machines(state):
        return None
    last = state.machines[next(reversed(state.machines))].offer
    refused = any(key in state.blocks for key in scopes(last).values())
    return last.area_key if turn_at(state, last.area_key) and not refused else None


def next_deadline(state: RunState, now: Micros) -> Micros | None:
    """When its place lets us ask for the next machine. Else nothing falls due: somebody who wants more
    machines later asks again."""
    area = awaited_area(state)
    at = turn_at(state, area) if area is not None else 0
    return at if at > now else None
