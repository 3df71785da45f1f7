"""What can be done to a virtual machine that exists, by its owner or by Azure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

from standins.cloud.words import Answer, Call, Json

from .metadata import Metadata
from .operations import Operation
from .run_commands import RunCommands
from .store import Resource
from .vms import VirtualMachines, Vm
from .words import ArmError

if TYPE_CHECKING:
    from .cloud import Cloud

Deed = Callable[[Vm], Awaitable[Json | None]]
"""What is done to a machine, and what comes of it, if that is told."""
LOGS = "/serial-logs"


class Power:
    """The actions of virtual machines."""

    def __init__(self, cloud: Cloud, machines: VirtualMachines, metadata: Metadata) -> None:
        self._cloud = cloud
        self._metadata = metadata
        self._vms = machines
        deeds: dict[str, Deed] = {
            "start": self._start,
            "restart": self._restart,
            "deallocate": self.deallocate,
            "poweroff": self._power_off,
            "redeploy": self._redeploy,
            "reapply": self._nothing,
        }
        machines.actions = {
            **{name: self._action(name, deed) for name, deed in deeds.items()},
            "generalize": self._generalize,
            "retrievebootdiagnosticsdata": self._boot_diagnostics,
            "simulateeviction": self._simulate_eviction,
            "runcommand": RunCommands(cloud, self).invoke,
        }

    def _action(self, name: str, deed: Deed) -> Callable[[Resource, Call, float], Awaitable[Answer]]:
        async def act(resource: Resource, call: Call, hold_s: float) -> Answer:
            assert isinstance(resource, Vm)
            if resource.generalized and name != "deallocate":
                raise _not_allowed(name, resource, "generalized")
            operation = self.begin(resource, deed, hold_s)
            headers = self._cloud.operations.headers(call, operation, location=True)
            return Answer(202, None, headers)

        return act

    def begin(self, vm: Vm, deed: Deed, hold_s: float = 0.0) -> Operation:
        """Raises if something else is being done to it."""
        if vm.busy is not None and not vm.busy.done.is_set():
            raise self._vms.is_busy(vm)
        vm.state, vm.changed_at = "Updating", self._cloud.clock.now()
        where = f"/subscriptions/{vm.id.subscription}/providers/Microsoft.Compute/locations/{vm.location}"
        vm.busy = self._cloud.operations.start(where, self._do(vm, deed, hold_s))
        return vm.busy

    async def _do(self, vm: Vm, deed: Deed, hold_s: float) -> Json | None:
        try:
            if hold_s:
                await self._cloud.clock.sleep(hold_s)
            result = await deed(vm)
        except ArmError:
            vm.state = "Failed"
            raise
        vm.state = "Succeeded"
        return result

    # -- deeds ---------------------------------------------------------------------------------

    async def _nothing(self, vm: Vm) -> None:
        await self._cloud.pause(self._cloud.timing.network_s)

    async def _start(self, vm: Vm) -> None:
        if vm.power == "running":
            return
        was_off = vm.power == "deallocated"
        await self._cloud.pause(self._cloud.timing.allocation_s)
        self._vms.allocate(vm)
        await self._vms.boot(vm, fresh_temp_disk=was_off)

    async def deallocate(self, vm: Vm) -> None:
        if vm.power == "deallocated":
            return
        self._vms.set_power(vm, "deallocating")
        await self._cloud.pause(self._cloud.timing.deallocate_s)
        await self._vms.unplace(vm)

    async def _power_off(self, vm: Vm) -> None:
        if vm.power == "running":
            self._vms.set_power(vm, "stopping")
            await self._cloud.pause(self._cloud.timing.deallocate_s)
            await self._cloud.really(self._cloud.machines.power_off(str(vm.id)))
            self._vms.set_power(vm, "stopped")  # and billed on

    async def _restart(self, vm: Vm) -> None:
        if vm.power not in ("running", "stopped"):
            raise ArmError(
                409,
                "OperationNotAllowed",
                f"Cannot restart VM '{vm.id.name}' because it is {vm.power or 'not allocated'}.",
            )
        await self._again(vm, fresh_temp_disk=False)

    async def _redeploy(self, vm: Vm) -> None:
        if vm.power == "deallocated":
            raise ArmError(
                409, "OperationNotAllowed", f"Cannot redeploy VM '{vm.id.name}': it is deallocated."
            )
        self._cloud.machines.mend(str(vm.id))
        await self._again(vm, fresh_temp_disk=True)

    async def _again(self, vm: Vm, *, fresh_temp_disk: bool) -> None:
        self._vms.set_power(vm, "starting")
        await self._cloud.really(self._cloud.machines.power_off(str(vm.id)))
        await self._vms.boot(vm, fresh_temp_disk=fresh_temp_disk)

    async def _generalize(self, resource: Resource, call: Call, hold_s: float) -> Answer:
        """Azure believes that what is on the disk was generalized."""
        assert isinstance(resource, Vm)
        if resource.power not in ("stopped", "deallocated"):
            raise _not_allowed("generalize", resource, resource.power or "not allocated")
        resource.generalized = True
        return Answer(200)

    # -- other actions -------------------------------------------------------------------------

    async def _boot_diagnostics(self, resource: Resource, call: Call, hold_s: float) -> Answer:
        enabled = (resource.properties.get("diagnosticsProfile") or {}).get("bootDiagnostics") or {}
        if not enabled.get("enabled"):
            raise ArmError(
                409,
                "OperationNotAllowed",
                f"Boot diagnostics is not enabled for the virtual machine '{resource.id.name}'.",
            )
        log = f"{call.base}{LOGS}{quote(str(resource.id))}?sv=2023&sig=standin"
        shot = f"{call.base}{LOGS}{quote(str(resource.id))}?screenshot=1&sig=standin"
        return Answer(200, {"serialConsoleLogBlobUri": log, "consoleScreenshotBlobUri": shot})

    async def _simulate_eviction(self, resource: Resource, call: Call, hold_s: float) -> Answer:
        assert isinstance(resource, Vm)
        if not resource.is_spot:
            raise ArmError(409, "OperationNotAllowed", f"VM '{resource.id.name}' is no Spot virtual machine.")
        self._metadata.evict(resource, 30.0)
        return Answer(204)


def _not_allowed(action: str, vm: Vm, state: str) -> ArmError:
    return ArmError(
        409,
        "OperationNotAllowed",
        f"Operation '{action}' is not allowed on VM '{vm.id.name}' since the VM is {state}.",
    )
