"""A world that outlives controllers, as a cloud does: machines, jobs, meters, and what went wrong.

It watches the invariants that can only be seen at the moment they break, and writes violations down.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from evalfleet.channels.supervisor.host import HostClock, expiry_in, seconds_to
from evalfleet.errors import ChannelError, PlaceError, StaleController
from evalfleet.model import (
    SECOND,
    AttemptId,
    Ended,
    EndReason,
    Job,
    MachineId,
    Micros,
    Offer,
    after,
    seconds_between,
)

from .loop import SimComputer, SimLoop


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad a simulated world is. Chances are per call, machine or job; spans are seconds. All zero: it is
    perfect."""

    call_fails: float = 0.0
    call_throttled: float = 0.0
    refused_for_good: float = 0.0
    create_lands_late_s: float = 1.0
    never_boots: float = 0.0
    boot_s: tuple[float, float] = (30.0, 60.0)
    setup_fails: float = 0.0
    machine_dies_every_s: float = 0.0
    machine_freezes_every_s: float = 0.0
    freeze_s: tuple[float, float] = (20.0, 900.0)
    machine_hangs_every_s: float = 0.0
    hangs_from_boot: float = 0.0
    evicted_every_s: float = 0.0
    eviction_notice_s: float = 0.0
    channel_fails: float = 0.0
    job_hangs: float = 0.0
    job_breaks: float = 0.0
    grader_fails: float = 0.0
    queue_s: tuple[float, float] = (0.0, 3600.0)
    service_restarts_every_s: float = 0.0
    controller_crashes: int = 0
    crash_every_s: float = 2000.0
    take_over: float = 0.0
    reboots: float = 0.0  # that a crash of the controller is one of its computer
    lies: float = 0.0  # that a machine answers anything: see places.LyingChannel
    forges: float = 0.0  # that something else than our supervisor answers on it from the start
    clocks_set_every_s: float = 0.0  # somebody sets the wall clock of a machine
    clocks_set_by_s: float = 0.0  # at most so far from the truth, either way
    clocks_strobe: float = 0.0  # that a machine's wall clock jumps to and fro all the time
    host_reboots_every_s: float = 0.0  # a lent host boots anew, and is off for a while
    latency_s: tuple[float, float] = (0.05, 2.0)
    commit_s: tuple[float, float] = (0.001, 0.02)

    @property
    def calm(self) -> bool:
        """Nothing fails but, perhaps, controllers, their own network, and machines that lie."""
        return not (
            self.call_fails
            or self.never_boots
            or self.setup_fails
            or self.channel_fails
            or self.job_hangs
            or self.job_breaks
            or self.machine_dies_every_s
            or self.machine_freezes_every_s
            or self.machine_hangs_every_s
            or self.hangs_from_boot
            or self.evicted_every_s
            or self.service_restarts_every_s
            or self.host_reboots_every_s
        )


@dataclass(frozen=True, slots=True)
class Trouble:
    """What befalls one place and no other."""

    place: str
    breaks: float = 0.0
    """The chance that a job there breaks; another such chance is that a machine there never boots."""
    never_boots: float = 0.0
    away: tuple[tuple[float, float], ...] = ()
    """From when until when nothing of it answers. Its machines are gone when it goes away."""


def draw_faults(rng: random.Random) -> Faults:
    """A world somewhere between calm and awful."""
    misery = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0))
    return Faults(
        machine_hangs_every_s=rng.choice((0.0, 6000.0)) * (misery > 0),
        hangs_from_boot=0.04 * misery,
        eviction_notice_s=rng.choice((0.0, 30.0)),
        call_fails=0.04 * misery,
        call_throttled=0.04 * misery,
        refused_for_good=rng.choice((0.0, 0.0, 0.02)) * misery,
        create_lands_late_s=rng.uniform(1.0, 40.0),
        never_boots=0.04 * misery,
        boot_s=(30.0, rng.choice((60.0, 300.0, 900.0))),
        setup_fails=0.05 * misery,
        machine_dies_every_s=rng.choice((0.0, 7200.0, 3000.0)) * (misery > 0),
        machine_freezes_every_s=rng.choice((0.0, 5000.0)) * (misery > 0),
        evicted_every_s=rng.choice((0.0, 4000.0)) * (misery > 0),
        channel_fails=0.02 * misery,
        job_hangs=0.03 * misery,
        job_breaks=0.08 * misery,
        grader_fails=0.01 * misery,
        queue_s=rng.choice(((0.0, 60.0), (0.0, 3600.0), (0.0, 3600.0))),
        service_restarts_every_s=rng.choice((0.0, 5000.0)) * (misery > 0),
        controller_crashes=rng.choice((0, 2, 5, 9)),
        crash_every_s=rng.choice((300.0, 2000.0)),
        take_over=rng.choice((0.0, 0.5)),
        reboots=rng.choice((0.0, 0.0, 0.5)),
        lies=rng.choice((0.0, 0.0, 0.1, 0.3)),
    )


def draw_clocks(faults: Faults, rng: random.Random) -> Faults:
    """The same world with what befalls the clocks of its machines."""
    return replace(
        faults,
        clocks_set_every_s=rng.choice((0.0, 300.0, 4000.0)),
        clocks_set_by_s=rng.choice((2.0, 100.0)) * 3600,
        clocks_strobe=rng.choice((0.0, 0.3)),
        host_reboots_every_s=rng.choice((0.0, 5000.0)) * (not faults.calm),
    )


HANGS = float("inf")
"""How long a job runs that does nothing any more."""
STROBES = ((0.7, 7200.0), (40.0, -9000.0))
"""How wall clocks jump to and fro: every so many seconds, by so many."""
OFF_S = (20.0, 200.0)
"""How long a host is off when it boots anew."""
INEXACT_S = 0.01
"""So much may times differ that were counted by other clocks: they are rounded."""
HOPELESS = 3
"""So many mends would help a machine that nothing helps: places know two."""


@dataclass(slots=True, eq=False)
class Life:
    """One controller process. Dead: nothing it still does may reach the world.

    `held` is what would run if its computer did not sleep; None: it is awake.
    """

    epoch: int = 0
    alive: bool = True
    held: list[Callable[[], object]] | None = None


@dataclass(slots=True)
class Bill:
    """What a place bills one machine for: in full until `end`, its disk and address until `swept`.

    `off_s`: how long the machine was off since it was told when it expires. It cannot know of that for sure.
    """

    machine: MachineId
    offer: Offer
    start: Micros
    expires_at: Micros
    end: Micros | None = None
    swept: Micros | None = None
    off_s: float = 0.0


class SimHostClock(HostClock):
    """The clocks of one machine, as its supervisor reads them."""

    def __init__(self, machine: MachineId, computer: SimComputer) -> None:
        self._machine, self._computer = machine, computer

    @property
    def boot(self) -> str:
        return self._computer.boot

    @property
    def host(self) -> str:
        return self._machine

    def wall(self) -> float:
        return self._computer.wall() / SECOND

    def steady(self) -> float:
        return self._computer.steady() / SECOND


@dataclass(slots=True, eq=False)
class SimJob:
    """One job. Whoever supervises it knows when it `began` by the machine's clock, the world in truth."""

    id: AttemptId
    ends_at: float
    end: Ended
    began: float = 0.0
    began_at: float = 0.0
    stood_s: float = 0.0  # it stood still, with its machine
    ended: Ended | None = None
    after: str = ""
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    def wake(self) -> None:
        """Let all who wait for news of it look again."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


@dataclass(slots=True, eq=False)
class SimMachine:
    """One machine, lent host or job of a service, whatever kind of place it is in."""

    id: MachineId
    boots_at: float
    meter: Bill
    computer: SimComputer
    queued: bool = False
    starts: int = 0  # how often its service has started it
    ran_s: float = 0.0  # in its earlier starts
    node: str = ""
    gone: bool = False
    evicted: bool = False
    frozen_until: float = 0.0
    hangs: int = 0  # nothing reaches it until so many mends more
    leaving: bool = False  # its place has announced to take it back
    lies: bool = False  # what it says may be anything
    expiry: dict[str, Any] | None = None  # what a lent host has on its disk of when it is free again
    left_s: float = HANGS  # of its life, when it last went off
    epoch: int = 0
    jobs: dict[AttemptId, SimJob] = field(default_factory=dict[AttemptId, SimJob])
    open: list[SimJob] = field(default_factory=list[SimJob])  # those of `jobs` that may still run
    prepared: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    @property
    def clock(self) -> SimHostClock:
        return SimHostClock(self.id, self.computer)


class World:
    def __init__(self, seed: int, loop: SimLoop, faults: Faults, slots: int = 1) -> None:
        self.rng = random.Random(seed)
        self._own = contextvars.Context()
        self.loop = loop
        self.faults = faults
        self.slots = slots
        self.machines: dict[MachineId, SimMachine] = {}
        self.meters: list[Bill] = []
        self.started: dict[AttemptId, MachineId] = {}
        self.ended: dict[AttemptId, Ended] = {}  # of all jobs, how they ended in truth
        self.liars: set[MachineId] = set()
        self.forged: set[MachineId] = set()
        self.lent: set[MachineId] = set()  # hosts that end by themselves: there is no place that could
        self.lying = random.Random(f"lies {seed}")
        self.booting = random.Random(f"boots of hosts {seed}")
        self.untold_s = 0.0  # that passed, and no clock could tell the run's controllers
        self.channel_class: Any = None  # how machines are reached, if not as usual
        self.durable: set[str] = set()  # ids whose intent is on disk: the only ones we may act on
        self.marks: Counter[str] = Counter()  # what scripts left behind, to be counted by tests
        self.violations: list[str] = []
        self.refusals = 0
        self.asked_at: dict[str, deque[float]] = {}  # by area, as many as may be asked for in a minute
        self.throttled = 0  # so often a machine was asked for too soon
        self.offline_until = 0.0  # an outage of our own network: the world is well
        self.api_lost_until = 0.0  # the service answers nobody: its machines are well
        self.ticks = 0
        self.troubles: dict[str, Trouble] = {}
        self.breaking = random.Random(f"troubles {seed}")
        self.crash_at_tick: int | None = None
        self.on_crash: Callable[[], None] | None = None

    # -- what every call goes through ------------------------------------------------------------

    async def call(self, life: Life) -> None:
        """The way there: takes time, and the controller may be dead at any step of it."""
        self.tick(life)
        await asyncio.sleep(self.rng.uniform(*self.faults.latency_s))
        self.tick(life)

    def tick(self, life: Life) -> None:
        """A point at which a controller can crash."""
        self.ticks += 1
        if self.ticks == self.crash_at_tick and self.on_crash is not None:
            self.on_crash()
        if not life.alive:
            raise asyncio.CancelledError

    async def place_call(self, life: Life, place: str = "") -> None:
        await self.call(life)
        if self.back_at(place) > self.loop.time():
            raise PlaceError("503 the service is unavailable", transient=True, scope="place")
        if self.loop.time() < self.offline_until:
            raise PlaceError("the network cannot be reached", transient=True)
        if self.chance(self.faults.call_throttled):
            raise PlaceError("429 too many requests", transient=True, retry_after_s=self.rng.uniform(1, 30))
        if self.chance(self.faults.call_fails):
            raise PlaceError("500 internal server error", transient=True)

    def too_soon_s(self, offer: Offer) -> float:
        """How long until its place lets anybody ask for a machine of the offer; 0: this time it does."""
        if offer.creates_a_minute is None:
            return 0.0
        asked = self.asked_at.setdefault(offer.area_key, deque(maxlen=offer.creates_a_minute))
        if len(asked) == asked.maxlen and self.loop.time() < asked[0] + 60.0:
            self.throttled += 1
            return asked[0] + 60.0 - self.loop.time()
        asked.append(self.loop.time())
        return 0.0

    def back_at(self, place: str) -> float:
        """When a place that is away now is there again; 0 if it is not away."""
        trouble = self.troubles.get(place)
        spans = () if trouble is None else trouble.away
        return next((end for start, end in spans if start <= self.loop.time() < end), 0.0)

    def troubled(self, place: str, kind: str) -> bool:
        """Does one more job, or machine, of the place fail?"""
        trouble = self.troubles.get(place)
        if trouble is None:
            return False
        return self.breaking.random() < (trouble.breaks if kind == "job" else trouble.never_boots)

    def lose_place(self, place: str) -> None:
        """All of its machines are gone, and nobody is told."""
        for machine in self.machines.values():
            if machine.meter.offer.place == place and not machine.queued and not machine.gone:
                self.kill(machine)

    def chance(self, p: float) -> bool:
        return p > 0 and self.rng.random() < p

    def later(self, delay_s: float, happens: Callable[..., object], *args: object) -> None:
        """What happens in the world does so whether or not the controller that caused it still lives."""
        self.loop.call_later(delay_s, happens, *args, context=self._own)

    def must_be_durable(self, name: str) -> None:
        if name not in self.durable:
            self.violations.append(f"acted on {name} before it was durable")

    # -- machines ----------------------------------------------------------------------------------

    def bring_up(self, machine: MachineId, offer: Offer, expires_s: float, boot_s: float) -> None:
        """The machine exists and is billed from now on, whoever asked for it and is gone since."""
        if machine in self.machines:
            return
        now, loop = self.loop.now(), self.loop
        meter = Bill(machine, offer, now, after(now, expires_s))
        made = SimMachine(machine, loop.time() + boot_s, meter, SimComputer(loop))
        self.machines[machine] = made
        self._corrupt(made)
        self._wind(made)
        if machine in self.lent:
            made.expiry = expiry_in(expires_s, made.clock)
            self._schedule_reboot(made)
        self.meters.append(meter)
        self.later(expires_s, self._expire, made)
        self._schedule_fate(made, self.faults.machine_dies_every_s, self.kill)
        if offer.spot:
            self._schedule_fate(made, self.faults.evicted_every_s, self._announce)
        self._schedule_fate(made, self.faults.machine_freezes_every_s, self._freeze)
        if offer.mends:
            self._schedule_fate(made, self.faults.machine_hangs_every_s, self._hang)
            if self.chance(self.faults.hangs_from_boot):
                self._hang(made)

    def enqueue(self, machine: MachineId, offer: Offer, life_s: float) -> None:
        """The service has accepted the machine, and starts it some time: then its life and billing begin."""
        if machine not in self.machines:
            meter = Bill(machine, offer, self.loop.now(), self.loop.now())
            made = SimMachine(machine, 0.0, meter, SimComputer(self.loop), queued=True)
            self.machines[machine] = made
            self._corrupt(made)
            self._wind(made)
            self.later(self.rng.uniform(*self.faults.queue_s), self._allocate, made, life_s)

    def _corrupt(self, machine: SimMachine) -> None:
        if self.faults.lies and self.lying.random() < self.faults.lies:
            machine.lies = True
            self.liars.add(machine.id)
        if self.faults.forges and self.lying.random() < self.faults.forges:
            self.forged.add(machine.id)
            self.liars.add(machine.id)

    def _wind(self, machine: SimMachine) -> None:
        """What befalls its wall clock: by chances of its own, so that nothing else in the world changes."""
        rng, computer, faults = random.Random(f"clock of {machine.id}"), machine.computer, self.faults
        if faults.clocks_strobe and rng.random() < faults.clocks_strobe:
            computer.strobe = rng.choice(STROBES)
        if faults.clocks_set_every_s:
            computer.set_by(self._clock_fate(rng))

    def _clock_fate(self, rng: random.Random) -> Iterator[tuple[float, float]]:
        at_s = self.loop.time()
        while True:
            at_s += rng.expovariate(1 / self.faults.clocks_set_every_s)
            yield at_s, rng.uniform(-1, 1) * self.faults.clocks_set_by_s

    def _schedule_reboot(self, machine: SimMachine) -> None:
        if self.faults.host_reboots_every_s:
            self.later(
                self.booting.expovariate(1 / self.faults.host_reboots_every_s), self._power_off, machine
            )

    def _power_off(self, machine: SimMachine) -> None:
        """A lent host boots anew: nothing runs on it any more, and its steady clock begins again."""
        if machine.gone:
            return
        off_s = self.booting.uniform(*OFF_S)
        machine.left_s = self.life_left_s(machine)
        machine.meter.off_s += off_s + INEXACT_S
        machine.frozen_until = max(machine.frozen_until, self.loop.time() + off_s)
        self._end_jobs(machine, Ended("lost"))
        self.later(off_s, machine.computer.reboot)
        self.later(off_s, self._expire, machine)
        self._schedule_reboot(machine)

    def life_left_s(self, machine: SimMachine) -> float:
        """The life left to a lent host, as its own clocks tell."""
        if machine.expiry is None:
            return HANGS
        return seconds_to(machine.expiry, machine.clock, machine.left_s)

    def _allocate(self, machine: SimMachine, life_s: float) -> None:
        if machine.gone:
            return
        now = self.loop.now()
        machine.meter = Bill(machine.id, machine.meter.offer, now, after(now, life_s))
        self.meters.append(machine.meter)
        machine.queued, machine.starts = False, machine.starts + 1
        machine.boots_at = self.loop.time() + self.rng.uniform(1.0, 5.0)
        if self.troubled(machine.meter.offer.place, "machine"):
            machine.boots_at = 1e9
        machine.node = f"node-{self.rng.randrange(1000)}"
        self.later(life_s, self._expire, machine)
        if machine.starts == 1:
            self._schedule_fate(machine, self.faults.machine_dies_every_s, self.kill)
            self._schedule_fate(machine, self.faults.machine_freezes_every_s, self._freeze)
        self._schedule_fate(machine, self.faults.service_restarts_every_s, self._restart)

    def _restart(self, machine: SimMachine) -> None:
        """The service puts the machine back into its queue: what ran is over, what it had run counts."""
        if machine.gone or machine.queued:
            return
        now = self.loop.now()
        left_s = seconds_between(now, machine.meter.expires_at)
        machine.meter.end = machine.meter.swept = now
        machine.ran_s += seconds_between(machine.meter.start, now)
        machine.queued = True
        machine.prepared.clear()
        self._end_jobs(machine, Ended("evicted"))
        self.later(self.rng.uniform(0.0, 300.0), self._allocate, machine, left_s)

    def lose_api(self, seconds: float) -> None:
        """The service's API is down: its machines are well, but nothing is heard of them."""
        self.api_lost_until = self.loop.time() + seconds
        self._wake_all()

    def _schedule_fate(self, machine: SimMachine, every_s: float, fate: Callable[[SimMachine], None]) -> None:
        if every_s > 0:
            self.later(self.rng.expovariate(1 / every_s), fate, machine)

    def extend(self, machine: MachineId, expires_s: float) -> None:
        if (known := self.machines.get(machine)) is not None:
            known.meter.expires_at = after(self.loop.now(), expires_s)
            known.meter.off_s = 0.0
            if known.expiry is not None:
                known.expiry, known.left_s = expiry_in(expires_s, known.clock), HANGS
            self.later(expires_s, self._expire, known)

    def _expire(self, machine: SimMachine) -> None:
        """The dead-man switch, unless the machine was extended meanwhile: its place ends it, or itself."""
        if machine.queued or machine.gone:
            return
        early_s = seconds_between(self.loop.now(), machine.meter.expires_at)
        left_s = early_s if machine.expiry is None else self.life_left_s(machine)
        if left_s > 3e-6:  # seconds are floats
            if machine.expiry is not None:
                self.later(left_s, self._expire, machine)
            return
        if early_s > INEXACT_S and not machine.meter.off_s:
            self.violations.append(f"{machine.id} expired {early_s:.0f} s too early")
        end = self.loop.now() if machine.meter.off_s else machine.meter.expires_at
        machine.meter.end = machine.meter.end or end
        self.kill(machine)

    def kill(self, machine: SimMachine) -> None:
        """Gone without a word: its jobs end unheard, its billing stops."""
        machine.gone = True
        if machine.meter.end is None:
            machine.meter.end = self.loop.now()
        self._end_jobs(machine, Ended("lost"))  # not told so: a keep-alive notices that nobody answers

    def _hang(self, machine: SimMachine) -> None:
        """It runs and is billed, but answers nobody until it is mended: its processes make no progress."""
        machine.hangs = self.rng.randint(1, HOPELESS)
        self._end_jobs(machine, Ended("lost"))

    def mend(self, machine: SimMachine, boot_s: float, *, wipe: bool) -> None:
        """Booted anew: nothing runs on it. `wipe`: on other hardware, with an empty local disk."""
        machine.hangs = max(0, machine.hangs - 1)
        machine.frozen_until = self.loop.time() + boot_s
        self._end_jobs(machine, Ended("lost"))
        machine.computer.reboot()
        if wipe:
            machine.prepared.clear()
        self._schedule_fate(machine, self.faults.machine_hangs_every_s, self._hang)

    def _end_jobs(self, machine: SimMachine, ended: Ended) -> None:
        for job in machine.jobs.values():
            self.end_job(job, ended)

    def _announce(self, machine: SimMachine) -> None:
        """A machine that is told beforehand ends its jobs itself, and takes no more."""
        if self.faults.eviction_notice_s and not machine.gone:
            machine.leaving = True
            self._end_jobs(machine, Ended("evicted"))
        self.later(self.faults.eviction_notice_s, self._evict, machine)

    def _evict(self, machine: SimMachine) -> None:
        machine.evicted = True
        self.kill(machine)

    def _freeze(self, machine: SimMachine) -> None:
        """Unreachable for a while, its jobs standing still: the zombie that comes back."""
        span = self.rng.uniform(*self.faults.freeze_s)
        machine.frozen_until = self.loop.time() + span
        for job in machine.jobs.values():
            job.ends_at += span
            job.stood_s += span
            job.wake()
        self._schedule_fate(machine, self.faults.machine_freezes_every_s, self._freeze)

    def cut_off(self, seconds: float) -> None:
        """Our own network is down: the machines are well, but keep-alives notice that none answers."""
        self.offline_until = self.loop.time() + seconds
        self._wake_all()

    def _wake_all(self) -> None:
        for machine in self.machines.values():
            for job in machine.jobs.values():
                job.wake()

    def remove(self, machine: MachineId) -> None:
        if (known := self.machines.pop(machine, None)) is not None:
            self.kill(known)
            known.meter.swept = self.loop.now()

    # -- jobs --------------------------------------------------------------------------------------

    async def reach(self, machine: MachineId, life: Life, epoch: int, silent_s: float) -> SimMachine:
        """Get through to the machine, or raise after the silence that the fence allows."""
        await self.call(life)
        deadline = self.loop.time() + silent_s
        while True:
            known = self.machines.get(machine)
            dead = known is None or known.gone or known.queued or known.hangs > 0
            thaws = max(float("inf") if known is None or dead else known.frozen_until, self.offline_until)
            if known is not None and self.troubles:
                thaws = max(thaws, self.back_at(known.meter.offer.place))
            if known is not None and known.meter.offer.life.queues:
                thaws = max(thaws, self.api_lost_until)
            if known is not None and thaws <= self.loop.time():
                break
            await asyncio.sleep(max(0.01, min(thaws, deadline) - self.loop.time()))
            self.tick(life)
            if self.loop.time() >= deadline:
                raise ChannelError(f"nothing heard of {machine} for {silent_s:g} s")
        if self.chance(self.faults.channel_fails):
            raise ChannelError(f"connection to {machine} lost")
        if known.expiry is not None and known.expiry["boot"] != known.clock.boot:
            known.expiry = expiry_in(self.life_left_s(known), known.clock)  # as a supervisor does that starts
        self.fence(known, epoch)
        if epoch < known.epoch:
            self.violations.append(f"{machine} obeyed the stale epoch {epoch}")
        known.epoch = max(epoch, known.epoch)
        return known

    def fence(self, machine: SimMachine, epoch: int) -> None:
        """A machine obeys the highest epoch it has seen."""
        if epoch < machine.epoch:
            self.refusals += 1
            raise StaleController(f"{machine.id} obeys epoch {machine.epoch}, not {epoch}")

    def start(
        self, machine: SimMachine, job: Job, length_s: float, end: Ended, marks: tuple[str, str] = ("", "")
    ) -> None:
        """Run the job, once. The host enforces the time limit, and ends one that writes nothing."""
        if job.id in machine.jobs:
            return
        self.must_be_durable(job.id)
        if job.id in self.started:
            self.violations.append(f"{job.id} started twice, on {self.started[job.id]} and {machine.id}")
        machine.open = [known for known in machine.open if known.ended is None]
        if job.bundle and (job.bundle, "") not in machine.prepared:
            self.violations.append(f"{job.id} was started on {machine.id}, which is not set up")
        if len(machine.open) >= self.slots and not machine.lies:  # one that lies says what ended, too
            self.violations.append(f"{machine.id} runs more than {self.slots} attempts at once")
        self.started[job.id] = machine.id
        self.marks[marks[0]] += 1
        if machine.leaving:
            length_s, end = 0.0, Ended("evicted", node=end.node)
        now = self.loop.time()
        made = SimJob(job.id, now + length_s, end, self.seconds_of(machine), now, after=marks[1])
        machine.jobs[job.id] = made
        machine.open.append(made)
        if length_s < HANGS:
            self.later(length_s, self._finish, machine, made)
        limits: list[tuple[float, EndReason]] = [(job.timeout_s, "timed_out")]
        if job.stall_s and length_s == HANGS:
            limits.append((job.stall_s, "stalled"))
        limit_s, reason = min(limits)
        self.later(limit_s, self._end_in_time, machine, made, limit_s, Ended(reason, node=end.node))

    def seconds_of(self, machine: SimMachine) -> float:
        """What a supervisor counts durations by."""
        return machine.clock.steady()

    def _ran_s(self, machine: SimMachine, job: SimJob) -> float:
        """How long it has run, as its supervisor has counted it; and the world sees whether that is true."""
        seconds = self.seconds_of(machine) - job.began - job.stood_s
        truth = self.loop.time() - job.began_at - job.stood_s
        if abs(seconds - truth) > INEXACT_S:
            self.violations.append(f"{job.id} ran {truth:.0f} s, but its machine counted {seconds:.0f}")
        return seconds

    def _end_in_time(self, machine: SimMachine, job: SimJob, limit_s: float, ended: Ended) -> None:
        if job.ended is not None:
            return
        seconds = self._ran_s(machine, job)
        if seconds < limit_s - INEXACT_S:
            self.later(limit_s - seconds, self._end_in_time, machine, job, limit_s, ended)
        else:
            self.end_job(job, structs.replace(ended, seconds=round(seconds, 3)))

    def _finish(self, machine: SimMachine, job: SimJob) -> None:
        if job.ended is not None:
            return
        if self.loop.time() < job.ends_at:  # it stood still for a while
            self.later(job.ends_at - self.loop.time(), self._finish, machine, job)
            return
        self.marks[job.after] += job.end.reason == "exited"
        self.end_job(job, structs.replace(job.end, seconds=round(self._ran_s(machine, job), 3)))

    def end_job(self, job: SimJob, ended: Ended) -> None:
        """The job is over, unless it was before; whoever waits is told."""
        job.ended = self.ended[job.id] = job.ended or ended
        job.wake()
