"""The machines of a named pool, as a run borrows them, keep the contract of a place."""

from __future__ import annotations

import asyncio
import functools

from evalfleet.clock import WallClock
from evalfleet.errors import LeaseLost, PlaceError, StaleController
from evalfleet.events import (
    Event,
    MachinePrepared,
    MachineReady,
    MachineRequested,
    MachineUp,
    PoolPlanned,
    RunPlanned,
)
from evalfleet.journal import Holder, Holds, Store
from evalfleet.model import AttemptId, Job, Limits, MachineId, Needs, Plan, after
from evalfleet.named_pools import LentPlace, look_at
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Fence, Place
from evalfleet.testing import ChannelContract, Harness, PlaceContract, ShellHarness
from evalfleet.testing.harness import Kind, find, first_offer, promise, raised
from tests.waiting import PATIENCE_S, allow_for_load

MACHINES = 3
EVER_S = 86_400.0
NEWEST = 4  # above all epochs that the suites use


class LentHarness(ShellHarness):
    """A pool of machines of this computer, and runs `contract` and `other` that borrow them."""

    kind: Kind = "lent"
    unit_s = 0.25
    silent_s = 3.0
    patience_s = PATIENCE_S
    listed_when_expired = True  # what expires is the hold; the machine is the pool's

    def __init__(self, machines: int) -> None:
        super().__init__()
        allow_for_load(self)
        self.capacity = machines
        self.store = Store.open(self.directory / "home")
        self.epochs: dict[str, int] = {}
        self.local = LocalPlace("local", LocalSettings(), self.store.home / ".machines")
        self.machines = [MachineId(f"pool-{self.store.home_id}-{n}") for n in range(1, machines + 1)]
        asyncio.run(self._make_pool())
        for run in ("contract", "other"):
            self.store.create_stream(run, "run", WallClock().now(), [RunPlanned(Plan(run, "b"), 0)])
            asyncio.run(self.new_controller(run))

    async def _make_pool(self) -> None:
        now = WallClock().now()
        (offer,) = await self.local.offers(Needs())
        limits = Limits(workers=len(self.machines))
        events: list[Event] = [
            PoolPlanned(Plan("pool", "", ("local",), limits=limits, home=self.store.home_id))
        ]
        for lane, machine in enumerate(self.machines):
            await self.local.create(machine, offer, EVER_S)
            events.append(MachineRequested(machine, f"vm-{lane}", offer, after(now, EVER_S)))
        for seen in await self.local.list("pool"):
            events += [MachineUp(seen.id, seen.address, seen.node), MachineReady(seen.id)]
        self.store.create_stream("pool", "pool", now, events)

    async def new_controller(self, run: str) -> None:
        now = WallClock().now()
        journal = self.store.acquire(run, Holder.here(now), now)
        self.epochs[run] = journal.epoch
        await journal.close()

    def make_place(self) -> Place:
        return self.borrower("contract")

    def borrower(self, run: str) -> LentPlace:
        holds = Holds(self.store, "pool")
        epoch = self.epochs[run]
        look = functools.partial(look_at, self.store, "pool")
        return LentPlace(self.local, holds, look, run, epoch, WallClock().now, "b")

    async def sweep(self) -> None:
        while self.epochs["contract"] < NEWEST:
            await self.new_controller("contract")
        await super().sweep()
        for machine in self.machines:
            await self.local.delete(machine)


class TestLentChannel(ChannelContract):
    """Its tests use one machine each, and every other one would be a supervisor that does nothing."""

    def harness(self) -> Harness:
        return LentHarness(1)


class TestLentPlace(PlaceContract):
    def harness(self) -> Harness:
        return LentHarness(MACHINES)

    @promise
    async def test_a_machine_ends_by_itself_at_its_expiry(self, h: Harness) -> None:
        """Of a borrowed one the hold ends: the next run gets the machine, and what ran there has ended."""
        assert isinstance(h, LentHarness)
        mine = h.borrower("contract")
        seen = [await h.bring_up(mine, n) for n in range(1, MACHINES + 1)]
        job = Job(AttemptId("t.0"), h.command(seconds=60, mark="began", after="survived"), h.long_s)
        for machine in seen:
            await h.channel(mine, machine).start(job)
        await h.until(lambda: h.marks("began"), lambda many: many == MACHINES, "the jobs began")
        await mine.extend(h.machine_id(2), 0.0)
        theirs = h.borrower("other")
        got = MachineId("other-abc123-1")
        await theirs.create(got, await first_offer(theirs), h.long_s)
        taken = await h.until_up(theirs, got)
        assert taken.address == seen[1].address, "it got one that is still held"
        assert await find(mine, h.machine_id(2)) is None
        hello = h.channel(theirs, taken)
        assert (await hello.ended(AttemptId("t.0"))).reason == "lost", "the machine was not cleared"
        await raised(PlaceError, mine.extend(h.machine_id(2), h.long_s))
        await theirs.delete(got)

    @promise
    async def test_extend_moves_the_expiry(self, h: Harness) -> None:
        assert isinstance(h, LentHarness)
        mine, theirs = h.borrower("contract"), h.borrower("other")
        for n in range(1, MACHINES + 1):
            await h.bring_up(mine, n, 4 * h.unit_s)
            await mine.extend(h.machine_id(n), h.long_s)
        await h.wait(4.5)
        got = MachineId("other-abc123-1")
        err = await raised(PlaceError, theirs.create(got, await first_offer(theirs), h.long_s))
        assert err.transient
        assert "held by contract" in str(err)
        assert "evalfleet cancel" in str(err)

    @promise
    async def test_a_machine_that_is_prepared_for_the_benchmark_is_borrowed_first(self, h: Harness) -> None:
        assert isinstance(h, LentHarness)
        now = WallClock().now()
        journal = h.store.acquire("pool", Holder.here(now), now)
        first, _, third = h.machines
        await journal.append(now, [MachinePrepared(first, "another"), MachinePrepared(third, "b")])
        await journal.close()
        mine = h.borrower("contract")
        borrowed = [(await h.bring_up(mine, n)).address for n in range(1, MACHINES + 1)]
        own = {machine.id: machine.address for machine in await h.local.list("pool")}
        assert borrowed[0] == own[third]
        assert borrowed[-1] == own[first], "what another benchmark was prepared on goes last"

    @promise
    async def test_a_controller_that_was_replaced_takes_nothing_and_gives_nothing_back(
        self, h: Harness
    ) -> None:
        assert isinstance(h, LentHarness)
        stale = h.borrower("contract")
        seen = await h.bring_up(stale)
        await h.new_controller("contract")
        newer = h.borrower("contract")
        assert await h.channel(newer, seen, h.epochs["contract"]).probe(None)
        err = await raised(PlaceError, stale.create(h.machine_id(2), await first_offer(stale), h.long_s))
        assert not err.transient
        await raised(LeaseLost, stale.delete(seen.id))  # by the store: what a machine says decides nothing
        assert await find(newer, seen.id) is not None, "a stale controller gave the machine back"

    @promise
    async def test_who_had_a_machine_before_is_refused_by_it(self, h: Harness) -> None:
        assert isinstance(h, LentHarness)
        await h.new_controller("contract")  # a higher epoch than the other's: its hold's number decides
        mine, theirs = h.borrower("contract"), h.borrower("other")
        for n in range(1, MACHINES + 1):
            await h.bring_up(mine, n)
        machine = await h.until_up(mine, h.machine_id(2))
        old = mine.channel(machine, Fence("contract", 2, 20.0))
        assert await old.probe(None)
        await mine.delete(machine.id)
        await theirs.create(MachineId("other-abc123-1"), await first_offer(theirs), h.long_s)
        try:
            await raised(StaleController, old.start(Job(AttemptId("t.0"), h.command(mark="ran"), h.long_s)))
        finally:
            await old.close()
        assert await h.marks("ran") == 0
        await theirs.delete(MachineId("other-abc123-1"))
