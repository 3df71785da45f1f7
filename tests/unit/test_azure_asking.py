"""One question that many have at once: few are put, and no answer is older than its question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from evalfleet.places.azure.asking import Shared

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


def run(main: Callable[[Oracle, Shared[int]], Awaitable[None]]) -> None:
    async def bounded() -> None:
        oracle = Oracle()
        async with asyncio.timeout(LONG_S):
            await main(oracle, Shared(oracle.ask))

    asyncio.run(bounded())


def test_who_asks_at_once_shares_an_answer() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        oracle.gate.set()
        assert await asyncio.gather(*(shared.fresh() for _ in range(5))) == [1] * 5

    run(main)


def test_who_asks_while_a_question_is_under_way_gets_the_next_answer() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        first = asyncio.create_task(shared.fresh())
        await oracle.put.wait()
        later = [asyncio.create_task(shared.fresh()) for _ in range(3)]
        await asyncio.sleep(0)
        oracle.gate.set()
        assert await first == 1
        assert await asyncio.gather(*later) == [2] * 3

    run(main)


def test_who_waits_gets_what_others_ask_for() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        oracle.gate.set()
        waiting = [asyncio.create_task(shared.soon(LONG_S)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await shared.fresh() == 1
        assert await asyncio.gather(*waiting) == [1] * 3

    run(main)


def test_who_has_waited_long_enough_asks_and_all_that_wait_hear_it() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        oracle.gate.set()
        assert list(await asyncio.gather(shared.soon(0.01), shared.soon(LONG_S))) == [1, 1]

    run(main)


def test_who_loses_patience_while_a_question_is_under_way_puts_none() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        first = asyncio.create_task(shared.fresh())
        await oracle.put.wait()
        waiting = asyncio.create_task(shared.soon(0.0))
        for _ in range(5):
            await asyncio.sleep(0)
        oracle.gate.set()
        assert (await first, await waiting) == (1, 1)
        assert oracle.asked == 1

    run(main)


def test_an_error_is_told_to_who_asked_and_the_next_question_is_put() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        oracle.gate.set()
        oracle.asked = 12
        with pytest.raises(OSError, match="no answer"):
            await shared.fresh()
        assert await shared.fresh() == 14

    run(main)


def test_who_leaves_takes_the_answer_from_nobody() -> None:
    async def main(oracle: Oracle, shared: Shared[int]) -> None:
        leaves, stays = asyncio.create_task(shared.fresh()), asyncio.create_task(shared.fresh())
        await oracle.put.wait()
        leaves.cancel()
        oracle.gate.set()
        assert await stays == 1

    run(main)
