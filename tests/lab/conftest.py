"""What tests of the lab are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab import Lab, NamespaceHost


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.create(5) as made:
        yield made


@pytest.fixture
def host(lab: Lab) -> Iterator[NamespaceHost]:
    """One that a test may break: it is gone afterwards."""
    added = lab.add()[0]
    yield added
    lab.remove(added)
