"""Virtual machines as hosts of the lab: real addresses, a real sshd, disks that survive a deallocation."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from lab import Lab, LabError, NamespaceHost, network, system

from .cloudinit import Seeder
from .machines import Guest, MachineTrouble

P = ParamSpec("P")
T = TypeVar("T")
METADATA = "169.254.169.254"
OWN_PORTS = "echo 10240 32767 >/proc/sys/net/ipv4/ip_local_port_range || true"
"""What connects from within the lab gets ports from here: stand-ins listen there at those that the computer's
own network gave them, from 32768 on. Where this cannot be set, two meet once in many thousand times."""
TOGETHER = 8  # hosts that are made at once
HERE = Path(__file__).parent
OF_SSHD = re.compile("kex_exchange_identification|banner exchange|Connection (closed|reset|from) ")
OWN = ("etc/hostname", "etc/hosts", "etc/machine-id")


def cable_of(address: str) -> network.Cable:
    *_, high, low = map(int, address.split("."))
    return network.cable((high - 1) * 250 + low - 1)


class GuestHost(NamespaceHost):
    """Its address is given, and its disk is seeded before it first boots."""

    guest: Guest
    image: Path | None = None
    """The disk that its own is a copy of."""

    def _copy(self, image: Path, disk: Path) -> None:
        """What is the machine's own, and set by the platform, stays."""
        own = {name: (disk / name).read_bytes() for name in OWN}
        system.run(["cp", "-a", f"{image}/.", str(disk)])
        for name, data in own.items():
            (disk / name).write_bytes(data)

    def keep(self, image: Path) -> None:
        """While it is off."""
        image.parent.mkdir(exist_ok=True)
        system.run(["cp", "-a", str(self._directory / "disk/upper"), str(image)])

    def make(self) -> None:
        super().make()
        disk = self._directory / "disk/upper"
        if self.image is not None:
            self._copy(self.image, disk)
        Seeder(disk, self._site.base.path).seed(self.guest)
        programs = disk / self._site.base.rootfs_path(Path("sbin"))
        programs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / "guest-init.sh", programs / "lab-init")
        tools = disk / self._site.base.rootfs_path(Path("usr/bin"))
        tools.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / "guest-cloud-init.sh", tools / "cloud-init")
        (tools / "cloud-init").chmod(0o755)
        self.rewire(self.guest.address)

    def rewire(self, address: str) -> None:
        """Before it boots: another address."""
        self.cable = cable_of(address)
        self.address = address
        metadata = (
            f"route replace {METADATA}/32 dev eth0\n"
            f"neigh replace {METADATA} lladdr {network.GATEWAY_MAC} dev eth0 nud permanent\n"
        )
        (self._directory / "net").write_text(network.host_side(self.cable) + metadata)

    def protect(self, rules: str) -> None:
        pid = self._need_power()
        # either may be what this kernel supports
        tools = [tool for tool in ("iptables-restore", "iptables-legacy-restore") if system.find(tool)]
        complaint = LabError("security groups need iptables")
        for tool in tools:
            try:
                system.run(["nsenter", f"--net=/proc/{pid}/ns/net", "--", tool], rules)
            except LabError as err:
                complaint = err
            else:
                return
        raise complaint

    def authorize(self, user: str, keys: Sequence[str]) -> None:
        home = Path(f"/proc/{self._need_power()}/root/home") / user
        (home / ".ssh/authorized_keys").write_text("".join(f"{key}\n" for key in keys))

    def wipe_temp_disk(self) -> None:
        """While it is off: another machine's local disk is empty."""
        for each in (self._directory / "disk/upper/mnt").glob("*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


class GuestLab(Lab):
    """Its hosts are the guests that were planned, in that order."""

    def plan(self, guests: list[Guest], images: Mapping[str, Path]) -> None:
        self.images = images
        self._planned = deque(guests)

    def _define(self, index: int) -> NamespaceHost:
        assert self._layout is not None
        guest = self._planned.popleft()
        directory = self.directory / "hosts" / f"host-{index}"
        host = GuestHost(self._site, directory, index, self._layout.host(directory.name, self._limits))
        host.guest = guest
        host.image = self.images.get(guest.image)
        host.name = guest.name
        return host


class Hosts:
    """Machines of the stand-in. Needs root; `GuestLab.missing()` says what is missing."""

    is_flat = True

    def __init__(self, disk_bytes: int = 1 << 30, expose: Iterable[Path] = ()) -> None:
        self.lab = GuestLab.create(0, disk_bytes=disk_bytes, expose=expose)
        self.images: dict[str, Path] = {}
        self._kept = 0
        system.run([*self.lab.prefix, "ip", "addr", "add", f"{METADATA}/32", "dev", "br0"])
        system.run([*self.lab.prefix, "sh", "-c", OWN_PORTS])
        self._hand = ThreadPoolExecutor(1)  # a lab is used by one thread at a time
        self._hosts: dict[str, GuestHost] = {}
        self._coming: dict[str, asyncio.Future[None]] = {}
        self._waiting: list[tuple[Guest, asyncio.Future[None]]] = []
        self._building: asyncio.Task[None] | None = None
        self._unreachable: set[str] = set()
        self._last = 0

    def new_address(self, taken: Set[str]) -> str:
        """Those given back are used last."""
        used = {*taken, *(host.address for host in self._hosts.values())}
        for _ in range(network.MOST_HOSTS):
            address = network.cable(self._last).address
            self._last = (self._last + 1) % network.MOST_HOSTS
            if address not in used:
                return address
        raise MachineTrouble("there are no addresses left")

    def host(self, id: str) -> GuestHost:
        return self._hosts[id.lower()]

    def holder(self, address: str) -> str:
        """The id of the machine that has an address; empty if none does."""
        return next((id for id, host in self._hosts.items() if host.address == address), "")

    # -- machines ------------------------------------------------------------------------------

    async def create(self, guest: Guest) -> None:
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((guest, made))
        self._coming[guest.id.lower()] = made
        if self._building is None:
            self._building = asyncio.create_task(self._build())
        await asyncio.shield(made)

    async def _arrived(self, id: str) -> GuestHost | None:
        """A machine's host, also if it is only just being made."""
        coming = self._coming.get(id.lower())
        if coming is not None:
            await asyncio.wait([coming])
        return self._hosts.get(id.lower())

    async def _build(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
            try:
                hosts = await self._do(self._make, [guest for guest, _ in some])
            except MachineTrouble as err:
                for guest, made in some:
                    del self._coming[guest.id.lower()]
                    made.set_exception(MachineTrouble(str(err)))
                    made.exception()  # seen, also if nobody waits any more
                continue
            for (guest, made), host in zip(some, hosts, strict=True):
                self._hosts[guest.id.lower()] = host
                del self._coming[guest.id.lower()]
                made.set_result(None)
        self._building = None

    def _make(self, guests: list[Guest]) -> list[GuestHost]:
        self.lab.plan(guests, self.images)
        return [host for host in self.lab.add(len(guests)) if isinstance(host, GuestHost)]

    async def power_off(self, id: str) -> None:
        host = await self._arrived(id)
        if host is not None:
            await self._do(host.power_off)

    async def power_on(self, id: str, address: str, *, fresh_temp_disk: bool) -> None:
        host = self._hosts.get(id.lower())
        if host is None:
            raise MachineTrouble(f"{id} has no host")
        await self._do(self._boot, host, address, fresh_temp_disk and host.guest.has_temp_disk)
        if id.lower() in self._unreachable:
            await self._do(host.partition)

    def _boot(self, host: GuestHost, address: str, wipe: bool) -> None:
        if wipe:
            host.wipe_temp_disk()
        if host.address != address:
            host.rewire(address)
        host.power_on()

    async def protect(self, id: str, rules: str) -> None:
        host = self._hosts.get(id.lower())
        if host is not None and host.is_on:
            await self._do(host.protect, rules)

    async def authorize(self, id: str, user: str, keys: Sequence[str]) -> None:
        host = self._hosts.get(id.lower())
        if host is not None and host.is_on and user:
            await self._do(host.authorize, user, keys)

    async def execute(self, id: str, script: str) -> tuple[int, str, str]:
        host = self._hosts.get(id.lower())
        if host is None or not host.is_on:
            return 1, "", "it is off"
        done = await self._do(host.run, ["/bin/sh", "-c", script], check=False)
        return done.returncode, done.stdout, done.stderr

    async def destroy(self, id: str) -> None:
        await self._arrived(id)
        self._unreachable.discard(id.lower())
        host = self._hosts.pop(id.lower(), None)  # before it is gone: who asks again has nothing to do
        if host is not None:
            await self._do(self.lab.remove, host)

    async def capture(self, id: str, image: str) -> None:
        host = await self._arrived(id)
        if host is not None:
            self._kept += 1
            kept = self.lab.directory / "images" / str(self._kept)
            await self._do(host.keep, kept)
            self.images[image] = kept

    def forget_image(self, image: str) -> None:
        if (kept := self.images.pop(image, None)) is not None:
            shutil.rmtree(kept)

    async def make_unreachable(self, id: str, *, also_after_restart: bool) -> None:
        """It runs, but nothing reaches it, until it is restarted, or (`also_after_restart`) redeployed."""
        if also_after_restart:
            self._unreachable.add(id.lower())
        await self._do(self.host(id).partition)

    def mend(self, id: str) -> None:
        self._unreachable.discard(id.lower())

    def log(self, id: str) -> str:
        """Without what its SSH server tells of each connection, which real machines write elsewhere."""
        host = self._hosts.get(id.lower())
        lines = host.console().splitlines(keepends=True) if host is not None else ()
        return "".join(line for line in lines if not OF_SSHD.match(line))

    async def close(self) -> None:
        if self._building is not None:
            await self._building
        await self._do(self.lab.destroy)
        self._hand.shutdown()

    async def _do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = functools.partial(call, *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._hand, work)
        except (LabError, OSError) as err:
            raise MachineTrouble(str(err)) from err
