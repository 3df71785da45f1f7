"""The keeper of a lab: a process that outlives controllers, and ends with the lab when nobody needs it.

The place starts it as `python -m lab.keeper ORDERS`.

A lab lives as long as the process that made it. So a keeper makes it, and adds and removes hosts for the
controllers of one home, until no machine is left, whether deleted or expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from evalfleet.files import replace
from evalfleet.model import decodable

from .cgroups import HostLimits
from .hosts import NamespaceHost
from .lab import Lab
from .protocol import (
    Add,
    End,
    ExtendExpiry,
    KeeperAnswer,
    KeeperOrders,
    KeeperRecord,
    List,
    Phase,
    Question,
    Remove,
    Seen,
    Shape,
    Taken,
)
from .system import LabError

READY = "ready"
IDLE_S = 5.0
RETRY_S = 1.0
BACKLOG = 1024

log = logging.getLogger(__name__)


class LabKeeper:
    """The process that answers questions about one lab, and decides when it is over."""

    def __init__(self, lab: Lab, shape: Shape) -> None:
        self._shape = shape
        self._tenants = Tenants(lab)
        self._closing = asyncio.Event()

    async def serve(self, socket: str) -> None:
        """Answer until it is over; nobody can ask any more then, and the lab is gone."""
        server = await asyncio.start_unix_server(self._connected, socket, backlog=BACKLOG)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._closing.set)
        let_go_of_output()
        watching = asyncio.create_task(self._watch())
        await self._closing.wait()
        watching.cancel()
        os.unlink(socket)  # from here on others start another one
        server.close()
        await self._tenants.end()

    async def _watch(self) -> None:
        """End machines at their expiry, and the keeper when it has had none for a while."""
        idle_since = time.monotonic()
        while True:
            self._tenants.changed.clear()
            await self._tenants.remove_expired()
            now = time.monotonic()
            expiry = self._tenants.next_expiry()
            if len(self._tenants):
                idle_since = now
            elif now - idle_since >= IDLE_S:
                self._closing.set()
            await self._change(IDLE_S if expiry is None else expiry - now)

    async def _change(self, longest_s: float) -> None:
        # what could not be removed is past its expiry: it is not tried again at once
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s if longest_s > 0 else RETRY_S):
                await self._tenants.changed.wait()

    # -- questions -----------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled when the keeper ends
            line = await reader.readline()
            answer = (
                await self._answer(msgspec.json.decode(line, type=decodable(Question)))
                if line
                else KeeperAnswer()
            )
            writer.write(msgspec.json.encode(answer))
            await writer.drain()
        writer.close()

    async def _answer(self, question: Question) -> KeeperAnswer:
        if self._closing.is_set():
            return KeeperAnswer("closing")
        try:
            match question:
                case Add():
                    return await self._add(question)
                case Taken(machine) | ExtendExpiry(machine):
                    return self._about(machine, question)
                case Remove(machine):
                    await self._tenants.remove(machine)
                    return KeeperAnswer()
                case List():
                    return KeeperAnswer(machines=self._tenants.seen())
                case End():
                    return await self._end()
        except (LabError, OSError) as err:
            log.warning("%s: %s", question, err)
            return KeeperAnswer("failed", str(err))

    async def _add(self, wanted: Add) -> KeeperAnswer:
        known = self._tenants.get(wanted.machine)
        if known is not None and known.leaving is not None:
            return KeeperAnswer("deleting")
        if known is None and len(self._tenants) >= wanted.most:
            return KeeperAnswer("full")
        if known is None and wanted.shape != self._shape:
            return KeeperAnswer("shape", str(self._shape))
        await self._tenants.add(wanted.machine, wanted.expires_s)
        tenant = self._tenants.get(wanted.machine)
        return KeeperAnswer(machines=(tenant.seen(),)) if tenant is not None else KeeperAnswer("deleting")

    def _about(self, machine: str, question: Taken | ExtendExpiry) -> KeeperAnswer:
        tenant = self._tenants.get(machine)
        if tenant is None or tenant.leaving is not None:
            return KeeperAnswer("unknown")
        if isinstance(question, Taken):
            tenant.taken = True
        else:
            self._tenants.extend(tenant, question.expires_s)
        return KeeperAnswer(machines=(tenant.seen(),))

    async def _end(self) -> KeeperAnswer:
        if not len(self._tenants):
            self._closing.set()
            await asyncio.Event().wait()  # no answer: the line ends with the process
        return KeeperAnswer()


# -- the process ---------------------------------------------------------------------------------


def main(errand: KeeperOrders) -> int:
    try:
        lab = create(errand.shape)
    except LabError as err:
        print(err, flush=True)
        return 1
    record = KeeperRecord(
        pid=os.getpid(),
        lab=str(lab.directory),
        socket=str(lab.directory / "keeper.sock"),
        network=str(lab.network_path),
        key=str(lab.client.key_path),
        known_hosts=str(lab.client.known_hosts_path),
    )
    with lab:
        asyncio.run(keep(lab, errand, record))
    return 0


def create(shape: Shape) -> Lab:
    return Lab.create(
        0,
        disk_bytes=shape.disk_bytes,
        limits=HostLimits(shape.memory_bytes, shape.cpus),
        expose=[Path(path) for path in shape.expose],
    )


async def keep(lab: Lab, errand: KeeperOrders, record: KeeperRecord) -> None:
    path = Path(errand.record)
    replace(path, msgspec.json.encode(record))
    await LabKeeper(lab, errand.shape).serve(record.socket)
    forget(path, errand.lock, record)


def forget(path: Path, lock: str, record: KeeperRecord) -> None:
    """Take our record away, unless a successor's is there."""
    with contextlib.suppress(OSError, msgspec.DecodeError), locked(lock):
        if msgspec.json.decode(path.read_bytes(), type=decodable(KeeperRecord)) == record:
            path.unlink()


@contextlib.contextmanager
def locked(path: str) -> Generator[None]:
    """Held by who starts a keeper or takes a record away."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def let_go_of_output() -> None:
    """Who started us waits for this line, and for nothing else."""
    print(READY, flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


TOGETHER = 8  # hosts that are made at once: the first can work while the others boot


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Tenant:
    """A machine and its host, which may be still to come. `taken`: its supervisor runs."""

    machine: str
    expires_at: float
    host: asyncio.Future[NamespaceHost]
    taken: bool = False
    leaving: asyncio.Task[None] | None = None

    def seen(self) -> Seen:
        if not self.host.done():
            return Seen(self.machine, "pending")
        host = self.host.result()
        return Seen(self.machine, self._phase(host), host.address, host.name)

    def _phase(self, host: NamespaceHost) -> Phase:
        if not host.is_on:
            return "gone"
        return "up" if self.taken and self.leaving is None else "pending"


class Tenants:
    """The machines that have hosts of one lab. A host that was handed out is always given back."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._hand = ThreadPoolExecutor(1)  # a lab is used by one thread at a time
        self._tenants: dict[str, Tenant] = {}
        self._waiting: list[Tenant] = []
        self._building: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tenants)

    def get(self, machine: str) -> Tenant | None:
        return self._tenants.get(machine)

    def seen(self) -> tuple[Seen, ...]:
        return tuple(tenant.seen() for tenant in self._tenants.values())

    def next_expiry(self) -> float | None:
        return min((each.expires_at for each in self._tenants.values() if each.leaving is None), default=None)

    async def add(self, machine: str, expires_s: float) -> None:
        """Its host is up when this returns. Raises LabError."""
        tenant = self._tenants.get(machine)
        if tenant is None:
            host = asyncio.get_running_loop().create_future()
            tenant = self._tenants[machine] = Tenant(machine, 0.0, host)
            self._waiting.append(tenant)
            if self._building is None:
                self._building = asyncio.create_task(self._build())
        self.extend(tenant, expires_s)
        await asyncio.shield(tenant.host)

    def extend(self, tenant: Tenant, expires_s: float) -> None:
        tenant.expires_at = time.monotonic() + expires_s
        self.changed.set()

    async def remove(self, machine: str) -> None:
        """Raises LabError or OSError if its host cannot be removed; then it may be asked again."""
        tenant = self._tenants.get(machine)
        if tenant is None:
            return
        if tenant.leaving is None:
            tenant.leaving = asyncio.create_task(self._remove(tenant))
        await asyncio.shield(tenant.leaving)

    async def remove_expired(self) -> None:
        now = time.monotonic()
        over = [each.machine for each in self._tenants.values() if each.expires_at <= now]
        for problem in await asyncio.gather(*map(self.remove, over), return_exceptions=True):
            if problem is not None:
                log.warning("an expired machine stays: %s", problem)

    async def end(self) -> None:
        """The lab is gone with all that is in it."""
        if self._building is not None:
            await self._building
        await self._do(self._lab.destroy)
        self._hand.shutdown()

    async def _build(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
            try:
                hosts = await self._do(self._lab.add, len(some))
            except (LabError, OSError) as err:
                for tenant in some:
                    del self._tenants[tenant.machine]
                    tenant.host.set_exception(LabError(str(err)))
                    tenant.host.exception()  # seen, also if nobody waits any more
                self.changed.set()
                continue
            for tenant, host in zip(some, hosts, strict=True):
                tenant.host.set_result(host)
        self._building = None

    async def _remove(self, tenant: Tenant) -> None:
        try:
            host = await tenant.host
        except LabError:
            return  # it never came
        try:
            await self._do(self._lab.remove, host)
            del self._tenants[tenant.machine]
        finally:
            tenant.leaving = None
            self.changed.set()

    async def _do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._hand, run)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=decodable(KeeperOrders))))
