"""One question that many have at once: few are put, and no answer is older than its question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from evalfleet.single_flight import SingleFlight
from sim.loop import SimLoop

LONG_S = 60.0


class Oracle:
    """Answers with a number that grows, once it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.put = asyncio.Event()

    async def ask(self) -> int:
        self.asked += 1
        number = self.asked
        self.put.set()
        await self.gate.wait()
        if number == 13:
            raise OSError("no answer")
        return number


def run(main: Callable[[Oracle, SingleFlight[int]], Awaitable[None]]) -> None:
    async def bounded() -> None:
        oracle = Oracle()
        async with asyncio.timeout(LONG_S):
            await main(oracle, SingleFlight(oracle.ask))

    asyncio.run(bounded())


def test_who_asks_at_once_shares_an_answer() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        oracle.gate.set()
        assert await asyncio.gather(*(flight.fresh() for _ in range(5))) == [1] * 5

    run(main)


def test_who_asks_while_a_question_is_under_way_gets_the_next_answer() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        first = asyncio.create_task(flight.fresh())
        await oracle.put.wait()
        later = [asyncio.create_task(flight.fresh()) for _ in range(3)]
        await asyncio.sleep(0)
        oracle.gate.set()
        assert await first == 1
        assert await asyncio.gather(*later) == [2] * 3

    run(main)


def test_who_waits_gets_what_others_ask_for() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        oracle.gate.set()
        waiting = [asyncio.create_task(flight.soon(LONG_S)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await flight.fresh() == 1
        assert await asyncio.gather(*waiting) == [1] * 3

    run(main)


def test_who_has_waited_long_enough_asks_and_all_that_wait_hear_it() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        oracle.gate.set()
        assert list(await asyncio.gather(flight.soon(0.01), flight.soon(LONG_S))) == [1, 1]

    run(main)


def test_who_loses_patience_while_a_question_is_under_way_puts_none() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        first = asyncio.create_task(flight.fresh())
        await oracle.put.wait()
        waiting = asyncio.create_task(flight.soon(0.0))
        for _ in range(5):
            await asyncio.sleep(0)
        oracle.gate.set()
        assert (await first, await waiting) == (1, 1)
        assert oracle.asked == 1

    run(main)


def test_an_error_is_told_to_who_asked_and_the_next_question_is_put() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        oracle.gate.set()
        oracle.asked = 12
        with pytest.raises(OSError, match="no answer"):
            await flight.fresh()
        assert await flight.fresh() == 14

    run(main)


def test_who_leaves_takes_the_answer_from_nobody() -> None:
    async def main(oracle: Oracle, flight: SingleFlight[int]) -> None:
        leaves, stays = asyncio.create_task(flight.fresh()), asyncio.create_task(flight.fresh())
        await oracle.put.wait()
        leaves.cancel()
        oracle.gate.set()
        assert await stays == 1

    run(main)


class SlowCall:
    """A call of a second, in simulated time, that counts how many of it are under way."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls = self.at_once = self.most_at_once = 0
        self.fails = fails

    async def __call__(self) -> int:
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.at_once -= 1
        if self.fails:
            raise OSError("no answer")
        return self.calls


def simulate(main: Coroutine[Any, Any, None]) -> None:
    loop = SimLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_a_thousand_pollers_cost_one_call_at_a_time() -> None:
    async def main() -> None:
        call = SlowCall()
        flight = SingleFlight(call)

        async def poll(n: int) -> None:
            for _ in range(10):
                await flight.fresh()
                await asyncio.sleep(0.001 * n)

        await asyncio.gather(*(poll(n) for n in range(1000)))
        assert call.most_at_once == 1
        assert call.calls <= 25

    simulate(main())


def test_each_call_waits_as_long_as_it_is_told_to() -> None:
    async def main() -> None:
        waits = iter((0.0, 5.0))
        flight = SingleFlight(SlowCall(), lambda: next(waits))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await flight.fresh()
        assert loop.time() - begun == pytest.approx(1.0)
        await flight.fresh()
        assert loop.time() - begun == pytest.approx(7.0)

    simulate(main())


def test_an_error_that_nobody_stayed_to_hear_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        asker = asyncio.create_task(SingleFlight(SlowCall(fails=True)).fresh())
        await asyncio.sleep(0.5)
        asker.cancel()
        await asyncio.sleep(5.0)

    simulate(main())
    assert not caplog.records
