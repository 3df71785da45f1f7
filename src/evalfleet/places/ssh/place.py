"""The place `ssh`: hosts that we are lent, reached by SSH."""

from __future__ import annotations

import asyncio
import functools
import getpass
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from evalfleet.channels.samples import Load, Samples
from evalfleet.channels.ssh.target import (
    AS_POOL,
    Access,
    HostDown,
    HostKeyUnknown,
    HostLost,
    HostRefused,
    openssh,
    target,
)
from evalfleet.clock import wall_seconds
from evalfleet.errors import ChannelError, MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Cost, Machine, MachineId, Needs, Offer
from evalfleet.ports import Belonging, Channel, Check, Dialled, Fence, HostKey, PlaceContext
from evalfleet.version import install_command

from .examination import LONGEST_ASIDE_S, SWITCH_ON, examine_host, host_key, write_down
from .fleet import NO_ANSWER, HostFleet, by_hand, owed, plain, trusting
from .records import Records

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostAnswer, HostHome


class SshSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of hosts. What is not given comes from ~/.ssh/config and OpenSSH's defaults."""

    hosts: Annotated[tuple[str, ...], Meta(description="[user@]host[:port], each one machine")]
    user: str | None = None
    key: Annotated[str | None, Meta(description="a private key; else the agent's and ~/.ssh's")] = None
    known_hosts: Annotated[str | None, Meta(description="else the user's own; verified always")] = None
    port: int | None = None
    jump: Annotated[str | None, Meta(description="[user@]host[:port][,...] to go through")] = None
    python: Annotated[str, Meta(description="Python 3.8 or later on the hosts")] = "python3"
    connect_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    isolation: Annotated[
        Literal["user", "container", "none"] | None,
        Meta(
            description="user: each attempt is a user of its own, by sudo if need be; else so if we are root"
        ),
    ] = None
    max_per_host: Annotated[int, Meta(ge=1, description="machines a host")] = 1
    gone_after_s: Annotated[
        float, Meta(ge=0, description="a deleted machine counts as gone when its host was silent for so long")
    ] = 15.0
    set_aside_s: Annotated[
        float,
        Meta(
            ge=0, le=LONGEST_ASIDE_S, description="a host that does badly is left alone for so long, at first"
        ),
    ] = 30.0
    usd_per_hour: Annotated[float, Meta(ge=0, le=10_000)] = 0.0


def access_of(name: str, settings: SshSettings, context: PlaceContext) -> Access:
    """How the hosts are reached. Raises RequestError."""
    if not settings.hosts:
        raise RequestError(f"place {name!r} has no hosts; list some in `hosts`")
    if len(set(settings.hosts)) < len(settings.hosts):
        raise RequestError(f"place {name!r} lists a host twice; `max_per_host` gives it more machines")

    def path(setting: str, given: str | None, needed: bool = True) -> str | None:
        file = str(context.base / Path(given).expanduser()) if given else None
        if file is not None and not os.path.isfile(file) and (needed or os.path.exists(file)):
            raise RequestError(f"place {name!r}: {setting} = {file!r} is no file; correct it")
        return file

    return Access(
        user=settings.user,
        key=path("key", settings.key),
        # one that is not there yet knows nobody: `doctor --trust` makes it
        known_hosts=path("known_hosts", settings.known_hosts, needed=False),
        port=settings.port,
        jump=settings.jump,
        python=settings.python,
        connect_timeout_s=settings.connect_timeout_s,
        agent=context.environ.get("SSH_AUTH_SOCK"),
    )


WHOSE_CAP = 700
HANDSHAKES = 32
CREATES = 32

log = logging.getLogger(__name__)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return str(os.getuid())


class SshPlace:
    """Hosts reached by SSH, a machine each: locked while we use them, and given back clean."""

    Settings = SshSettings
    extra = "ssh"
    machine_list = ("hosts", "max_per_host")

    def __init__(self, name: str, settings: SshSettings, fleet: HostFleet, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._fleet = fleet
        self._records = fleet.records
        self._context = context
        self._secrets = context.secrets
        self._owner = f"{_user()}@{socket.gethostname()}:{context.home.absolute()}"
        self._owner += AS_POOL if context.for_pool else ""
        self._samples = Samples(context.home)
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._creates = asyncio.Semaphore(CREATES)
        self._scan: asyncio.Task[None] | None = None

    @classmethod
    def make(cls, name: str, settings: SshSettings, context: PlaceContext) -> SshPlace:
        try:
            from evalfleet.channels.ssh.host_home import HostHome
            from evalfleet.channels.ssh.hosts import SshHost
        except ModuleNotFoundError as err:
            if err.name != "asyncssh":
                raise
            raise RequestError(f"place {name!r} needs asyncssh: {install_command('ssh')}") from err
        access = access_of(name, settings, context)
        handshakes = asyncio.Semaphore(HANDSHAKES)
        hosts = [SshHost(target(host), access, handshakes) for host in settings.hosts]
        homes: Mapping[str, HostHome] = {host.name: HostHome(host, context.home_id) for host in hosts}
        records = Records(context.home, name, wall_seconds)
        fleet = HostFleet(
            *(name, homes, records, settings.gone_after_s, settings.set_aside_s),
            most=settings.max_per_host,
        )
        return cls(name, settings, fleet, context)

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """One offer for all hosts. Which of them have what is needed is asked when they are reached.

        What the benchmark needs comes first; then what some of its tasks need, which some hosts may have.
        """
        settings = self._settings
        self._fleet.needs = self._fleet.needs or needs
        size = "host" if needs == self._fleet.needs else f"host with {needs.in_words()}"
        capacity = len(settings.hosts) * settings.max_per_host
        return (
            Offer(
                self._name,
                size,
                capacity=capacity,
                lent=True,
                has=needs,
                cost=Cost(usd_per_hour=settings.usd_per_hour),
            ),
        )

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """Every host, in parallel: can it be reached, what has it, who holds it."""
        what, most = trusting(self._name), self._settings.max_per_host
        homes = self._fleet.homes.values()
        checks = await asyncio.gather(*(examine_host(each, needs, most, what) for each in homes))
        if len(checks) > 1 and all(check.remedy == SWITCH_ON for check in checks):
            remedy = "look at this computer's own network first (VPN, firewall, `jump`)"
            return (*checks, Check("hosts", "bad", f"none of {len(checks)} hosts answers", remedy))
        usable = sum(check.verdict == "good" for check in checks) * most
        if usable >= workers:
            return checks
        hosts = f"{usable} of {len(checks) * most} machines can be had now, {workers} asked for"
        bad = any(check.verdict == "bad" for check in checks)
        return (*checks, Check("hosts", "bad" if bad else "warn", hosts))

    async def unknown_keys(self) -> Sequence[HostKey]:
        async def key_of(host_home: HostHome) -> HostKey | None:
            try:
                await host_home.host.connect()
            except HostKeyUnknown as err:
                return host_key(err, host_home.host.name)
            except NO_ANSWER:
                pass
            return None

        keys = await asyncio.gather(*map(key_of, self._fleet.homes.values()))
        return list({key.line: key for key in keys if key is not None}.values())

    def trust(self, keys: Sequence[HostKey]) -> None:
        write_down(keys)

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        async with self._turns.setdefault(machine, asyncio.Lock()):
            if self._records.get(machine) is None:
                await self._look_once()
            self._fleet.creating.add(machine)
            try:
                async with self._creates:  # the first shall work soon, rather than all at the same time
                    await self._take(machine, offer, expires_s)
                self._fleet.made(machine)
            finally:
                self._fleet.creating.discard(machine)

    async def _take(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        held = self._records.latest(machine)
        if held is None:
            await self._find_host(machine, offer, expires_s)
        elif held.deleting:
            raise MachineUnavailable(machine, "it is being deleted")
        else:
            await self._order("take", machine, held.host, expires_s)

    async def _look_once(self) -> None:
        """Look at all hosts, in parallel: an earlier controller may have made the machine."""
        if self._scan is None:
            self._scan = asyncio.create_task(self._fleet.look_everywhere())
        await asyncio.shield(self._scan)

    async def _find_host(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        needs = offer.has
        tried: set[str] = set(self._fleet.short[needs])
        while (host := self._fleet.next_host(tried, offer.without)) is not None:
            tried.add(host)
            # before it is asked: it may do it although the answer is lost, and others must not ask it too
            self._records.keep(machine, host, expires_s)
            try:
                await self._fleet.contact(host, self._fleet.check_needs(host))
                if not await self._fleet.contact(host, self._fleet.has(host, needs)):
                    self._records.drop(machine)
                    continue
            except (HostDown, HostLost, HostRefused):
                self._records.drop(machine)
                continue
            except asyncio.CancelledError:
                self._records.drop(machine)  # nothing was asked of it: nobody need wait for it to answer
                raise
            try:
                await self._fleet.pay_debts(host)
                answer = await self._ask("take", machine, host, expires_s)
            except (HostDown, HostRefused):
                self._records.drop(machine)
                continue
            except HostLost as err:
                raise MachineUnavailable(machine, str(err)) from err
            if not answer.error:
                return
            if answer.error not in ("taken", "deleting"):  # it was locked before that: give it back
                await self._fleet.give_up(machine, f"{host}: {answer.detail}")
                raise MachineUnavailable(machine, f"{host}: {answer.detail}")
            self._records.drop(machine)
            self._fleet.standings[host].problem = f"{host} is held by {plain(answer.detail, WHOSE_CAP)}"
        raise self._fleet.nowhere(needs)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        held = await self._fleet.whereabouts(machine)
        if held is None or held.deleting:
            raise NoSuchMachine(machine)
        await self._order("extend", machine, held.host, expires_s)

    async def list(self, pool: str) -> Sequence[Machine]:
        """What hosts show; of one that does not answer, what we hold there.

        That is until its expiry, by which the host ends it by itself; or, once it was deleted, until its
        host has been silent for `gone_after_s`. What is left there is removed when it answers again.
        """
        found = await self._fleet.machines()
        return tuple(found[machine] for machine in sorted(found) if machine.startswith(f"{pool}-"))

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        held = await self._fleet.whereabouts(machine)
        if held is None or held.left:
            return
        if not held.deleting:
            self._consider(held.host)
        elif (why := self._fleet.no_use(held)) is not None:
            raise MachineUnavailable(machine, why)  # to connect in vain takes long, and all wait for it
        try:
            await self._fleet.remove(held)
        except NO_ANSWER as err:
            if not held.deleting:
                later = "it is asked again for %g s; later, `evalfleet machines` removes what is left there"
                log.warning(f"%s: {later}", err, self._settings.gone_after_s)
            raise MachineUnavailable(machine, str(err)) from err

    async def stop(self, machine: MachineId) -> None:
        """End what runs there. The host is not ours to switch off, and stays locked."""
        held = await self._fleet.whereabouts(machine)
        if held is None:
            raise NoSuchMachine(machine)
        known = self._fleet.silent_s(held.host) > 0
        try:
            answer = await self._fleet.contact(held.host, self._fleet.homes[held.host].ask("halt", machine))
        except NO_ANSWER as err:
            if known and self._fleet.silent_s(held.host) >= self._settings.gone_after_s:
                return  # whatever runs there ends at the lease's end
            if not known:
                told = "%s: it is asked again, and counts as stopped after %g s of silence"
                log.warning(told, err, self._settings.gone_after_s)
            raise MachineUnavailable(machine, str(err)) from err
        if answer.error:
            raise MachineUnavailable(machine, f"{held.host}: {answer.detail}")

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """OpenSSH's client, with the same key and the same known hosts."""
        host = target(machine.address)
        access = access_of(self._name, self._settings, self._context)
        return openssh(host, access, command)

    def remains(self) -> Sequence[Belonging]:
        """What was not removed from hosts, by this home's records, and how to finish that."""
        return [
            Belonging(
                *(held.machine, self._context.home_id, "", held.host, None),
                tuple(filter(None, (held.left,))),
                kept_by=by_hand(held) if held.left else owed(held),
            )
            for held in self._records.owed()
        ]

    async def dial(self, machine: Machine, port: int) -> Dialled:
        host_home = self._fleet.homes.get(machine.address)
        if host_home is None:
            raise ChannelError(f"{machine.address} is not among the hosts of {self._name} any more")
        return await host_home.host.dial(port)

    def _consider(self, host: str) -> None:
        """A machine on it is deleted: should it have another soon?"""
        standing, now = self._fleet.standings[host], time.monotonic()
        if standing.given_up(now):
            why = "attempts broke there, or it fell silent"
            log.warning("%s is set aside for %.0f s: %s", host, standing.aside_until - now, why)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        from evalfleet.channels.ssh.channel import SshChannel

        held = self._records.get(machine.id)
        host = machine.address or (held.host if held is not None else "")
        if host not in self._fleet.homes:
            raise PlaceError(
                f"{machine.id} is on {host!r}, which {self._name} no longer lists; add it again",
                transient=False,
                scope="machine",
            )
        on_load = functools.partial(self._on_beat, machine.id)
        verdict = self._fleet.standings[host].did
        return SshChannel(self._fleet.homes[host], machine.id, fence, self._secrets, on_load, verdict)

    def _on_beat(self, machine: MachineId, load: Load, written: Mapping[str, int]) -> None:
        self._fleet.heard(machine)
        self._samples.keep(machine, load, written)

    async def close(self) -> None:
        if self._scan is not None:
            self._scan.cancel()
        await self._fleet.close()

    # -- orders --------------------------------------------------------------------------------

    async def _order(
        self, verb: Literal["take", "extend"], machine: MachineId, host: str, expires_s: float
    ) -> None:
        """Give an order to a machine that we have."""
        self._records.keep(machine, host, expires_s)
        try:
            answer = await self._ask(verb, machine, host, expires_s)
        except (HostDown, HostLost) as err:
            raise MachineUnavailable(machine, str(err)) from err
        except HostRefused as err:
            raise PlaceError(str(err), transient=False, scope="machine") from err
        if answer.error == "taken":
            why = f"{machine} had expired, and {host} is taken by {answer.detail}"
            raise PlaceError(why, transient=False, scope="machine")
        if answer.error == "unknown":
            self._records.drop(machine)
            raise NoSuchMachine(machine)
        if answer.error:
            raise MachineUnavailable(machine, answer.detail)

    async def _ask(
        self, verb: Literal["take", "extend"], machine: MachineId, host: str, expires_s: float
    ) -> HostAnswer:
        most = self._settings.max_per_host
        call = self._fleet.homes[host].ask(
            verb, machine, expires_s=expires_s, most=most, lent=True, owner=self._owner
        )
        answer = await self._fleet.contact(host, call)
        if verb == "take" and not answer.error:
            self._records.found(machine, answer.kept)
        return answer
