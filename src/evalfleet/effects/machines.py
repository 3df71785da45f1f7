"""Bringing machines up, keeping them, tearing them down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec import structs

from evalfleet.errors import (
    ChannelError,
    MachineForged,
    MachineMute,
    NoSuchMachine,
    PlaceError,
    Scope,
    SetupFailed,
    StaleController,
)
from evalfleet.events import (
    FORGED,
    SERVICE_STEP,
    MachineAllocated,
    MachineCondemned,
    MachineDeleted,
    MachineDeleteRefused,
    MachineLeaseSet,
    MachineQueued,
    MachineReady,
    MachineStep,
    MachineStopped,
    MachineUnreachable,
    MachineUp,
)
from evalfleet.model import (
    AttemptId,
    Cause,
    Isolated,
    Machine,
    MachineId,
    Micros,
    Needs,
    Offer,
    after,
    seconds_between,
)
from evalfleet.names import safe_name
from evalfleet.ports import Channel, Extendable, HostChannel, Place, Stoppable
from evalfleet.state import MachineState, kept_out

from .tools import Tools, check_wanted

PROVISIONING_TRIES = 3
OFFER_TRIES = 5
CALL_MARGIN_S = 5.0
BOOT_LOOK_S = 120.0
SERVICE_START_S = 600.0
FIRST_SAID_S, SAID_S = 10.0, 60.0
RESTARTED = "its service started it anew"
MACHINES = ".machines"
"""In a run's folder: what a failed set-up left, by machine. No task's folder starts with a dot."""

T = TypeVar("T")

log = logging.getLogger(__name__)


# -- up ------------------------------------------------------------------------------------------


async def bring_up(tools: Tools, machine: MachineState) -> None:
    """Create it, wait until it is up, set it up, probe it; or say why it cannot be had."""
    try:
        await _boot_and_set_up(tools, machine)
    except MachineMute as err:
        tools.report(MachineUnreachable(machine.id, str(err), err.step))
    except PlaceError as err:
        refusal = MachineCondemned(
            machine.id, str(err), Cause.PROVISIONING, scope=err.scope, permanent=not err.transient
        )
        tools.give_up(refusal)
    except SetupFailed as err:
        scope: Scope = "place" if err.permanent else "machine"
        tools.give_up(
            MachineCondemned(machine.id, str(err), Cause.SETUP, err.step, scope, permanent=err.permanent)
        )
    except (StaleController, MachineForged) as err:
        # if there is a newer controller, this report is refused; if not, the machine lies, and goes alone
        tools.give_up(MachineCondemned(machine.id, str(err), Cause.CONNECTION, step=FORGED))
    except ChannelError as err:
        if machine.offer.mends:
            tools.report(MachineUnreachable(machine.id, str(err), "setup"))
        else:
            tools.give_up(MachineCondemned(machine.id, str(err), Cause.CONNECTION))
    except _LeftWaiting as err:
        tools.give_up(MachineCondemned(machine.id, str(err), Cause.PROVISIONING, scope="offer"))
    except _NeverStarted as err:
        tools.give_up(MachineCondemned(machine.id, str(err), Cause.BOOT, step="start"))
    except TimeoutError:
        cause = Cause.BOOT if machine.up_at is None else Cause.READINESS
        detail = f"not ready after {tools.state.limits.boot_limit_s(machine.offer):g} s ({cause})"
        tools.give_up(MachineCondemned(machine.id, detail, cause))


async def _boot_and_set_up(tools: Tools, machine: MachineState) -> None:
    await _its_turn(tools, machine)
    begun, start = machine.billed_at, machine.start
    if machine.unstarted:
        seen = await _leave_queue(tools, machine)
        if seen is None or seen.phase not in ("pending", "up"):
            _report_ended_in_queue(tools, machine, seen)
            return
        begun, start = started_at(tools, seen), seen.start
        tools.report(MachineAllocated(machine.id, begun, seen.start, seen.node))
    timings: dict[str, float] = {}
    async with asyncio.timeout(_time_left_s(tools, tools.state.limits.boot_limit_s(machine.offer), begun)):
        up: Machine | None = None
        if machine.phase in ("requested", "queued", "allocated"):
            up = await _boot_in_time(tools, machine, begun)
            if up.phase != "up" or up.start != start:
                report_gone(tools, machine, up)
                return
            timings.update(_came_up(seconds_between(begun, tools.clock.now()), up))
            tools.report(MachineUp(machine.id, up.address, up.node, up.name, dict(timings), up.host_key))
        isolated = await set_up(tools, machine, up, timings)
    tools.report(MachineReady(machine.id, timings, isolated=isolated))


async def _its_turn(tools: Tools, machine: MachineState) -> None:
    """One of many machines that are started at once may have to wait until its place lets us ask for it."""
    wait_s = seconds_between(tools.clock.now(), machine.requested_at)
    if machine.phase == "requested" and wait_s > 0:
        await asyncio.sleep(wait_s)


class _LeftWaiting(Exception):
    """Its service has not started the machine in the time that its offer gives it."""


async def _leave_queue(tools: Tools, machine: MachineState) -> Machine | None:
    """Wait until its service has started it, or shows it no more: for as long as its offer says."""
    queued_at = machine.queued_at
    if machine.phase == "requested":
        limit_s = tools.state.limits.boot_timeout_s  # `Lifetime.boot_s` counts from its start
        async with asyncio.timeout(_time_left_s(tools, limit_s, machine.requested_at)):
            await _create(tools, machine)
            seen = await _once(tools, machine, lambda seen: seen is not None)
        if seen is not None and seen.phase == "queued":
            tools.report(MachineQueued(machine.id, seen.detail))
            queued_at = tools.clock.now()
    queue_s, said, said_at = machine.offer.life.max_queue_s, "", tools.clock.now()

    def is_over(seen: Machine | None) -> bool:
        nonlocal said, said_at
        if seen is None or seen.phase != "queued":
            return True
        now = tools.clock.now()
        if queue_s is not None and queued_at is not None and now >= after(queued_at, queue_s):
            raise _LeftWaiting(
                f"it waited for {queue_s:g} s in the queue (queue_s); {seen.detail}".rstrip("; ")
            )
        if seen.detail not in (said, machine.detail) and now >= said_at:
            said, said_at = seen.detail, after(now, SAID_S)
            tools.report(MachineQueued(machine.id, said))
        return False

    return await _once(tools, machine, is_over)


def started_at(tools: Tools, seen: Machine) -> Micros:
    """When its service started the machine, by our clock."""
    return after(tools.clock.now(), -(seen.ran_s or 0.0))


def _report_ended_in_queue(tools: Tools, machine: MachineState, seen: Machine | None) -> None:
    """It may have run, and cost something, while nobody looked."""
    if seen is not None and seen.ran_s:
        tools.report(MachineAllocated(machine.id, started_at(tools, seen), seen.start, seen.node))
    if seen is not None and seen.phase == "gone" and not seen.start and seen.detail:
        # its service will not have it, and says why: another one would fare alike
        tools.report(MachineCondemned(machine.id, seen.detail, Cause.PROVISIONING, scope="offer"))
    else:
        report_gone(tools, machine, seen)


async def set_up(
    tools: Tools, machine: MachineState, seen: Machine | None, timings: dict[str, float]
) -> Isolated:
    """Bring the benchmark's files there, run its steps, and wait until it is ready for work.

    Returns how attempts will be kept apart there.
    """
    await tools.has_files()
    channel, bundle = tools.channel(machine, seen), tools.benchmark.bundle
    left = tools.artefacts / MACHINES / safe_name(machine.id)
    tell = StepTeller(tools, machine.id)
    isolated = await _patiently(tools, lambda: _isolated(tools, machine, channel))
    if (metering := tools.state.plan.metering) is not None and isinstance(channel, HostChannel):
        await _patiently(tools, lambda: channel.meter(metering))
    preparing = _patiently(tools, lambda: channel.prepare(bundle, left, tell))
    steps = await _timed(tools, timings, "setup", preparing)
    if tools.files is not None:
        await _patiently(tools, lambda: _bring_score_files(tools, channel))
    timings.update({f"setup.{name}": round(seconds, 3) for name, seconds in steps.items()})
    await _timed(tools, timings, "probe", _patiently(tools, lambda: _until_ready(tools, channel)))
    return isolated


async def _bring_score_files(tools: Tools, channel: Channel) -> None:
    task = next(iter(tools.state.tasks.values()), None)
    scorer = tools.scorer(task.task, AttemptId(f"{task.task.id}.0")) if task is not None else None
    if scorer is not None and scorer.bundle.digest:
        await channel.prepare(scorer.bundle)


async def _isolated(tools: Tools, machine: MachineState, channel: Channel) -> Isolated:
    wanted = tools.state.plan.isolation.get(machine.offer.place, "")
    if not wanted or not isinstance(channel, HostChannel):
        return Isolated()
    return await channel.isolate(wanted)


class StepTeller:
    """A teller that records each step as it begins, and now and then what a step says, for those who wait."""

    def __init__(self, tools: Tools, machine: MachineId) -> None:
        self._tools = tools
        self._machine = machine
        self._next: Micros = 0

    def __call__(self, step: str, said: str) -> None:
        now = self._tools.clock.now()
        if not said or now >= self._next:
            self._next = after(now, SAID_S if said else FIRST_SAID_S)
            self._tools.report(MachineStep(self._machine, step, said))


def _came_up(seconds: float, seen: Machine) -> dict[str, float]:
    """The seconds of each step until it was up: what its place does not account for was its boot."""
    told = sum(took for step, took in seen.timings.items() if "." not in step)
    return {"boot": round(max(0.0, seconds - told), 3), **seen.timings}


def _time_left_s(tools: Tools, limit_s: float, begun: Micros) -> float:
    """What is left of the time to boot; a controller that has just come gives it a moment."""
    return max(limit_s - seconds_between(begun, tools.clock.now()), min(limit_s, BOOT_LOOK_S))


class _NeverStarted(Exception):
    """Its place says that the machine runs, but nothing of ours answers there."""


async def _boot_in_time(tools: Tools, machine: MachineState, begun: Micros) -> Machine:
    """A service may say for hours that a job runs whose container never started."""
    limit_s = (machine.offer.life.boot_s or SERVICE_START_S) if machine.offer.life.queues else None
    if limit_s is None:
        return await _boot(tools, machine)
    spent_s = seconds_between(begun, tools.clock.now())
    start = _StartTeller(tools, machine.id)
    try:
        async with asyncio.timeout(max(limit_s - spent_s, min(limit_s, BOOT_LOOK_S))):
            return await _boot(tools, machine, start)
    except TimeoutError:
        detail = f"it has run for {limit_s:g} s, and our supervisor has not started there"
        raise _NeverStarted("; ".join(filter(None, (detail, start.said)))) from None


class _StartTeller:
    """Waits for a machine to be up, and records what its service says meanwhile: that is what it hung in."""

    def __init__(self, tools: Tools, machine: MachineId) -> None:
        self._tools, self._machine = tools, machine
        self._next: Micros = 0
        self._told = ("", "")
        self.said = ""

    def is_over(self, seen: Machine | None) -> bool:
        if seen is None or seen.phase != "pending":
            return True
        self.said, now = seen.detail, self._tools.clock.now()
        telling = (seen.step or SERVICE_STEP, seen.detail)
        if seen.detail and telling != self._told and now >= self._next:
            self._told, self._next = telling, after(now, FIRST_SAID_S)
            self._tools.report(MachineStep(self._machine, *telling))
        return False


async def _boot(tools: Tools, machine: MachineState, start: _StartTeller | None = None) -> Machine:
    """Create the machine and wait until its place says that it is up, or gone again."""
    if not machine.offer.life.queues:
        await _create(tools, machine)
        seen = await _once(tools, machine, lambda seen: seen is not None and seen.phase != "pending")
    else:
        start = start or _StartTeller(tools, machine.id)
        seen = await _once(tools, machine, start.is_over)
    return seen or Machine(machine.id, "gone")


async def _create(tools: Tools, machine: MachineState) -> None:
    place = tools.place_of(machine)

    def create() -> Awaitable[None]:
        without = kept_out(tools.state, place.name)
        offer = structs.replace(machine.offer, without=without) if without else machine.offer
        return place.create(machine.id, offer, lifetime_s(tools, machine, machine.ends_at))

    await tools.persist(create, PROVISIONING_TRIES)


async def _once(
    tools: Tools, machine: MachineState, good: Callable[[Machine | None], bool]
) -> Machine | None:
    """The machine as its place shows it, once that is good."""
    delay = tools.pace.poll_s
    while not good(seen := await tools.find(machine)):
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, tools.pace.poll_cap_s)
    return seen


async def _timed(tools: Tools, timings: dict[str, float], name: str, work: Awaitable[T]) -> T:
    start = tools.clock.now()
    done = await work
    timings[name] = round(seconds_between(start, tools.clock.now()), 3)
    return done


async def _patiently(tools: Tools, call: Callable[[], Awaitable[T]]) -> T:
    """A machine that has just come up may not answer yet, and our own network may be down."""
    until = after(tools.clock.now(), tools.state.limits.fleet_lost_s)
    while True:
        try:
            return await call()
        except (SetupFailed, StaleController, MachineForged):
            raise
        except ChannelError:
            if tools.clock.now() >= until:
                raise
            check_wanted()
            await asyncio.sleep(tools.pace.poll_s * 5)


async def _until_ready(tools: Tools, channel: Channel) -> None:
    delay = tools.pace.poll_s
    while not await channel.probe(tools.benchmark.probe):
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, tools.pace.poll_cap_s)


# -- while it lives ------------------------------------------------------------------------------


async def extend(tools: Tools, machine: MachineState, expires_at: Micros) -> None:
    """Move the time at which the place ends it by itself."""
    place = tools.place_of(machine)
    if not isinstance(place, Extendable):
        return
    extendable = place
    try:
        await tools.persist(
            lambda: extendable.extend(machine.id, lifetime_s(tools, machine, expires_at)), None
        )
    except PlaceError:
        return  # it ends by itself at the expiry it has; policy ends it before
    tools.report(MachineLeaseSet(machine.id, expires_at))


def lifetime_s(tools: Tools, machine: MachineState, expires_at: Micros) -> float:
    """Places are given durations: their clocks need not agree with ours, but calls take time.

    That of a machine which waits in a queue begins when it starts.
    """
    margin = min(CALL_MARGIN_S, machine.offer.life.teardown_s / 4)
    begin = machine.billed_at if machine.unstarted else tools.clock.now()
    return max(0.0, seconds_between(begin, expires_at) - margin)


async def find_offers(tools: Tools, place: Place, needs: Needs) -> Sequence[Offer]:
    """Return the place's offers."""
    kinds = [kind for kind in tools.state.kinds if kind is not None]
    return await offers_by_kind(
        lambda all_needs: tools.persist(lambda: place.offers(all_needs), OFFER_TRIES), needs, kinds
    )


async def offers_by_kind(
    ask: Callable[[Needs], Awaitable[Sequence[Offer]]], needs: Needs, kinds: Sequence[Needs]
) -> Sequence[Offer]:
    """A place's offers of machines that do for the benchmark, and of those that do for tasks which need more.

    Each says what its machines have. Raises PlaceError if the place has none that do for the benchmark.
    """
    offers = {offer.key: offer for offer in await ask(needs)}
    for kind in kinds:
        wanted = needs.joined(kind)
        try:
            found = await ask(wanted)
        except PlaceError:
            continue  # the place has no such machines; another may
        for offer in found:
            known = offers.get(offer.key, offer)
            offers[offer.key] = structs.replace(known, has=known.has.joined(wanted))
    return list(offers.values())


async def survey(tools: Tools, place: Place) -> None:
    """Report machines that their place shows as ended, or no more."""
    state = tools.state
    known = [m for i in state.undeleted if (m := state.machines[i]).offer.place == place.name]
    watched = [m for m in known if m.phase in ("up", "ready")]
    if not watched:
        return
    try:
        seen = await tools.listing(place).fresh()
    except (PlaceError, OSError):
        return  # no answer is no news
    for machine in watched:
        found = seen.get(machine.id)
        if found is None or found.phase not in ("pending", "up") or found.start != machine.start:
            report_gone(tools, machine, found)


def report_gone(tools: Tools, machine: MachineState, seen: Machine | None) -> None:
    """Report the end of a machine. It was evicted only if its place says so of the start that we know: what
    runs on a machine may cause another start, or forge the name of one."""
    cause, detail = Cause.MACHINE_LOST, "the place no longer shows it"
    if seen is not None and seen.phase == "evicted" and machine.start in ("", seen.start):
        cause, detail = Cause.EVICTED, "the place took it back"
    elif seen is not None and seen.phase != "gone":
        detail = RESTARTED
    if seen is not None and seen.phase in ("gone", "evicted") and seen.detail:
        detail = f"{detail} ({seen.detail})" if cause is Cause.EVICTED else seen.detail
    why = MachineCondemned(machine.id, detail, cause)
    if seen is None:
        tools.report(why)  # there is no disk to keep
    else:
        tools.give_up(why)


# -- stopped -------------------------------------------------------------------------------------


async def stop(tools: Tools, machine: MachineState) -> None:
    """Stop it, and wait until its place says so. What it has on its disk stays."""
    place = tools.place_of(machine)
    await tools.drop_channel(machine.id)
    if isinstance(place, Stoppable):
        stoppable = place
        try:
            await tools.persist(lambda: stoppable.stop(machine.id), None)
        except NoSuchMachine:
            report_gone(tools, machine, None)
            return
    tools.report(MachineStopped(machine.id))


# -- down ----------------------------------------------------------------------------------------


async def tear_down(tools: Tools, machine: MachineState) -> None:
    """Delete until it is absent from two listings `settle_s` apart: a create may land late."""
    await tools.drop_channel(machine.id)
    place = tools.place_of(machine)
    queued_at = await _last_queued(tools, machine) if machine.unstarted else None
    gone_at: Micros | None = None
    refused, pause = "", tools.pace.poll_s
    while True:
        if gone_at is None:  # else look first: one that landed meanwhile is paid until it is gone again
            refused = await _delete(tools, place, machine)
        if not await _absent(tools, machine):
            gone_at = None
            if refused:
                tools.report(MachineDeleteRefused(machine.id, refused))
            await asyncio.sleep(pause)
            pause = min(pause * 2, tools.pace.poll_cap_s * 3) if refused else tools.pace.poll_s
        elif gone_at is None and machine.offer.life.settle_s > 0:
            gone_at = tools.clock.now()
            await asyncio.sleep(machine.offer.life.settle_s)
        else:
            break
    gone_at = gone_at or tools.clock.now()
    unseen_s = None if queued_at is None else seconds_between(queued_at, gone_at)
    tools.report(MachineDeleted(machine.id, gone_at, unseen_s))


async def _delete(tools: Tools, place: Place, machine: MachineState) -> str:
    """Ask for its deletion. Returns what is wrong with it: whether it is gone, only the listing tells."""
    try:
        await tools.persist(lambda: place.delete(machine.id), PROVISIONING_TRIES)
    except (PlaceError, OSError) as err:
        return str(err)
    return ""


async def _last_queued(tools: Tools, machine: MachineState) -> Micros | None:
    """When it was last seen waiting: it may start, and cost something, before its delete gets there.

    None if it has run (that is reported, with how long) or never existed.
    """
    asked_at = tools.clock.now()
    seen: Machine | None = None
    with suppress(PlaceError):  # refused for good: then nobody can tell
        seen = await tools.find(machine)
    if seen is not None and (seen.ran_s or seen.phase in ("pending", "up")):
        tools.report(MachineAllocated(machine.id, started_at(tools, seen), seen.start, seen.node))
    elif seen is not None and seen.phase == "queued":
        return asked_at
    return None


async def _absent(tools: Tools, machine: MachineState) -> bool:
    """Is the machine not shown at all? A dead one that is still listed may still hold a lock or a disk."""
    try:
        return await tools.find(machine) is None
    except PlaceError as err:  # refused for good, now: credentials may come back
        log.warning("cannot tell whether %s is gone: %s", machine.id, err)
        await asyncio.sleep(tools.pace.poll_cap_s)
        return False
