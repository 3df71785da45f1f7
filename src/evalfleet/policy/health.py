"""Machines that fail: which to give up, and when to give up altogether."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ..events import AttemptEnded, Event, MachineCondemned, StopRequested
from ..model import Broken, Cause, MachineId, Micros, Offer, seconds_between
from ..state import RunState
from .scale import refused_for_good


def end_orphans(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Attempts on condemned machines are over: broken by what broke the machine, or cancelled."""
    decided: list[Event] = []
    for attempt in state.orphans:
        known = state.attempts[attempt]
        machine = state.machines[known.machine]
        outcome = Broken(machine.cause or Cause.CANCELLED, machine.detail)
        decided.append(AttemptEnded(attempt, outcome, seconds_between(known.started_at, now)))
    return decided


def heed_silence(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give up silent machines, unless the whole fleet is silent: then it is our own network."""
    if not state.silent:
        return []
    if len(state.silent) < len(state.ready):
        return [_silent(state, now, machine) for machine in state.silent]
    due = [d for d in state.deadlines[:1] if d.kind == "silent" and d.at <= now]
    return [_silent(state, now, d.machine) for d in due]


def _silent(state: RunState, now: Micros, machine: MachineId) -> Event:
    since = state.machines[machine].silent_since or now
    seconds = seconds_between(since, now)
    return MachineCondemned(machine, f"nothing heard of it for {seconds:.0f} s", Cause.CONNECTION)


def condemn_suspects(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that breaks every attempt is given up, but only while others score."""
    for machine in islice(state.suspects, 4):
        known = state.machines[machine]
        if state.scored > known.streak_mark:
            detail = f"{known.streak} attempts in a row broke on it while others scored"
            return [MachineCondemned(machine, detail, Cause.STUCK)]
    return []


def stop_when_hopeless(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Stop when buying more machines would not help."""
    if state.stop is not None:
        return []
    detail = _hopeless(state, offers)
    return [StopRequested("refused", detail)] if detail else []


def _hopeless(state: RunState, offers: Sequence[Offer]) -> str:
    limits = state.limits
    for failure, count in state.same_failures.items():
        if count >= limits.same_failure_machines:
            where = failure.replace(":", " ", 1).strip()
            return f"{count} machines failed alike ({where}): {state.last_failure}"
    if state.first_broken and not state.scored:
        for cause, count in state.first_broken.items():
            if count >= limits.first_attempts_alike:
                return f"the first {count} attempts all broke alike ({cause}) and none scored"
    if state.waiting and not state.live and offers and refused_for_good(state, offers):
        return "; ".join(sorted({f"{key}: {block.detail}" for key, block in state.blocks.items()}))
    return ""
