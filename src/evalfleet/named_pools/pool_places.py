"""A pool's machines: under whose fence they are, and as a place for runs that borrow them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from evalfleet.errors import ChannelError, LeaseLost, PlaceError, RequestError, StaleController
from evalfleet.journal import Hold, Holds
from evalfleet.journal.holds import EPOCHS
from evalfleet.model import (
    BORROWED,
    AttemptId,
    Bundle,
    Collected,
    Command,
    Cost,
    Ended,
    Job,
    Lifetime,
    Machine,
    MachineId,
    Micros,
    Needs,
    Offer,
    Piece,
    after,
)
from evalfleet.policy.pool import awaited_area
from evalfleet.ports import (
    Channel,
    Fence,
    HostChannel,
    ImageMaker,
    Place,
    TellStep,
)
from evalfleet.state import MachineState

from .view import PoolView

CLEAR_S = 20.0
AVOID_S = 30.0
LOOK_S = 0.3
COMING = ("requested", "queued", "allocated", "up")

log = logging.getLogger(__name__)


def estate_at(place: Place) -> ImageMaker:
    """Raises RequestError where machines cannot become images."""
    if not isinstance(place, ImageMaker):
        raise RequestError(
            f"machines of {place.name} cannot be captured as an image: that takes a place that makes its "
            "machines from images"
        )
    return place


def fence_of(holds: Holds, machine: MachineId, fence: Fence) -> Fence:
    """Return the fence of the pool's own controller, by the hold that it has on the machine, if any."""
    return pool_fence(holds.pool, holds.all().get(machine), fence)


def pool_fence(pool: str, hold: Hold | None, fence: Fence) -> Fence:
    """Whoever has the machine now is above all who had it before."""
    number = 0 if hold is None else hold.number
    return structs.replace(fence, run=pool, epoch=number * EPOCHS + fence.epoch)


class LentPlace:
    """A pool's machines, for a run: `create` takes a hold on a free one, `delete` gives it back clean.

    The run's machine is a name of its own for one that exists already. The hold is taken once the run's
    journal says that it wants a machine, in one transaction with the check that its controller is the one.
    """

    def __init__(
        self,
        place: Place,
        holds: Holds,
        pool: Callable[[], PoolView],
        run: str,
        epoch: int,
        clock: Callable[[], Micros],
        benchmark: str = "",
    ) -> None:
        self._place = place
        self._holds = holds
        self._pool = pool
        self._run = run
        self._benchmark = benchmark
        self._epoch = epoch
        self._clock = clock
        self._held: dict[MachineId, Hold] = {}
        self._avoid: dict[MachineId, float] = {}

    @property
    def name(self) -> str:
        return self._place.name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """The pool's machines at the price that it pays: a run is charged for the time it had them.

        How they are made, mended, extended and swept away is the pool's affair, and left out.
        """
        pool = self._pool()
        offers = [machine.offer for machine in self._own(pool)] or await self._place.offers(needs)
        many = max(len(pool.machines), pool.state.limits.workers)
        return [
            Offer(
                offer.place,
                BORROWED,
                offer.region,
                spot=offer.spot,
                capacity=many,
                has=offer.has,
                cpus=offer.cpus,
                memory_gb=offer.memory_gb,
                lent=True,
                cost=Cost(offer.cost.usd_per_hour, offer.cost.billing_step_s, priced=offer.cost.priced),
                life=Lifetime(
                    silent_s=offer.life.silent_s,
                    lost_s=offer.life.lost_s,
                    teardown_s=offer.life.teardown_s,
                ),
            )
            for offer in offers[:1]
        ]

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        hold = self._take(machine, offer, expires_s)
        while hold is None and self._may_come():
            await asyncio.sleep(LOOK_S)
            hold = self._take(machine, offer, expires_s)
        if hold is None:
            raise self._none_free()
        self._held[machine] = hold
        try:
            # repeated by a controller that came later, it must not end what runs there by now
            await self._clear(hold, once=f"hold {hold.number}")
        except StaleController:
            raise
        except (ChannelError, TimeoutError) as err:
            self._avoid[hold.machine] = time.monotonic() + AVOID_S
            self._give_back(machine)
            name = self._pool().state.machines[hold.machine].name
            raise PlaceError(f"{name} does not answer: {err}", transient=True, scope="machine") from err

    def _may_come(self) -> bool:
        """Is a machine just being made, or does the pool itself work on one?"""
        pool = self._pool()
        making = any(each.phase in COMING for each in self._own(pool)) or awaited_area(pool.state) is not None
        return pool.state.stop is None and (making or self._holds.being_worked_on(self._clock()))

    def _take(self, machine: MachineId, offer: Offer, expires_s: float) -> Hold | None:
        now = self._clock()
        try:
            hold = self._holds.take(
                self._candidates(offer), self._run, self._epoch, machine, now, after(now, expires_s)
            )
        except LeaseLost as err:
            raise PlaceError(str(err), transient=False, scope="machine") from err
        # nobody but its holder changes a machine: what it is now, it stays
        if hold is not None and self._pool().state.machines[hold.machine].phase != "ready":
            self._give_back(machine)
            return None
        return hold

    def _candidates(self, offer: Offer) -> list[MachineId]:
        """Those that are up. Those of which nothing is known to be wrong come first, and of these the ones
        that are prepared for this benchmark; those that are prepared for another one are left to that."""
        pool, now, wall = self._pool(), time.monotonic(), self._clock()
        if pool.state.stop is not None:
            return []
        ready = [
            m
            for m in self._own(pool)
            if m.phase == "ready" and m.expires_at > wall and m.name not in offer.without
        ]
        order = {self._benchmark: 0, "": 1}
        best_first = sorted(ready, key=lambda m: (self._avoid.get(m.id, 0.0) > now, order.get(m.prepared, 2)))
        return [machine.id for machine in best_first]

    def _own(self, pool: PoolView) -> list[MachineState]:
        """The machines of this place: a pool may have machines of several."""
        return [machine for machine in pool.machines if machine.offer.place == self._place.name]

    def _none_free(self) -> PlaceError:
        pool, now = self._pool(), self._clock()
        holders = sorted({who for m in pool.machines if (who := pool.holder(m.id, now)) is not None})
        if holders:
            why = f"its machines are held by {', '.join(holders)} (`evalfleet cancel RUN` frees them)"
        else:
            why = f"none of its machines is ready (`evalfleet pool status {pool.name}`)"
        return PlaceError(f"pool {pool.name}: {why}", transient=True)

    async def _clear(self, hold: Hold, once: str = "") -> None:
        """Whatever an earlier borrower left running ends now."""
        known = self._pool().state.machines[hold.machine]
        fence = pool_fence(hold.pool, hold, Fence(self._run, self._epoch, known.offer.life.silent_s))
        channel = self._place.channel(machine_of(known), fence)
        try:
            async with asyncio.timeout(CLEAR_S):
                if isinstance(channel, HostChannel):
                    await channel.clear(once)
        finally:
            with suppress(ChannelError, OSError):
                await channel.close()

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        if not self._holds.extend(machine, after(self._clock(), expires_s)):
            raise PlaceError(f"there is no machine {machine}", transient=False, scope="machine")

    async def list(self, pool: str) -> Sequence[Machine]:
        lent = self._holds.of(self._run)
        own = self._pool()
        there = await self._place.list(f"{own.name}-{own.state.plan.home}")
        seen = {machine.id: machine for machine in there}
        return [
            self._shown(borrower, own.state.machines[hold.machine], seen)
            for borrower, hold in lent.items()
            if borrower.startswith(f"{pool}-")
        ]

    def _shown(self, borrower: MachineId, known: MachineState, seen: Mapping[MachineId, Machine]) -> Machine:
        found = seen.get(known.id)
        if found is None or known.phase != "ready":
            return Machine(borrower, "gone", name=known.name)
        return Machine(borrower, found.phase, found.address, found.node, known.name)

    async def delete(self, machine: MachineId) -> None:
        """Who has it next clears it, too, should it not answer now."""
        hold = self._holds.of(self._run).get(machine)
        if hold is None:
            return
        try:
            await self._clear(hold)
        except (ChannelError, TimeoutError) as err:  # also if it says that somebody else has it
            log.warning("%s was given back as it was: %s", hold.machine, err)
            self._avoid[hold.machine] = time.monotonic() + AVOID_S
        self._give_back(machine)

    def _give_back(self, machine: MachineId) -> None:
        self._held.pop(machine, None)
        self._holds.give_back([machine], self._run, self._epoch)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        hold = self._hold(machine.id)
        if hold is None:
            return Unreachable(f"{machine.id} is no longer lent to {self._run}")
        known = self._pool().state.machines[hold.machine]
        return self._place.channel(machine_of(known), pool_fence(hold.pool, hold, fence))

    def _hold(self, machine: MachineId) -> Hold | None:
        """Taken anew by a controller that has just come, so that the store knows its epoch."""
        if machine not in self._held:
            lent = self._holds.of(self._run).get(machine)
            taken = lent and self._holds.take(
                (), self._run, self._epoch, machine, self._clock(), max(lent.until, self._clock())
            )
            if not taken:
                return None
            self._held[machine] = taken
        return self._held[machine]

    async def close(self) -> None:
        await self._place.close()


def machine_of(known: MachineState) -> Machine:
    return Machine(known.id, "up", known.address, known.node, known.name, start=known.start)


class Unreachable:
    """The channel to a machine that is lent to us no longer: who has it now is not to be disturbed."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        raise ChannelError(self._why)

    async def probe(self, command: Command | None) -> bool:
        raise ChannelError(self._why)

    async def start(self, job: Job) -> None:
        raise ChannelError(self._why)

    async def ended(self, job: AttemptId) -> Ended:
        raise ChannelError(self._why)

    async def stop(self, job: AttemptId) -> None:
        raise ChannelError(self._why)

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        raise ChannelError(self._why)

    async def follow(self, job: AttemptId, path: str = "log", offset: int = 0) -> AsyncGenerator[Piece]:
        raise ChannelError(self._why)
        yield  # it is a generator, as the others are

    def forget(self, job: AttemptId) -> None:
        """Whoever had the machine next has cleared it."""

    async def close(self) -> None:
        """Nothing is open."""
