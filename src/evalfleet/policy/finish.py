"""How a run comes to its end: hand out no more, let machines go, say so."""

from __future__ import annotations

from collections.abc import Sequence

from evalfleet.events import Event, MachineCondemned, RunEnded
from evalfleet.model import MachineId, Micros, Offer, RunStatus
from evalfleet.state import RunState


def wind_down(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """After a stop: let go of every machine, or, when draining, of those with nothing under way."""
    if state.stop is None or not (state.live or state.mending):
        return []
    leaving: list[MachineId] = [*state.coming, *state.mending]
    if state.stop.drain:
        leaving += [machine for machine in state.idle if not state.machines[machine].open]
    else:
        leaving += state.ready
    return [MachineCondemned(machine, f"the run was stopped ({state.stop.reason})") for machine in leaving]


def finish(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Once no task can run any more: let go of all machines, and end when the last one is gone."""
    if state.running or (state.waiting and state.stop is None):
        return []
    if leaving := (*state.coming, *state.ready, *state.mending):
        return [MachineCondemned(machine, "the run is over") for machine in leaving]
    if state.undeleted or state.uncollected or grading_is_due(state):
        return []
    return [RunEnded(_status(state))]


def grading_is_due(state: RunState) -> bool:
    """Is there something to grade, all of it here, no task that can run, and no machine left?

    Grading may take long, and nobody pays machines for that. One whose place refuses to delete it is not
    waited for: only people can do something about that. Somebody who cancels a run does not want to wait for
    grading, and grading that has failed is not tried again: the answers stay.
    """
    if not (state.answered or state.regrading) or state.grading_problem or state.ended_at is not None:
        return False
    cancelled = state.stop is not None and state.stop.reason == "user" and not state.stop.drain
    over = not state.running and (not state.waiting or state.stop is not None)
    gone = all(state.machines[machine].delete_refused for machine in state.undeleted)
    return over and gone and not cancelled and not state.uncollected


def _status(state: RunState) -> RunStatus:
    if not (state.waiting or state.answered or state.counts["held"]):
        return "done"
    return "failed" if state.stop is not None and state.stop.reason == "refused" else "stopped"
