"""What tests of stand-ins are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cloud.azure import StandIn
from tests.cloud.rest import Rest


@pytest.fixture
def azure() -> Iterator[StandIn]:
    """Without hosts."""
    with StandIn() as made:
        yield made


@pytest.fixture
def rest(azure: StandIn) -> Rest:
    made = Rest(azure)
    made.furnish()
    return made
