"""What the events of machines change in the state: phases, leases, what is reserved, which offers are
blocked."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from msgspec import structs

from evalfleet import events as ev
from evalfleet.cost import billed_usd, lingering_usd, reserved_usd
from evalfleet.errors import Scope
from evalfleet.model import CAUSES, SECOND, Cause, Micros, Offer, after, seconds_between
from evalfleet.names import spread

from .circuits import machine_failed, machine_joined, machine_left, machine_works, refresh_idle
from .nouns import Block, Deadline, MachineState, PlaceHearing, Refusal, RunState


def machine_requested(state: RunState, at: Micros, event: ev.MachineRequested) -> None:
    machine = MachineState(
        *(event.machine, event.name, event.offer, at),
        *(event.expires_at, event.expires_at, 0, at),
    )
    state.machines[event.machine] = machine
    if event.offer.place not in state.lines:
        state.lines[event.offer.place] = PlaceHearing(event.offer.life.queues)
    state.coming[event.machine] = None
    state.undeleted[event.machine] = None
    machine_joined(state, machine)
    state.live_by_offer[event.offer.key] += 1
    _note_asked(state, event.offer, at)
    state.spend.machines.reserved += _reservation(machine)
    if not machine.unstarted:
        _set_renewal(state, machine, at)
    state.touched_machines[event.machine] = None


def _note_asked(state: RunState, offer: Offer, at: Micros) -> None:
    if (most := offer.creates_a_minute) is not None:
        state.asked_at.setdefault(offer.area_key, deque(maxlen=most)).append(at)


def _reservation(machine: MachineState) -> float:
    if machine.stopped_at is not None:
        return 0.0
    return reserved_usd(machine.offer, machine.billed_at, machine.ends_at)


RENEWAL_LEAD_S = 2700.0
"""A cloud's own timer may need half an hour to take note of another time."""


def _set_renewal(state: RunState, machine: MachineState, at: Micros) -> None:
    """When to look at the machine's life again: some time before it must be deleted to be gone in time.

    A machine that neither money nor time allow to extend is looked at again and again, each time a quarter
    of what is left ahead, so that it is used to the end. One whose place never does is looked at then.
    """
    last_call = after(machine.expires_at, -machine.offer.life.teardown_s)
    lead = min((last_call - at) // 4, round(RENEWAL_LEAD_S * SECOND)) if machine.offer.life.extendable else 0
    machine.renew_at = max(at, last_call - lead)
    heapq.heappush(state.deadlines, Deadline(machine.renew_at, machine.id))


def machine_queued(state: RunState, at: Micros, event: ev.MachineQueued) -> None:
    """Its first lease stays reserved, whenever it starts: those that wait cannot overspend together."""
    machine = state.machines[event.machine]
    if machine.queued_at is None:
        machine.queued_at = at
    machine.phase, machine.detail = "queued", event.detail
    state.touched_machines[event.machine] = None


def machine_allocated(state: RunState, at: Micros, event: ev.MachineAllocated) -> None:
    """A machine that is given up already is changed, too: that it started must be paid."""
    machine = state.machines[event.machine]
    state.spend.machines.reserved -= _reservation(machine)
    life = machine.expires_at - machine.billed_at
    machine.allocated_at = machine.billed_at = max(machine.requested_at, min(at, event.started_at))
    machine.expires_at = machine.lease_set = machine.billed_at + life
    machine.start, machine.node = event.start, event.node
    state.spend.machines.reserved += _reservation(machine)
    if machine.phase != "condemned":
        machine.phase, machine.detail = "allocated", ""
        _set_renewal(state, machine, at)
    state.touched_machines[event.machine] = None


def machine_up(state: RunState, at: Micros, event: ev.MachineUp) -> None:
    machine = state.machines[event.machine]
    machine.phase, machine.up_at = "up", at
    machine.address, machine.node = event.address, event.node or machine.node
    machine.name, machine.host_key = event.name or machine.name, event.host_key
    machine.timings, machine.setting_up = dict(event.timings), ("", "")
    # the place took it before it could know that it was drained
    if (drained := state.kept_out.get((machine.offer.place, machine.name))) is not None:
        machine.steered = drained
        state.draining[machine.id] = None
    lift(state, machine)
    state.touched_machines[event.machine] = None


def machine_step(state: RunState, at: Micros, event: ev.MachineStep) -> None:
    machine = state.machines[event.machine]
    if event.step != machine.setting_up[0]:
        machine.step_since = at
    machine.setting_up = (event.step, event.said)


def machine_ready(state: RunState, at: Micros, event: ev.MachineReady) -> None:
    machine = state.machines[event.machine]
    machine.setting_up = ("", "")
    if machine.phase == "mending":
        _mended(state, machine, event.address)
    elif machine.ready_at is None:
        state.boots += 1
        state.boot_seconds += max(0.0, seconds_between(machine.billed_at, at))
    state.fleet_changed_at = at
    machine.phase, machine.ready_at = "ready", at
    machine.timings = {**machine.timings, **event.timings}
    machine.isolated = event.isolated
    machine.kept = not state.plan.benchmark and not machine.offer.life.queues
    state.coming.pop(event.machine, None)
    state.ready[event.machine] = None
    state.audible[event.machine] = None
    heard(state, at, machine)
    state.same_failures.clear()
    machine_works(state, machine)
    state.forged.pop(machine.offer.key, None)
    refresh_idle(state, machine)
    state.touched_machines[event.machine] = None


def machine_unreachable(state: RunState, at: Micros, event: ev.MachineUnreachable) -> None:
    machine = state.machines[event.machine]
    machine.detail, machine.step = event.detail, event.step
    state.unreachable[event.machine] = None
    state.touched_machines[event.machine] = None


def machine_mending(state: RunState, at: Micros, event: ev.MachineMending) -> None:
    """It takes no work meanwhile, and others may take its tasks."""
    machine = state.machines[event.machine]
    machine.phase, machine.mending_since = "mending", at
    machine.mends.append(event.step)
    machine.cause, machine.detail = Cause.CONNECTION, event.detail
    machine.silent_since = None
    _take_out(state, machine)
    state.mending[event.machine] = None
    _orphan(state, machine)
    state.touched_machines[event.machine] = None


def _mended(state: RunState, machine: MachineState, address: str) -> None:
    machine.address = address or machine.address
    machine.cause, machine.detail, machine.step, machine.mending_since = None, "", "", None
    machine.streak = 0
    state.mending.pop(machine.id, None)


def _orphan(state: RunState, machine: MachineState) -> None:
    for attempt in machine.open:
        state.orphans[attempt] = None
        state.touched_attempts[attempt] = None


def machine_silent(state: RunState, at: Micros, event: ev.MachineSilent) -> None:
    machine = state.machines[event.machine]
    machine.silent_since = event.since
    state.silent[event.machine] = None
    state.lines[machine.offer.place].silent[event.machine] = None
    state.audible.pop(event.machine, None)
    refresh_idle(state, machine)
    state.touched_machines[event.machine] = None


def machine_heard(state: RunState, at: Micros, event: ev.MachineHeard) -> None:
    machine = state.machines[event.machine]
    heard(state, at, machine)
    unsilence(state, machine)


def controller_started(state: RunState, at: Micros, event: ev.ControllerStarted) -> None:
    """Nobody listened for a while, so no machine has been silent: each has all the time to answer."""
    state.controllers += 1
    state.controller = event
    for machine in list(state.silent):
        unsilence(state, state.machines[machine])


def unsilence(state: RunState, machine: MachineState) -> None:
    machine.silent_since = None
    state.silent.pop(machine.id, None)
    state.lines[machine.offer.place].silent.pop(machine.id, None)
    state.audible[machine.id] = None
    refresh_idle(state, machine)
    state.touched_machines[machine.id] = None


def machine_answered(state: RunState, at: Micros, event: ev.MachineAnswered) -> None:
    heard(state, at, state.machines[event.machine])


def heard(state: RunState, at: Micros, machine: MachineState) -> None:
    """A machine gave proof that we reach machines: those of its own place, and all that need no service."""
    if state.silent:
        _stir(state, at, machine)
    state.heard_at = at
    if machine.offer.life.queues:
        state.lines[machine.offer.place].heard_at = at


def _stir(state: RunState, at: Micros, machine: MachineState) -> None:
    """If for long none was heard, our own network was down, or the service: the others get time to answer."""
    for place, line in state.lines.items():
        if line.silent and (place == machine.offer.place or not line.shared):
            first = state.machines[next(iter(line.silent))]
            if at > after(first.silent_since or 0, first.offer.life.lost_s) > state.last_heard(line):
                line.stirred_at = at


def machine_extended(state: RunState, at: Micros, event: ev.MachineExtended) -> None:
    machine = state.machines[event.machine]
    state.spend.machines.reserved -= _reservation(machine)
    machine.expires_at = event.expires_at
    state.spend.machines.reserved += _reservation(machine)
    _set_renewal(state, machine, at)
    _trim_deadlines(state)
    state.touched_machines[event.machine] = None


def machine_prepared(state: RunState, at: Micros, event: ev.MachinePrepared) -> None:
    machine = state.machines[event.machine]
    machine.prepared = event.benchmark
    machine.good_until = event.good_until
    machine.timings.update(event.timings)
    if event.prefix and event.prefix != state.plan.machine_names:
        _rename(state, event.prefix)


def _rename(state: RunState, prefix: str) -> None:
    """Give a pool's machines names that begin otherwise. Their ids stay."""
    old = f"{state.plan.machine_names}-"
    for machine in state.machines.values():
        if machine.name.startswith(old):
            machine.name = f"{prefix}-{machine.name.removeprefix(old)}"
            state.touched_machines[machine.id] = None
    state.plan = structs.replace(state.plan, machine_names=prefix)


def machine_stopping(state: RunState, at: Micros, event: ev.MachineStopping) -> None:
    machine = state.machines[event.machine]
    machine.phase, machine.cause, machine.detail = "stopping", event.cause, event.detail
    _take_out(state, machine)
    state.touched_machines[event.machine] = None


def machine_stopped(state: RunState, at: Micros, event: ev.MachineStopped) -> None:
    machine = state.machines[event.machine]
    _close_account(state, machine, at)
    machine.phase, machine.stopped_at = "stopped", at
    state.touched_machines[event.machine] = None


def machine_starting(state: RunState, at: Micros, event: ev.MachineStarting) -> None:
    machine, begins = state.machines[event.machine], after(at, event.after_s)
    _close_account(state, machine, begins)
    _note_asked(state, machine.offer, begins)
    machine.phase, machine.requested_at, machine.stopped_at = "requested", begins, None
    machine.billed_at, machine.queued_at, machine.allocated_at, machine.start = begins, None, None, ""
    machine.up_at = machine.ready_at = None
    machine.prepared = ""  # what was on a local disk is gone: the next run looks
    machine.mends, machine.cause, machine.detail, machine.step = [], None, "", ""
    state.coming[event.machine] = None
    state.spend.machines.reserved += _reservation(machine)
    _set_renewal(state, machine, at)
    state.touched_machines[event.machine] = None


def _take_out(state: RunState, machine: MachineState) -> None:
    """Take a machine out: it takes no work, and none is expected of it."""
    indexes = (state.coming, state.ready, state.audible, state.idle, state.silent, state.suspects)
    others = (state.mending, state.unreachable, state.draining, state.replacing)
    for index in (*indexes, *others, state.lines[machine.offer.place].silent):
        index.pop(machine.id, None)


def _close_account(state: RunState, machine: MachineState, end: Micros) -> None:
    """What it has cost since it was asked for or stopped is paid, and nothing more is reserved for it."""
    state.spend.machines.reserved -= _reservation(machine)
    _pay(state, machine, machine.open_usd(end))


def _pay(state: RunState, machine: MachineState, usd: float) -> None:
    machine.closed_usd += usd
    state.spend.machines.spent += usd


def machine_lease_set(state: RunState, at: Micros, event: ev.MachineLeaseSet) -> None:
    state.machines[event.machine].lease_set = event.expires_at
    state.touched_machines[event.machine] = None


def machine_condemned(state: RunState, at: Micros, event: ev.MachineCondemned) -> None:
    machine = state.machines[event.machine]
    was = machine.phase
    machine.phase, machine.condemned_at = "condemned", at
    machine.cause, machine.detail, machine.step = event.cause, event.detail, event.step
    machine.image = event.image
    state.fleet_changed_at = at
    _take_out(state, machine)
    state.live_by_offer[machine.offer.key] -= 1
    _orphan(state, machine)
    if event.cause is Cause.EVICTED:
        state.evictions[machine.offer.key] += 1
    machine_failed(state, at, machine, event, was)
    machine_left(state, machine)
    if event.cause is not None and was != "ready":
        _never_ready(state, at, machine, event)
    _trim_deadlines(state)
    state.touched_machines[event.machine] = None


def _never_ready(state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned) -> None:
    """Count what keeps machines from becoming ready, and block offers that refuse us."""
    if event.cause is Cause.CONNECTION and event.step == ev.FORGED:
        _never_ours(state, at, machine, event)
    if event.cause is None or not CAUSES[event.cause].systematic:
        return
    if event.cause is not Cause.PROVISIONING and not event.permanent:
        state.same_failures[f"{event.cause}:{event.step}"] += 1
        state.last_failure = event.detail
        return
    refuse(state, at, machine, event)


def _never_ours(state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned) -> None:
    """Something else answered on it from the start. If that is so again and again, its offer is no good."""
    state.forged[machine.offer.key] += 1
    count = state.forged[machine.offer.key]
    if count >= state.limits.same_failure_machines:
        detail = f"on {count} machines in a row something else than our supervisor answered: {event.detail}"
        refuse(state, at, machine, structs.replace(event, scope="offer", permanent=True, detail=detail))


def machine_delete_refused(state: RunState, at: Micros, event: ev.MachineDeleteRefused) -> None:
    """It stays what it was, and is paid: only people can do something about it."""
    state.machines[event.machine].delete_refused = event.detail


def machine_deleted(state: RunState, at: Micros, event: ev.MachineDeleted) -> None:
    machine = state.machines[event.machine]
    machine.gone_at = min(event.gone_at, at)
    if machine.unstarted:
        _pay_unseen(state, machine, event.unseen_s or 0.0)
    elif not machine.offer.cost.idle_usd_per_hour:  # whoever looks late, its place ended the billing
        machine.gone_at = min(machine.gone_at, machine.ends_at)
    state.undeleted.pop(event.machine, None)
    _close_account(state, machine, machine.gone_at)
    if not machine.unstarted:
        _pay(state, machine, lingering_usd(machine.offer))
    machine.phase, machine.delete_refused = "deleted", ""
    if not state.undeleted:
        state.spend.machines.reserved = 0.0  # sums of floats drift; nothing reserved is exactly nothing
    state.touched_machines[event.machine] = None


def _pay_unseen(state: RunState, machine: MachineState, seconds: float) -> None:
    ran = min(after(0, seconds), machine.ends_at - machine.billed_at)
    _pay(state, machine, billed_usd(machine.offer, 0, ran))


def _trim_deadlines(state: RunState) -> None:
    heap = state.deadlines
    while heap and not _holds(state, heap[0]):
        heapq.heappop(heap)


_LIVING = ("requested", "allocated", "up", "ready", "mending")


def _holds(state: RunState, deadline: Deadline) -> bool:
    machine = state.machines[deadline.machine]
    return machine.phase in _LIVING and machine.renew_at == deadline.at


FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0


def scopes(offer: Offer) -> Mapping[Scope, str]:
    """The keys under which something about the offer may be blocked: the offer, and what it is part of."""
    area = f"{offer.place}/{offer.area or offer.region}/"
    family: dict[Scope, str] = {"family": f"{area}*{offer.family}"} if offer.family else {}
    return {"offer": offer.key, **family, "region": area, "place": f"{offer.place}/"}


def refuse(state: RunState, at: Micros, machine: MachineState, event: ev.MachineCondemned) -> None:
    """A machine could not be had. Those that were asked for at once are refused at once: that is one no."""
    offer = machine.offer
    key = scopes(offer).get(event.scope, offer.key)
    block = state.blocks.get(key)
    if block is None or block.at < machine.requested_at:
        failures = 1 if block is None else block.failures + 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))
        until = after(at, pause_s * spread(f"{state.plan.run} {key} {failures}"))
        block = state.blocks[key] = Block(at, until, failures, event.permanent, event.detail)
    block.permanent |= event.permanent
    tries = state.refusals[offer.key].tries + 1 if offer.key in state.refusals else 1
    state.refusals[offer.key] = Refusal(offer, tries, event.detail, event.scope, event.permanent)


def lift(state: RunState, machine: MachineState) -> None:
    """A machine came up: what was refused before it was asked for is granted again.

    What was refused for good stays refused, and so does what was refused since: others had the last of it.
    """
    if not state.blocks:
        return
    for key in scopes(machine.offer).values():
        block = state.blocks.get(key)
        if block is not None and not block.permanent and block.at < machine.requested_at:
            del state.blocks[key]
