"""Jobs of Azure Machine Learning keep the contract of machines: pilots and mailboxes are real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from evalfleet.testing import ChannelContract, Harness, PlaceContract
from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.cloud.mail_desk import MailHarness

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")


class MlMachines:
    ml: ClassVar[StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _workspace(cls) -> Iterator[None]:
        with StandIn(Processes(), ml_timing=ml_places.FAST) as cls.ml:
            yield

    def harness(self) -> Harness:
        return MailHarness(self.ml, lambda home: ml_places.place(self.ml, home))


class TestAzureMlPlace(MlMachines):
    """What a service of jobs could get wrong; the rest is promised nightly."""

    test_creating_twice_makes_one_machine = PlaceContract.test_creating_twice_makes_one_machine
    test_deleting_before_it_is_up = PlaceContract.test_deleting_a_machine_that_is_not_up_yet


@pytest.mark.nightly
class TestAllOfAzureMlPlace(MlMachines, PlaceContract, ChannelContract):
    """The whole contract: its machines take seconds to start, and minutes in all."""
