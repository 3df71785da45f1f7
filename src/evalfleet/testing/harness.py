"""What a contract suite needs to know of the world that it tests: a place, its time, its commands."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from evalfleet.errors import FleetError
from evalfleet.model import Command, Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Fence, Place

Kind = Literal["created", "lent", "service"]
T = TypeVar("T")
X = TypeVar("X", bound=Exception)


class Harness(ABC):
    """One fresh world. Times are real seconds, or virtual ones where `run` has a loop of its own.

    `unit_s` is the grain of the tests: jobs last, and machines live, a few of them. `patience_s` is how
    long a machine may take to come up or to be gone. `capacity`: how many machines there are to lend.
    """

    kind: Kind = "created"
    pool: str = "contract"
    unit_s: float = 0.5
    patience_s: float = 60.0
    boot_s: float = 0.0
    """How much of the life of a machine that cannot be extended its start may take."""
    silent_s: float = 10.0
    capacity: int | None = None
    keeps_files: bool = True
    """Does `collect` bring real files?"""
    listed_when_expired: bool = False
    """May an expired machine still be listed as up? Only where it costs nothing and keeps its results."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._channels: list[Channel] = []
        self._directory = tempfile.TemporaryDirectory(prefix="evalfleet-contract-")
        self.directory = Path(self._directory.name).resolve()

    @abstractmethod
    def make_place(self) -> Place:
        """A new object for the same world: what another controller would have."""

    @abstractmethod
    def command(
        self,
        *,
        seconds: float = 0.0,
        exit_code: int = 0,
        score: float | None = None,
        mark: str = "",
        after: str = "",
    ) -> Command:
        """Leaves the mark `mark`, lasts, writes the score, leaves the mark `after`, ends with the code."""

    @abstractmethod
    async def marks(self, mark: str) -> int:
        """How often this mark was left, on whatever machine."""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)

    def fence(self, epoch: int) -> Fence:
        return Fence("contract", epoch, self.silent_s)

    async def wait(self, units: float) -> None:
        await asyncio.sleep(units * self.unit_s)

    def close(self) -> None:
        """Remove what the world leaves behind, if anything."""
        self._directory.cleanup()

    # -- what the suites use -------------------------------------------------------------------

    @property
    def long_s(self) -> float:
        """A time that no test reaches the end of."""
        return max(1000 * self.unit_s, 10 * self.patience_s)

    def life_s(self, offer: Offer) -> float:
        """A life that no test reaches the end of, and that the place must grant: it may need no more."""
        life_s = max(self.long_s, offer.life.least_life_s)
        return life_s if offer.life.max_life_s is None else min(life_s, offer.life.max_life_s)

    def place(self) -> Place:
        self._places.append(self.make_place())
        return self._places[-1]

    def channel(self, place: Place, machine: Machine, epoch: int = 1) -> Channel:
        self._channels.append(place.channel(machine, self.fence(epoch)))
        return self._channels[-1]

    def machine_id(self, n: int = 1, pool: str | None = None) -> MachineId:
        return MachineId(f"{self.pool if pool is None else pool}-abc123-{n}")

    async def bring_up(self, place: Place, n: int = 1, expires_s: float | None = None) -> Machine:
        """Create machine `n` and wait until it is up."""
        machine, offer = self.machine_id(n), await first_offer(place)
        await place.create(machine, offer, self.life_s(offer) if expires_s is None else expires_s)
        return await self.until_up(place, machine)

    async def until_up(self, place: Place, machine: MachineId) -> Machine:
        seen = await self.until(lambda: find(place, machine), is_up, f"{machine} is up")
        assert seen is not None
        return seen

    async def until(self, ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], what: str) -> T:
        """Ask until the answer is good."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience_s
        while not good(answer := await ask()):
            assert loop.time() < deadline, f"not within {self.patience_s:g} s: {what}; last seen: {answer!r}"
            await self.wait(0.2)
        return answer

    async def remove(self, place: Place, machine: MachineId) -> None:
        """Delete as the engine does: until it is absent from two listings, a settling time apart."""
        settle_s = (await first_offer(place)).life.settle_s
        await place.delete(machine)
        await self.until(lambda: find(place, machine), lambda seen: seen is None, f"{machine} is gone")
        if settle_s:
            await asyncio.sleep(settle_s)
            await place.delete(machine)
            assert await find(place, machine) is None, f"{machine} came back after its delete"

    async def sweep(self) -> None:
        """Leave nothing behind, whatever the test did."""
        place = self.place()
        for machine in [*await place.list(self.pool), *await place.list(f"{self.pool}x")]:
            await self.remove(place, machine.id)
        for channel in self._channels:
            with suppress(FleetError):
                await channel.close()
        for each in self._places:
            await each.close()


class ShellHarness(Harness):
    """A harness for places whose machines have a POSIX shell. Marks are files that jobs and tests both
    reach."""

    def command(
        self,
        *,
        seconds: float = 0.0,
        exit_code: int = 0,
        score: float | None = None,
        mark: str = "",
        after: str = "",
    ) -> Command:
        lines = [
            self._leave(mark),
            f"sleep {seconds:g} || exit" if seconds else "",  # a sleep that was killed did not last
            "" if score is None else f"""printf '{{"score": {score:g}}}' > "$EVALFLEET_OUT/result.json" """,
            self._leave(after),
            f"exit {exit_code}",
        ]
        return Command(("sh", "-c", "\n".join(line for line in lines if line)))

    def _leave(self, mark: str) -> str:
        return f"echo >> {shlex.quote(str(self.directory / mark))}" if mark else ""

    async def marks(self, mark: str) -> int:
        try:
            return (self.directory / mark).read_text().count("\n")
        except FileNotFoundError:
            return 0


# -- small words of the suites -----------------------------------------------------------------


async def first_offer(place: Place) -> Offer:
    offers = await place.offers(Needs())
    assert offers, "the place offers nothing, even to a benchmark without needs"
    return offers[0]


async def find(place: Place, machine: MachineId) -> Machine | None:
    pool = machine.rsplit("-", 2)[0]
    found = [seen for seen in await place.list(pool) if seen.id == machine]
    assert len(found) <= 1, f"{machine} is listed {len(found)} times"
    return found[0] if found else None


async def raised(kind: type[X], call: Awaitable[object]) -> X:
    """The error of this kind that the call must raise."""
    try:
        answer = await call
    except kind as err:
        return err
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


def is_up(seen: Machine | None) -> bool:
    assert seen is None or seen.phase in ("queued", "pending", "up"), f"a new machine is {seen}"
    return seen is not None and seen.phase == "up"


def has_started(seen: Machine | None) -> bool:
    return seen is not None and seen.phase not in ("queued", "gone", "evicted")


def has_ended(seen: Machine | None) -> bool:
    return seen is None or seen.phase in ("gone", "evicted")


# -- how tests are made ------------------------------------------------------------------------


class _Suite(Protocol):
    def harness(self) -> Harness: ...


S = TypeVar("S", bound=_Suite)


def promise(test: Callable[[S, Harness], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An asynchronous test as a plain method: pytest must see no argument that it would look up."""

    def method(self: S) -> None:
        harness = self.harness()

        async def main() -> None:
            try:
                await test(self, harness)
            finally:
                await harness.sweep()

        try:
            harness.run(main())
        finally:
            harness.close()

    method.__name__, method.__qualname__, method.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return method
