"""One simulated place of each kind, behind the same ports as the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from evalfleet.errors import (
    ChannelError,
    MachineForged,
    MachineMute,
    PlaceError,
    SetupFailed,
    StaleController,
)
from evalfleet.model import (
    AttemptId,
    Bundle,
    Collected,
    Command,
    Ended,
    EndReason,
    Job,
    Machine,
    MachineId,
    Needs,
    Offer,
    Piece,
    seconds_between,
)
from evalfleet.ports import Channel, Fence, TellStep

from .world import HANGS, Life, SimMachine, World

MachinePhase = Literal["queued", "pending", "up", "gone", "evicted"]


class SimChannel:
    """A channel to one simulated machine, as long as it is the same start of it."""

    def __init__(self, world: World, life: Life, machine: Machine, fence: Fence) -> None:
        self._world, self._life, self._machine = world, life, machine.id
        self._fence = fence
        self._start = machine.start

    async def _reach(self) -> SimMachine:
        machine = await self._reach_any_start()
        if name_of_start(machine) != self._start:
            raise ChannelError(f"{machine.id} was started anew")
        return machine

    async def _reach_any_start(self) -> SimMachine:
        return await self._world.reach(self._machine, self._life, self._fence.epoch, self._fence.silent_s)

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        machine = await self._reach()
        if (bundle.digest, "") not in machine.prepared and self._world.chance(self._world.faults.setup_fails):
            raise SetupFailed("install", "exit code 1")
        for step in bundle.steps:
            if (bundle.digest, step.name) not in machine.prepared:
                if tell is not None:
                    tell(step.name, "")
                script = Script.of(step.command)
                self._world.marks[script.mark] += 1
                if script.exit_code:
                    raise SetupFailed(step.name, f"exit code {script.exit_code}")
                machine.prepared.add((bundle.digest, step.name))
        machine.prepared.add((bundle.digest, ""))
        return {}

    async def probe(self, command: Command | None) -> bool:
        await self._reach()
        return command is None or not Script.of(command).exit_code

    async def start(self, job: Job) -> None:
        machine = await self._reach()
        script = Script.of(job.command)
        length_s, end = job_fate(self._world, script)
        if self._world.troubled(machine.meter.offer.place, "job"):
            end = Ended("exited", 1, length_s if length_s < HANGS else 0.0)
        self._world.start(machine, job, length_s, end, script.marks)

    async def ended(self, job: AttemptId) -> Ended:
        while True:
            machine = await self._reach_any_start()  # its files tell how jobs of an earlier one ended
            known = machine.jobs.get(job)
            if known is None:
                return Ended("lost", detail="the machine knows of no such job")
            if known.ended is not None:
                return known.ended
            waiter = self._world.loop.create_future()
            known.waiters.append(waiter)
            await waiter  # its end, or news of the machine that a keep-alive would notice
            self._world.tick(self._life)

    async def stop(self, job: AttemptId) -> None:
        machine = await self._reach()
        if (known := machine.jobs.get(job)) is not None:
            self._world.end_job(known, Ended("stopped"))

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        await self._reach()
        return Collected(files=1, bytes=100)

    async def follow(self, job: AttemptId, path: str = "log", offset: int = 0) -> AsyncGenerator[Piece]:
        """Simulated jobs write nothing."""
        machine = await self._reach_any_start()
        if job in machine.jobs:
            yield Piece(offset, b"", offset, at_end=True)
            await self.ended(job)

    def forget(self, job: AttemptId) -> None:
        return

    async def close(self) -> None:
        return


class LyingChannel(SimChannel):
    """Reaches a machine that may answer anything: jobs it never ran, results of others, nonsense, refusals.

    It says what a real channel lets through of a hostile machine: that bounds each value, and raises nothing
    but these errors.
    """

    async def _tempted(self) -> World | None:
        """The world to draw a lie from; None: this time the machine is honest, or it is no liar."""
        self._lying = self._world.lying
        if self._machine not in self._world.liars or self._lying.random() < 0.5:
            return None
        await self._reach_any_start()
        return self._world

    async def _refuse(self) -> None:
        if await self._tempted() is not None:
            match self._lying.randrange(4):
                case 0:
                    raise StaleController("the machine obeys another controller: epoch 999999999")
                case 1:
                    raise MachineForged("what answers there is no supervisor of ours")
                case 2:
                    raise ChannelError("the supervisor answered nonsense")
                case _:
                    return

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        if self._machine in self._world.forged:
            await self._reach_any_start()
            raise MachineForged("what answers there is no supervisor of ours")
        await self._refuse()
        return await super().prepare(bundle, left, tell)

    async def probe(self, command: Command | None) -> bool:
        await self._refuse()
        return await super().probe(command)

    async def start(self, job: Job) -> None:
        await self._refuse()
        if await self._tempted() is None:
            await super().start(job)

    async def ended(self, job: AttemptId) -> Ended:
        if (world := await self._tempted()) is None:
            return await super().ended(job)
        others = [*world.ended.values()]
        match self._lying.randrange(5):
            case 0 if others:  # an old result, or another's
                return self._lying.choice(others)
            case 1:
                reasons: Sequence[EndReason] = get_args(EndReason)
                return Ended(self._lying.choice(reasons), -1, self._lying.choice((0.0, 31_536_000.0)))
            case 2:
                nonsense = (
                    b"",
                    b"\xff",
                    b"[]",
                    b'{"score": 1e400}',
                    b'{"score": -1}',
                    b'{"broken": "evicted"}',
                )
                return Ended("exited", 0, 0.0, self._lying.choice(nonsense))
            case 3:
                return Ended("exited", 0, 0.0, b'{"score": 1.0}')
            case _:
                await self._refuse()
                return await super().ended(job)

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        await self._refuse()
        return await super().collect(job, into)


FIRST_START = "start 1"


def name_of_start(machine: SimMachine) -> str:
    return f"start {machine.starts}" if machine.starts else ""


@dataclass(frozen=True, slots=True)
class Script:
    """What a command says of itself, as words and values: `sleep 30 exit 3 score 0.5 mark m after n`.

    Whatever it leaves unsaid is up to the world: `work` says nothing. `mark` and `after` are counted by
    the world when a job begins and when it comes to its own end.
    """

    seconds: float | None = None
    exit_code: int | None = None
    score: float | None = None
    mark: str = ""
    after: str = ""

    @classmethod
    def of(cls, command: Command) -> Script:
        words = dict(zip(command.argv[::2], command.argv[1::2], strict=False))
        return cls(
            float(words["sleep"]) if "sleep" in words else None,
            int(words["exit"]) if "exit" in words else None,
            float(words["score"]) if "score" in words else None,
            words.get("mark", ""),
            words.get("after", ""),
        )

    @property
    def marks(self) -> tuple[str, str]:
        return self.mark, self.after


def job_fate(world: World, script: Script) -> tuple[float, Ended]:
    """How long a job takes and how it ends. Unless its script says: most score, some hang, some break."""
    seconds = script.seconds if script.seconds is not None else world.rng.uniform(60, 1200)
    if script.exit_code is not None or script.score is not None:
        result = None if script.score is None else b'{"score": %r}' % script.score
        return seconds, Ended("exited", script.exit_code or 0, seconds, result)
    if world.chance(world.faults.job_hangs):
        return HANGS, Ended("exited")
    if world.chance(world.faults.job_breaks):
        return seconds, Ended("exited", 1, seconds)
    score = b'{"score": 1.0}' if world.rng.random() < 0.5 else b'{"score": 0.0}'
    return seconds, Ended("exited", 0, seconds, score)


class _SimPlace:
    def __init__(self, world: World, life: Life, name: str, offers: Sequence[Offer]) -> None:
        self._world, self._life, self._name = world, life, name
        self._offers = offers

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        await self._world.place_call(self._life, self._name)
        return [offer for offer in self._offers if offer.has.covers(needs)]

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        await self._world.place_call(self._life, self._name)
        self._world.extend(machine, expires_s)

    async def delete(self, machine: MachineId) -> None:
        await self._world.place_call(self._life, self._name)
        self._world.remove(machine)

    async def list(self, pool: str) -> Sequence[Machine]:
        await self._world.place_call(self._life, self._name)
        mine = [m for m in self._world.machines.values() if m.meter.offer.place == self._name]
        return [self._seen(m) for m in mine if m.id.startswith(f"{pool}-")]

    def _seen(self, machine: SimMachine) -> Machine:
        if machine.evicted:
            return Machine(machine.id, "evicted")
        if machine.gone:
            return Machine(machine.id, "gone")
        up = self._world.loop.time() >= machine.boots_at
        return Machine(machine.id, "up" if up else "pending", "10.0.0.1", f"host-of-{machine.id}")

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        usual = LyingChannel if self._world.faults.lies or self._world.faults.forges else SimChannel
        kind: type[SimChannel] = self._world.channel_class or usual
        return kind(self._world, self._life, machine, fence)

    async def close(self) -> None:
        return


class SimVms(_SimPlace):
    """Machines that we create: slow, failing, and a create may land after its caller is gone."""

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        world, faults = self._world, self._world.faults
        world.tick(self._life)
        world.must_be_durable(machine)
        # one that is there already is found by looking: as real places do
        if machine not in world.machines and (retry_after_s := world.too_soon_s(offer)) > 0:
            await world.place_call(self._life, self._name)
            raise PlaceError("429 too many requests", transient=True, retry_after_s=retry_after_s)
        if machine not in world.machines:
            never = world.chance(faults.never_boots) or world.troubled(self._name, "machine")
            boot_s = 1e9 if never else world.rng.uniform(*faults.boot_s)
            lands_s = world.rng.uniform(0.1, faults.create_lands_late_s)
            world.later(lands_s, world.bring_up, machine, offer, expires_s - lands_s, boot_s)
        await world.place_call(self._life, self._name)
        if world.chance(faults.refused_for_good):
            raise PlaceError("quota exceeded", transient=False, scope="offer")

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        """Returns when it can be reached, as real places do."""
        await self._world.place_call(self._life, self._name)
        known = self._world.machines.get(machine)
        if known is None or known.gone:
            raise PlaceError(f"there is no machine {machine}", transient=False, scope="machine")
        boot_s = self._world.rng.uniform(*self._world.faults.boot_s)
        self._world.mend(known, boot_s, wipe=step == "redeploy")
        await asyncio.sleep(boot_s)
        self._world.tick(self._life)
        if known.hangs:
            raise MachineMute(f"{machine} is running but cannot be reached", "ssh")


class SimHosts(_SimPlace):
    """Machines that we are lent: `create` takes the lock of a free host."""

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await self._world.place_call(self._life, self._name)
        self._world.must_be_durable(machine)
        taken = sum(m.meter.offer.place == self.name for m in self._world.machines.values())
        if machine not in self._world.machines and taken >= (offer.capacity or 0):
            raise PlaceError("every host is taken", transient=True)
        self._world.lent.add(machine)
        self._world.bring_up(machine, offer, expires_s, 0.0)


class SimService(_SimPlace):
    """A service whose jobs are our machines: they queue, may be started anew, and end at their time limit."""

    async def _call(self) -> None:
        await self._world.place_call(self._life, self._name)
        if self._world.loop.time() < self._world.api_lost_until:
            raise PlaceError("the service does not answer", transient=True)

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        await self._call()
        return [offer for offer in self._offers if offer.has.covers(needs)]

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await self._call()
        self._world.must_be_durable(machine)
        self._world.enqueue(machine, offer, expires_s)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        await self._call()
        known = self._world.machines.get(machine)
        if known is not None and not known.meter.offer.life.extendable:
            raise PlaceError("the time limit of a job cannot be changed", transient=False, scope="machine")
        self._world.extend(machine, expires_s)

    async def delete(self, machine: MachineId) -> None:
        await self._call()
        self._world.remove(machine)

    async def list(self, pool: str) -> Sequence[Machine]:
        await self._call()
        return await super().list(pool)

    def _seen(self, machine: SimMachine) -> Machine:
        meter, ran_s = machine.meter, machine.ran_s
        if machine.queued and not machine.starts:
            return Machine(machine.id, "queued", ran_s=ran_s)
        if not machine.queued:
            ran_s += seconds_between(meter.start, meter.end or self._world.loop.now())
        if machine.queued or machine.starts > 1:
            return Machine(machine.id, "evicted", "job", machine.node, start=FIRST_START, ran_s=ran_s)
        up = self._world.loop.time() >= machine.boots_at
        phase: MachinePhase = "gone" if machine.gone else "up" if up else "pending"
        start = name_of_start(machine)
        said = "the service says: running" if phase == "pending" else ""
        return Machine(machine.id, phase, "job", machine.node, start=start, ran_s=ran_s, detail=said)
