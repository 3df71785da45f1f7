"""The suites see what they are for: a place that breaks one promise fails the test of that promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from evalfleet.errors import PlaceError
from evalfleet.model import AttemptId, Bundle, Command, Ended, Job, Machine, MachineId, Offer
from evalfleet.ports import Channel, Fence, Place, TellStep
from evalfleet.testing import ChannelContract, Harness, PlaceContract
from sim.places import SimChannel, SimHosts, SimService, SimVms
from sim.scenario import OFFERS
from sim.world import Life

from .test_sim_places import SimHarness


class ListsTooMuch(SimVms):
    async def list(self, pool: str) -> Sequence[Machine]:
        await self._world.place_call(self._life)
        return [self._seen(m) for m in self._world.machines.values() if m.id.startswith(pool)]


class MakesAnother(SimVms):
    """Names machines itself when the name is taken."""

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        taken = machine in self._world.machines
        await super().create(MachineId(f"{machine}0") if taken else machine, offer, expires_s)


class OnlyStops(SimVms):
    """A delete that leaves the machine where it is, stopped."""

    async def delete(self, machine: MachineId) -> None:
        if (known := self._world.machines.get(machine)) is not None:
            self._world.kill(known)


class IgnoresExtensions(SimVms):
    async def extend(self, machine: MachineId, expires_s: float) -> None:
        await self._world.place_call(self._life)


class LendsTooMany(SimHosts):
    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await super().create(machine, structs.replace(offer, capacity=99), expires_s)


class RefusesForGood(SimHosts):
    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        try:
            await super().create(machine, offer, expires_s)
        except PlaceError as err:
            raise PlaceError(str(err), transient=False) from err


class CountsTheQueue(SimService):
    """Ends a machine so long after it was asked for, whenever it started."""

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await super().create(machine, offer, expires_s)
        self._world.later(expires_s, self._world.kill, self._world.machines[machine])


class ForgetsWhatRan(SimService):
    async def list(self, pool: str) -> Sequence[Machine]:
        return [seen for seen in await super().list(pool) if seen.phase != "gone"]


def with_channel(channel: type[SimChannel]) -> type[SimVms]:
    class Vms(SimVms):
        def channel(self, machine: Machine, fence: Fence) -> Channel:
            return channel(self._world, self._life, machine, fence)

    return Vms


class StartsAgain(SimChannel):
    async def start(self, job: Job) -> None:
        (await self._reach()).jobs.pop(job.id, None)
        await super().start(job)


class Unfenced(SimChannel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fence = structs.replace(self._fence, epoch=99)


class SetsUpAgain(SimChannel):
    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        (await self._reach()).prepared.clear()
        return await super().prepare(bundle, left, tell)


class ProbesNothing(SimChannel):
    async def probe(self, command: Command | None) -> bool:
        return await super().probe(None)


class StopsNothing(SimChannel):
    async def stop(self, job: AttemptId) -> None:
        await self._reach()


class NoLimit(SimChannel):
    async def start(self, job: Job) -> None:
        await super().start(structs.replace(job, timeout_s=1e9))


class Invents(SimChannel):
    async def ended(self, job: AttemptId) -> Ended:
        ended = await super().ended(job)
        return Ended("exited", 0) if ended.reason == "lost" else ended


BROKEN: list[tuple[str, type[Any], Callable[..., None]]] = [
    ("vms", ListsTooMuch, PlaceContract.test_list_shows_only_the_pool),
    ("vms", MakesAnother, PlaceContract.test_creating_twice_makes_one_machine),
    ("vms", OnlyStops, PlaceContract.test_a_deleted_machine_is_gone_for_good),
    ("vms", IgnoresExtensions, PlaceContract.test_a_machine_ends_by_itself_at_its_expiry),
    ("hosts", LendsTooMany, PlaceContract.test_no_more_machines_than_there_are),
    ("hosts", RefusesForGood, PlaceContract.test_no_more_machines_than_there_are),
    ("service", CountsTheQueue, PlaceContract.test_the_life_of_a_machine_begins_when_it_starts),
    ("service", ForgetsWhatRan, PlaceContract.test_how_long_a_machine_ran_is_told_until_it_is_deleted),
    ("vms", with_channel(StartsAgain), ChannelContract.test_starting_twice_starts_once),
    ("vms", with_channel(Unfenced), ChannelContract.test_a_stale_controller_is_refused),
    ("vms", with_channel(SetsUpAgain), ChannelContract.test_each_step_runs_once),
    ("vms", with_channel(ProbesNothing), ChannelContract.test_a_probe_tells_yes_or_no),
    ("vms", with_channel(StopsNothing), ChannelContract.test_stop_ends_the_job_and_its_processes),
    ("vms", with_channel(NoLimit), ChannelContract.test_the_host_enforces_the_time_limit),
    ("vms", with_channel(Invents), ChannelContract.test_an_unknown_job_is_lost),
]


class BrokenHarness(SimHarness):
    """Whatever the test did, the sweep at its end finds a world that works."""

    def __init__(self, name: str, broken: Callable[..., Place]) -> None:
        super().__init__(name, "service" if name == "service" else "created")
        self._broken = broken

    def make_place(self) -> Place:
        return self._broken(self.world, Life(), self.name, OFFERS[self.name])

    async def sweep(self) -> None:
        for machine in list(self.world.machines):
            self.world.remove(machine)

    def close(self) -> None:
        self.world.violations.clear()
        super().close()


class Suites(PlaceContract, ChannelContract):
    def __init__(self, name: str, broken: Callable[..., Place]) -> None:
        self._name, self._broken = name, broken

    def harness(self) -> Harness:
        return BrokenHarness(self._name, self._broken)


@pytest.mark.parametrize(("name", "broken", "test"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_found(name: str, broken: type[Any], test: Callable[..., None]) -> None:
    with pytest.raises((AssertionError, TimeoutError)):
        test(Suites(name, broken))
