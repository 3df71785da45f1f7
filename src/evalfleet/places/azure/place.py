"""The place `azure_vm`: virtual machines of Azure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.names import NO_HOME
from evalfleet.places.vm.answers import as_refusal
from evalfleet.places.vm.place import UNSEEN, VmPlace, check_installed
from evalfleet.places.vm.preflight import clock_doubt
from evalfleet.places.vm.ssh_access import address_of
from evalfleet.ports import Belonging, Check, Image, Made, PlaceContext

from . import leftovers, preflight, prices, retail
from .answers import ArmFault
from .arm import ArmClient, ArmEndpoint, login_doubt
from .capture import ImageGallery, image_refusal
from .inventory import GroupInventory, GroupSnapshot, Vm
from .lifecycle import AzureControl
from .names import Names, names_of, tags_of
from .prices import offers_of
from .region_network import NetworkIds, RegionNetwork
from .settings import AzureAccount, AzureSettings, account_of
from .sizes import region_and_zone, strange, vcpus
from .template import (
    ADDRESS,
    NIC,
    RESOURCES,
    SCHEDULE,
    SHORTEST_S,
    STOPPING_S,
    VM,
    VmBuild,
    cloud_config,
    shutdown_at,
)

REARM_S = 6 * 3600.0
CLAIMS_S = 30.0

log = logging.getLogger(__name__)


class AzurePlace(VmPlace[Vm, GroupSnapshot]):
    """Virtual machines of Azure, made for us, stopped by Azure itself at their expiry, deleted after use."""

    Settings = AzureSettings
    extra = "azure"
    registry_settings = ("resource_group",)
    machine_s = 300.0
    price_list = retail.RetailPrices()

    def __init__(
        self, name: str, settings: AzureSettings, account: AzureAccount, context: PlaceContext
    ) -> None:
        super().__init__(name, settings, account, context, ".azure")
        self._settings = settings
        self._account = account
        self._environ = context.environ
        endpoint = ArmEndpoint(account.subscription, settings.endpoint, settings.scope, account.ca)
        self._arm = ArmClient(endpoint, context.environ)
        self._network = RegionNetwork(self._arm, name, settings, account, context.home_id)
        self._inventory = GroupInventory(self._arm, account.group, context.home_id)
        self._lifecycle = AzureControl(self._arm, self._inventory, self._network.root)
        self._use_cloud(self._arm, self._inventory, self._lifecycle)
        self._gallery = ImageGallery(
            self._arm, self._inventory, self._lifecycle, self._access, self._network, settings, self._home
        )
        self._admitted: set[str] = set()
        """Regions whose rules let in whom the settings name now."""
        self._rearm_at: dict[MachineId, float] = {}

    @classmethod
    def make(cls, name: str, settings: AzureSettings, context: PlaceContext) -> AzurePlace:
        check_installed(name, ("azure.mgmt.resource", "azure.identity", "aiohttp", "asyncssh"), "azure")
        account = account_of(name, settings, context)
        if no_sizes := strange(settings.sizes):
            raise RequestError(
                f"place {name!r}: {', '.join(no_sizes)} is no size; Azure's are as Standard_D4ds_v5"
            )
        if unpriced := prices.unpriced(settings, prices.AzurePriceBook.of(context.home)):
            raise RequestError(
                f"place {name!r}: the price of {', '.join(unpriced)} is not known; `evalfleet prices "
                f"--update` fetches it, or set prices = {{ {unpriced[0]} = 0.5 }} (USD an hour)"
            )
        return cls(name, settings, account, context)

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the price list of the home, or the built-in one: nothing is asked."""
        return offers_of(self._name, self._settings, prices.AzurePriceBook.of(self._folder), needs)

    # -- create --------------------------------------------------------------------------------

    async def _have(
        self,
        snapshot: GroupSnapshot,
        machine: MachineId,
        offer: Offer,
        until: float,
        on_allocated: Callable[[], None],
    ) -> Vm:
        region, zone = region_and_zone(offer.region)
        try:
            self._check_names(snapshot, machine)
            vm = snapshot.vms.get(machine)
            if vm is not None and vm.state == "deleting":
                raise MachineUnavailable(machine, "it is being deleted")
            if vm is not None and not self._keys.has_host(machine):
                why = f"{machine} was made by this home elsewhere: its host key is not here"
                raise PlaceError(why, transient=False, scope="machine")
            if vm is None and snapshot.has_disk(machine):  # another machine cannot have one of that name
                await self._lifecycle.remove(machine)
            failed = vm is not None and vm.state == "failed" and vm.power != "running"
            if vm is None or (failed and not _was_made(snapshot, machine)):
                self._ceiling.check(machine, {each: vcpus(vm.size) for each, vm in snapshot.vms.items()})
                _check_time(machine, offer, until - self._arm.now())
                network = await self._network.ids(region)
                await self._lifecycle.deploy(self._build(machine, offer, region, zone, network, until))
                self._rearm_at[machine] = self._arm.now() + REARM_S
                return await self._lifecycle.until_deployed(machine, on_allocated)
            if vm.power != "running":
                await self._arm_switch(machine, vm, until)
            return await self._lifecycle.until_running(machine)
        except ArmFault as fault:
            have_some = any(vm.region == region for vm in snapshot.vms.values())
            what, made = f"{offer.size} in {offer.region}", _was_made(snapshot, machine)
            raise fault.refusal(what, have_some=have_some, made=made) from fault

    def _build(
        self, machine: MachineId, offer: Offer, region: str, zone: str, network: NetworkIds, until: float
    ) -> VmBuild:
        s, host = self._settings, self._keys.of_host(machine)
        now = self._arm.now()
        return VmBuild(
            root=self._network.root,
            names=self._names(machine),
            region=region,
            zone=zone,
            size=offer.size,
            spot=offer.spot,
            image=s.image,
            security_type=s.security_type,
            disk=s.disk,
            disk_gb=s.disk_gb,
            user=s.user,
            public_key=self._keys.login().public,
            custom_data=cloud_config(host.private, host.public),
            subnet=network.subnet,
            nsg=network.nsg,
            public_ip=s.public_ip,
            identity=s.identity,
            tags=self._tags(machine, until),
            shutdown_at=shutdown_at(now, until - now - STOPPING_S),
        )

    def _check_names(self, snapshot: GroupSnapshot, machine: MachineId) -> None:
        """What has the name but not our tags is somebody else's, whatever it is."""
        names = self._names(machine)
        for kind, name in (
            (VM, names.vm),
            (NIC, names.nic),
            (ADDRESS, names.address),
            (SCHEDULE, names.schedule),
        ):
            if (kind.lower(), name.lower()) in snapshot.taken:
                why = f"{name} exists in {self._account.group} and is not ours ({kind}); it is left alone"
                remedy = "remove it, or set another `name`"
                # the next machine has another name, so that the offer is not to blame
                raise PlaceError(f"{why}: {remedy}", transient=True, scope="machine")

    # -- list, extend, stop, delete ------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        found = await self._machines()
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def _machines(self) -> dict[MachineId, Machine]:
        snapshot = await self._snapshot()
        await self._maintain(snapshot)
        with as_refusal(UNSEEN):
            machines = await self._inventory.machines(snapshot, self._arm.now())
        return {
            machine: structs.replace(
                shown, timings=self._readiness.timings(machine), host_key=self._keys.host_public(machine)
            )
            for machine, shown in machines.items()
        }

    async def _maintain(self, snapshot: GroupSnapshot) -> None:
        """Do what machines need while they live. If it is refused, they can still be seen and deleted."""
        try:
            await self._admit(snapshot)
            await self._rearm_switches(snapshot)
        except ArmFault as fault:
            log.warning("%s", fault.refusal("machines are not looked after"))

    async def _admit(self, snapshot: GroupSnapshot) -> None:
        """`ssh_from` may have changed since the machines were made: apply it once, where there are any."""
        regions = {vm.region for vm in snapshot.vms.values()} - self._admitted
        self._admitted |= regions
        await asyncio.gather(*(self._network.admit(region) for region in regions))

    async def _rearm_switches(self, snapshot: GroupSnapshot) -> None:
        """Move the switches on: an expiry may be further off than a daily time can say."""
        now = self._arm.now()
        for machine in self._access.in_use:
            vm, due = snapshot.vms.get(machine), now >= self._rearm_at.get(machine, now)
            # with less time left the switch could only be moved past the expiry
            if due and vm is not None and vm.power == "running" and (vm.expires_at or 0.0) > now + SHORTEST_S:
                self._rearm_at[machine] = now + REARM_S
                await self._arm_switch(machine, vm, vm.expires_at or now)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        snapshot = await self._snapshot()
        until = self._arm.now() + expires_s
        vm = snapshot.vms.get(machine)
        if vm is None or vm.state == "deleting":
            raise NoSuchMachine(machine)
        with as_refusal(machine):
            await self._arm_switch(machine, vm, until)
            await self._lifecycle.mark(snapshot.resources.get(machine, ()), until)
        try:
            address = address_of(await self._lifecycle.running(vm))
            await self._access.extend(machine, address, until - self._arm.skew_s)
        except (HostDown, HostLost) as err:
            raise MachineUnavailable(machine, str(err)) from err
        except HostRefused as err:
            raise PlaceError(str(err), transient=False, scope="machine") from err

    async def _arm_switch(self, machine: MachineId, vm: Vm, until: float) -> None:
        now = self._arm.now()
        tags = self._tags(machine, until)
        at = shutdown_at(now, until - now - STOPPING_S)
        await self._lifecycle.arm_switch(vm, self._names(machine), tags, at)
        self._rearm_at[machine] = now + REARM_S

    def _named(self, machine: MachineId) -> str:
        return f"{self._names(machine).vm} in {self._account.group}"

    def _vcpus(self, size: str) -> int:
        return vcpus(size)

    # -- before, and after ---------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(
            preflight.outline(self._name, self._settings, self._account, self._home or NO_HOME, machines)
        )

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        """Will our login outlive the run? Is this computer's clock right?"""
        try:
            async with asyncio.timeout(CLAIMS_S):
                await self._arm.get(self._arm.root, RESOURCES)
                login = await login_doubt(self._arm.claims, self._environ, self._arm.now(), lasts_s)
        except (ArmFault, TimeoutError):
            return ()  # the run itself tells what is wrong
        return tuple(filter(None, (login, clock_doubt(self._arm.skew_s, preflight.WHOSE))))

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """What can be found out before money is spent."""
        checks = preflight.AzureChecks(self._arm, self._environ, self._settings, self._account)
        return await checks.all(await self.offers(needs), needs, workers)

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's, of all homes, in the whole subscription."""
        with as_refusal(UNSEEN):
            return await leftovers.belongings(self._arm, self._account.group)

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            await leftovers.reap(self._arm, belonging)

    # -- images --------------------------------------------------------------------------------

    async def reserve(self, machine: MachineId, image: str) -> None:
        with image_refusal(image):
            await self._gallery.reserve(machine, image)

    async def capture(
        self,
        machine: Machine,
        image: str,
        rest: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> Image:
        with image_refusal(image):
            return await self._gallery.capture(machine, image, rest, tell)

    async def images(self) -> Sequence[Image]:
        with as_refusal("images cannot be seen"):
            return await self._gallery.images()

    async def drop_image(self, image: Image) -> None:
        with image_refusal(image.name):
            await self._gallery.drop(image)

    # -- words ---------------------------------------------------------------------------------

    def _names(self, machine: MachineId) -> Names:
        return names_of(machine, self._settings.name)

    def _tags(self, machine: MachineId, until: float) -> dict[str, str]:
        return tags_of(machine, self._home, self._account.owner, self._use, until, self._settings.tags)


def _was_made(snapshot: GroupSnapshot, machine: MachineId) -> bool:
    """Return True if the VM came up once. Azure may have deleted the record of its deployment since."""
    record = snapshot.deployments.get(machine)
    return machine in snapshot.vms and (record is None or record.state == "Succeeded")


def _check_time(machine: MachineId, offer: Offer, left_s: float) -> None:
    """Who counts on the machine's end by itself is refused when Azure could not keep it any more."""
    if offer.life.least_life_s and left_s < SHORTEST_S:
        raise MachineUnavailable(
            machine, f"less than {SHORTEST_S / 60:.0f} minutes are left: Azure could not stop it in time"
        )
