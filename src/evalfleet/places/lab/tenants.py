"""Which machine has which host of the lab, and until when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from evalfleet.lab import Lab, LabError, NamespaceHost

from .protocol import Phase, Seen

TOGETHER = 8  # hosts that are made at once: the first can work while the others boot

log = logging.getLogger(__name__)

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
    """Of one lab. What was begun is ended, also when nobody waits for it any more."""

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
