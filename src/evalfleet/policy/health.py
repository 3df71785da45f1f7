"""Machines that fail, or that people want out of the way: which to give up, and when to end the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from evalfleet.events import AttemptEnded, Event, MachineCondemned, MachineMending, StopRequested
from evalfleet.model import Broken, Cause, MachineId, Micros, Offer, seconds_between
from evalfleet.state import AttemptState, MachineState, RunState, steered_by

from .scale import refused_for_good, useful_offers
from .silence import first_given_up, proven_online

CANARY_ATTEMPTS = 3
"""So many broken attempts, and no score, before more machines are made: more would not help."""
BY_A_TASK = (Cause.CONNECTION, Cause.MACHINE_LOST)
"""Causes that are forgiven once a task: what runs on a machine can end it, or make it silent."""


def end_orphans(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """End the attempts on machines that are condemned or mended: what broke the machine broke them.

    When one machine falls silent while others are heard, what ran on it may have caused that. When none is
    heard, our own network may have: that is forgiven once a task.
    """
    decided: list[Event] = []
    for attempt in state.orphans:
        known = state.attempts[attempt]
        machine = state.machines[known.machine]
        cause = machine.cause or Cause.CANCELLED
        alone = cause is Cause.CONNECTION and _fell_silent_alone(state, machine)
        counts = alone or (cause in BY_A_TASK and _forgiven_before(state, known))
        outcome = Broken(cause, machine.detail, counts=counts)
        decided.append(AttemptEnded(attempt, outcome, seconds_between(known.started_at, now)))
    return decided


def _forgiven_before(state: RunState, attempt: AttemptState) -> bool:
    """Return True if an earlier attempt at the same task was forgiven for what the task may have caused."""
    earlier = (state.attempts[id].outcome for id in state.tasks[attempt.task].attempts)
    return any(isinstance(end, Broken) and end.is_free and end.cause in BY_A_TASK for end in earlier)


def _fell_silent_alone(state: RunState, machine: MachineState) -> bool:
    return machine.silent_since is None or proven_online(state, machine)


def heed_silence(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Mend or give up the machine that was silent first, once its time is over."""
    first = first_given_up(state)
    if first is None or now < first[0]:
        return []
    return [_silent(state, now, first[1])]


def _silent(state: RunState, now: Micros, machine: MachineId) -> Event:
    known = state.machines[machine]
    detail = f"nothing heard of it for {seconds_between(known.silent_since or now, now):.0f} s"
    step = next_mend(known)
    # if nobody was heard it may be our own network: a machine that is well is not restarted for that
    if step is not None and proven_online(state, known) and state.stop is None:
        return MachineMending(machine, step, detail)
    return MachineCondemned(machine, detail, Cause.CONNECTION)


def next_mend(machine: MachineState) -> str | None:
    """The mildest step of mending that was not tried on the machine yet."""
    return next((step for step in machine.offer.mends if step not in machine.mends), None)


def mend(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Take the next step that may help for each machine that runs but cannot be reached, or give it up.

    If no machine of the run was ever reached, the fault is hardly this one's: a wrong rule of a network,
    perhaps.
    """
    hopeful = state.heard_at > 0 and state.stop is None
    return [mend_or_give_up(state.machines[machine], hopeful) for machine in state.unreachable]


def mend_or_give_up(machine: MachineState, hopeful: bool) -> Event:
    step = next_mend(machine)
    if step is not None and hopeful:
        return MachineMending(machine.id, step, machine.detail)
    tried = f"; tried: {', '.join(machine.mends)}" if machine.mends else ""
    cause = Cause.BOOT if machine.ready_at is None else Cause.CONNECTION
    return MachineCondemned(machine.id, f"{machine.detail}{tried}", cause, step=machine.step)


def condemn_suspects(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that breaks every attempt is given up, but only while others score.

    What runs there now is not to blame for those before it.
    """
    for machine in islice(state.suspects, 4):
        known = state.machines[machine]
        if state.proofs > known.streak_mark:
            detail = f"{known.streak} attempts in a row broke on it while others scored"
            spared = Broken(Cause.CANCELLED, f"its machine was given up: {detail}")
            innocent: list[Event] = [
                AttemptEnded(attempt, spared, seconds_between(state.attempts[attempt].started_at, now))
                for attempt in known.open
            ]
            return [*innocent, MachineCondemned(machine, detail, Cause.STUCK)]
    return []


def let_go_drained(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """A machine that takes no more work goes when what runs on it has ended."""
    decided: list[Event] = []
    for machine in state.draining:
        known = state.machines[machine]
        if known.open:
            continue
        if known.steered is not None:
            decided.append(MachineCondemned(machine, f"drained {steered_by(known.steered)}"))
        elif (circuit := state.circuits[known.offer.place]).phase != "closed":
            decided.append(MachineCondemned(machine, f"{known.offer.place} is left: {circuit.detail}"))
    return decided


def replace(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give up the machines to replace. Their attempts are retried and use up no try."""
    for machine in state.replacing:
        known = state.machines[machine]
        if known.steered is None or state.stop is not None:
            continue
        detail = f"replaced {steered_by(known.steered)}"
        spared = Broken(Cause.CANCELLED, f"its machine was {detail}")
        innocent: list[Event] = [
            AttemptEnded(attempt, spared, seconds_between(state.attempts[attempt].started_at, now))
            for attempt in known.open
        ]
        return [*innocent, MachineCondemned(machine, detail)]
    return []


def stop_when_hopeless(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Stop when buying more machines would not help."""
    proved = state.proofs > 0 and state.proofs >= state.limits.canary
    if state.stop is not None or (proved and state.ready and not state.same_failures):  # as nearly always
        return []
    detail = _hopeless(state, offers)
    return [StopRequested("refused", detail)] if detail else []


def _not_one_machine_alone(state: RunState) -> bool:
    """Has every machine that works had its chance? One that breaks everything at once says nothing about
    others."""
    return all(state.machines[machine].streak for machine in state.ready)


def _hopeless(state: RunState, offers: Sequence[Offer]) -> str:
    limits = state.limits
    for failure, count in state.same_failures.items():
        if count >= limits.same_failure_machines:
            where = failure.replace(":", " ", 1).strip()
            return f"{count} machines failed alike ({where}): {state.last_failure}"
    if state.proofs < limits.canary and len(state.canary_breaks) >= CANARY_ATTEMPTS:
        many = len(state.canary_breaks)
        return f"the first {many} attempts broke and none scored, the last one by {state.canary_breaks[-1]}"
    if state.first_broken and not state.proofs:
        for cause, count in state.first_broken.items():
            if count >= limits.first_attempts_alike and _not_one_machine_alone(state):
                return f"the first {count} attempts all broke alike ({cause}) and none scored"
    if state.waiting and not (state.live or state.mending) and offers and refused_for_good(state, offers):
        if not useful_offers(state, offers):
            return "no machine that is offered has what the tasks that are left need"
        return "; ".join(_refusals(state))
    return ""


def _refusals(state: RunState) -> list[str]:
    """What was refused, and why. What a whole place says is not said again of its parts."""
    given_up = {
        (f"{place}/", circuit.detail) for place, circuit in state.circuits.items() if circuit.permanent
    }
    refused = given_up | {(key, block.detail) for key, block in state.blocks.items()}
    areas = [(key, why) for key, why in refused if key.endswith("/")]
    return [
        f"{key}: {why}"
        for key, why in sorted(refused)
        if not any(key != area and key.startswith(area) and why == told for area, told in areas)
    ]
