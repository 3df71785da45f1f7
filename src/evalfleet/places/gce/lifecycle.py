"""Instances made, started, stopped and taken down; and what their host keys are."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError
from evalfleet.model import MachineId
from evalfleet.places.vm.answers import Json, Problem, as_refusal, rows, table
from evalfleet.places.vm.place import UNSEEN
from evalfleet.places.vm.ssh_access import RunningVm, SshKeys

from .answers import GoogleFault
from .client import ComputeClient, path_of, request_id
from .inventory import COMING, Instance, ProjectInventory, ProjectSnapshot, vm_of
from .names import HOME, KIND, label, machine_in, timestamp
from .template import AGREES_S, LATE_S, InstanceBuild, instance, login_line, scheduling

DELETE_S = 300.0
"""For so long a deletion is waited for that goes on."""
BOOT_LOOK_S = 5.0
"""What boots is looked at so often at least: a hundred machines need not each be looked at by themselves."""
MOST_TRIES = 20
"""So often a machine may have been asked for in one zone, with no success."""
CONSOLE_LINES, CONSOLE_CHARACTERS = 8, 800
PUBLIC_KEY = re.compile("[A-Za-z0-9+/=]{1,4096}")
KEY_ORDER = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
NOTICES: Mapping[str, object] = {
    "url": "http://169.254.169.254/computeMetadata/v1/instance/preempted",
    "headers": {"Metadata-Flavor": "Google"},
    "match": {"text": "TRUE"},
}
"""Where Google tells a spot machine that it takes it back."""


class InstanceControl:
    """The instances of this home, from their insert until nothing is left of them.

    Raises GoogleFault, and PlaceError for what no answer of Google's says.
    """

    def __init__(self, client: ComputeClient, inventory: ProjectInventory, keys: SshKeys, home: str) -> None:
        self._client = client
        self._inventory = inventory
        self._keys = keys
        self._home = label(home)

    # -- up ------------------------------------------------------------------------------------

    async def insert(self, build: InstanceBuild, on_allocated: Callable[[], None]) -> Instance:
        """Make an instance, with everything, in one call. Returns when it runs."""
        machine = MachineId(build.machine)
        await self._clear_name(build, machine)
        zone = f"{self._client.root}/zones/{build.zone}"
        looking = asyncio.create_task(self._tell_allocated(machine, on_allocated))
        try:
            await self._client.finish(await self._begin(zone, build))
        except GoogleFault as fault:
            if not fault.has("alreadyExists", "RESOURCE_ALREADY_EXISTS"):
                raise
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        on_allocated()
        vm = await self._running(f"{zone}/instances/{build.name}", machine)
        await self.check_end(vm, build.ends_at)
        return vm

    async def _tell_allocated(self, machine: MachineId, on_allocated: Callable[[], None]) -> None:
        """As soon as Google says that the instance has what it needs, which is seconds before its insert is
        done: other machines wait to know whether there is room."""
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is not None and vm.status in ("STAGING", "RUNNING"):
                on_allocated()
                return

    async def _begin(self, zone: str, build: InstanceBuild) -> Json:
        """The operation that makes it.

        A request that was made before is answered by its operation, also by one that ended long ago. No
        insert is done at once: then, unless the instance is there, this is another try, with its own id.
        """
        for tries in range(MOST_TRIES):
            id = request_id(build.machine, build.zone, tries)
            operation = await self._client.begin("POST", f"{zone}/instances", instance(build), id=id)
            if operation.get("status") != "DONE":
                return operation
            if await self._client.find(f"{zone}/instances/{build.name}") is not None:
                return operation
        raise PlaceError(
            f"{build.machine} was asked for {MOST_TRIES} times in {build.zone}",
            transient=False,
            scope="machine",
        )

    async def _clear_name(self, build: InstanceBuild, machine: MachineId) -> None:
        """An old disk of that name would be attached in place of a new one. Nothing may come up elsewhere."""
        for operation in await self._inventory.inserting(build.name):
            if path_of(operation).split("/")[3] != build.zone:
                raise MachineUnavailable(machine, "it is being made in another zone")
        path = f"{self._client.root}/zones/{build.zone}/disks/{build.name}"
        shown = await self._client.find(path)
        if shown is None:
            return
        if not self._is_ours(shown, machine):
            why = f"a disk {build.name} is in {build.zone} and is not ours; it is left alone"
            raise PlaceError(f"{why}: remove it, or set another `name`", transient=True, scope="machine")
        if not shown.get("users"):
            await self._client.change("DELETE", path)

    def _is_ours(self, shown: Json, machine: MachineId) -> bool:
        return table(shown.get("labels")).get(HOME) == self._home and machine_in(shown) == machine

    async def _running(self, path: str, machine: MachineId) -> Instance:
        """The instance of this path once it runs; it must be the machine's."""
        shown = await self._client.find(path)
        if shown is not None and not self._is_ours(shown, machine):
            why = f"{shown['name']} exists and is not ours; it is left alone"
            # the next machine has another name, so that the offer is not to blame
            raise PlaceError(f"{why}: remove it, or set another `name`", transient=True, scope="machine")
        if shown is None or vm_of(shown).status != "RUNNING":
            return await self.until_running(machine)
        return vm_of(shown)

    async def until_running(self, machine: MachineId) -> Instance:
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None or vm.status not in (*COMING, "RUNNING"):
                raise GoogleFault(409, (Problem("Canceled", "it was stopped or deleted while it came up"),))
            if vm.status == "RUNNING":
                return vm
        raise AssertionError("snapshots never end")

    async def check_end(self, vm: Instance, told: float | None = None) -> None:
        """Google must have understood when it is to end the machine: nobody else may be there to do so.

        `told`: when it is to. One that was not asked for just now has that in its labels.
        """
        if vm.ends_at is None:
            shown = await self._client.find(vm.path)
            vm = vm_of(shown) if shown is not None else vm
        ends_at = told if told is not None else (vm.expires_at or 0.0) - LATE_S
        # one that ends sooner would be given tasks that outlive it
        if vm.ends_at is None or abs(vm.ends_at - ends_at) > AGREES_S:
            planned = "never" if vm.ends_at is None else f"at {timestamp(vm.ends_at)}"
            stops = vm.labels.get(KIND) == "pool"  # its disk may hold work
            if stops:
                await self._client.change("POST", f"{vm.path}/stop")
            else:
                await self._client.change("DELETE", vm.path)
            raise PlaceError(
                f"{vm.name}: Google would end it {planned}, and not at {timestamp(ends_at)} as it was told; "
                f"it is {'stopped' if stops else 'deleted'} again",
                transient=False,
                scope="place",
            )

    async def start(
        self, vm: Instance, machine: MachineId, ends_at: float, labels: Mapping[str, str], *, stops: bool
    ) -> Instance:
        """Start an instance that is stopped, with a new end: only now can that be set."""
        limit = scheduling(ends_at, spot=vm.spot, stops=stops)
        await self._client.change("POST", f"{vm.path}/setScheduling", limit)
        await self.mark(vm, labels)
        await self._client.change("POST", f"{vm.path}/start")
        running = await self.until_running(machine)
        await self.check_end(running, ends_at)
        return running

    async def mark(self, vm: Instance, labels: Mapping[str, str]) -> None:
        """Give an instance these labels, in place of those that it has."""
        body = {"labels": dict(labels), "labelFingerprint": vm.label_fingerprint}
        await self._client.change("POST", f"{vm.path}/setLabels", body)

    async def authorize(self, machine: MachineId, user: str, public_key: str) -> bool:
        """Have this key among the metadata's `ssh-keys`: the guest agent, which waits for changes, takes it
        up in a moment. Is the instance there?"""
        vm, line = (await self._inventory.fresh()).vms.get(machine), login_line(user, public_key)
        while vm is not None and (shown := await self._client.find(vm.path)) is not None:
            metadata = table(shown.get("metadata"))
            items = {str(each["key"]): str(each.get("value", "")) for each in rows(metadata.get("items"))}
            lines = items.get("ssh-keys", "").splitlines()
            if line in lines:
                return True
            items["ssh-keys"] = "\n".join([*lines, line])
            changed = [{"key": key, "value": value} for key, value in items.items()]
            body: Json = {"fingerprint": metadata.get("fingerprint", ""), "items": changed}
            try:
                await self._client.change("POST", f"{vm.path}/setMetadata", body)
            except GoogleFault as fault:
                if fault.status != 412:  # somebody else has changed it meanwhile
                    raise
        return False

    async def again(self, machine: MachineId, step: str) -> Instance:
        """Reset it, or stop it and start it, perhaps on other hardware. Its end stays where it is."""
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None or vm.status not in ("RUNNING", "TERMINATED", *COMING):
            raise PlaceError(f"{machine} does not run", transient=False, scope="machine")
        if step == "reset":
            await self._client.change("POST", f"{vm.path}/reset")
        else:
            if vm.status == "RUNNING":
                await self._client.change("POST", f"{vm.path}/stop")
            await self._client.change("POST", f"{vm.path}/start")
        running = await self.until_running(machine)
        await self.check_end(running)
        return running

    async def boot(self, machine: MachineId, vm: Instance) -> AsyncGenerator[RunningVm]:
        """An instance that runs, looked at anew each time, without end. Raises PlaceError."""
        begun = time.monotonic()
        while True:
            yield await self.running(machine, vm)
            with as_refusal(UNSEEN):  # one that is older than this would not show it yet
                snapshot = await self._inventory.recent(min(BOOT_LOOK_S, time.monotonic() - begun))
            now = snapshot.vms.get(machine)
            if now is None or snapshot.phase(machine, self._client.now()) == "gone":
                raise MachineUnavailable(machine, "it is gone again")
            vm = now

    async def running(self, machine: MachineId, vm: Instance) -> RunningVm:
        """How an instance that runs is reached, once its host key is known. Raises PlaceError."""
        notices = NOTICES if vm.spot else None
        if not self._keys.has_host(machine):
            with as_refusal(vm.name):
                key = await self._host_key(vm)
            if not key:
                missing = "has not told its host key yet (guest attributes hostkeys/)"
                return RunningVm(vm.name, "", missing, notices, listens_at=vm.address)
            self._keys.pin(machine, key)
        return RunningVm(vm.name, vm.address, notices=notices)

    async def _host_key(self, vm: Instance) -> str:
        """The public key that the machine has told Google at its first boot; empty if it has not yet.

        Later any process of the machine could write there: what was read before the first job counts.
        """
        shown = await self._client.find(f"{vm.path}/getGuestAttributes", queryPath="hostkeys/")
        return host_key_in(shown)

    async def console(self, vm: Instance) -> str:
        """The end of what it said while it booted; what keeps us from reading it, if something does."""
        try:
            shown = await self._client.get(f"{vm.path}/serialPort", port="1")
        except GoogleFault as fault:
            return f"(it cannot be read: {fault.told})"
        lines = str(shown.get("contents", "")).strip().splitlines()[-CONSOLE_LINES:]
        return "\n".join(lines)[-CONSOLE_CHARACTERS:]

    # -- down ----------------------------------------------------------------------------------

    async def stop(self, machine: MachineId) -> None:
        """Stop it; the meter stops, the disk stays."""
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None:
                raise NoSuchMachine(machine)
            if vm.status in ("TERMINATED", "STOPPED"):
                return
            if vm.status not in ("STOPPING", "SUSPENDING"):
                await self._client.change("POST", f"{vm.path}/stop")

    async def remove(self, machine: MachineId) -> bool:
        """Delete what there is of a machine, in all zones, until nothing is left, or it takes too long."""
        begun = time.monotonic()
        async for snapshot in self._inventory.watch():
            if machine not in snapshot.machines and not _doubles(snapshot, machine):
                return True
            await self._take_down(snapshot, machine)
            if time.monotonic() - begun > DELETE_S:
                break
        return False

    async def _take_down(self, snapshot: ProjectSnapshot, machine: MachineId) -> None:
        vm = snapshot.vms.get(machine)
        instances = [*([vm] if vm is not None else []), *_doubles(snapshot, machine)]
        if instances:
            await asyncio.gather(*(self.delete(each.path) for each in instances))
            return
        free = [disk.path for disk in snapshot.disks.get(machine, ()) if not disk.attached]
        await asyncio.gather(*(self.delete(path) for path in free))

    async def delete(self, path: str) -> None:
        """Delete an instance or a disk, and wait for that. One that is gone, or going, is none."""
        try:
            await self._client.change("DELETE", path)
        except GoogleFault as fault:
            if fault.status != 404 and not fault.has(
                "notFound", "RESOURCE_NOT_FOUND", "RESOURCE_NOT_READY", "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
            ):
                raise


def host_key_in(attributes: Json | None) -> str:
    """The best of the host keys among guest attributes, which the machine itself has written; or empty."""
    items = rows(table(table(attributes).get("queryValue")).get("items"))
    told = {str(each.get("key")): str(each.get("value", "")).strip() for each in items}
    known = (f"{kind} {told[kind]}" for kind in KEY_ORDER if PUBLIC_KEY.fullmatch(told.get(kind, "")))
    return next(known, "")


def _doubles(snapshot: ProjectSnapshot, machine: MachineId) -> list[Instance]:
    """Other instances of the machine: they have its name, and are in other zones."""
    vm = snapshot.vms.get(machine)
    return [double for double in snapshot.doubles if vm is not None and double.name == vm.name]
