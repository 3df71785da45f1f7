"""Azure's machines keep the contract: ARM by the stand-in, machines with a real sshd behind it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

import pytest

from evalfleet.lab import Lab
from evalfleet.lab.network import GATEWAY
from evalfleet.ports import Place
from evalfleet.testing import Harness, PlaceContract, ShellHarness
from standins.azure import StandIn
from standins.azure.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.places import left, place

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
MARKS_PORT = 7
T = TypeVar("T")


class AzureHarness(ShellHarness):
    """Hosts share no files with us: marks come over their network, to a listener at its gateway."""

    unit_s = 0.5
    silent_s = 5.0
    patience_s = 30.0

    def __init__(self, azure: StandIn) -> None:
        super().__init__()
        self.azure = azure
        self._left: collections.Counter[str] = collections.Counter()
        self._listener = azure.hosts.lab.socket()
        self._listener.bind((GATEWAY, MARKS_PORT))
        self._listener.listen()
        threading.Thread(target=self._count, daemon=True).start()

    def make_place(self) -> Place:
        return place(self.azure, self.directory, inside=True)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with self.azure.hosts.lab.inside():
            return asyncio.run(main)

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, connection.makefile() as file:
                    self._left.update(file.read().split())

    def _leave(self, mark: str) -> str:
        return f"bash -c 'echo {mark} >/dev/tcp/{GATEWAY}/{MARKS_PORT}'" if mark else ""

    async def marks(self, mark: str) -> int:
        return self._left[mark]

    def close(self) -> None:
        self._listener.shutdown(2)
        self._listener.close()
        super().close()
        assert not left(self.azure), "something is left"
        assert not self.azure.meters.running(), "something costs money still"


class TestAzurePlace(PlaceContract):
    """Its channels are those of the place `ssh`, whose tests they pass."""

    azure: ClassVar[StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _azure(cls) -> Iterator[None]:
        with StandIn(Hosts(), timing=FAST) as cls.azure:
            yield

    def harness(self) -> Harness:
        return AzureHarness(self.azure)
