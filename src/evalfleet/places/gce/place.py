"""The place `gce`: virtual machines of Google's Compute Engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.names import NO_HOME, safe_name
from evalfleet.places.vm.answers import as_refusal
from evalfleet.places.vm.place import VmPlace, check_installed
from evalfleet.places.vm.ssh_access import SshKeys, SshLogin
from evalfleet.ports import Belonging, Check, Image, Made, PlaceContext, Preflight

from . import leftovers, preflight, prices
from .answers import GoogleFault
from .capture import ProjectImages
from .client import ComputeClient, ComputeEndpoint
from .firewall import Firewall
from .inventory import Inventory, Snapshot, Vm
from .lifecycle import UNSEEN, VmLifecycle
from .machine_types import region_of, type_of
from .names import Kind, labels_of, name_of
from .settings import Account, GceSettings, account_of
from .template import Build, end_of

KEYS = ".gce"
"""The folder in the home with the keys of all places of this kind."""
MENDED_S = 300.0
"""A machine that was reset answers sooner than a new one."""
LOOK_S = 30.0

log = logging.getLogger(__name__)


class GcePlace(VmPlace, Preflight):
    """Virtual machines of Google's Compute Engine, made for us, deleted by Google itself at their limit."""

    Settings = GceSettings
    default_canary = 1
    changeable = ("ssh_from",)
    login_variables = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT")
    extra = "gcp"
    registry_settings = ("project",)
    machine_s = 120.0
    price_list = prices.GcePrices()

    def __init__(self, name: str, settings: GceSettings, account: Account, context: PlaceContext) -> None:
        keys = SshKeys(context.home / KEYS / safe_name(name), account.key)
        agent = context.environ.get("SSH_AUTH_SOCK")
        login = SshLogin(settings.user, settings.port, settings.jump, settings.answer_s, agent)
        super().__init__(name, context, keys, login, settings.max_vcpus)
        self._settings = settings
        self._account = account
        self._kind: Kind = "pool" if context.for_pool else "run"
        self._folder = context.home
        endpoint = ComputeEndpoint(account.project, settings.endpoint, account.ca)
        self._client = ComputeClient(endpoint, context.environ)
        self._firewall = Firewall(self._client, name, settings, context.home_id or NO_HOME)
        self._inventory = Inventory(self._client, context.home_id)
        self._lifecycle = VmLifecycle(self._client, self._inventory, keys, context.home_id)
        self._images = ProjectImages(
            self._client, self._inventory, self._lifecycle, self._access, settings, account, context.home_id
        )
        self._nested = bool(settings.nested)
        """Are machines to run virtual machines? Set by the settings, or by a benchmark that needs it."""

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
        """By the list of prices: nothing is asked."""
        self._nested = prices.wants_nesting(self._settings, needs)
        book = prices.GcePriceBook.of(self._folder)
        for_pool = self._kind == "pool"
        return prices.offers_of(
            self._name, self._settings, self._account.zones, book, needs, for_pool=for_pool
        )

    # -- create --------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Make the machine, or start it if it is stopped. Returns when it can be used."""
        async with self._turn(machine):
            with self._ceiling.counting(machine, _vcpus(offer.size)):
                begun = time.monotonic()
                snapshot = await self._snapshot()  # and with it, what time it is at Google
                until = self._client.now() + expires_s - (time.monotonic() - begun)
                if machine in snapshot.vms:
                    vm = await self._have(snapshot, machine, offer, until)
                else:
                    async with self._trials.asking(offer) as had:
                        vm = await self._have(snapshot, machine, offer, until, had)
                await self._wait_ready(machine, vm, until, self._settings.answer_s)

    async def _wait_ready(self, machine: MachineId, vm: Vm, until: float, patience_s: float) -> None:
        """`until`: when it ends, by Google's clock."""
        boot, here = self._lifecycle.boot(machine, vm), until - self._client.skew_s
        await self._readiness.wait(machine, boot, lambda: self._lifecycle.console(vm), here, patience_s)

    async def _have(
        self,
        snapshot: Snapshot,
        machine: MachineId,
        offer: Offer,
        until: float,
        on_allocated: Callable[[], None] = lambda: None,
    ) -> Vm:
        vm = snapshot.vms.get(machine)
        try:
            if vm is None:
                self._ceiling.check(machine, {each: _vcpus(vm.type) for each, vm in snapshot.vms.items()})
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
                labels, stops = self._labels(machine, until), self._kind == "pool"
                return await self._lifecycle.start(vm, machine, ends_at, labels, stops=stops)
            return await self._lifecycle.until_running(machine)
        except GoogleFault as fault:
            region = region_of(offer.region)
            have_some = any(region_of(vm.zone) == region for vm in snapshot.vms.values())
            raise fault.refusal(f"{offer.size} in {offer.region}", have_some=have_some) from fault

    def _build(self, machine: MachineId, offer: Offer, until: float) -> Build:
        s, project = self._settings, self._account.project
        region = region_of(offer.region)
        return Build(
            project=project,
            machine=machine,
            name=name_of(machine, s.name),
            zone=offer.region,
            type=offer.size,
            spot=offer.spot,
            nested=self._nested,
            stops=self._kind == "pool",
            image=s.image,
            disk=s.disk,
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
        return labels_of(machine, self._home, self._account.owner, self._kind, until, self._settings.labels)

    # -- list, stop, delete --------------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        snapshot = await self._snapshot()
        await self._maintain(snapshot)
        now = self._client.now()
        found = {machine: self._machine(snapshot, machine, now) for machine in snapshot.machines}
        ended = [each for each, shown in found.items() if shown.phase == "gone"]
        if ended or self._keys.hosts() - snapshot.machines:
            with as_refusal(UNSEEN):
                await self._tell_evicted(snapshot, found)
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def _tell_evicted(self, snapshot: Snapshot, found: dict[MachineId, Machine]) -> None:
        """Tell what Google took back from what was lost otherwise: that is in its operations alone.

        One that is gone with its disk is listed, too, until it is deleted here.
        """
        preempted = await self._inventory.preempted()
        for machine in {*found, *self._keys.hosts()}:
            if machine in found and found[machine].phase != "gone":
                continue
            name, vm = name_of(machine, self._settings.name), snapshot.vms.get(machine)
            if any(each.is_of(name, vm) for each in preempted):
                found[machine] = Machine(machine, "evicted")

    def _machine(self, snapshot: Snapshot, machine: MachineId, now: float) -> Machine:
        vm, phase = snapshot.vms.get(machine), snapshot.phase(machine, now)
        if vm is None or phase != "up":
            return Machine(machine, phase)
        if not vm.address or not self._keys.has_host(machine):
            return Machine(machine, "pending")
        timings = self._readiness.timings(machine)
        return Machine(machine, "up", vm.address, f"{vm.name} ({vm.zone})", timings=timings)

    async def _snapshot(self) -> Snapshot:
        with as_refusal(UNSEEN):
            return await self._inventory.fresh()

    async def _maintain(self, snapshot: Snapshot) -> None:
        """Do what machines need while they live. If it is refused, they can still be seen and deleted."""
        try:
            if snapshot.vms:
                await self._firewall.ensure()  # `ssh_from` may have changed since they were made
            if snapshot.doubles:
                await asyncio.gather(*(self._lifecycle.delete(vm.path) for vm in snapshot.doubles))
        except GoogleFault as fault:
            log.warning("%s", fault.refusal("machines are not looked after"))

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        """Google moves the limit of a machine only while it is stopped."""
        if machine not in (await self._snapshot()).vms:
            raise NoSuchMachine(machine)
        raise PlaceError(
            f"{machine}: Google does not move the limit of a machine that runs; stopped and started again, "
            "it gets a new one",
            transient=False,
            scope="machine",
        )

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        """Reset it; or stop and start it, perhaps on other hardware. Its end does not move by that."""
        async with self._turn(machine):
            await self._access.drop(machine)
            with as_refusal(f"{machine}: {step}"):
                vm = await self._lifecycle.again(machine, step)
            patience_s = min(self._settings.answer_s, MENDED_S)
            await self._wait_ready(machine, vm, self._client.now() + expires_s, patience_s)

    async def stop(self, machine: MachineId) -> None:
        """Stop it: its disk stays, and is billed."""
        await self._access.drop(machine)
        with as_refusal(machine):
            await self._lifecycle.stop(machine)

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        await self._access.drop(machine)
        with as_refusal(f"{name_of(machine, self._settings.name)} in {self._account.project}"):
            gone = await self._lifecycle.remove(machine)
        if gone:
            self._keys.drop(machine)
            self._readiness.forget(machine)

    # -- before, and after ---------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(preflight.outline(self._settings, self._firewall, machines))

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        """Is this computer's clock right?"""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._client.get(self._client.root)
        except (GoogleFault, TimeoutError):
            return ()  # the run itself tells what is wrong
        return tuple(filter(None, (preflight.clock_doubt(self._client.skew_s),)))

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """What can be found out before money is spent."""
        checks = preflight.GceChecks(self._client, self._settings, self._account, self._firewall)
        return await checks.all(await self.offers(needs), needs, workers)

    @property
    def owner(self) -> str:
        return self._account.owner

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

    async def close(self) -> None:
        await super().close()
        await self._client.close()


def _vcpus(type: str) -> int:
    known = type_of(type)
    return known.cpus if known is not None else 0
