"""What tests of stand-ins are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standins.azure import StandIn, Timing
from tests.cloud.rest import Rest

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
