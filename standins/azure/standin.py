"""The stand-in as tests hold it: a server in a thread, and hands to read and break it with."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from evalfleet.lab.network import GATEWAY
from standins.cloud import tls
from standins.cloud.clock import Clock
from standins.cloud.hosts import METADATA, Hosts
from standins.cloud.machines import Machines, Records
from standins.cloud.meters import Meters

from . import addresses, galleries, network, security
from .arm import Arm
from .cloud import Cloud, Timing
from .deployments import Deployments
from .disks import Disks, plain_kinds
from .faults import Faults
from .groups import Groups, Locks
from .identity import CLIENT_ID, CLIENT_SECRET, IDENTITY_HEADER, Identity
from .metadata import Metadata
from .power import Power
from .schedules import Schedules
from .server import MSI_PATH, Server
from .store import Resource
from .subscription import Subscription
from .vms import VM, VirtualMachines, Vm
from .words import SUBSCRIPTION, TENANT, Json

T = TypeVar("T")
START_S = 240.0
LOOPBACK = "127.0.0.1"


class StandIn:
    """Use as a context manager. Its methods may be called from any thread.

    `endpoint`: ARM, over https. `ca`: the file of the authority to trust. `environment`: what makes
    azure-identity's DefaultAzureCredential work against it. Tests set faults, quota and the like through
    `cloud`, before clients come or with `do`, which runs in the server's thread.
    """

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="azure-stand-in-")
        self._machines = machines or Records()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="azure-stand-in")
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._failure: BaseException | None = None
        self._sockets = [_listener(), _listener()]
        self.clock = Clock(speed)
        self.cloud = Cloud(self.clock, self._machines, timing or Timing(), seed)
        self.identity = Identity()
        self.arm = Arm(self.cloud)
        self.server = Server(self.cloud, self.arm, self.identity)
        self.metadata = Metadata(self.cloud)
        self._furnish()
        self.port: int = self._sockets[0].getsockname()[1]
        self.endpoint = f"https://{LOOPBACK}:{self.port}"
        self.identity_endpoint = f"http://{LOOPBACK}:{self._sockets[1].getsockname()[1]}{MSI_PATH}"
        self.ca, self._tls = tls.make(Path(self._folder.name), [LOOPBACK, GATEWAY])

    def _furnish(self) -> None:
        disks = Disks(self.cloud)
        public, interfaces = addresses.PublicAddresses(self.cloud), addresses.Interfaces(self.cloud)
        self.vms = VirtualMachines(self.cloud, disks, interfaces)
        self.power = Power(self.cloud, self.vms, self.metadata)
        for kind in (
            *network.kinds(self.cloud),
            *security.kinds(self.cloud),
            *plain_kinds(self.cloud),
            *galleries.kinds(self.cloud),
            disks,
            public,
            interfaces,
            self.vms,
        ):
            self.cloud.add_kind(kind)
        self.cloud.add_kind(Schedules(self.cloud, self.power))
        Deployments(self.cloud, self.arm)
        Locks(self.cloud, self.arm)
        Groups(self.cloud, self.arm)
        Subscription(self.cloud, self.arm)

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> StandIn:
        self._thread.start()
        self._ready.wait(START_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._folder.cleanup()
        failures = [*filter(None, [self._failure]), *self.cloud.operations.troubles]
        if failures:
            raise failures[0]

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as err:
            self._failure = err
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        await self.server.listen(self._sockets[0], self._tls)
        await self.server.listen(self._sockets[1], None)
        if isinstance(self._machines, Hosts):
            await self._serve_inside(self._machines)
        self._ready.set()
        try:
            await self._end.wait()
        finally:
            await self.server.close()
            await self.metadata.close()
            await self.cloud.operations.close()
            await self._machines.close()

    async def _serve_inside(self, hosts: Hosts) -> None:
        """The same ports in the lab's network: for clients in there; and the metadata service."""
        for where, tls_context in ((self._sockets[0], self._tls), (self._sockets[1], None)):
            sock = _bound(hosts.lab.socket(), GATEWAY, where.getsockname()[1])
            await self.server.listen(sock, tls_context)
        await self.metadata.listen(_bound(hosts.lab.socket(), METADATA, 80), hosts)

    # -- for tests -----------------------------------------------------------------------------

    subscription = SUBSCRIPTION
    tenant = TENANT
    client_id = CLIENT_ID
    client_secret = CLIENT_SECRET

    @property
    def environment(self) -> dict[str, str]:
        """For a client on this computer; one inside the lab's network needs `environment_inside`."""
        return {
            "IDENTITY_ENDPOINT": self.identity_endpoint,
            "IDENTITY_HEADER": IDENTITY_HEADER,
            "REQUESTS_CA_BUNDLE": str(self.ca),
            "SSL_CERT_FILE": str(self.ca),
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        }

    @property
    def endpoint_inside(self) -> str:
        """Of ARM, for a client inside the lab's network."""
        return self.endpoint.replace(LOOPBACK, GATEWAY)

    @property
    def environment_inside(self) -> dict[str, str]:
        there = self.identity_endpoint.replace(LOOPBACK, GATEWAY)
        return {**self.environment, "IDENTITY_ENDPOINT": there}

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

    @property
    def faults(self) -> Faults:
        return self.cloud.faults

    @property
    def meters(self) -> Meters:
        return self.cloud.meters

    def token(self) -> str:
        return self.do(self.identity.token)

    def jump(self, seconds: float) -> None:
        """Let time pass; what is due meanwhile has happened afterwards."""
        asyncio.run_coroutine_threadsafe(self.clock.jump(seconds), self._loop).result()

    def resources(self, type: str = "") -> list[Resource]:
        """All there are now, whatever lists say; of one type, or of all."""
        return self.do(
            lambda: [each for each in self.cloud.store if type.lower() in ("", each.id.type.lower())]
        )

    def vm(self, name: str) -> Vm:
        """The machine of this name, in whatever group."""
        for each in self.resources(VM):
            if isinstance(each, Vm) and each.id.name.lower() == name.lower():
                return each
        raise KeyError(name)

    def evict(self, name: str, notice_s: float = 30.0) -> None:
        """Announce the eviction of a machine; it goes `notice_s` later, or when it agrees."""
        vm = self.vm(name)
        self.do(lambda: self.metadata.evict(vm, notice_s))

    def make_unreachable(self, name: str, *, also_after_restart: bool = False) -> None:
        """A machine says it runs, but nothing reaches it, until it is restarted or redeployed."""
        work = self.hosts.make_unreachable(str(self.vm(name).id), also_after_restart=also_after_restart)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def shown(self) -> list[Json]:
        return self.do(lambda: [self.cloud.show(each) for each in self.cloud.store])


def _bound(sock: socket.socket, address: str, port: int) -> socket.socket:
    """Also where a connection from that port has just ended."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _listener() -> socket.socket:
    return socket.create_server((LOOPBACK, 0), backlog=1024)
