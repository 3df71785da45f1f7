"""The place `azure_vm`: virtual machines of Azure."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec

from msgspec import structs

from evalfleet.channels.samples import Samples
from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.names import NO_HOME
from evalfleet.ports import Belonging, Channel, Check, Dialled, Fence, Made, PlaceContext

from . import sweeping
from .arm import Arm, Way
from .arrivals import Arrivals
from .builds import Builder
from .capturing import Captures, Imaging, Site
from .checks import Checks
from .expiry import SHORTEST_S, STOPPING_S, shutdown_at
from .ground import Ground
from .keys import Keys
from .login import Login
from .names import Kind, Names, names_of, shared_tags, tags_of
from .offers import offers_of
from .outline import outline
from .pricelist import PriceList
from .prices import Book
from .reaching import Reach
from .refusals import ArmFault, refusal
from .settings import Account, AzureSettings, account_of
from .sizes import region_and_zone, size_of, unknown
from .template import ADDRESS, NIC, SCHEDULE, VM, Build, cloud_config
from .views import Looks, View, Vm

REARM_S = 6 * 3600.0
MENDED_S = 300.0
"""A machine that was restarted answers sooner than a new one."""
CLAIMS_S = 30.0

log = logging.getLogger(__name__)


class AzurePlace(PriceList, Imaging):
    """Virtual machines of Azure, made for us, stopped by Azure itself at their expiry, deleted after use."""

    Settings = AzureSettings
    default_canary = 1
    changeable = ("ssh_from",)
    machine_s = 300.0

    def __init__(self, name: str, settings: AzureSettings, account: Account, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._account = account
        self._home = context.home_id
        self._kind: Kind = "pool" if context.for_pool else "run"
        self._prices = context.home
        self._secrets = context.secrets
        way = Way(account.subscription, settings.endpoint, settings.scope, account.ca)
        self._arm = Arm(way, context.environ)
        self._login = Login(self._arm, context.environ)
        self._ground = Ground(self._arm, name, settings, account, context.home_id)
        self._looks = Looks(self._arm, account.group, context.home_id)
        self._builder = Builder(self._arm, self._looks, self._ground.root)
        self._keys = Keys(context.home, name, account.key)
        agent = context.environ.get("SSH_AUTH_SOCK")
        self._reach = Reach(settings, self._keys, context.home_id, agent)
        self._arrivals = Arrivals(self._looks, self._builder, self._reach)
        self._captures = Captures(
            Site(
                self._arm,
                self._looks,
                self._builder,
                self._reach,
                self._arrivals,
                settings,
                self._ground.root,
                context.home_id,
                shared_tags(context.home_id, account.owner, settings.tags),
            )
        )
        self._samples = Samples(context.home)
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._coming: dict[MachineId, int] = {}
        self._admitted: set[str] = set()
        self._rearm_at: dict[MachineId, float] = {}

    @classmethod
    def make(cls, name: str, settings: AzureSettings, context: PlaceContext) -> AzurePlace:
        for module in ("azure.mgmt.resource", "azure.identity", "aiohttp", "asyncssh"):
            if not _is_installed(module):
                raise RequestError(f"place {name!r} needs {module}; pip install 'evalfleet[azure]'")
        if strange := unknown(settings.sizes):
            raise RequestError(
                f"place {name!r}: what {', '.join(strange)} has and costs is not known; use sizes of the "
                "series Dsv3 to Ddsv5, Dasv5, Dadsv5, Esv3, Esv5 or Edsv5"
            )
        return cls(name, settings, account_of(name, settings, context), context)

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the price list of the home, or the built-in one: nothing is asked."""
        return offers_of(self._name, self._settings, Book.of(self._prices), needs)

    # -- create --------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Returns when it can be reached; one that is stopped is started."""
        async with self._turns.setdefault(machine, asyncio.Lock()), self._counted(machine, offer):
            until = time.time() + expires_s
            vm = await self._have(machine, offer, until)
            await self._arrivals.take(machine, vm, until, self._settings.answer_s)

    @asynccontextmanager
    async def _counted(self, machine: MachineId, offer: Offer) -> AsyncGenerator[None]:
        self._coming[machine] = _cpus(offer.size)
        try:
            yield
        finally:
            self._coming.pop(machine, None)

    async def _have(self, machine: MachineId, offer: Offer, until: float) -> Vm:
        region, zone = region_and_zone(offer.region)
        view = await self._view()
        try:
            self._check_names(view, machine)
            vm = view.vms.get(machine)
            if vm is not None and vm.state == "deleting":
                raise MachineUnavailable(machine, "it is being deleted")
            if vm is not None and not self._keys.known(machine):
                why = f"{machine} was made by this home elsewhere: its host key is not here"
                raise PlaceError(why, transient=False, scope="machine")
            if vm is None and view.has_disk(machine):  # another machine cannot have one of that name
                await self._builder.remove(machine)
            if vm is None or (vm.state == "failed" and vm.power != "running"):
                self._check_ceiling(view, machine)
                _check_time(machine, offer, until)
                land = await self._ground.land(region)
                await self._builder.deploy(
                    self._build(machine, offer, region, zone, land.subnet, land.nsg, until)
                )
                self._rearm_at[machine] = time.time() + REARM_S
                return await self._builder.until_deployed(machine)
            if vm.power != "running":
                await self._switch(machine, vm, until)
            return await self._builder.until_running(machine)
        except ArmFault as fault:
            have_some = any(vm.region == region for vm in view.vms.values())
            raise refusal(fault, f"{offer.size} in {offer.region}", have_some=have_some) from fault

    def _build(
        self, machine: MachineId, offer: Offer, region: str, zone: str, subnet: str, nsg: str, until: float
    ) -> Build:
        s, host = self._settings, self._keys.of_host(machine)
        now = time.time()
        return Build(
            root=self._ground.root,
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
            public_key=self._keys.own().public,
            custom_data=cloud_config(host.private, host.public),
            subnet=subnet,
            nsg=nsg,
            public_ip=s.public_ip,
            identity=s.identity,
            tags=self._tags(machine, until),
            shutdown_at=shutdown_at(now, until - now - STOPPING_S),
        )

    def _check_names(self, view: View, machine: MachineId) -> None:
        """What has the name but not our tags is somebody else's, whatever it is."""
        names = self._names(machine)
        for kind, name in (
            (VM, names.vm),
            (NIC, names.nic),
            (ADDRESS, names.address),
            (SCHEDULE, names.schedule),
        ):
            if (kind.lower(), name.lower()) in view.taken:
                why = f"{name} exists in {self._account.group} and is not ours ({kind}); it is left alone"
                remedy = "remove it, or set another `name`"
                # the next machine has another name, so that the offer is not to blame
                raise PlaceError(f"{why}: {remedy}", transient=True, scope="machine")

    def _check_ceiling(self, view: View, machine: MachineId) -> None:
        used = sum(_cpus(vm.size) for each, vm in view.vms.items() if each not in self._coming)
        ceiling = self._settings.max_vcpus
        if ceiling and used + sum(self._coming.values()) > ceiling:
            raise PlaceError(
                f"{machine}: {used} of max_vcpus = {ceiling} are in use", transient=True, scope="place"
            )

    # -- list, extend, stop, delete ------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        found = await self._machines()
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def _machines(self) -> dict[MachineId, Machine]:
        view = await self._view()
        await self._look_after(view)
        try:
            found = await self._looks.machines(view, time.time())
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault
        return {
            machine: structs.replace(seen, timings=self._arrivals.timings(machine))
            for machine, seen in found.items()
        }

    async def _view(self) -> View:
        try:
            return await self._looks.fresh()
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault

    async def _look_after(self, view: View) -> None:
        """What machines need while they live. If it is refused, they are still seen, and can be deleted."""
        try:
            await self._admit(view)
            await self._move_on(view)
        except ArmFault as fault:
            log.warning("%s", refusal(fault, "machines are not looked after"))

    async def _admit(self, view: View) -> None:
        """`ssh_from` may have changed since the machines were made: apply it once, where there are any."""
        regions = {vm.region for vm in view.vms.values()} - self._admitted
        self._admitted |= regions
        await asyncio.gather(*(self._ground.admit(region) for region in regions))

    async def _move_on(self, view: View) -> None:
        """An expiry may be further off than a daily time can say: the switch moves on while they are used."""
        now = time.time()
        for machine in self._reach.in_use:
            vm, due = view.vms.get(machine), now >= self._rearm_at.get(machine, now)
            # with less time left the switch could only be moved past the expiry
            if due and vm is not None and vm.power == "running" and (vm.expires_at or 0.0) > now + SHORTEST_S:
                self._rearm_at[machine] = now + REARM_S
                await self._switch(machine, vm, vm.expires_at or now)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        until = time.time() + expires_s
        view = await self._view()
        vm = view.vms.get(machine)
        if vm is None or vm.state == "deleting":
            raise NoSuchMachine(machine)
        try:
            await self._switch(machine, vm, until)
            await self._builder.mark(view.parts.get(machine, ()), until)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault
        try:
            await self._reach.extend(machine, await self._arrivals.address(vm), until)
        except (HostDown, HostLost) as err:
            raise MachineUnavailable(machine, str(err)) from err
        except HostRefused as err:
            raise PlaceError(str(err), transient=False, scope="machine") from err

    async def _switch(self, machine: MachineId, vm: Vm, until: float) -> None:
        now = time.time()
        tags = self._tags(machine, until)
        at = shutdown_at(now, until - now - STOPPING_S)
        await self._builder.arm_switch(vm, self._names(machine), tags, at)
        self._rearm_at[machine] = now + REARM_S

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        """Restart it, or let Azure move it to other hardware; there, its local disk is empty."""
        async with self._turns.setdefault(machine, asyncio.Lock()):
            await self._reach.drop(machine)
            try:
                vm = await self._builder.again(machine, step)
            except ArmFault as fault:
                raise refusal(fault, f"{machine}: {step}") from fault
            patience_s = min(self._settings.answer_s, MENDED_S)
            await self._arrivals.take(machine, vm, time.time() + expires_s, patience_s)

    async def stop(self, machine: MachineId) -> None:
        """Deallocate it: its disk and its address stay, and are billed."""
        await self._reach.drop(machine)
        try:
            await self._builder.stop(machine)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        await self._reach.drop(machine)
        try:
            gone = await self._builder.remove(machine)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault
        if gone:
            self._keys.drop(machine)
            self._arrivals.forget(machine)

    # -- before, and after ---------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(outline(self._name, self._settings, self._account, self._home or NO_HOME, machines))

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        """Will our login outlive the run?"""
        try:
            async with asyncio.timeout(CLAIMS_S):
                return tuple(filter(None, [await self._login.doubt(time.time(), lasts_s)]))
        except (ArmFault, TimeoutError):
            return ()  # the run itself tells what is wrong

    async def examine(self, needs: Needs) -> Sequence[Check]:
        """What can be found out before money is spent."""
        checks = Checks(self._arm, self._login, self._settings, self._account)
        return await checks.all(await self.offers(needs), needs)

    @property
    def owner(self) -> str:
        return self._account.owner

    async def belongings(self) -> Sequence[Belonging]:
        """Of all homes, in the whole subscription."""
        try:
            return await sweeping.belongings(self._arm, self._account.group)
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault

    async def reap(self, belonging: Belonging) -> None:
        try:
            await sweeping.reap(self._arm, belonging)
        except ArmFault as fault:
            raise refusal(fault, belonging.machine) from fault

    # -- hosts ---------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        on_load = functools.partial(self._samples.keep, machine.id)
        lot = self._reach.lot(machine.id, machine.address)
        return SshChannel(lot, machine.id, fence, self._secrets, on_load)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client, with the key and the host key that we made."""
        return self._reach.shell(machine, command)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self._reach.lot(machine.id, machine.address).host.dial(port)

    async def close(self) -> None:
        await self._reach.close()
        await self._arm.close()

    # -- words ---------------------------------------------------------------------------------

    def _names(self, machine: MachineId) -> Names:
        return names_of(machine, self._settings.name)

    def _tags(self, machine: MachineId, until: float) -> dict[str, str]:
        return tags_of(machine, self._home, self._account.owner, self._kind, until, self._settings.tags)


def _check_time(machine: MachineId, offer: Offer, until: float) -> None:
    """Who counts on the machine's end by itself is refused when Azure could not keep it any more."""
    if offer.least_life_s and until - time.time() < SHORTEST_S:
        raise MachineUnavailable(
            machine, f"less than {SHORTEST_S / 60:.0f} minutes are left: Azure could not stop it in time"
        )


def _cpus(size: str) -> int:
    known = size_of(size)
    return known.cpus if known is not None else 0


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
