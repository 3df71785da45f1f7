"""A fleet a module: hosts are started once, and each test leaves them empty."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from .fleet import Fleet, fleet


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests here may be coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), 3) as made:
        yield made


@pytest.fixture
def hosts(shared: Fleet) -> Iterator[Fleet]:
    yield shared
    left = [str(path) for host in shared.hosts for path in host.home.iterdir()]
    assert not left, "a test left something on a host"
