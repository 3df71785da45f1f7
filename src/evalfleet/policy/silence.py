"""Machines that say nothing: whether it is they or our own network, and how long to wait."""

from __future__ import annotations

from evalfleet.model import MachineId, Micros, after
from evalfleet.state import MachineState, PlaceHearing, RunState

ALL_AT_ONCE = 1.5
"""Where no machine is heard, each gets so much longer than one that is silent alone: a store that all of them
speak through may be away for as long as one machine may be silent."""


def silence_ends(state: RunState) -> Micros | None:
    """When the next silent machine is given up."""
    first = first_given_up(state)
    return None if first is None else first[0]


def first_given_up(state: RunState) -> tuple[Micros, MachineId] | None:
    """Of the machines that were silent first at each place, the one whose time is over first, and when."""
    if not state.silent:
        return None
    silent = ((line, next(iter(line.silent))) for line in state.lines.values() if line.silent)
    return min((_given_up_at(state, line, state.machines[m]), m) for line, m in silent)


def _given_up_at(state: RunState, line: PlaceHearing, machine: MachineState) -> Micros:
    """When a silent machine is given up: soon, if another one was heard after its silence was noticed.

    If none was, our own network is probably down, or the service that speaks for all of them: then we wait
    much longer, and once one machine answers again the others get time to do the same.
    """
    since = machine.silent_since or 0
    at_last = after(since, max(state.limits.fleet_lost_s, ALL_AT_ONCE * machine.offer.life.lost_s))
    if not proven_online(state, machine):
        return at_last
    return min(at_last, after(max(since, line.stirred_at), machine.offer.life.lost_s))


def proven_online(state: RunState, machine: MachineState) -> bool:
    """Was another machine, by a way that this one has too, heard after its silence was noticed?"""
    line = state.lines[machine.offer.place]
    return state.last_heard(line) > after(machine.silent_since or 0, machine.offer.life.silent_s)
