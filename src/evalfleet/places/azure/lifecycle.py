"""VMs made, started, stopped and taken down: what is asked of Azure, and waiting until it is so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress

from evalfleet.clock import pauses
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError
from evalfleet.model import MachineId
from evalfleet.places.vm.answers import Json, Problem, as_refusal, rows, table
from evalfleet.places.vm.place import UNSEEN
from evalfleet.places.vm.ssh_access import RunningVm

from .answers import ArmFault, fault_of
from .arm import ArmClient
from .inventory import GroupInventory, GroupSnapshot, MachineResource, Vm
from .names import EXPIRES, Names, names_of_record, stamp
from .template import (
    ADDRESS,
    API,
    COMPUTE,
    DISK,
    NIC,
    RESOURCES,
    SCHEDULE,
    VM,
    VmBuild,
    deployment,
    id_of,
    let_in,
    schedule,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
DELETE_S = 120.0
"""For so long a deletion is waited for that goes on."""
TELL_S = 40.0
"""After so long it is told that Azure takes a deletion and does not do it, or puts it off again and again."""
FIRST_AGAIN_S, LONGEST_AGAIN_S = 0.3, 15.0
"""How long a deletion is not asked for again: Azure bears four a minute of one machine."""
COMMAND_S = 180.0
"""For so long something else that Azure runs on a machine is waited for."""
CONSOLE_LINES, CONSOLE_CHARACTERS = 8, 800
LATER = ("InUse", "CannotBeDeleted", "Reserved", "Conflict", "Preempted", "InProgress")
"""Parts of the codes by which Azure says that something else must go first."""
NOTICES_URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
"""Where Azure tells a spot machine that it takes it back."""
ORDER: Sequence[tuple[str, ...]] = ((NIC, DISK), (ADDRESS, SCHEDULE))
"""What is left of a machine goes in this order: an address that an interface uses cannot be deleted."""


def parts_of(root: str, record: str) -> Sequence[tuple[str, str]]:
    """Type and id of all that the deployment of this name makes in the resource group `root`."""
    names = names_of_record(record)
    if names is None:
        return ()
    kinds = (VM, names.vm), (NIC, names.nic), (DISK, names.disk), (ADDRESS, names.address)
    return [(kind, id_of(root, kind, name)) for kind, name in (*kinds, (SCHEDULE, names.schedule))]


class AzureControl:
    """The VMs of a resource group, from their deployment until nothing is left of them.

    Raises ArmFault, and PlaceError for what no answer of Azure's says.
    """

    def __init__(self, arm: ArmClient, inventory: GroupInventory, root: str) -> None:
        self._arm = arm
        self._inventory = inventory
        self._root = root

    # -- up ------------------------------------------------------------------------------------

    async def deploy(self, build: VmBuild) -> None:
        """Ask for a VM. Another controller may have done so: then that is the one."""
        try:
            await self._arm.send("PUT", self._record(build.names.deployment), RESOURCES, deployment(build))
        except ArmFault as fault:
            if not fault.has("DeploymentActive"):
                raise

    async def until_deployed(self, machine: MachineId, on_allocated: Callable[[], None]) -> Vm:
        """`on_allocated` is called when Azure has found room for it, though it is not running yet."""
        async for snapshot in self._inventory.watch():
            record, vm = snapshot.deployments.get(machine), snapshot.vms.get(machine)
            if vm is not None and vm.power in ("starting", "running"):
                on_allocated()
            if record is None:
                raise ArmFault(409, (Problem("Canceled", "its deployment was taken back"),))
            if record.active:
                continue
            if record.state != "Succeeded":
                raise await self._failure(record.name, record.error)
            if vm is not None and vm.power == "running":
                return vm
            if vm is None or vm.power not in ("", "starting"):
                raise ArmFault(409, (Problem("Canceled", "it was stopped or deleted while it came up"),))
        raise AssertionError("snapshots never end")

    async def _failure(self, record: str, error: object) -> ArmFault:
        if error is None:
            shown = await self._arm.get(self._record(record), RESOURCES)
            error = shown["properties"].get("error")
        return fault_of(409, error or {"code": "Canceled", "message": "its deployment was cancelled"})

    async def until_running(self, machine: MachineId) -> Vm:
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None or vm.state == "deleting":
                raise ArmFault(409, (Problem("Canceled", "it was deleted while it came up"),))
            if vm.power == "running":
                return vm
            off = vm.power in ("deallocated", "stopped")
            if vm.state == "failed" and not off:
                raise await self._why(vm)
            if off and vm.state != "updating":  # it may also have failed at an earlier start
                await self._arm.finish(await self._act(vm, "start"))
        raise AssertionError("snapshots never end")

    async def again(self, machine: MachineId, action: str) -> Vm:
        """Restart or redeploy it. Returns when that is done."""
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None or vm.state == "deleting" or vm.power.startswith("dealloc"):
            raise PlaceError(f"{machine} does not run", transient=False, scope="machine")
        await self._arm.finish(await self._arm.begin(f"{vm.id}/{action}", COMPUTE))
        return await self.until_running(machine)

    async def _why(self, vm: Vm) -> ArmFault:
        """Why a VM did not start, by its instance view."""
        shown = await self._arm.get(f"{vm.id}/instanceView", COMPUTE)
        for each in rows(shown.get("statuses")):
            words = str(each.get("code", "")).split("/")
            if words[:2] == ["ProvisioningState", "failed"] and len(words) > 2:
                return ArmFault(409, (Problem(words[2], str(each.get("message", ""))),))
        return ArmFault(409, (Problem("RetryableError", f"{vm.name} did not start"),))

    async def boot(self, machine: MachineId, vm: Vm) -> AsyncGenerator[RunningVm]:
        """A VM that runs, and the same one looked at anew each time, without end. Raises PlaceError."""
        while True:
            yield await self.running(vm)
            vm = await self._still(machine)

    async def running(self, vm: Vm) -> RunningVm:
        """How a VM that runs is reached. Raises PlaceError."""
        with as_refusal(vm.name):
            address = await self._inventory.address(vm)
        return RunningVm(vm.name, address, notices=_notices(vm.name) if vm.spot else None)

    async def _still(self, machine: MachineId) -> Vm:
        """The VM as it is now: it may be gone while we wait for it."""
        with as_refusal(UNSEEN):
            snapshot = await self._inventory.fresh()
        vm = snapshot.vms.get(machine)
        if vm is None or snapshot.phase(machine, self._arm.now()) in ("gone", "evicted"):
            raise MachineUnavailable(machine, "it is gone again")
        return vm

    async def console(self, vm: Vm) -> str:
        """The end of what it said while it booted; what keeps us from reading it, if something does."""
        try:
            shown = await self._arm.send("POST", f"{vm.id}/retrieveBootDiagnosticsData", COMPUTE)
            text = await self._arm.download(str(shown["serialConsoleLogBlobUri"]))
        except (ArmFault, KeyError) as err:
            return f"(it cannot be read: {err})"
        return "\n".join(text.strip().splitlines()[-CONSOLE_LINES:])[-CONSOLE_CHARACTERS:]

    # -- while it lives ------------------------------------------------------------------------

    async def arm_switch(self, vm: Vm, names: Names, tags: Json, at: float) -> None:
        """Set the time at which Azure stops it, and read it back."""
        wanted: Json = {"location": vm.region, "tags": tags, "properties": schedule(vm.id, at)}
        path = f"{self._root}/providers/{SCHEDULE}/{names.schedule}"
        shown = await self._arm.send("PUT", path, API[SCHEDULE], wanted)
        if shown["properties"].get("dailyRecurrence") != wanted["properties"]["dailyRecurrence"]:
            raise ArmFault(409, (Problem("RetryableError", f"{path} does not have the time that was set"),))

    async def mark(self, resources: Sequence[MachineResource], expires_at: float) -> None:
        """Write the new expiry into the tags of everything that costs money."""
        body = {"operation": "Merge", "properties": {"tags": {EXPIRES: stamp(expires_at)}}}
        costly = [each.id for each in resources if each.type in (VM.lower(), DISK.lower(), ADDRESS.lower())]
        paths = [f"{id}/providers/Microsoft.Resources/tags/default" for id in costly]
        await asyncio.gather(*(self._arm.send("PATCH", path, RESOURCES, body) for path in paths))

    async def authorize(self, machine: MachineId, user: str, public_key: str) -> bool:
        """Have Azure's agent on the machine write this key beside those that let the user in. Is that done?

        By Azure's documentation it takes 20 seconds at least, and one at a time is done. Its extension
        VMAccess could do the same, but would stay, as a resource of the machine's.
        """
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None:
            return False
        operation = await self._begin_command(f"{vm.id}/runCommand", let_in(user, public_key))
        told = table(table((await self._arm.finish(operation)).get("properties")).get("output"))
        for status in rows(told.get("value")):
            if "/failed" in str(status.get("code")):
                said = " ".join(str(status.get("message")).split())
                log.warning("%s: our key could not be put onto it: %s", machine, said)
                return False
        return True

    async def _begin_command(self, path: str, body: Json) -> str:
        begun, rests = time.monotonic(), pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                return await self._arm.begin(path, COMPUTE, body=body)
            except ArmFault as fault:
                busy = fault.status == 409 and fault.has("Conflict")
                if not busy or time.monotonic() - begun > COMMAND_S:
                    raise
            await asyncio.sleep(next(rests))

    # -- down ----------------------------------------------------------------------------------

    async def stop(self, machine: MachineId) -> None:
        """Deallocate it; the meter stops, the disk stays."""
        asked = False
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None:
                raise NoSuchMachine(machine)
            if vm.power == "deallocated":
                return
            if not asked and vm.power != "deallocating":
                await self._act(vm, "deallocate")
                asked = True

    async def remove(self, machine: MachineId) -> bool:
        """Delete what there is of a machine until nothing is left, or it takes too long. Is nothing left?

        Raises ArmFault as soon as Azure refuses, PlaceError when it has put it off for long.
        """
        begun = time.monotonic()
        deletes = _Deletes(self._arm)
        async for snapshot in self._inventory.watch():
            if machine not in snapshot.machines:
                return True
            await self._take_down(snapshot, machine, deletes)
            waited_s = time.monotonic() - begun
            if waited_s > TELL_S and deletes.put_off is not None:
                why = f"{machine} is still there after {waited_s:.0f} s: {deletes.put_off.told}"
                raise PlaceError(why, transient=False, scope="machine")
            if waited_s > DELETE_S:
                break
        return False

    async def _take_down(self, snapshot: GroupSnapshot, machine: MachineId, deletes: _Deletes) -> None:
        record, vm = snapshot.deployments.get(machine), snapshot.vms.get(machine)
        if record is not None and record.active:
            with suppress(ArmFault):  # it may have ended just now; if it has not, the next snapshot shows it
                await self._arm.send("POST", f"{self._record(record.name)}/cancel", RESOURCES)
        if vm is not None:
            if vm.state != "deleting":
                await deletes.ask(vm.id, COMPUTE)
            return
        parts = [part for part in snapshot.resources.get(machine, ()) if part.type != VM.lower()]
        for kinds in ORDER:
            paths = [(part.id, API[kind]) for kind in kinds for part in parts if part.type == kind.lower()]
            await asyncio.gather(*(deletes.ask(path, version) for path, version in paths))
        if record is None or record.active or parts:
            return
        if await self._left_of(record.name):
            return  # the list lags behind: what it shows next is deleted, and then the record
        await deletes.ask(self._record(record.name), RESOURCES)

    async def _left_of(self, record: str) -> bool:
        """Does anything exist that the deployment of this name makes?"""
        parts = parts_of(self._root, record)
        found = await asyncio.gather(*(self._arm.find(id, API[kind]) for kind, id in parts))
        return any(shown is not None for shown in found)

    async def _act(self, vm: Vm, action: str) -> str:
        """Return where to ask how it goes. Empty: nothing was begun."""
        try:
            return await self._arm.begin(f"{vm.id}/{action}", COMPUTE)
        except ArmFault as fault:
            if fault.status != 409 or not fault.has("Conflict", "OperationPreempted"):
                raise
            return ""  # something is being done to it, and the next snapshot tells how it ended

    def _record(self, name: str) -> str:
        return f"{self._root}/providers/Microsoft.Resources/deployments/{name}"


class _Deletes:
    """The deletions that one removal has asked for: none is asked for again too soon, or forgotten."""

    def __init__(self, arm: ArmClient) -> None:
        self._arm = arm
        self._again_at: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._operations: dict[str, str] = {}
        self.put_off: ArmFault | None = None
        """Why the last one that was asked for was not begun: something else must go first."""

    async def ask(self, id: str, version: str) -> None:
        """Raises ArmFault if Azure refuses it, or has begun it and then failed."""
        now = time.monotonic()
        if now < self._again_at.get(id, 0.0):
            return
        if operation := self._operations.pop(id, ""):
            await self._check(operation)
        pause_s = self._pause_s.get(id, FIRST_AGAIN_S)
        self._again_at[id], self._pause_s[id] = now + pause_s, min(pause_s * 2, LONGEST_AGAIN_S)
        try:
            self._operations[id] = await self._arm.begin(id, version, "DELETE")
            self.put_off = None
        except ArmFault as fault:
            later = any(word in each.code for each in fault.problems for word in LATER)
            if fault.status == 404:
                return
            if fault.has("ScopeLocked") or (fault.status != 409 and not later):
                raise
            self.put_off = fault  # the next snapshot shows this again

    async def _check(self, operation: str) -> None:
        """Look how a deletion ended of something that is still there."""
        try:
            shown = await self._arm.send("GET", operation, "")
        except ArmFault:
            return  # nobody remembers it any more
        if shown.get("status") in ("Failed", "Canceled"):
            fault = fault_of(409, shown.get("error") or {"code": "Canceled"})
            if not any(word in each.code for each in fault.problems for word in LATER):
                raise fault
            self.put_off = fault


def _notices(vm: str) -> Mapping[str, object]:
    """What a machine is to watch for. Others of our set may be named in Azure's answers, too."""
    match = {"list": "Events", "fields": {"EventType": "Preempt", "Resources": vm}}
    return {"url": NOTICES_URL, "headers": {"Metadata": "true"}, "match": match}
