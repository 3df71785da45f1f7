"""The machines of clouds keep the contract: the API by a stand-in, machines with a real sshd behind it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from evalfleet.ports import Place
from evalfleet.testing import Harness, PlaceContract, ShellHarness
from evalfleet.testing.harness import Kind
from lab import Lab
from standins import azure, azure_batch, gce
from standins.cloud.hosts import Hosts
from standins.cloud.standin import CloudStandIn
from tests.cloud import batch_places, conftest, gce_places, places
from tests.lab.marks import Marks, leave
from tests.waiting import PATIENCE_S, allow_for_load

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
T = TypeVar("T")


class CloudHarness(ShellHarness):
    """Hosts share no files with us: marks come over their network, to a listener at its gateway."""

    unit_s = 0.5
    silent_s = 5.0
    patience_s = PATIENCE_S

    def __init__(self, cloud: CloudStandIn, make: Callable[[Path], Place]) -> None:
        super().__init__()
        allow_for_load(self)
        self._cloud, self._make = cloud, make
        self._left: collections.Counter[str] = collections.Counter()
        self._listener = Marks(cloud.hosts.lab.socket(), self._left)

    def make_place(self) -> Place:
        return self._make(self.directory)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with self._cloud.hosts.lab.inside():
            return asyncio.run(main)

    def _leave(self, mark: str) -> str:
        return leave(mark, self._listener.port)

    async def marks(self, mark: str) -> int:
        return self._left[mark]

    def close(self) -> None:
        self._listener.close()
        super().close()
        assert not self._cloud.left(), "something is left"
        assert not self._cloud.meters.running(), "something costs money still"


class GceHarness(CloudHarness):
    """Its machines have their host keys and their limits a little later."""

    # their limit cannot be moved once they run: on a busy computer it must be further off from the start
    unit_s = 0.6
    boot_s = 4.0


class TestAzurePlace(PlaceContract):
    """Its channels are those of the place `ssh`, whose tests they pass."""

    cloud: ClassVar[azure.StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _azure(cls) -> Iterator[None]:
        with azure.StandIn(Hosts(), timing=conftest.FAST) as cls.cloud:
            yield

    def harness(self) -> Harness:
        return CloudHarness(self.cloud, lambda home: places.place(self.cloud, home, inside=True))


class TestGcePlace(PlaceContract):
    """Its channels are those of the place `ssh`, too."""

    cloud: ClassVar[gce.StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _google(cls) -> Iterator[None]:
        with gce.StandIn(Hosts(), timing=gce_places.FAST) as cls.cloud:
            yield

    def harness(self) -> Harness:
        return GceHarness(self.cloud, lambda home: gce_places.place(self.cloud, home, inside=True))


class BatchHarness(CloudHarness):
    """Its machines are jobs, whose nodes are billed from before they can be used."""

    kind: Kind = "service"
    unit_s = 1.5
    silent_s = 8.0
    boot_s = 6.0


class BatchMachines:
    """Its channels are those of the place `ssh`, too."""

    cloud: ClassVar[azure_batch.StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _batch(cls) -> Iterator[None]:
        with azure_batch.StandIn(Hosts(), timing=batch_places.FAST) as cls.cloud:
            yield

    def harness(self) -> Harness:
        return BatchHarness(self.cloud, lambda home: batch_places.place(self.cloud, home, inside=True))


class TestAzureBatchPlace(BatchMachines):
    """What a service of jobs could get wrong; the rest is promised nightly."""

    test_creating_twice_makes_one_machine = PlaceContract.test_creating_twice_makes_one_machine
    test_the_life_begins_with_the_start = PlaceContract.test_the_life_of_a_machine_begins_when_it_starts
    test_deleting_before_it_is_up = PlaceContract.test_deleting_a_machine_that_is_not_up_yet


@pytest.mark.nightly
class TestAllOfAzureBatchPlace(BatchMachines, PlaceContract):
    """The whole contract: its machines take seconds to start, and minutes in all."""
