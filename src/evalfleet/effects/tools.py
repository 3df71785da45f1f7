"""What all effects share: the state to read, the places to call, the channels that are open."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from evalfleet.clock import pauses
from evalfleet.errors import FleetError, PlaceError
from evalfleet.events import Event, MachineCondemned
from evalfleet.model import AttemptId, Bundle, Collected, Machine, MachineId, Metered, Micros, Scorer, Task
from evalfleet.names import spread
from evalfleet.policy.pool import given_up
from evalfleet.ports import Benchmark, Channel, Clock, Fence, FileBenchmark, Place, Stepped
from evalfleet.single_flight import SingleFlight
from evalfleet.state import MachineState, RunState

T = TypeVar("T")
Listing = SingleFlight[Mapping[MachineId, Machine]]
"""What exists in one place of one run or pool, asked by all its machines together."""


FenceOf = Callable[[MachineId, Fence], Fence]
"""What makes a stream's own fence the one that a machine is under."""


class PollTempo(Protocol):
    """The part of the engine's tempo that effects need."""

    @property
    def poll_s(self) -> float: ...

    @property
    def poll_cap_s(self) -> float: ...


class RunCopy(Protocol):
    """A run's copy in a store, as far as effects use it."""

    async def keep(self, attempt: AttemptId) -> None:
        """Put artefacts that have come home into the store, before that is reported."""
        ...

    async def has_files(self) -> None:
        """Wait until what machines get is here, if another computer has planned the run. Raises
        RequestError."""
        ...

    async def fetched(self) -> None:
        """Wait until the artefacts are here that controllers on other computers have collected."""
        ...


@dataclass(frozen=True)
class Tools:
    """What effects work with. They read the state and never change it: what they find out they `report`."""

    state: RunState
    places: Mapping[str, Place]
    benchmark: Benchmark
    clock: Clock
    artefacts: Path
    epoch: int
    pace: PollTempo
    report: Callable[[Event], None]
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    began_at: Micros = 0  # this controller
    copy: RunCopy | None = None
    """The run's copy in a store, if it has one."""
    fence_of: FenceOf | None = None
    """Of a pool, whose machines are under other fences while runs have them."""
    rescued: dict[AttemptId, Collected] = field(default_factory=dict[AttemptId, Collected])
    """Artefacts that came home before their attempt was reported as ended: its machine was soon to go."""
    metered: dict[AttemptId, Metered] = field(default_factory=dict[AttemptId, Metered])
    """What attempts used of models, as their machines told before anybody could report it."""
    _channels: dict[MachineId, Channel] = field(default_factory=dict[MachineId, Channel])
    _listings: dict[str, Listing] = field(default_factory=dict[str, Listing])
    _retries: Iterator[int] = field(default_factory=itertools.count)

    # What the benchmark can do is asked once: to look a protocol up takes longer than to decide a turn.

    @functools.cached_property
    def files(self) -> FileBenchmark | None:
        """The benchmark, if it is made of files."""
        return self.benchmark if isinstance(self.benchmark, FileBenchmark) else None

    @functools.cached_property
    def stepped(self) -> Stepped | None:
        """The benchmark, if its attempts write their steps into a file."""
        return self.benchmark if isinstance(self.benchmark, Stepped) and self.benchmark.steps else None

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None:
        """What grades the attempt where it ran, if it does not score itself."""
        return self.files.scorer(task, attempt) if self.files is not None else None

    def task_bundle(self, task: Task) -> Bundle:
        """The task's own files."""
        return self.files.task_bundle(task) if self.files is not None else Bundle()

    def place_of(self, machine: MachineState) -> Place:
        return self.places[machine.offer.place]

    async def has_files(self) -> None:
        """Wait until the benchmark has the files that machines get. Raises RequestError."""
        if self.copy is not None:
            await self.copy.has_files()

    def give_up(self, why: MachineCondemned) -> None:
        """Report that a machine failed, whose disk may hold a pool's work."""
        self.report(given_up(self.state.machines[why.machine], why))

    # -- channels --------------------------------------------------------------------------------

    def channel(self, machine: MachineState, seen: Machine | None = None) -> Channel:
        """The one channel to the machine, by what its place says of it now, or by what is recorded."""
        if machine.id not in self._channels:
            known = Machine(
                *(machine.id, "up", machine.address, machine.node),
                start=machine.start,
                host_key=machine.host_key,
            )
            seen = seen or known
            fence = Fence(self.state.plan.run, self.epoch, machine.offer.life.silent_s)
            if self.fence_of is not None:
                fence = self.fence_of(machine.id, fence)
            self._channels[machine.id] = self.place_of(machine).channel(seen, fence)
        return self._channels[machine.id]

    def open_channel(self, machine: MachineId) -> Channel | None:
        return self._channels.get(machine)

    async def drop_channel(self, machine: MachineId) -> None:
        if (channel := self._channels.pop(machine, None)) is not None:
            with suppress(FleetError, OSError):
                await channel.close()

    async def close(self) -> None:
        closing = [channel.close() for channel in self._channels.values()]
        self._channels.clear()
        await asyncio.gather(*closing, return_exceptions=True)

    # -- places ----------------------------------------------------------------------------------

    def listing(self, place: Place) -> Listing:
        if place.name not in self._listings:
            prefix = f"{self.state.plan.run}-{self.state.plan.home}"
            self._listings[place.name] = Listing(functools.partial(_list, place, prefix))
        return self._listings[place.name]

    async def find(self, machine: MachineState) -> Machine | None:
        """The machine as its place shows it now. Raises PlaceError when refused for good."""
        listing = self.listing(self.place_of(machine))
        return (await self.persist(listing.fresh, None)).get(machine.id)

    async def persist(self, call: Callable[[], Awaitable[T]], tries: int | None) -> T:
        """Make the call until it succeeds, is refused for good, or `tries` are used up."""
        delays = pauses(self.pace.poll_s * 5, self.pace.poll_cap_s * 3, 2)
        tried = 0
        while True:
            try:
                return await call()
            except PlaceError as err:
                tried += 1
                if not err.transient or tried == tries:
                    raise
                check_wanted()
                own_s = next(delays) * spread(f"{self.state.plan.run} {self.epoch} {next(self._retries)}")
                await asyncio.sleep(max(err.retry_after_s or 0.0, own_s))


def check_wanted() -> None:
    """Raises CancelledError if this effect was cancelled, and what it called has answered with an error
    instead: what is tried once more then, such as a create, would come after what replaced it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _list(place: Place, prefix: str) -> Mapping[MachineId, Machine]:
    return {machine.id: machine for machine in await place.list(prefix)}
