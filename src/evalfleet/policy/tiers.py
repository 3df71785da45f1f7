"""Several places: in which order they are asked for machines, and what becomes of one that keeps failing.

A place has a circuit. It opens when the place fails much more often than another one does, or than one that
was not tried yet may: its machines end what they run and go, the next place gives others, and what is left
runs there. After a while one machine is tried, and the circuit closes once that has scored. One place at
least is never left for its failures: there is nowhere to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evalfleet.events import CircuitChanged, Event, MachineCondemned, TasksReopened
from evalfleet.model import Micros, Offer, Plan, after
from evalfleet.names import spread
from evalfleet.state import Circuit, RunState, replaceable

from .scale import best_offers, is_final, missing, useful_offers

RISING = 3
"""Of the newest ten outcomes: with so many failures, and twice as many as before, a place is drained."""
FAILING = 5
"""With so many it is left."""
IN_A_ROW = 4
MACHINES_IN_A_ROW = 3
"""It is left, too, after so many failures in a row, or so many machines that never were ready."""
WASTED_S = 600.0
"""It is left, too, if machines that never were ready have taken so long, and none there is ready."""
UNFIT = 0.3
"""It is left, too, if this part of all that ran there failed, and a task broke for good that broke nowhere
else."""
PROBES = 3
"""A place that was left again and again is trusted again after so many attempts worked; the first time, after
two."""
TELLING = 5
"""With fewer outcomes than this, nobody knows how a place does."""
BETTER = 0.5
"""A place that fails less than half as often is worth going to."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 900.0
ROUNDS_LEFT = 2
"""A machine makes room for one of an earlier place only if each worker has so many tasks left, or more."""


def in_order(plan: Plan, offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers, the one to take first in front: by the order of their places if the plan has one,
    then by price. At equal prices regular machines come before spot ones, else the order of the place stands:
    it may know which region to try next."""
    if not plan.ordered:
        return sorted(offers, key=lambda offer: (offer.cost.usd_per_hour, offer.spot))
    tier = {place: n for n, place in enumerate(plan.places)}
    return sorted(
        offers, key=lambda offer: (tier.get(offer.place, len(tier)), offer.cost.usd_per_hour, offer.spot)
    )


def judge(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Open, drain or close the circuit of a place by how it has done of late."""
    if not state.shaky or state.stop is not None:
        return []
    for place in state.shaky:
        circuit = state.circuits[place]
        change = None if circuit.permanent else _judged(state, now, offers, place, circuit)
        if change is not None:
            return [change]
        if circuit.phase == "open" and circuit.gave_up and _elsewhere(state, offers, place):
            return [TasksReopened(tuple(circuit.gave_up))]
    return []


def _judged(
    state: RunState, now: Micros, offers: Sequence[Offer], place: str, circuit: Circuit
) -> CircuitChanged | None:
    if why := _for_good(state, circuit):
        return CircuitChanged(place, "open", why, permanent=True)
    if circuit.phase == "open":
        return _probed(state, now, place, circuit)
    if (why := _why_left(state, circuit)) and _elsewhere(state, offers, place):
        return _opened(state, now, place, circuit, why)
    if circuit.phase == "closed":
        if _rising(circuit) and _elsewhere(state, offers, place):
            why = f"{_recently(circuit)}, more than before; the last one, {circuit.last_failure}"
            return CircuitChanged(place, "draining", why)
        return None
    if sum(circuit.recent) < RISING - 1:
        return CircuitChanged(place, "closed", "it does well again")
    if not _elsewhere(state, offers, place):
        return CircuitChanged(place, "closed", "no other place does better")
    if not circuit.machines:
        return _opened(state, now, place, circuit, circuit.detail)
    return None


def _for_good(state: RunState, circuit: Circuit) -> str:
    if circuit.refused:
        return circuit.refused
    if circuit.failed_machines <= replaceable(state, circuit):
        return ""
    scored = f"{circuit.proofs} attempts worked there"
    lost = f"{circuit.failed_machines} of its machines failed and {scored}: no more are replaced"
    return f"{lost}; the last one, {circuit.last_failure}"


def _probed(state: RunState, now: Micros, place: str, circuit: Circuit) -> CircuitChanged | None:
    if circuit.probe_worked >= min(PROBES, 1 + circuit.opened):
        return CircuitChanged(place, "closed", "one machine was tried, and works")
    if circuit.probe_failed:
        return _opened(state, now, place, circuit, f"one machine was tried: {circuit.probe_failed}")
    return None


def _opened(state: RunState, now: Micros, place: str, circuit: Circuit, why: str) -> CircuitChanged:
    """Each time in a row it stays open for twice as long; runs that share a place do not try it at once."""
    doublings = min(circuit.opened, 16)  # enough for the longest; without an end, floats are exceeded
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)
    pause_s *= spread(f"{state.plan.run} {place} {circuit.opened}")
    return CircuitChanged(place, "open", why, until=after(now, pause_s))


def _why_left(state: RunState, circuit: Circuit) -> str:
    if circuit.never_ready >= MACHINES_IN_A_ROW:
        many = f"{circuit.never_ready} machines in a row never were ready"
        return f"{many}; the last one, {circuit.last_failure}"
    if circuit.wasted_s >= WASTED_S and not any(machine in state.ready for machine in circuit.machines):
        many = f"no machine was ready there, after {circuit.wasted_s:.0f} s"
        return f"{many}; the last one, {circuit.last_failure}"
    if circuit.gave_up and circuit.failures >= max(RISING, UNFIT * circuit.outcomes):
        task = next(iter(circuit.gave_up))
        failed = f"{circuit.failures} of {circuit.outcomes} attempts and machines there failed"
        return f"{failed}, and {task} broke nowhere else"
    canary = state.proofs < state.limits.canary and len(circuit.recent) >= RISING
    in_a_row = RISING if canary else IN_A_ROW
    newest = circuit.recent[-in_a_row:]
    if sum(circuit.recent) >= FAILING or (len(newest) == in_a_row and all(newest)):
        return f"{_recently(circuit)}; the last one, {circuit.last_failure}"
    return ""


def _recently(circuit: Circuit) -> str:
    return f"{sum(circuit.recent)} of the last {len(circuit.recent)} attempts and machines there failed"


def _rising(circuit: Circuit) -> bool:
    failed, before = sum(circuit.recent), circuit.outcomes - len(circuit.recent)
    earlier = (circuit.failures - failed) / before if before > 0 else 0.0
    return failed >= RISING and failed / len(circuit.recent) >= 2 * earlier


def _elsewhere(state: RunState, offers: Sequence[Offer], place: str) -> bool:
    """Is there another place to go to: one that does much better, or that nobody can tell of yet?"""
    here = state.circuits[place]
    share = sum(here.recent) / max(1, len(here.recent))
    useful = useful_offers(state, offers) or offers  # none is, if all that is left was given up
    others = {offer.place for offer in useful if offer.place != place and not is_final(state, offer)}
    return any(_is_better(state.circuits.get(other, Circuit()), share) for other in others)


def _is_better(circuit: Circuit, share: float) -> bool:
    if circuit.phase == "open":
        return False
    return len(circuit.recent) < TELLING or sum(circuit.recent) / len(circuit.recent) < BETTER * share


def make_room(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Let an idle machine of a later place go for one of an earlier place that was left and may be tried, or
    works again, if much is left to do.

    Those come back as they went, a few at a time: as many at once as work there already, or one.
    """
    if not state.shaky or not state.plan.ordered or not state.idle or state.stop is not None:
        return []
    if state.waiting < ROUNDS_LEFT * state.limits.workers * state.plan.slots or state.paused is not None:
        return []
    tier = {place: n for n, place in enumerate(state.plan.places)}
    for place in state.shaky:
        circuit = state.circuits[place]
        if not circuit.owed or missing(state, now, offers):
            continue
        coming = sum(machine in state.coming for machine in circuit.machines)
        best = best_offers(state, now, offers)
        if not best or best[0].place != place or coming >= max(1, len(circuit.machines) - coming):
            continue
        for machine in state.idle:
            known = state.machines[machine]
            if not known.open and tier.get(known.offer.place, 0) > tier[place]:
                return [MachineCondemned(machine, f"it makes room for a machine of {place}")]
    return []
