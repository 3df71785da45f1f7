"""How VMs are reached: by SSH, with a key that is made here, and a host key that is known beforehand: it is
made here and given to the VM, or the VM makes it and the cloud's API tells it (`SshKeys.pin`).

A VM that runs can be used once SSH answers, the supervisor is there and cloud-init is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from evalfleet.channels.samples import Samples
from evalfleet.channels.ssh.target import Access, HostDown, HostLost, HostRefused, Target, openssh
from evalfleet.clock import pauses, wall_seconds
from evalfleet.errors import MachineMute, MachineUnavailable, PlaceError
from evalfleet.files import OURSELVES, create, replace
from evalfleet.model import Machine, MachineId
from evalfleet.names import safe_name
from evalfleet.ports import Channel, Dialled, Fence, PlaceContext

from .settings import PlaceSettings

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostAnswer, HostHome

HANDSHAKES = 16
CONNECT_S = 10.0


class SshLogin(Struct, frozen=True):
    """How the settings of a place say that its VMs are entered."""

    user: str
    """The user on the VM."""
    port: int
    """The port of the VM's sshd."""
    jump: str
    """Jump hosts to go through, as OpenSSH writes them; empty: none."""
    connect_timeout_s: float
    """The longest that one connection may take to come up; never more than CONNECT_S."""
    agent: str | None
    """The socket of the user's SSH agent, which is asked for jump hosts only."""

    @classmethod
    def of(cls, user: str, port: int, settings: PlaceSettings, environ: Mapping[str, str]) -> SshLogin:
        return cls(user, port, settings.jump, settings.answer_s, environ.get("SSH_AUTH_SOCK"))


class SshAccess:
    """The SSH connections to a place's machines, one a machine, and the orders that are given over them."""

    def __init__(
        self,
        login: SshLogin,
        keys: SshKeys,
        home: str,
        secrets: Mapping[str, str],
        samples: Samples,
        let_in: Callable[[MachineId], Awaitable[bool]] | None = None,
    ) -> None:
        """`let_in`: has the cloud let our key into a machine that refuses it. Is that under way?"""
        self.keys = keys
        self._login = login
        self._let_in = let_in
        self._home = home
        self._secrets, self._samples = secrets, samples
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._homes: dict[MachineId, HostHome] = {}

    @classmethod
    def of(
        cls,
        place: str,
        login: SshLogin,
        key: str,
        context: PlaceContext,
        folder: str,
        let_in: Callable[[MachineId], Awaitable[bool]] | None = None,
    ) -> SshAccess:
        """`folder`: in the home, with the keys of all places of this kind. `key`: the user's own, if any."""
        keys = SshKeys(context.home / folder / safe_name(place), key)
        return cls(login, keys, context.home_id, context.secrets, Samples(context.home), let_in)

    @property
    def in_use(self) -> Sequence[MachineId]:
        """The machines that this process has connected to, or tried to."""
        return tuple(self._homes)

    def host_home(self, machine: MachineId, address: str) -> HostHome:
        """What is ours on the machine's host; another connection, if its address has changed."""
        from evalfleet.channels.ssh.host_home import HostHome
        from evalfleet.channels.ssh.hosts import SshHost

        host_home = self._homes.get(machine)
        host_name, port = self._end(address)
        if host_home is None or (host_home.host.where.host, host_home.host.where.port) != (host_name, port):
            where = Target(f"{machine} ({address})", host_name, port)
            let_in = None if self._let_in is None else functools.partial(self._let_in, machine)
            host = SshHost(where, self._access(machine, address), self._handshakes, let_in)
            host_home = self._homes[machine] = HostHome(host, self._home)
        return host_home

    async def take(
        self, machine: MachineId, address: str, until: float, notices: Mapping[str, object] | None
    ) -> HostAnswer:
        """Bring the supervisor there. `notices`: where the cloud tells the VM that it will be taken back.

        Raises HostDown, HostLost, HostRefused, MachineUnavailable.
        """
        return await self._order("take", machine, address, until, anew=True, boot=True, watch=notices)

    async def extend(self, machine: MachineId, address: str, until: float) -> None:
        """Tell the supervisor the new expiry. Raises as `take` does."""
        await self._order("extend", machine, address, until)

    async def _order(
        self, verb: Literal["take", "extend"], machine: MachineId, address: str, until: float, **more: Any
    ) -> HostAnswer:
        host_home = self.host_home(machine, address)
        answer = await host_home.ask(
            verb, machine, most=1, expires_s=max(0.0, until - wall_seconds()), **more
        )
        if answer.error:
            raise MachineUnavailable(machine, answer.detail)
        return answer

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        if machine.host_key and not self.keys.has_host(machine.id):
            self.keys.pin(machine.id, machine.host_key)  # another computer made it, and has told which it is
        on_load = functools.partial(self._samples.keep, machine.id)
        host_home = self.host_home(machine.id, machine.address)
        return SshChannel(host_home, machine.id, fence, self._secrets, on_load, made=True)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self.host_home(machine.id, machine.address).host.dial(port)

    async def is_silent(self, address: str) -> bool:
        """Does nobody listen there yet? Nothing is said to who does. What is behind a jump host, or has no
        address, is not known to be silent."""
        if self._login.jump or not address:
            return False
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(*self._end(address))
        except (OSError, TimeoutError):
            return True
        writer.close()
        with contextlib.suppress(OSError):  # it listened, and that was asked
            await writer.wait_closed()
        return False

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client, with the key and the host key that we made."""
        where = Target(machine.id, *self._end(machine.address))
        return openssh(where, self._access(machine.id, machine.address), command)

    def _end(self, address: str) -> tuple[str, int]:
        """The host and the port of an address, which may name a port of its own: HOST:PORT."""
        host, _, port = address.rpartition(":")
        return (host, int(port)) if host and ":" not in host else (address, self._login.port)

    def _access(self, machine: MachineId, address: str) -> Access:
        login = self._login
        host, port = self._end(address)
        others = _users_known_hosts() if login.jump else ""
        return Access(
            user=login.user,
            key=str(self.keys.login().path),
            known_hosts=str(self.keys.known_hosts(machine, host, port, others)),
            jump=login.jump or None,
            connect_timeout_s=min(CONNECT_S, login.connect_timeout_s),
            agent=login.agent if login.jump else None,
        )

    async def drop(self, machine: MachineId) -> None:
        if (host_home := self._homes.pop(machine, None)) is not None:
            await host_home.host.close()

    async def close(self) -> None:
        await asyncio.gather(*(host_home.host.close() for host_home in self._homes.values()))


def _users_known_hosts() -> str:
    """The user's own known_hosts: whoever goes through a jump host has it there already."""
    try:
        return Path("~/.ssh/known_hosts").expanduser().read_text()
    except OSError:
        return ""


# -- keys --------------------------------------------------------------------------------------------


class KeyPair(Struct, frozen=True):
    """A private key, its public key, and the file of the private one, which only we can read."""

    private: str
    public: str
    path: Path


class SshKeys:
    """The SSH keys of one place, as files under the home.

    A VM gets its host key from us when it is made, or its cloud tells us which one it has made, so that it is
    known from the first connection on. Whoever makes or pins a key first has done so for all controllers of
    the home.
    """

    def __init__(self, folder: Path, login_key: str) -> None:
        self._folder = folder
        self._login_key = Path(login_key) if login_key else folder / "id_ed25519"
        self._login_pair: KeyPair | None = None
        self._public: dict[MachineId, str] = {}
        """Host keys that were read: every listing asks for them."""

    def login(self) -> KeyPair:
        """The key by which machines let us in: the user's own, or one that is made here."""
        if self._login_pair is None:  # every machine needs it, and to read it takes some milliseconds
            self._login_pair = _read_or_make(self._login_key)
        return self._login_pair

    def of_host(self, machine: MachineId) -> KeyPair:
        """The machine's host key; made if there is none yet."""
        return _read_or_make(self._host_path(machine))

    def has_host(self, machine: MachineId) -> bool:
        """Is the machine's host key known in this home?"""
        return self._host_path(machine).is_file() or self._pin_path(machine).is_file()

    def made_host(self, machine: MachineId) -> bool:
        """Has this home made the machine's host key, and with it the machine?"""
        return self._host_path(machine).is_file()

    def hosts(self) -> set[MachineId]:
        """The machines of this home whose host keys are pinned, and that were not deleted yet."""
        return {MachineId(path.stem) for path in (self._folder / "hosts").glob("*.pub")}

    def pin(self, machine: MachineId, public: str) -> str:
        """Take this for the machine's host key, unless one is known. Returns the one that counts."""
        _write(self._pin_path(machine), public.strip() + "\n", only_new=True)
        return self._pin_path(machine).read_text().strip()

    def host_public(self, machine: MachineId) -> str:
        """The machine's host key, as far as others may know it; empty if it is not known in this home."""
        if machine not in self._public and self.has_host(machine):
            pinned = self._pin_path(machine)
            known = pinned.read_text().strip() if pinned.is_file() else self.of_host(machine).public
            self._public[machine] = known
        return self._public.get(machine, "")

    def known_hosts(self, machine: MachineId, address: str, port: int, others: str = "") -> Path:
        """A file with the machine's host key at this address, and with `others`, the lines of other hosts."""
        where = address if port == 22 else f"[{address}]:{port}"
        text = f"{where} {self.host_public(machine) or self.of_host(machine).public}\n{others}"
        path = self._host_path(machine).with_suffix(".known_hosts")
        if not path.is_file() or path.read_text() != text:
            _write(path, text)
        return path

    def drop(self, machine: MachineId) -> None:
        self._public.pop(machine, None)
        key = self._host_path(machine)
        for path in (key, self._pin_path(machine), key.with_suffix(".known_hosts")):
            path.unlink(missing_ok=True)

    def _host_path(self, machine: MachineId) -> Path:
        return self._folder / "hosts" / f"{safe_name(machine)}.key"

    def _pin_path(self, machine: MachineId) -> Path:
        return self._host_path(machine).with_suffix(".pub")


def _read_or_make(path: Path) -> KeyPair:
    import asyncssh

    if not path.is_file():
        fresh = asyncssh.generate_private_key("ssh-ed25519")  # pyright: ignore[reportUnknownMemberType]
        _write(path, fresh.export_private_key().decode(), only_new=True)
    private = path.read_text()
    public = asyncssh.import_private_key(private).export_public_key().decode().strip()
    return KeyPair(private, public, path)


def _write(path: Path, text: str, *, only_new: bool = False) -> None:
    """Write the file for our eyes only. `only_new`: one that is there stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    (create if only_new else replace)(path, text.encode(), mode=OURSELVES)


KEYS_S = 90.0
"""For so long after it runs, a VM may refuse our key: cloud-init may not have put it there yet."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.3, 5.0
KNOCK_S, KNOCK_EVERY_S, SILENT_S = 1.0, 0.5, 10.0
"""A port can be asked more often than a cloud, whose calls are counted: so it is soon known that a system is
up. All the same the cloud is asked now and then what became of the VM."""


class RunningVm(Struct, frozen=True):
    """A VM that runs, as far as one must know it to come in."""

    name: str
    """Its name in the cloud."""
    address: str
    """Where it is reached; empty while it has no address."""
    missing: str = "has no address yet"
    """What an empty `address` means: what it still lacks."""
    notices: Mapping[str, object] | None = None
    """Where the cloud tells the VM that it will be taken back; None if it never will."""
    listens_at: str = ""
    """Where it will be reached, also while it lacks something."""


class Readiness:
    """The wait until VMs can be used, which remembers how long each took for what."""

    def __init__(self, access: SshAccess) -> None:
        self._access = access
        self._timings: dict[MachineId, dict[str, float]] = {}

    def timings(self, machine: MachineId) -> Mapping[str, float]:
        """Seconds by step, of a machine that became ready here; empty for others."""
        return self._timings.get(machine, {})

    def forget(self, machine: MachineId) -> None:
        self._timings.pop(machine, None)

    async def wait(
        self,
        machine: MachineId,
        looks: AsyncIterator[RunningVm],
        console: Callable[[], Awaitable[str]],
        until: float,
        patience_s: float,
    ) -> None:
        """Return when the machine, which ends by itself at `until`, can be used.

        `looks` shows its VM anew each time, without end, and raises PlaceError if it is gone. `console` reads
        the end of its serial console. Raises PlaceError; MachineMute when `patience_s` are over.
        """
        begun, rests = time.monotonic(), pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        timings: dict[str, float] = {}
        async for vm in looks:
            try:
                answer = await self._access.take(machine, address_of(vm), until, vm.notices)
            except (HostDown, HostLost) as err:
                trouble, step = f"{vm.name} is running but cannot be reached: {err}", "ssh"
            except HostRefused as err:
                if time.monotonic() - begun > KEYS_S:
                    raise PlaceError(str(err), transient=False, scope="machine") from err
                trouble, step = str(err), "ssh"
            else:
                _note(timings, begun, answer.cloud_init_s)
                if answer.cloud_init != "running":
                    self._timings[machine] = timings
                    return
                trouble, step = f"{vm.name} answers, but its cloud-init does not finish", "cloud-init"
            if time.monotonic() - begun > patience_s:
                raise MachineMute(f"{trouble}; its console ends with {await console()!r}", step)
            await self._rest(vm.listens_at or vm.address, rests)
        raise AssertionError("looks never end")

    async def _rest(self, address: str, rests: Iterator[float]) -> None:
        """Wait until it is worth while to try again."""
        if not await self._access.is_silent(address):
            await asyncio.sleep(next(rests))
            return
        until = time.monotonic() + SILENT_S
        while time.monotonic() < until:
            await asyncio.sleep(KNOCK_EVERY_S)
            if not await self._access.is_silent(address):
                return


def address_of(vm: RunningVm) -> str:
    """Raises HostDown while it has none."""
    if not vm.address:
        raise HostDown(f"{vm.name} {vm.missing}")
    return vm.address


def _note(timings: dict[str, float], begun: float, cloud_init_s: float) -> None:
    waited = round(time.monotonic() - begun, 3)
    ssh = timings.setdefault("ssh", waited)
    if cloud_init_s:
        timings["boot.cloud_init"] = cloud_init_s
    if waited > ssh:
        timings["cloud_init_wait"] = round(waited - ssh, 3)
