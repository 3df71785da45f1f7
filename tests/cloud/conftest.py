"""What tests of stand-ins are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from standins.azure import StandIn, Timing
from tests.cloud.rest import Rest

if TYPE_CHECKING:
    from standins import azure_batch, azure_ml

QUICK = (0.0, 0.02)
FAST = Timing(QUICK, QUICK, (0.05, 0.1), QUICK, QUICK)


@pytest.fixture
def azure() -> Iterator[StandIn]:
    """Without hosts, and fast."""
    with StandIn(timing=FAST) as made:
        yield made


@pytest.fixture
def rest(azure: StandIn) -> Rest:
    made = Rest(azure)
    made.furnish()
    return made


@pytest.fixture(params=["azure_ml", "azure_batch"])
def service(request: pytest.FixtureRequest) -> Iterator[azure_ml.StandIn | azure_batch.StandIn]:
    """Each service of managed compute, whose nodes are processes of this computer."""
    from standins import azure_batch, azure_ml
    from tests.cloud import batch_places, ml_places

    if request.param == "azure_ml":
        with azure_ml.StandIn(azure_ml.Processes(), ml_timing=ml_places.FAST) as ml:
            yield ml
    else:
        nodes = azure_batch.ProcessNodes()
        with azure_batch.StandIn(nodes=nodes, timing=batch_places.FAST) as batch:
            yield batch
