"""Machines that run, until they can be used: SSH answers, the supervisor is there, cloud-init is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineMute, MachineUnavailable, PlaceError
from evalfleet.model import MachineId

from .builds import Builder
from .reaching import Reach
from .refusals import ArmFault, refusal
from .views import Looks, Vm

ADMIT_S = 90.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.3, 5.0


class Arrivals:
    """Waits, and remembers how long each machine took for what. Raises PlaceError."""

    def __init__(self, looks: Looks, builder: Builder, reach: Reach) -> None:
        self._looks = looks
        self._builder = builder
        self._reach = reach
        self._timings: dict[MachineId, dict[str, float]] = {}

    def timings(self, machine: MachineId) -> Mapping[str, float]:
        """Seconds by step, of those whose arrival was seen here."""
        return self._timings.get(machine, {})

    async def take(self, machine: MachineId, vm: Vm, until: float, patience_s: float) -> None:
        """Returns when it can be used. Raises MachineMute, with what its console said last."""
        begun, pause = time.monotonic(), FIRST_PAUSE_S
        timings: dict[str, float] = {}
        while True:
            try:
                answer = await self._reach.take(machine, vm, await self.address(vm), until)
            except (HostDown, HostLost) as err:
                trouble, step = f"{vm.name} is running but cannot be reached: {err}", "ssh"
            except HostRefused as err:
                if time.monotonic() - begun > ADMIT_S:  # cloud-init may not have put the keys there yet
                    raise PlaceError(str(err), transient=False, scope="machine") from err
                trouble, step = str(err), "ssh"
            else:
                self._note(timings, begun, answer.cloud_init_s)
                if answer.cloud_init != "running":
                    self._timings[machine] = timings
                    return
                trouble, step = f"{vm.name} answers, but its cloud-init does not finish", "cloud-init"
            if time.monotonic() - begun > patience_s:
                said = await self._builder.console(vm)
                raise MachineMute(f"{trouble}; its console ends with {said!r}", step)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
            vm = await self._still(machine)

    def _note(self, timings: dict[str, float], begun: float, cloud_init_s: float) -> None:
        waited = round(time.monotonic() - begun, 3)
        ssh = timings.setdefault("ssh", waited)
        if cloud_init_s:
            timings["cloud_init"] = cloud_init_s
        if waited > ssh:
            timings["cloud_init_wait"] = round(waited - ssh, 3)

    async def _still(self, machine: MachineId) -> Vm:
        """It may be gone while we wait for it."""
        try:
            view = await self._looks.fresh()
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault
        vm = view.vms.get(machine)
        if vm is None or view.phase(machine, time.time()) in ("gone", "evicted"):
            raise MachineUnavailable(machine, "it is gone again")
        return vm

    async def address(self, vm: Vm) -> str:
        try:
            address = await self._looks.address(vm)
        except ArmFault as fault:
            raise refusal(fault, vm.name) from fault
        if not address:
            raise HostDown(f"{vm.name} has no address yet")
        return address

    def forget(self, machine: MachineId) -> None:
        self._timings.pop(machine, None)
