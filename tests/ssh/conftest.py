"""A fleet a module: hosts are started once, and each test leaves them empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fleet import Fleet, fleet


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), 3) as made:
        yield made


@pytest.fixture
def hosts(shared: Fleet) -> Iterator[Fleet]:
    yield shared
    left = [str(path) for host in shared.hosts for path in host.home.iterdir()]
    if left:  # the tests after it fail by themselves, or not at all
        for host in shared.hosts:
            host.clear()
    assert not left, "a test left something on a host"
