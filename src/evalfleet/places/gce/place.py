"""The place `gce`: virtual machines of Google's Compute Engine."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from evalfleet.errors import MachineUnavailable, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.names import NO_HOME
from evalfleet.places.vm.answers import as_refusal
from evalfleet.places.vm.place import UNSEEN, VmPlace, check_installed
from evalfleet.places.vm.preflight import clock_doubt
from evalfleet.ports import Belonging, Check, Image, Made, PlaceContext

from . import leftovers, preflight, prices
from .answers import GoogleFault
from .capture import ProjectImages
from .client import ComputeClient, ComputeEndpoint
from .firewall import Firewall
from .inventory import Instance, ProjectInventory, ProjectSnapshot
from .lifecycle import InstanceControl
from .machine_types import disk_of, region_of, vcpus
from .names import labels_of, name_of
from .price_list import GcePrices
from .settings import GceSettings, GoogleAccount, account_of
from .template import InstanceBuild, end_of

LOOK_S = 30.0
AT_LIMIT = "Google ended it at its limit"

log = logging.getLogger(__name__)


class GcePlace(VmPlace[Instance, ProjectSnapshot]):
    """Virtual machines of Google's Compute Engine, made for us, deleted by Google itself at their limit."""

    Settings = GceSettings
    extra = "gcp"
    registry_settings = ("project",)
    machine_s = 120.0
    price_list = GcePrices()

    def __init__(
        self, name: str, settings: GceSettings, account: GoogleAccount, context: PlaceContext
    ) -> None:
        super().__init__(name, settings, account, context, ".gce")
        self._settings = settings
        self._account = account
        endpoint = ComputeEndpoint(account.project, settings.endpoint, account.ca)
        self._client = ComputeClient(endpoint, context.environ)
        self._firewall = Firewall(self._client, name, settings, context.home_id or NO_HOME)
        self._inventory = ProjectInventory(self._client, context.home_id)
        self._lifecycle = InstanceControl(self._client, self._inventory, self._keys, context.home_id)
        self._use_cloud(self._client, self._inventory, self._lifecycle)
        self._images = ProjectImages(
            self._client, self._inventory, self._lifecycle, self._access, settings, account, context.home_id
        )
        self._nested = bool(settings.nested)
        """Are machines to run virtual machines? Set by the settings, or by a benchmark that needs it."""
        self._distances: dict[str, float] = {}
        """Seconds to each region, nearest first, once they were measured."""
        self._measuring = asyncio.Lock()
        self._ends: dict[MachineId, float] = {}
        """When Google ends each machine that was seen to run, by its own clock."""

    @classmethod
    def make(cls, name: str, settings: GceSettings, context: PlaceContext) -> GcePlace:
        check_installed(name, ("google.auth", "aiohttp", "asyncssh"), "gcp")
        account = account_of(name, settings, context)
        if missing := prices.unpriced(settings, account.zones, prices.GcePriceBook.of(context.home)):
            raise RequestError(
                f"place {name!r}: the price of {', '.join(missing)} is not known; set prices = "
                f"{{ {missing[0]} = 0.5 }} (USD an hour)"
            )
        return cls(name, settings, account, context)

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the list of prices: Google is asked nothing. Raises PlaceError if no region can be reached."""
        self._nested = prices.wants_nesting(self._settings, needs)
        book = prices.GcePriceBook.of(self._folder)
        for_pool = self._use == "pool"
        return prices.offers_of(
            self._name, self._settings, await self._zones(), book, needs, for_pool=for_pool
        )

    async def _zones(self) -> Sequence[str]:
        """Where machines may be; with `zones = "nearest"` in the region that is, which is measured once."""
        zones, regions = self._account.zones, dict.fromkeys(map(region_of, self._account.zones))
        if self._settings.zones != "nearest":
            return zones
        async with self._measuring:
            if not self._distances:
                by = self._settings.distance_by
                self._distances = await preflight.distances(regions, by, self._account.ca)
        if not self._distances:
            why = "no region answers from here, so none can be the nearest; name `zones` or `regions` instead"
            raise PlaceError(f"place {self._name!r}: {why}", transient=False, scope="place")
        nearest = next(iter(self._distances))
        return [zone for zone in zones if region_of(zone) == nearest]

    # -- create --------------------------------------------------------------------------------

    async def _have(
        self,
        snapshot: ProjectSnapshot,
        machine: MachineId,
        offer: Offer,
        until: float,
        on_allocated: Callable[[], None],
    ) -> Instance:
        vm = snapshot.vms.get(machine)
        try:
            if vm is None:
                self._ceiling.check(machine, {each: vcpus(vm.type) for each, vm in snapshot.vms.items()})
                await self._firewall.ensure()
                return await self._lifecycle.insert(self._build(machine, offer, until), on_allocated)
            if vm.status in ("STOPPING", "SUSPENDING"):
                raise MachineUnavailable(machine, "it is being stopped or deleted")
            if vm.status in ("TERMINATED", "STOPPED"):
                if not self._keys.has_host(machine):
                    why = f"{machine} was made by this home elsewhere: its host key is not here"
                    raise PlaceError(why, transient=False, scope="machine")
                await self._firewall.ensure()
                ends_at = end_of(self._client.now(), until)
                labels, stops = self._labels(machine, until), self._use == "pool"
                return await self._lifecycle.start(vm, machine, ends_at, labels, stops=stops)
            running = await self._lifecycle.until_running(machine)
            await self._lifecycle.check_end(running)  # who asked for it may have been killed before
            return running
        except GoogleFault as fault:
            region = region_of(offer.region)
            have_some = any(region_of(vm.zone) == region for vm in snapshot.vms.values())
            what = f"{offer.size} in {offer.region}"
            raise fault.refusal(what, have_some=have_some, made=vm is not None) from fault

    def _build(self, machine: MachineId, offer: Offer, until: float) -> InstanceBuild:
        s, project = self._settings, self._account.project
        region = region_of(offer.region)
        return InstanceBuild(
            project=project,
            machine=machine,
            name=name_of(machine, s.name),
            zone=offer.region,
            type=offer.size,
            spot=offer.spot,
            nested=self._nested,
            stops=self._use == "pool",
            image=s.image,
            disk=disk_of(offer.size, s.disk),
            disk_gb=s.disk_gb,
            user=s.user,
            public_key=self._keys.login().public,
            network=self._firewall.network,
            subnet=f"projects/{project}/regions/{region}/subnetworks/{s.subnet}" if s.subnet else "",
            tag=self._firewall.tag,
            public_ip=s.public_ip,
            service_account=s.service_account,
            labels=self._labels(machine, until),
            ends_at=end_of(self._client.now(), until),
        )

    def _labels(self, machine: MachineId, until: float) -> dict[str, str]:
        return labels_of(machine, self._home, self._account.owner, self._use, until, self._settings.labels)

    # -- list, stop, delete --------------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        snapshot = await self._snapshot()
        await self._maintain(snapshot)
        now = self._client.now()
        self._ends |= {machine: vm.ends_at for machine, vm in snapshot.vms.items() if vm.ends_at is not None}
        found = {machine: self._machine(snapshot, machine, now) for machine in snapshot.machines}
        ended = [each for each, shown in found.items() if shown.phase == "gone"]
        if ended or self._keys.hosts() - snapshot.machines:
            with as_refusal(UNSEEN):
                await self._tell_why(snapshot, found, now)
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def _tell_why(self, snapshot: ProjectSnapshot, found: dict[MachineId, Machine], now: float) -> None:
        """Tell what Google took back, and what it ended at its limit, from what was lost otherwise.

        The first is in its operations alone. What is gone with its disk is listed, too, until it is deleted
        here. Of a machine whose limit came while nobody looked, the engine knows when that was.
        """
        preempted = await self._inventory.preempted()
        for machine in {*found, *self._keys.hosts()}:
            if machine in found and found[machine].phase != "gone":
                continue
            name, vm = name_of(machine, self._settings.name), snapshot.vms.get(machine)
            if any(each.is_of(name, vm) for each in preempted):
                found[machine] = Machine(machine, "evicted")
            elif now >= self._ends.get(machine, math.inf):
                found[machine] = Machine(machine, "gone", detail=AT_LIMIT)

    def _machine(self, snapshot: ProjectSnapshot, machine: MachineId, now: float) -> Machine:
        vm, phase = snapshot.vms.get(machine), snapshot.phase(machine, now)
        if vm is None or phase != "up":
            shown = f"Google shows it as {vm.status}" if vm is not None and phase == "gone" else ""
            return Machine(machine, phase, detail=shown)
        if not vm.address or not self._keys.has_host(machine):
            return Machine(machine, "pending")
        timings, host_key = self._readiness.timings(machine), self._keys.host_public(machine)
        node = f"{vm.name} ({vm.zone})"
        return Machine(machine, "up", vm.address, node, timings=timings, host_key=host_key)

    async def _maintain(self, snapshot: ProjectSnapshot) -> None:
        """Do what machines need while they live. If it is refused, they can still be seen and deleted."""
        try:
            if snapshot.vms:
                await self._firewall.ensure()  # `ssh_from` may have changed since they were made
            if snapshot.doubles:
                await asyncio.gather(*(self._lifecycle.delete(vm.path) for vm in snapshot.doubles))
        except GoogleFault as fault:
            log.warning("%s", fault.refusal("machines are not looked after"))

    def _named(self, machine: MachineId) -> str:
        return f"{name_of(machine, self._settings.name)} in {self._account.project}"

    def _vcpus(self, size: str) -> int:
        return vcpus(size)

    # -- before, and after ---------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(preflight.outline(self._settings, self._firewall, machines))

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        """Are we let in, and is this computer's clock right?"""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._client.get(self._client.root)
        except GoogleFault as fault:
            refusal = fault.refusal(f"place {self._name!r}")
            if not refusal.transient:
                raise refusal from fault
            return ()  # the run asks again
        except TimeoutError:
            return ()
        return tuple(filter(None, (clock_doubt(self._client.skew_s, preflight.WHOSE),)))

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """What can be found out before money is spent."""
        try:
            offers, zones = await self.offers(needs), await self._zones()
        except PlaceError as err:
            told, _, remedy = str(err).partition("; ")
            return (Check("distance", "bad", told, remedy),)
        checks = preflight.GceChecks(self._client, self._settings, self._account, self._firewall, zones)
        found = await checks.all(offers, needs, workers)
        if not self._distances:
            return found
        told = ", ".join(f"{region} {1000 * each:.0f} ms" for region, each in self._distances.items())
        return (*found, Check("distance", "good", f"a TLS handshake takes: {told}; nearest first"))

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's, of all homes, in the whole project."""
        with as_refusal(UNSEEN):
            return await leftovers.belongings(self._client)

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            await leftovers.reap(self._client, belonging)

    # -- images --------------------------------------------------------------------------------

    async def reserve(self, machine: MachineId, image: str) -> None:
        with as_refusal(f"image {image}"):
            await self._images.reserve(machine, image)

    async def capture(
        self,
        machine: Machine,
        image: str,
        rest: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> Image:
        with as_refusal(f"image {image}"):
            return await self._images.capture(machine, image, rest, tell)

    async def images(self) -> Sequence[Image]:
        with as_refusal("images cannot be seen"):
            return await self._images.all()

    async def drop_image(self, image: Image) -> None:
        with as_refusal(f"image {image.name}"):
            await self._images.drop(image)
