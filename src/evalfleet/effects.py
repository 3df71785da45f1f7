"""Effects: what the engine has under way in the world, and what it reports back as events.

Each may be started again at any time, by this controller or by its successor: every call it makes is
idempotent by the names that the journal holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from .errors import ChannelError, FleetError, ProviderError, SetupFailed, StaleController
from .events import (
    AttemptCollected,
    AttemptEnded,
    Event,
    MachineCondemned,
    MachineDeleted,
    MachineHeard,
    MachineLeaseSet,
    MachineReady,
    MachineSilent,
    MachineUp,
)
from .listing import Listing
from .model import (
    AttemptId,
    Broken,
    Cause,
    Collected,
    Ended,
    Job,
    Machine,
    MachineId,
    Micros,
    Needs,
    Offer,
    Outcome,
    Scored,
    Task,
    after,
    seconds_between,
)
from .names import safe_name
from .policy import BringUp, Collect, Effect, Extend, RunAttempt, TearDown
from .ports import Benchmark, Channel, Clock, Fence, Provider
from .state import AttemptState, MachineState, RunState

T = TypeVar("T")

log = logging.getLogger(__name__)

COLLECT_LIMIT_S = 600.0
DOWNLOADS_AT_ONCE = 8
PROVISIONING_TRIES = 3
SETUP_SILENCES = 10
CALL_MARGIN_S = 5.0
BOOT_LOOK_S = 120.0
UNREACHABLE = frozenset({Cause.MACHINE_LOST, Cause.EVICTED, Cause.CONNECTION, Cause.BOOT, Cause.PROVISIONING})


class Pace(Protocol):
    """The part of the engine's tempo that effects need."""

    @property
    def poll_s(self) -> float: ...

    @property
    def poll_cap_s(self) -> float: ...


class Performer:
    """Performs effects against places and channels. Reads the state; never changes it."""

    def __init__(
        self,
        state: RunState,
        places: Mapping[str, Provider],
        benchmark: Benchmark,
        clock: Clock,
        artefacts: Path,
        epoch: int,
        pace: Pace,
        report: Callable[[Event], None],
    ) -> None:
        self._state = state
        self._places = places
        self._benchmark = benchmark
        self._clock = clock
        self._artefacts = artefacts
        self._epoch = epoch
        self._pace = pace
        self._report = report
        self._channels: dict[MachineId, Channel] = {}
        self._listings: dict[str, Listing] = {}
        self._downloads = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

    async def perform(self, effect: Effect) -> None:
        """Until it is done and reported. Raises FleetError only when the controller must stop."""
        while True:
            try:
                return await self._perform(effect)
            except FleetError:
                raise
            except Exception as err:  # a bug in a plug-in must not take the run down
                if not threading.main_thread().is_alive():
                    raise asyncio.CancelledError from err  # Python is ending and takes its executors away
                log.exception("%r failed", effect)
                if not isinstance(effect, TearDown):
                    return self._report_bug(effect, f"{type(err).__name__}: {err}")
            await asyncio.sleep(self._pace.poll_cap_s)  # a machine must go, whatever it takes

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case BringUp(machine):
                await self._bring_up(self._state.machines[machine])
            case Extend(machine, expires_at):
                await self._extend(self._state.machines[machine], expires_at)
            case RunAttempt(attempt):
                await self._run_attempt(self._state.attempts[attempt])
            case Collect(attempt):
                await self._collect(self._state.attempts[attempt])
            case TearDown(machine):
                await self._tear_down(self._state.machines[machine])

    def _report_bug(self, effect: Effect, detail: str) -> None:
        match effect:
            case BringUp(machine) | Extend(machine, _) | TearDown(machine):
                self._report(MachineCondemned(machine, detail, Cause.INTERNAL))
            case RunAttempt(attempt):
                machine = self._state.attempts[attempt].machine
                self._report(MachineCondemned(machine, detail, Cause.INTERNAL))
            case Collect(attempt):
                self._report(AttemptCollected(attempt, Collected(problem=detail)))

    def forget(self, attempt: AttemptId) -> None:
        """The attempt's artefacts are home and the journal says so."""
        machine = self._state.attempts[attempt].machine
        if (channel := self._channels.get(machine)) is not None:
            channel.forget(attempt)

    async def close(self) -> None:
        closing = [channel.close() for channel in self._channels.values()]
        self._channels.clear()
        await asyncio.gather(*closing, return_exceptions=True)

    # -- machines ----------------------------------------------------------------------------

    async def _bring_up(self, machine: MachineState) -> None:
        try:
            await self._boot_and_set_up(machine)
        except ProviderError as err:
            self._report(
                MachineCondemned(
                    machine.id, str(err), Cause.PROVISIONING, scope=err.scope, permanent=not err.transient
                )
            )
        except SetupFailed as err:
            self._report(MachineCondemned(machine.id, str(err), Cause.SETUP, step=err.step))
        except StaleController:
            raise
        except ChannelError as err:
            self._report(MachineCondemned(machine.id, str(err), Cause.CONNECTION))
        except TimeoutError:
            cause = Cause.BOOT if machine.up_at is None else Cause.READINESS
            detail = f"not ready after {self._state.limits.boot_timeout_s:g} s ({cause})"
            self._report(MachineCondemned(machine.id, detail, cause))

    async def _boot_and_set_up(self, machine: MachineState) -> None:
        timings: dict[str, float] = {}
        async with asyncio.timeout(self._boot_time_left_s(machine)):
            if machine.phase == "requested" and not await self._boot(machine):
                return
            channel = self._channel(machine)
            bundle = self._benchmark.bundle
            await self._timed(timings, "setup", self._patiently(lambda: channel.prepare(bundle)))
            await self._timed(timings, "probe", self._patiently(lambda: self._until_ready(channel)))
        if machine.up_at is not None:
            timings["boot"] = seconds_between(machine.requested_at, machine.up_at)
        self._report(MachineReady(machine.id, timings))

    def _boot_time_left_s(self, machine: MachineState) -> float:
        """Counted from the request, whoever made it; a controller that has just come gives it a moment."""
        limit = self._state.limits.boot_timeout_s
        spent = seconds_between(machine.requested_at, self._clock.now())
        return max(limit - spent, min(limit, BOOT_LOOK_S))

    async def _boot(self, machine: MachineState) -> bool:
        """Create the machine and wait until it is up. False: it was gone again and is condemned."""
        place = self._places[machine.offer.place]
        await self._persist(
            lambda: place.create(machine.id, machine.offer, self._lifetime_s(machine, machine.expires_at)),
            PROVISIONING_TRIES,
        )
        delay = self._pace.poll_s
        while True:
            seen = await self._find(machine)
            if seen is not None and seen.phase == "up":
                machine_up = MachineUp(machine.id, seen.address, seen.node)
                self._report(machine_up)
                await self._recorded(lambda: machine.phase != "requested")
                return True
            if seen is not None and seen.phase in ("gone", "evicted"):
                self._report_gone(machine, seen)
                return False
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, self._pace.poll_cap_s)

    async def _recorded(self, done: Callable[[], bool]) -> None:
        """Wait until what was just reported is part of the state."""
        while not done():
            await asyncio.sleep(self._pace.poll_s / 20)

    async def _timed(self, timings: dict[str, float], name: str, work: Awaitable[None]) -> None:
        start = self._clock.now()
        await work
        timings[name] = round(seconds_between(start, self._clock.now()), 3)

    async def _patiently(self, call: Callable[[], Awaitable[None]]) -> None:
        """A machine that has just come up may not answer yet, and our own network may be down."""
        for _ in range(SETUP_SILENCES - 1):
            try:
                return await call()
            except (SetupFailed, StaleController):
                raise
            except ChannelError:
                await asyncio.sleep(self._pace.poll_s * 5)
        return await call()

    async def _until_ready(self, channel: Channel) -> None:
        delay = self._pace.poll_s
        while not await channel.probe(self._benchmark.probe):
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, self._pace.poll_cap_s)

    async def _extend(self, machine: MachineState, expires_at: Micros) -> None:
        place = self._places[machine.offer.place]
        try:
            await self._persist(lambda: place.extend(machine.id, self._lifetime_s(machine, expires_at)), None)
        except ProviderError:
            return  # it ends by itself at the expiry it has; policy ends it before
        self._report(MachineLeaseSet(machine.id, expires_at))

    def _lifetime_s(self, machine: MachineState, expires_at: Micros) -> float:
        """Places are given durations: their clocks need not agree with ours, but calls take time."""
        margin = min(CALL_MARGIN_S, machine.offer.teardown_s / 4)
        return max(0.0, seconds_between(self._clock.now(), expires_at) - margin)

    async def _tear_down(self, machine: MachineState) -> None:
        """Delete until it is absent from two listings `settle_s` apart: a create may land late."""
        await self._drop_channel(machine.id)
        place = self._places[machine.offer.place]
        gone_at: Micros | None = None
        while True:
            with suppress(ProviderError, OSError):  # whatever it answers, only the listing tells
                await self._persist(lambda: place.delete(machine.id), PROVISIONING_TRIES)
            if await self._absent(machine):
                if gone_at is not None or machine.offer.settle_s <= 0:
                    break
                gone_at = self._clock.now()
                await asyncio.sleep(machine.offer.settle_s)
            else:
                gone_at = None
                await asyncio.sleep(self._pace.poll_s)
        self._report(MachineDeleted(machine.id, gone_at or self._clock.now()))

    async def _absent(self, machine: MachineState) -> bool:
        """Not shown at all: a dead machine that is still listed may still hold a lock or a disk."""
        try:
            return await self._find(machine) is None
        except ProviderError as err:  # refused for good, now: credentials may come back
            log.warning("cannot tell whether %s is gone: %s", machine.id, err)
            await asyncio.sleep(self._pace.poll_cap_s)
            return False

    async def offers(self, place: Provider, needs: Needs) -> Sequence[Offer]:
        return await self._persist(lambda: place.offers(needs), 5)

    async def survey(self, place: Provider) -> None:
        """Report machines that their place no longer shows, or shows as ended."""
        known = [m for i in self._state.undeleted if (m := self._state.machines[i]).offer.place == place.name]
        watched = [m for m in known if m.phase in ("up", "ready")]
        if not watched:
            return
        try:
            seen = await self._listing(place).fresh()
        except (ProviderError, OSError):
            return  # no answer is no news
        for machine in watched:
            found = seen.get(machine.id)
            if found is None or found.phase in ("gone", "evicted"):
                self._report_gone(machine, found)

    def _report_gone(self, machine: MachineState, seen: Machine | None) -> None:
        evicted = seen is not None and seen.phase == "evicted"
        cause = Cause.EVICTED if evicted else Cause.MACHINE_LOST
        detail = "the place took it back" if evicted else "the place no longer shows it"
        self._report(MachineCondemned(machine.id, detail, cause))

    def _listing(self, place: Provider) -> Listing:
        if place.name not in self._listings:
            prefix = f"{self._state.plan.run}-{self._state.plan.home}"
            self._listings[place.name] = Listing(place, prefix)
        return self._listings[place.name]

    async def _find(self, machine: MachineState) -> Machine | None:
        listing = self._listing(self._places[machine.offer.place])
        return (await self._persist(listing.fresh, None)).get(machine.id)

    async def _persist(self, call: Callable[[], Awaitable[T]], tries: int | None) -> T:
        """Make the call until it succeeds, is refused for good, or `tries` are used up."""
        delay = self._pace.poll_s * 5
        tried = 0
        while True:
            try:
                return await call()
            except ProviderError as err:
                tried += 1
                if not err.transient or tried == tries:
                    raise
                await asyncio.sleep(max(err.retry_after_s or 0.0, delay))
            delay = min(delay * 2, self._pace.poll_cap_s * 3)

    def _channel(self, machine: MachineState) -> Channel:
        if machine.id not in self._channels:
            seen = Machine(machine.id, "up", machine.address, machine.node)
            fence = Fence(self._state.plan.run, self._epoch, self._state.limits.silent_s)
            self._channels[machine.id] = self._places[machine.offer.place].channel(seen, fence)
        return self._channels[machine.id]

    async def _drop_channel(self, machine: MachineId) -> None:
        if (channel := self._channels.pop(machine, None)) is not None:
            with suppress(FleetError, OSError):
                await channel.close()

    # -- attempts ----------------------------------------------------------------------------

    async def _run_attempt(self, attempt: AttemptState) -> None:
        machine = self._state.machines[attempt.machine]
        task = self._state.tasks[attempt.task].task
        channel = self._channel(machine)
        limits = self._state.limits
        job = Job(
            attempt.id,
            self._benchmark.command(task, attempt.id),
            task.timeout_s,
            self._benchmark.bundle.digest,
            limits.lease_s,
        )
        # the host ends the attempt at its limit; this only catches a host that does not. The second look
        # is for a controller that was stopped for long: what it waited for may have happened meanwhile
        for patience_s in (task.timeout_s + limits.grace_s, 2 * limits.silent_s):
            try:
                async with asyncio.timeout(patience_s):
                    ended = await self._to_the_end(channel, job, machine)
                    outcome = await self._judge(channel, task, ended)
            except TimeoutError:
                continue
            seconds, node = round(ended.seconds, 3), ended.node or machine.node
            self._report(AttemptEnded(attempt.id, outcome, seconds, node))
            return
        detail = f"{attempt.id} was not ended at its limit of {task.timeout_s:g} s"
        self._report(MachineCondemned(machine.id, detail, Cause.STUCK))

    async def _to_the_end(self, channel: Channel, job: Job, machine: MachineState) -> Ended:
        while True:
            try:
                await channel.start(job)
                if machine.silent_since is not None:
                    self._report(MachineHeard(machine.id))
                return await channel.ended(job.id)
            except StaleController:
                raise
            except ChannelError:
                since = after(self._clock.now(), -self._state.limits.silent_s)
                self._report(MachineSilent(machine.id, since))
                await asyncio.sleep(self._pace.poll_s * 5)

    async def _judge(self, channel: Channel, task: Task, ended: Ended) -> Outcome:
        healthy = True
        if ended.reason == "timed_out" and ended.result is None:
            healthy = await self._answers(channel)
        return self._benchmark.outcome(task, ended, healthy)

    async def _answers(self, channel: Channel) -> bool:
        try:
            return await channel.probe(self._benchmark.probe)
        except StaleController:
            raise
        except ChannelError:
            return False

    async def _collect(self, attempt: AttemptState) -> None:
        """Bring the artefacts home. Trouble with them never touches the outcome."""
        machine = self._state.machines[attempt.machine]
        if machine.phase == "condemned" and machine.cause in UNREACHABLE:
            self._report(AttemptCollected(attempt.id, Collected(problem="the machine is gone")))
            return
        superseded: Outcome | None = None
        try:
            async with self._downloads, asyncio.timeout(COLLECT_LIMIT_S):
                channel = self._channel(machine)
                if machine.phase == "condemned":
                    superseded = await self._late_result(channel, attempt)
                collected = await channel.collect(attempt.id, self._home_of(attempt))
        except StaleController:
            raise
        except (ChannelError, OSError) as err:  # a TimeoutError is an OSError
            collected = Collected(problem=str(err) or type(err).__name__)
        self._report(AttemptCollected(attempt.id, collected, superseded))

    async def _late_result(self, channel: Channel, attempt: AttemptState) -> Outcome | None:
        """End what still runs of the attempt. A score that it wrote is kept, but no longer counts."""
        await channel.stop(attempt.id)
        if not isinstance(attempt.outcome, Broken):
            return None
        ended = await channel.ended(attempt.id)
        outcome = self._benchmark.outcome(self._state.tasks[attempt.task].task, ended, True)
        return outcome if isinstance(outcome, Scored) and ended.result is not None else None

    def _home_of(self, attempt: AttemptState) -> Path:
        return self._artefacts / safe_name(attempt.task) / safe_name(attempt.id)
