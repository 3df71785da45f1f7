"""VMs that run, until they can be used: SSH answers, the supervisor is there, cloud-init is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec import Struct

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.clock import pauses
from evalfleet.errors import MachineMute, PlaceError
from evalfleet.model import MachineId

from .ssh_access import SshAccess

KEYS_S = 90.0
"""For so long after it runs, a VM may refuse our key: cloud-init may not have put it there yet."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.3, 5.0


class RunningVm(Struct, frozen=True):
    """A VM that runs, as far as one must know it to come in."""

    name: str
    """Its name in the cloud."""
    address: str
    """Where it is reached; empty while it has no address."""
    notices: Mapping[str, object] | None = None
    """Where the cloud tells the VM that it will be taken back; None if it never will."""


class Readiness:
    """Waits until VMs can be used, and remembers how long each took for what."""

    def __init__(self, access: SshAccess) -> None:
        self._access = access
        self._timings: dict[MachineId, dict[str, float]] = {}

    def timings(self, machine: MachineId) -> Mapping[str, float]:
        """Seconds by step, of a machine that became ready here; empty for others."""
        return self._timings.get(machine, {})

    def forget(self, machine: MachineId) -> None:
        self._timings.pop(machine, None)

    async def wait(
        self,
        machine: MachineId,
        looks: AsyncIterator[RunningVm],
        console: Callable[[], Awaitable[str]],
        until: float,
        patience_s: float,
    ) -> None:
        """Return when the machine, which ends by itself at `until`, can be used.

        `looks` shows its VM anew each time, without end, and raises PlaceError if it is gone. `console` reads
        the end of its serial console. Raises PlaceError; MachineMute when `patience_s` are over.
        """
        begun, rests = time.monotonic(), pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        timings: dict[str, float] = {}
        async for vm in looks:
            try:
                answer = await self._access.take(machine, address_of(vm), until, vm.notices)
            except (HostDown, HostLost) as err:
                trouble, step = f"{vm.name} is running but cannot be reached: {err}", "ssh"
            except HostRefused as err:
                if time.monotonic() - begun > KEYS_S:
                    raise PlaceError(str(err), transient=False, scope="machine") from err
                trouble, step = str(err), "ssh"
            else:
                _note(timings, begun, answer.cloud_init_s)
                if answer.cloud_init != "running":
                    self._timings[machine] = timings
                    return
                trouble, step = f"{vm.name} answers, but its cloud-init does not finish", "cloud-init"
            if time.monotonic() - begun > patience_s:
                raise MachineMute(f"{trouble}; its console ends with {await console()!r}", step)
            await asyncio.sleep(next(rests))
        raise AssertionError("looks never end")


def address_of(vm: RunningVm) -> str:
    """Raises HostDown while it has none."""
    if not vm.address:
        raise HostDown(f"{vm.name} has no address yet")
    return vm.address


def _note(timings: dict[str, float], begun: float, cloud_init_s: float) -> None:
    waited = round(time.monotonic() - begun, 3)
    ssh = timings.setdefault("ssh", waited)
    if cloud_init_s:
        timings["boot.cloud_init"] = cloud_init_s
    if waited > ssh:
        timings["cloud_init_wait"] = round(waited - ssh, 3)
