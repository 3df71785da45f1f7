"""The place `azure_vm`: virtual machines of Azure."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evalfleet.channels.samples import Samples
from evalfleet.channels.ssh.words import Access, HostDown, HostLost, HostRefused, Target, openssh
from evalfleet.errors import ProviderError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Fence, PlaceContext

from .arm import Arm, Way
from .builds import Builder
from .expiry import shutdown_at
from .ground import Ground
from .keys import Keys
from .names import Names, names_of, tags_of
from .refusals import ArmFault, refusal
from .settings import Account, AzureSettings, account_of
from .sizes import Menu, offers_of, region_and_zone, size_of, unknown
from .template import ADDRESS, NIC, SCHEDULE, VM, Build, cloud_config
from .views import Looks, View, Vm

if TYPE_CHECKING:
    from evalfleet.channels.ssh.asking import Lot

HANDSHAKES = 16
CONNECT_S = 10.0
ANSWER_S = 600.0
ADMIT_S = 90.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.3, 5.0


class AzurePlace:
    """Virtual machines of Azure, made for us, stopped by Azure itself at their expiry, deleted after use."""

    Settings = AzureSettings
    default_canary = 1

    def __init__(self, name: str, settings: AzureSettings, account: Account, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._account = account
        self._home = context.home_id
        self._secrets = context.secrets
        self._agent = context.environ.get("SSH_AUTH_SOCK")
        way = Way(account.subscription, settings.endpoint, settings.scope, account.ca)
        self._arm = Arm(way, context.environ)
        self._ground = Ground(self._arm, settings, account, context.home_id)
        self._looks = Looks(self._arm, account.group, context.home_id)
        self._builder = Builder(self._arm, self._looks, self._ground.root)
        self._keys = Keys(context.home, name, account.key)
        self._samples = Samples(context.home)
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._coming: dict[MachineId, int] = {}
        self._admitted: set[str] = set()
        self._lots: dict[MachineId, Lot] = {}

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
        """By the built-in table: nothing is asked."""
        s = self._settings
        menu = Menu(
            place=self._name,
            sizes=s.sizes,
            regions=s.regions,
            zones=s.zones,
            spot=s.spot,
            disk=s.disk,
            disk_gb=s.disk_gb,
            public_ip=s.public_ip,
            prices=s.prices,
            max_vcpus=s.max_vcpus,
            settle_s=s.settle_s,
        )
        return offers_of(menu, needs)

    # -- create --------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Returns when it can be reached; one that is stopped is started."""
        async with self._turns.setdefault(machine, asyncio.Lock()), self._counted(machine, offer):
            until = time.time() + expires_s
            vm = await self._have(machine, offer, until)
            await self._take(machine, vm, until)

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
                raise _no(machine, "it is being deleted")
            if vm is not None and not self._keys.known(machine):
                why = f"{machine} was made by this home elsewhere: its host key is not here"
                raise ProviderError(why, transient=False, scope="machine")
            if vm is None or (vm.state == "failed" and vm.power != "running"):
                self._check_ceiling(view, machine)
                land = await self._ground.land(region)
                await self._builder.deploy(
                    self._build(machine, offer.size, region, zone, land.subnet, land.nsg, until)
                )
                return await self._builder.until_deployed(machine)
            if vm.power != "running":
                await self._switch(machine, vm, until)
            return await self._builder.until_running(machine)
        except ArmFault as fault:
            have_some = any(vm.region == region for vm in view.vms.values())
            raise refusal(fault, f"{offer.size} in {offer.region}", have_some=have_some) from fault

    def _build(
        self, machine: MachineId, size: str, region: str, zone: str, subnet: str, nsg: str, until: float
    ) -> Build:
        s, host = self._settings, self._keys.of_host(machine)
        now = time.time()
        return Build(
            root=self._ground.root,
            names=self._names(machine),
            region=region,
            zone=zone,
            size=size,
            spot=s.spot,
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
            shutdown_at=shutdown_at(now, until - now),
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
                raise ProviderError(f"{why}: {remedy}", transient=False, scope="machine")

    def _check_ceiling(self, view: View, machine: MachineId) -> None:
        used = sum(_cpus(vm.size) for each, vm in view.vms.items() if each not in self._coming)
        ceiling = self._settings.max_vcpus
        if ceiling and used + sum(self._coming.values()) > ceiling:
            raise ProviderError(
                f"{machine}: {used} of max_vcpus = {ceiling} are in use", transient=True, scope="place"
            )

    async def _take(self, machine: MachineId, vm: Vm, until: float) -> None:
        """Until its sshd answers and the supervisor there has taken it."""
        begun, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return await self._order("take", machine, await self._address(vm), until)
            except (HostDown, HostLost) as err:
                if time.monotonic() - begun > ANSWER_S:
                    raise _no(machine, f"{vm.name} is running but cannot be reached: {err}") from err
            except HostRefused as err:
                if time.monotonic() - begun > ADMIT_S:  # cloud-init may not have put the keys there yet
                    raise ProviderError(str(err), transient=False, scope="machine") from err
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
            vm = await self._still(machine)

    async def _still(self, machine: MachineId) -> Vm:
        """It may be gone while we wait for it."""
        view = await self._view()
        vm = view.vms.get(machine)
        if vm is None or view.phase(machine, time.time()) in ("gone", "evicted"):
            raise _no(machine, "it is gone again")
        return vm

    async def _address(self, vm: Vm) -> str:
        try:
            address = await self._looks.address(vm)
        except ArmFault as fault:
            raise refusal(fault, vm.name) from fault
        if not address:
            raise HostDown(f"{vm.name} has no address yet")
        return address

    # -- list, extend, stop, delete ------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        found = await self._machines()
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def _machines(self) -> dict[MachineId, Machine]:
        view = await self._view()
        try:
            await self._admit(view)
            return await self._looks.machines(view, time.time())
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault

    async def _view(self) -> View:
        try:
            return await self._looks.fresh()
        except ArmFault as fault:
            raise refusal(fault, "what exists cannot be seen") from fault

    async def _admit(self, view: View) -> None:
        """`ssh_from` may have changed since the machines were made: apply it once, where there are any."""
        regions = {vm.region for vm in view.vms.values()} - self._admitted
        self._admitted |= regions
        await asyncio.gather(*(self._ground.land(region) for region in regions))

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        until = time.time() + expires_s
        view = await self._view()
        vm = view.vms.get(machine)
        if vm is None or vm.state == "deleting":
            raise ProviderError(f"there is no machine {machine}", transient=False, scope="machine")
        try:
            await self._switch(machine, vm, until)
            await self._builder.mark(view.parts.get(machine, ()), until)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault
        try:
            await self._order("extend", machine, await self._address(vm), until)
        except (HostDown, HostLost) as err:
            raise _no(machine, str(err)) from err
        except HostRefused as err:
            raise ProviderError(str(err), transient=False, scope="machine") from err

    async def _switch(self, machine: MachineId, vm: Vm, until: float) -> None:
        now = time.time()
        tags = self._tags(machine, until)
        await self._builder.arm_switch(vm, self._names(machine), tags, shutdown_at(now, until - now))

    async def stop(self, machine: MachineId) -> None:
        """Deallocate it: its disk and its address stay, and are billed."""
        await self._drop_lot(machine)
        try:
            await self._builder.stop(machine)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        await self._drop_lot(machine)
        try:
            gone = await self._builder.remove(machine)
        except ArmFault as fault:
            raise refusal(fault, machine) from fault
        if gone:
            self._keys.drop(machine)

    # -- hosts ---------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        on_load = functools.partial(self._samples.keep, machine.id)
        return SshChannel(self._lot(machine.id, machine.address), machine.id, fence, self._secrets, on_load)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client, with the key and the host key that we made."""
        where = Target(machine.id, machine.address, self._settings.port)
        return openssh(where, self._access(machine.id, machine.address), command)

    def _lot(self, machine: MachineId, address: str) -> Lot:
        from evalfleet.channels.ssh.asking import Lot
        from evalfleet.channels.ssh.hosts import Host

        lot = self._lots.get(machine)
        if lot is None or lot.host.where.host != address:
            where = Target(f"{machine} ({address})", address, self._settings.port)
            host = Host(where, self._access(machine, address), self._handshakes)
            lot = self._lots[machine] = Lot(host, self._home)
        return lot

    def _access(self, machine: MachineId, address: str) -> Access:
        settings = self._settings
        others = _users_own() if settings.jump else ""
        return Access(
            user=settings.user,
            key=str(self._keys.own().path),
            known_hosts=str(self._keys.known_hosts(machine, address, settings.port, others)),
            jump=settings.jump or None,
            connect_timeout_s=CONNECT_S,
            agent=self._agent if settings.jump else None,
        )

    async def _order(
        self, verb: Literal["take", "extend"], machine: MachineId, address: str, until: float
    ) -> None:
        lot = self._lot(machine, address)
        answer = await lot.ask(verb, machine, most=1, expires_s=max(0.0, until - time.time()))
        if answer.error:
            raise _no(machine, answer.detail)

    async def _drop_lot(self, machine: MachineId) -> None:
        if (lot := self._lots.pop(machine, None)) is not None:
            await lot.host.close()

    async def close(self) -> None:
        await asyncio.gather(*(lot.host.close() for lot in self._lots.values()))
        await self._arm.close()

    # -- words ---------------------------------------------------------------------------------

    def _names(self, machine: MachineId) -> Names:
        return names_of(machine, self._settings.name)

    def _tags(self, machine: MachineId, until: float) -> dict[str, str]:
        return tags_of(machine, self._home, self._account.owner, until, self._settings.tags)


def _cpus(size: str) -> int:
    known = size_of(size)
    return known.cpus if known is not None else 0


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _users_own() -> str:
    """Who goes through a jump host knows it already."""
    try:
        return Path("~/.ssh/known_hosts").expanduser().read_text()
    except OSError:
        return ""


def _no(machine: MachineId, why: str) -> ProviderError:
    return ProviderError(f"{machine}: {why}", transient=True, scope="machine")
