"""Jobs of Azure Machine Learning keep the contract of machines: pilots and mailboxes are real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from evalfleet.ports import Place
from evalfleet.testing import ChannelContract, Harness, PlaceContract, ShellHarness
from evalfleet.testing.harness import Kind
from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.waiting import PATIENCE_S, SLOWNESS, until

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")


class MlHarness(ShellHarness):
    """Its machines take seconds to start, and each word goes through the storage."""

    kind: Kind = "service"
    unit_s = 3.0 * SLOWNESS
    silent_s = 30.0
    patience_s = PATIENCE_S
    boot_s = 10.0 * SLOWNESS

    def __init__(self, ml: StandIn) -> None:
        super().__init__()
        self._ml = ml

    def make_place(self) -> Place:
        return ml_places.place(self._ml, self.directory)

    def close(self) -> None:
        super().close()
        until(lambda: not self._ml.left(), lambda: f"something is left: {self._ml.left()}")
        assert not self._ml.meters.running(), "something costs money still"


class MlMachines:
    ml: ClassVar[StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _workspace(cls) -> Iterator[None]:
        with StandIn(Processes(), ml_timing=ml_places.FAST) as cls.ml:
            yield

    def harness(self) -> Harness:
        return MlHarness(self.ml)


class TestAzureMlPlace(MlMachines):
    """What a service of jobs could get wrong; the rest is promised nightly."""

    test_creating_twice_makes_one_machine = PlaceContract.test_creating_twice_makes_one_machine
    test_deleting_before_it_is_up = PlaceContract.test_deleting_a_machine_that_is_not_up_yet


@pytest.mark.nightly
class TestAllOfAzureMlPlace(MlMachines, PlaceContract, ChannelContract):
    """The whole contract: its machines take seconds to start, and minutes in all."""
