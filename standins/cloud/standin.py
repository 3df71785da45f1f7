"""A cloud's stand-in as tests hold it: servers in a thread, and hands to read and break it with."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from lab import Lab
from lab.network import GATEWAY

from . import tls
from .clock import Clock
from .faults import FaultRules
from .hosts import METADATA, Hosts
from .machines import Machines, Records
from .meters import Meters

T = TypeVar("T")
START_S = 240.0
LOOPBACK = "127.0.0.1"


class CloudStandIn(ABC):
    """What the stand-ins of all clouds have in common. Use as a context manager.

    Its methods may be called from any thread. `ca`: the file of the authority to trust. It listens on two
    ports, the first over https; where machines are hosts of the lab, also in their network.
    """

    vendor_names: tuple[str, ...] = ()
    """Hosts of the vendor's own that it can be taken for, where a proxy leads there."""

    def __init__(self, name: str, machines: Machines | None, speed: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"{name}-stand-in-")
        self._machines = machines or Records()
        self._lab: Lab | None = machines.lab if isinstance(machines, Hosts) else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{name}-stand-in")
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._failure: BaseException | None = None
        self._sockets = [socket.create_server((LOOPBACK, 0), backlog=1024) for _ in range(2)]
        self._ports: list[int] = [sock.getsockname()[1] for sock in self._sockets]
        self.clock = Clock(speed)
        self.ca, self._tls = tls.make(Path(self._folder.name), [LOOPBACK, GATEWAY], self.vendor_names)

    # -- what each cloud has of its own --------------------------------------------------------

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """The API, over https."""

    @property
    @abstractmethod
    def faults(self) -> FaultRules[Any]: ...

    @property
    @abstractmethod
    def meters(self) -> Meters: ...

    @abstractmethod
    def left(self) -> list[str]:
        """All there is that costs money."""

    @abstractmethod
    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        """Serve there, by plain http without a `context`."""

    @abstractmethod
    async def _listen_metadata(self, sock: socket.socket, hosts: Hosts) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    def _troubles(self) -> Sequence[BaseException]:
        """Errors of the stand-in's own, which no client has seen."""

    @abstractmethod
    def _machine(self, name: str) -> str:
        """The id of the machine of this name. Raises KeyError."""

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(START_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._folder.cleanup()
        for failure in (*filter(None, [self._failure]), *self._troubles()):
            raise failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as err:
            self._failure = err
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        contexts = (self._tls, None)
        for sock, context in zip(self._sockets, contexts, strict=True):
            await self._listen(sock, context)
        if self._lab is not None:
            for port, context in zip(self._ports, contexts, strict=True):
                await self._listen(bound(self._lab.socket(), GATEWAY, port), context)
        if isinstance(self._machines, Hosts):
            hosts = self._machines
            await self._listen_metadata(bound(hosts.lab.socket(), METADATA, 80), hosts)
        self._ready.set()
        try:
            await self._end.wait()
        finally:
            await self._close()
            await self._machines.close()

    # -- for tests -----------------------------------------------------------------------------

    @property
    def endpoint_inside(self) -> str:
        """Of the API, for a client inside the lab's network."""
        return self.endpoint.replace(LOOPBACK, GATEWAY)

    @property
    def hosts(self) -> Hosts:
        """What is behind the machines, if there is."""
        assert isinstance(self._machines, Hosts)
        return self._machines

    def do(self, action: Callable[[], T]) -> T:
        """In the server's thread."""

        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_S)

    def jump(self, seconds: float) -> None:
        """Let time pass; what is due meanwhile has happened afterwards."""
        asyncio.run_coroutine_threadsafe(self.clock.jump(seconds), self._loop).result()

    def make_unreachable(self, name: str, *, also_after_restart: bool = False) -> None:
        """A machine says it runs, but nothing reaches it, until it is restarted, or moved to another host."""
        work = self.hosts.make_unreachable(self._machine(name), also_after_restart=also_after_restart)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)


def bound(sock: socket.socket, address: str, port: int) -> socket.socket:
    """Also where a connection from that port has just ended."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
