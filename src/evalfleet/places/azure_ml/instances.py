"""Compute instances of a workspace, one a machine: made, started, stopped and deleted by us, reached by SSH.

A compute instance is a computer of its own with Docker, as official scripts of benchmarks make them. Its
creation script lets our key in, and writes the public host key of its SSH server into a folder of the
datastore that only people of the workspace can write to: from there it is known before the first connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct, structs

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError
from evalfleet.model import KeptFiles, Machine, MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.names import EXPIRES, HOME, MACHINE, moment, tags_of
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure.retail import RetailPrices
from evalfleet.places.azure.services import belongings_of, knock
from evalfleet.places.azure.sizes import vcpus
from evalfleet.places.vm.answers import Json, Problem, as_refusal, rows, table
from evalfleet.places.vm.place import UNSEEN, Snapshots, VmPlace, check_installed
from evalfleet.places.vm.preflight import machine_words
from evalfleet.places.vm.settings import VmSettings
from evalfleet.places.vm.ssh_access import RunningVm, SshKeys
from evalfleet.ports import Belonging, Check, Made, PlaceContext

from . import preflight
from .service import MlClient
from .settings import AzureMlSettings, MlAccount
from .template import (
    ComputeInstanceBuild,
    instance_body,
    instance_name,
    instance_schedules,
    instance_setup,
    job_name,
)
from .workspace import MlWorkspace

USER = "azureuser"
"""Azure makes it on every compute instance, and it may do everything."""
BOXES = "instances"
"""The folder of the datastore with a folder for each compute instance of each home."""
SETUP, HOST_KEY, ABOUT = "setup", "host-key", "about"
ABOUT_BYTES = 1 << 16
MAKE_S = 900.0
"""How long a compute instance may take to be made, or started."""
SETUP_S = 4 * MAKE_S
"""How long its creation script may use its two signed addresses."""
DELETE_S = 100.0
"""For so long one call of `delete` waits for it to be gone."""
GOING_S = 60.0
State: TypeAlias = Literal["comes", "runs", "rests", "failed", "goes"]
STATES: Mapping[str, State] = {
    "creating": "comes",
    "settingup": "comes",
    "usersettingup": "comes",
    "starting": "comes",
    "restarting": "comes",
    "resizing": "comes",
    "unknown": "comes",
    "running": "runs",
    "jobrunning": "runs",
    "stopping": "rests",
    "stopped": "rests",
    "createfailed": "failed",
    "setupfailed": "failed",
    "usersetupfailed": "failed",
    "unusable": "failed",
    "deleting": "goes",
}
"""What each state of a compute instance means. One that Azure adds later counts as `unknown` does."""

log = logging.getLogger(__name__)


class MlInstance(Struct, frozen=True):
    """A compute instance as the workspace lists it."""

    name: str
    machine: MachineId
    size: str
    state: str
    """In small letters."""
    address: str
    """HOST:PORT of its SSH server; empty while it has none."""
    trouble: tuple[Problem, ...]
    """Azure's words, if something is wrong with it."""
    tags: Mapping[str, str]
    """As it was made with them: Azure does not change the tags of a compute instance."""
    stopped_by: str = ""
    """Schedule or IdleShutdown, if Azure has stopped it."""
    start_failed: str = ""
    """When its last start failed, in Azure's words. Empty if that did not fail."""

    @property
    def stage(self) -> State:
        return STATES.get(self.state, "comes")


class InstanceSnapshot(Struct, frozen=True):
    """What there is of this home, by machine, at one moment."""

    vms: Mapping[MachineId, MlInstance]
    boxes: Mapping[MachineId, float | None]
    """When each machine expires that has a folder of blobs, with or without a compute instance."""
    taken: frozenset[str]
    """Names of computes, in small letters, that are not this home's."""


def instance_of(shown: Json, *, public: bool) -> MlInstance | None:
    """None if it is no compute instance of evalfleet's."""
    compute, tags = table(shown.get("properties")), _tags(shown)
    if str(compute.get("computeType")).lower() != "computeinstance" or MACHINE not in tags:
        return None
    inner = table(compute.get("properties"))
    ends = table(inner.get("connectivityEndpoints"))
    host = str(ends.get("publicIpAddress" if public else "privateIpAddress") or "")
    port = int(table(inner.get("sshSettings")).get("sshPort") or (50000 if public else 22))
    state = str(inner.get("state") or compute.get("provisioningState") or "").lower()
    errors = [*rows(inner.get("errors")), *rows(compute.get("provisioningErrors"))]
    words = [table(each.get("error")) or each for each in errors]
    trouble = tuple(Problem(str(each.get("code")), str(each.get("message")).rstrip(".")) for each in words)
    address = f"{host}:{port}" if host else ""
    last = table(inner.get("lastOperation"))
    stopped_by = str(last.get("operationTrigger") or "")
    start_failed = str(last.get("operationTime")) if last.get("operationStatus") == "StartFailed" else ""
    return MlInstance(
        str(shown.get("name")),
        MachineId(tags[MACHINE]),
        str(inner.get("vmSize") or ""),
        "deleting" if str(compute.get("provisioningState")).lower() == "deleting" else state,
        address,
        trouble,
        tags,
        stopped_by if state == "stopped" and stopped_by != "User" else "",
        start_failed,
    )


def _tags(shown: Json) -> Mapping[str, str]:
    return {str(key): str(value) for key, value in table(shown.get("tags")).items()}


class InstanceInventory(Snapshots[InstanceSnapshot]):
    """The compute instances of this home in a workspace. Raises ArmFault."""

    def __init__(self, client: MlClient, workspace: MlWorkspace, home: str, *, public: bool) -> None:
        super().__init__(self._take)
        self._client, self._workspace, self._home, self._public = client, workspace, home, public

    async def _take(self) -> InstanceSnapshot:
        boxes, computes = await asyncio.gather(
            _all_tags(self._workspace, f"{self._home}/"), self._client.clusters()
        )
        found: dict[MachineId, MlInstance] = {}
        taken: set[str] = set()
        for shown in computes:
            instance = instance_of(shown, public=self._public)
            if instance is None or instance.tags.get(HOME) != self._home:
                taken.add(str(shown.get("name")).lower())
            else:
                found[instance.machine] = instance
        ours = {MachineId(tags[MACHINE]): moment(tags.get(EXPIRES, "")) for tags in boxes.values()}
        return InstanceSnapshot(found, ours, frozenset(taken))


class ComputeInstanceControl:
    """What brings compute instances up and down. Raises ArmFault, and PlaceError."""

    def __init__(
        self,
        client: MlClient,
        workspace: MlWorkspace,
        inventory: InstanceInventory,
        keys: SshKeys,
        home: str,
        form: str,
    ) -> None:
        self._client, self._workspace, self._inventory = client, workspace, inventory
        self._keys, self._home, self._form = keys, home, form

    def box(self, machine: MachineId) -> str:
        """Return the name of a machine's folder."""
        return f"{self._home}/{job_name(machine, self._form)}"

    async def until_running(self, machine: MachineId) -> MlInstance:
        """Start it, if it rests, and wait until it runs.

        Azure's description of a start promises no address where its end could be asked for.
        """
        begun, asked, failed_before = time.monotonic(), False, ""
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None or vm.stage == "goes":
                raise ArmFault(409, (Problem("Canceled", "it was deleted while it came up"),))
            if vm.stage == "runs":
                return vm
            if vm.stage == "failed":
                state = Problem(vm.state, f"the compute instance {vm.name} has failed")
                raise ArmFault(409, vm.trouble or (state,))
            if vm.state == "stopped" and not asked:
                asked, failed_before = True, vm.start_failed
                await self._client.act(vm.name, "start")
            elif vm.state == "stopped" and vm.start_failed != failed_before:
                raise ArmFault(409, vm.trouble or (Problem("StartFailed", f"{vm.name} did not start"),))
            if time.monotonic() - begun > MAKE_S:
                why = f"the compute instance {vm.name} is {vm.state} for {MAKE_S / 60:.0f} min"
                raise PlaceError(why, transient=True, scope="offer")
        raise AssertionError("snapshots never end")

    async def boot(self, machine: MachineId, vm: MlInstance) -> AsyncGenerator[RunningVm]:
        while True:
            if not self._keys.has_host(machine):
                await self._learn_key(machine)
            known = self._keys.has_host(machine)
            missing = "has no address yet" if known else "has not told its host key yet"
            yield RunningVm(vm.name, vm.address if known else "", missing)
            with as_refusal(UNSEEN):
                seen = (await self._inventory.fresh()).vms.get(machine)
            if seen is None or seen.stage not in ("comes", "runs"):
                raise MachineUnavailable(machine, "it is gone again")
            vm = seen

    async def _learn_key(self, machine: MachineId) -> None:
        with as_refusal(machine):
            told = await (await self._workspace.folder(BOXES)).read(f"{self.box(machine)}/{HOST_KEY}")
        if told:
            self._keys.pin(machine, told.decode("utf-8", "replace").strip())

    async def console(self, vm: MlInstance) -> str:
        return "(Azure ML shows no console; the studio's page Compute has the logs of its creation script)"

    async def again(self, machine: MachineId, step: str) -> MlInstance:
        """Restart it. Returns when it runs."""
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None or vm.stage not in ("comes", "runs"):
            raise PlaceError(f"{machine} does not run", transient=False, scope="machine")
        await self._client.act(vm.name, step)
        return await self.until_running(machine)

    async def authorize(self, machine: MachineId, user: str, public_key: str) -> bool:
        """Azure ML runs nothing on a compute instance that is made already."""
        return False

    async def stop(self, machine: MachineId) -> None:
        asked = False
        async for snapshot in self._inventory.watch():
            vm = snapshot.vms.get(machine)
            if vm is None:
                raise NoSuchMachine(machine)
            if vm.state == "stopped" or (asked and vm.stage == "failed"):
                return
            if not asked and vm.stage in ("runs", "failed"):
                await self._client.act(vm.name, "stop")
                asked = True

    async def remove(self, machine: MachineId) -> bool:
        """Delete what there is of it, for a while. Is nothing left?"""
        begun, asked_at = time.monotonic(), 0.0
        async for snapshot in self._inventory.watch():
            vm, now = snapshot.vms.get(machine), time.monotonic()
            if vm is None and machine not in snapshot.boxes:
                return True
            if vm is None:
                await remove_box(self._workspace, self.box(machine))
            elif vm.stage != "goes" and now - asked_at > GOING_S:
                asked_at = now
                await self._client.delete_cluster(vm.name)
            if now - begun > DELETE_S:
                break
        return False


async def _all_tags(workspace: MlWorkspace, below: str) -> dict[str, Mapping[str, str]]:
    """Return the tags of compute instances by the names of their folders."""
    bucket = await workspace.folder(BOXES)
    names = [name for name in await bucket.names(below) if name.endswith(f"/{ABOUT}")]
    contents = await asyncio.gather(*(bucket.read(name, ABOUT_BYTES) for name in names))
    found: dict[str, Mapping[str, str]] = {}
    for name, content in zip(names, contents, strict=True):
        with suppress(msgspec.DecodeError):
            tags = msgspec.json.decode(content or b"", type=dict[str, str])
            if MACHINE in tags:
                found[name.removesuffix(f"/{ABOUT}")] = tags
    return found


async def remove_box(workspace: MlWorkspace, box: str) -> None:
    """Remove the folder of a compute instance. What tells of it goes last."""
    bucket = await workspace.folder(BOXES)
    names = [name for name in await bucket.names(f"{box}/") if not name.endswith(f"/{ABOUT}")]
    if names:
        await bucket.remove(names)
    await bucket.remove([f"{box}/{ABOUT}"])


class AzureMlInstances(VmPlace[MlInstance, InstanceSnapshot]):
    """Compute instances, each a machine. `pool` starts and stops them."""

    Settings = AzureMlSettings
    extra = "azure"
    machine_s = 300.0
    price_list = RetailPrices()

    def __init__(
        self, name: str, settings: AzureMlSettings, account: MlAccount, arm: ArmClient, context: PlaceContext
    ) -> None:
        common = VmSettings(
            user=USER, port=50000, answer_s=settings.answer_s, jump=settings.jump, owner=settings.owner
        )
        super().__init__(name, common, account, context, ".azure_ml")
        self._settings, self._account, self._arm = settings, account, arm
        self._client = MlClient(arm, account)
        self._workspace = MlWorkspace(self._client, settings, account, context.environ, context.open_bucket)
        inventory = InstanceInventory(
            self._client, self._workspace, context.home_id, public=settings.public_ip
        )
        self._instances = ComputeInstanceControl(
            self._client, self._workspace, inventory, self._keys, self._home, settings.name
        )
        self._use_cloud(arm, inventory, self._instances)

    @classmethod
    def of(
        cls, name: str, settings: AzureMlSettings, account: MlAccount, context: PlaceContext
    ) -> AzureMlInstances:
        check_installed(name, ("asyncssh",), "azure")
        endpoint = ArmEndpoint(account.subscription, settings.endpoint, settings.scope, account.ca)
        return cls(name, settings, account, ArmClient(endpoint, context.environ), context)

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        with as_refusal(f"place {self._name!r}"):
            region = await self._workspace.region()
        book = AzurePriceBook.of(self._folder)
        return preflight.instance_offers(self._name, self._settings, region, book, needs)

    # -- up ------------------------------------------------------------------------------------

    async def _have(
        self,
        snapshot: InstanceSnapshot,
        machine: MachineId,
        offer: Offer,
        until: float,
        on_allocated: Callable[[], None],
    ) -> MlInstance:
        vm, name = snapshot.vms.get(machine), instance_name(machine, self._home)
        with as_refusal(f"{offer.size} in {offer.region}", made=vm is not None):
            if vm is not None and vm.stage == "goes":
                raise MachineUnavailable(machine, "it is being deleted")
            if name in snapshot.taken:
                why = f"the workspace has a compute {name} that is not this home's; delete it"
                raise PlaceError(why, transient=True, scope="machine")
            if vm is None:
                await self._put_setup(machine, until)
                await self._add(machine, name, offer.size, until)
            elif vm.stage == "rests":
                await self._prolong(machine, vm.name, until)
            found = await self._instances.until_running(machine)
            on_allocated()
            return found

    async def _put_setup(self, machine: MachineId, until: float) -> None:
        """Write its creation script, and where its host key will be."""
        bucket, box = await self._workspace.folder(BOXES), self._instances.box(machine)
        await self._put_about(machine, until)
        (tells,) = await bucket.sign("PUT", [f"{box}/{HOST_KEY}"], SETUP_S)
        program = instance_setup(USER, self._keys.login().public, tells)
        await bucket.replace(f"{box}/{SETUP}", program.encode())

    async def _put_about(self, machine: MachineId, until: float) -> None:
        """Write down when it ends: the tags of a compute instance cannot be changed."""
        bucket, box = await self._workspace.folder(BOXES), self._instances.box(machine)
        await bucket.replace(f"{box}/{ABOUT}", msgspec.json.encode(self._tags(machine, until)))

    async def _add(self, machine: MachineId, name: str, size: str, until: float) -> None:
        bucket = await self._workspace.folder(BOXES)
        (setup,) = await bucket.sign("GET", [f"{self._instances.box(machine)}/{SETUP}"], SETUP_S)
        build = ComputeInstanceBuild(
            region=await self._workspace.region(),
            size=size,
            setup=setup,
            stops_at=until,
            tags={key: tag for key, tag in self._tags(machine, until).items() if key != EXPIRES},
        )
        await self._client.add_instance(name, instance_body(self._settings, build))

    async def _prolong(self, machine: MachineId, name: str, until: float) -> None:
        """Give it another end: Azure stops it then, whoever is there."""
        await self._put_about(machine, until)
        await self._client.update_schedules(name, instance_schedules(until))

    def _tags(self, machine: MachineId, until: float) -> dict[str, str]:
        return tags_of(machine, self._home, self._owner, self._use, until, {})

    # -- what exists ---------------------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        snapshot = await self._snapshot()
        now, found = self._arm.now(), {*snapshot.vms, *snapshot.boxes}
        return tuple(
            self._machine(machine, snapshot.vms.get(machine), snapshot.boxes.get(machine), now)
            for machine in sorted(found)
            if machine.startswith(f"{pool}-")
        )

    def _machine(
        self, machine: MachineId, vm: MlInstance | None, expires_at: float | None, now: float
    ) -> Machine:
        if vm is None:
            return Machine(machine, "gone", detail="its compute instance is not there")
        words = [f"{problem.message} ({problem.code})" for problem in vm.trouble]
        state = f"stopped by Azure ({vm.stopped_by})" if vm.stopped_by else vm.state
        detail = f"Azure ML: {'; '.join(words) or state}"
        expired = expires_at is not None and now > expires_at
        if expired or vm.stage in ("rests", "failed", "goes"):
            return Machine(machine, "gone", detail=detail)
        if vm.stage == "comes" or not vm.address:
            return Machine(machine, "pending", detail=detail)
        shown = Machine(machine, "up", vm.address, vm.name)
        return structs.replace(
            shown, timings=self._readiness.timings(machine), host_key=self._keys.host_public(machine)
        )

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        snapshot = await self._snapshot()
        vm, until = snapshot.vms.get(machine), self._arm.now() + expires_s
        if vm is None or vm.stage == "goes":
            raise NoSuchMachine(machine)
        with as_refusal(machine):
            await self._prolong(machine, vm.name, until)
        if vm.stage == "runs":
            await self._extend_there(machine, vm, until - self._arm.skew_s)

    async def _extend_there(self, machine: MachineId, vm: MlInstance, until: float) -> None:
        try:
            await self._access.extend(machine, vm.address, until)
        except (HostDown, HostLost) as err:
            raise MachineUnavailable(machine, str(err)) from err
        except HostRefused as err:
            raise PlaceError(str(err), transient=False, scope="machine") from err

    def _named(self, machine: MachineId) -> str:
        return f"{instance_name(machine, self._home)} of {self._account.workspace}"

    def _vcpus(self, size: str) -> int:
        return vcpus(size)

    async def close(self) -> None:
        await self._workspace.close()
        await super().close()

    # -- before, and after ---------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        where = f"{self._account.workspace} in {self._account.group}"
        return tuple(
            Made(
                "compute instance",
                instance_name(machine, self._home),
                where,
                machine_words(offer, "", public_ip=self._settings.public_ip),
            )
            for machine, offer in machines
        )

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        found = await knock(self._arm, self._name, self._workspace.check)
        return (*found, *preflight.private_doubts(self._settings))

    async def keep_files(
        self, files: KeptFiles, lasts_s: float, tell: Callable[[str], None]
    ) -> Mapping[str, str]:
        with as_refusal(f"place {self._name!r}: {files.label}"):
            return await self._workspace.keep_files(files, lasts_s, tell)

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        checks = preflight.MlChecks(self._client, self._workspace.mail, self._settings, self._account)
        return await checks.all(lambda: self.offers(needs), needs, workers)

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's in the workspace, of all homes: compute instances, and their folders."""
        with as_refusal(UNSEEN):
            boxes, computes = await asyncio.gather(_all_tags(self._workspace, ""), self._client.clusters())
        instances = [instance for each in computes if (instance := instance_of(each, public=True))]
        parts = (
            *(("folder", name, tags) for name, tags in boxes.items()),  # first, for its tag of the end
            *(("instance", each.name, each.tags) for each in instances),
        )
        return belongings_of(parts, f"{self._account.workspace} in {self._account.group}")

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            for part in reversed(belonging.parts):
                what, _, name = part.partition(" ")
                if what == "instance":
                    await self._client.delete_cluster(name)
                else:
                    await remove_box(self._workspace, name)
