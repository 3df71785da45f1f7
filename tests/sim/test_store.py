"""Simulated runs whose store goes away: they drain, and start nothing that the store does not know of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from evalfleet.engine import Engine
from evalfleet.events import Event, StopRequested
from evalfleet.model import Micros
from evalfleet.ports import Request
from sim.checks import violations
from sim.journal import SimJournal
from sim.scenario import Scenario, draw
from sim.simulate import Parts, Simulated, simulate
from sim.world import Faults


class LosesItsStore(SimJournal):
    """Waits for its store after so many appends, until it asks to drain: as the mirrored journal does."""

    appends = 0
    away_after = 10
    alone = False

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        self.appends += 1
        if self.appends <= self.away_after:
            return await super().append(at, events, answered)
        world = self._store.world
        known = set(world.durable)
        await super().append(at, events, answered)
        world.durable &= known  # nothing of it may be started
        while not self.alone:
            await asyncio.sleep(5.0)
        return False

    async def requests(self) -> Sequence[Request]:
        asked = await super().requests()
        if self.appends <= self.away_after:
            return asked
        self.alone = True
        return [*asked, Request(-1, StopRequested("store", "it is away", drain=True))]


class StartsAllTheSame(Engine):
    """Takes no notice of where it was written down."""

    def _hold_back(self, recorded: Sequence[Event]) -> bool:
        return False


def away(seed: int, engine: type[Engine] = Engine) -> Simulated:
    drawn = draw(seed)
    journal = type("Away", (LosesItsStore,), {"away_after": 4 + seed % 9})
    scenario = Scenario(seed, drawn.plan, drawn.tasks, Faults())
    return simulate(scenario, Parts(engine=engine, journal=journal))


@pytest.mark.parametrize("seed", range(24))
def test_a_run_whose_store_goes_away_keeps_all_invariants(seed: int) -> None:
    assert violations(away(seed)) == []


def test_the_check_sees_what_is_started_all_the_same() -> None:
    found = [each for seed in range(12) for each in violations(away(seed, StartsAllTheSame))]
    assert any("before it was durable" in each for each in found)
