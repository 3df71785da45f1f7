"""The simulated places keep the contract of real ones, in a world without faults."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from evalfleet.model import Command
from evalfleet.ports import Place
from evalfleet.testing import ChannelContract, Harness, PlaceContract
from evalfleet.testing.harness import Kind
from sim.loop import SimLoop
from sim.scenario import OFFERS, PLACES
from sim.world import Faults, Life, World

T = TypeVar("T")


class OpenWorld(World):
    """No journal stands behind these calls: all of them are meant."""

    def must_be_durable(self, name: str) -> None:
        return


class SimHarness(Harness):
    unit_s = 60.0
    patience_s = 7200.0
    silent_s = 60.0
    keeps_files = False

    def __init__(self, name: str, kind: Kind) -> None:
        super().__init__()
        self.name, self.kind = name, kind
        self.capacity = OFFERS[name][0].capacity
        self.loop = SimLoop()
        self.world = OpenWorld(0, self.loop, Faults())

    def make_place(self) -> Place:
        return PLACES[self.name](self.world, Life(), self.name, OFFERS[self.name])

    def command(
        self,
        *,
        seconds: float = 0.0,
        exit_code: int = 0,
        score: float | None = None,
        mark: str = "",
        after: str = "",
    ) -> Command:
        words = ["sleep", f"{seconds}", "exit", f"{exit_code}", "mark", mark, "after", after]
        return Command((*words, "score", f"{score}") if score is not None else tuple(words))

    async def marks(self, mark: str) -> int:
        return self.world.marks[mark]

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    def close(self) -> None:
        pending = asyncio.all_tasks(self.loop)
        self.loop.close()
        super().close()
        assert not pending
        assert not self.world.violations


class TestSimVms(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return SimHarness("vms", "created")


class TestSimHosts(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return SimHarness("hosts", "lent")


class TestSimService(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return SimHarness("service", "service")
