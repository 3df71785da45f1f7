"""Google's machines keep the contract: the API by the stand-in, machines with a real sshd behind it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

import pytest

from evalfleet.lab import Lab
from evalfleet.ports import Place
from evalfleet.testing import Harness, PlaceContract, ShellHarness
from standins.gce import Hosts, StandIn
from tests.cloud.gce_places import FAST, place
from tests.lab.marks import Marks, leave
from tests.waiting import PATIENCE_S

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
T = TypeVar("T")


class GceHarness(ShellHarness):
    """Hosts share no files with us: marks come over their network, to a listener at its gateway."""

    unit_s = 0.6
    boot_s = 4.0
    silent_s = 5.0
    patience_s = PATIENCE_S

    def __init__(self, google: StandIn) -> None:
        super().__init__()
        self.google = google
        self._left: collections.Counter[str] = collections.Counter()
        self._listener = Marks(google.hosts.lab.socket(), self._left)

    def make_place(self) -> Place:
        return place(self.google, self.directory, inside=True)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with self.google.hosts.lab.inside():
            return asyncio.run(main)

    def _leave(self, mark: str) -> str:
        return leave(mark, self._listener.port)

    async def marks(self, mark: str) -> int:
        return self._left[mark]

    def close(self) -> None:
        self._listener.close()
        super().close()
        assert not self.google.left(), "something is left"
        assert not self.google.meters.running(), "something costs money still"


class TestGcePlace(PlaceContract):
    """Its channels are those of the place `ssh`, whose tests they pass."""

    google: ClassVar[StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _google(cls) -> Iterator[None]:
        with StandIn(Hosts(), timing=FAST) as cls.google:
            yield

    def harness(self) -> Harness:
        return GceHarness(self.google)
