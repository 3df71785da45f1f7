"""One listing at a time, shared; but never an answer older than the question."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import pytest

from evalfleet.errors import PlaceError
from evalfleet.listing import Listing
from evalfleet.model import Machine, MachineId
from evalfleet.ports import Place
from evalfleet.sim.loop import SimLoop


class SlowPlace:
    """Lists what was there when the call began; each call takes a second."""

    def __init__(self) -> None:
        self.calls = self.at_once = self.most_at_once = 0
        self.machines: list[str] = []
        self.fails = False

    async def list(self, pool: str) -> Sequence[Machine]:
        assert pool == "pool"
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        seen, fails = list(self.machines), self.fails
        try:
            await asyncio.sleep(1.0)
        finally:
            self.at_once -= 1
        if fails:
            raise PlaceError("500", transient=True)
        return [Machine(MachineId(machine), "up") for machine in seen]


def listing_of(place: SlowPlace) -> Listing:
    return Listing(cast("Place", place), "pool")


def run(main: Coroutine[Any, Any, None]) -> None:
    loop = SimLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_all_who_ask_at_once_share_a_call() -> None:
    async def main() -> None:
        place = SlowPlace()
        listing = listing_of(place)
        place.machines = ["m"]
        answers = await asyncio.gather(*(listing.fresh() for _ in range(1000)))
        assert place.calls == 1
        assert all(list(answer) == ["m"] for answer in answers)

    run(main())


def test_who_asks_while_a_call_is_under_way_gets_the_next_one() -> None:
    async def main() -> None:
        place = SlowPlace()
        listing = listing_of(place)
        early = asyncio.create_task(listing.fresh())
        await asyncio.sleep(0.5)
        place.machines.append("new")
        late = [asyncio.create_task(listing.fresh()) for _ in range(10)]
        assert list(await early) == []
        assert [list(answer) for answer in await asyncio.gather(*late)] == [["new"]] * 10
        assert (place.calls, place.most_at_once) == (2, 1)

    run(main())


def test_a_thousand_pollers_cost_one_call_at_a_time() -> None:
    async def main() -> None:
        place = SlowPlace()
        listing = listing_of(place)

        async def poll(n: int) -> None:
            for _ in range(10):
                await listing.fresh()
                await asyncio.sleep(0.001 * n)

        await asyncio.gather(*(poll(n) for n in range(1000)))
        assert place.most_at_once == 1
        assert place.calls <= 25

    run(main())


def test_one_asker_that_leaves_takes_the_answer_from_nobody() -> None:
    async def main() -> None:
        listing = listing_of(SlowPlace())
        first, second = (asyncio.create_task(listing.fresh()) for _ in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second == {}

    run(main())


def test_a_failed_call_fails_its_askers_and_not_the_next() -> None:
    async def main() -> None:
        place = SlowPlace()
        listing = listing_of(place)
        place.fails = True
        answers = await asyncio.gather(listing.fresh(), listing.fresh(), return_exceptions=True)
        assert [type(answer) for answer in answers] == [PlaceError, PlaceError]
        place.fails = False
        assert await listing.fresh() == {}

    run(main())


def test_an_error_that_nobody_stayed_to_hear_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        place = SlowPlace()
        place.fails = True
        asker = asyncio.create_task(listing_of(place).fresh())
        await asyncio.sleep(0.5)
        asker.cancel()
        await asyncio.sleep(5.0)

    run(main())
    assert not caplog.records
