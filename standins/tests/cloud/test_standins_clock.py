"""The clock of the stand-ins: what is due while time jumps happens at its own moment."""

from __future__ import annotations

import asyncio

from standins.cloud.clock import Clock


def test_what_is_between_two_sleeps_when_time_jumps_happens_at_its_own_moment() -> None:
    """Else a node of Batch was billed until its job's limit: its task's own limit had not begun yet."""

    async def main() -> list[float]:
        clock, moments = Clock(), list[float]()
        begun = clock.now()

        async def act() -> None:
            for _ in range(2):
                await clock.sleep(100.0)
                moments.append(round(clock.now() - begun))

        acting = asyncio.create_task(act())
        await clock.jump(1000.0)
        await acting
        return moments

    assert asyncio.run(main()) == [100, 200]
