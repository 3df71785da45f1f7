"""The part of a place of VMs that does not depend on the cloud."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import Generic, Protocol, TypeVar

from evalfleet.channels.samples import Samples
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Offer
from evalfleet.ports import Channel, Dialled, Fence, PlaceContext
from evalfleet.single_flight import SingleFlight
from evalfleet.version import install_command

from .answers import CloudFault, as_refusal
from .settings import MachineUse, VmAccount, VmSettings
from .ssh_access import Readiness, RunningVm, SshAccess, SshLogin

log = logging.getLogger(__name__)

UNSEEN = "what exists cannot be seen"
MENDED_S = 300.0
"""A machine that was restarted answers sooner than a new one."""


class CloudClient(Protocol):
    """What calls a cloud's API, as far as all clouds are alike."""

    @property
    def skew_s(self) -> float:
        """How far the cloud's clock is ahead of this computer's."""
        ...

    def now(self) -> float:
        """The time by the cloud's clock."""
        ...

    async def close(self) -> None: ...


class VmSnapshot(Protocol):
    """What is there of this home, at one moment."""

    @property
    def vms(self) -> Mapping[MachineId, object]: ...


V = TypeVar("V")
S = TypeVar("S")
SnapshotT = TypeVar("SnapshotT", bound=VmSnapshot)


class VmControl(Protocol[V]):
    """What brings VMs up and down in one cloud. Raises CloudFault, and PlaceError."""

    def boot(self, machine: MachineId, vm: V, /) -> AsyncGenerator[RunningVm]:
        """A VM that runs, looked at anew each time, without end."""
        ...

    async def console(self, vm: V, /) -> str:
        """The end of what it said while it booted."""
        ...

    async def again(self, machine: MachineId, step: str, /) -> V:
        """Mend it by this step. Returns when it runs."""
        ...

    async def authorize(self, machine: MachineId, user: str, public_key: str) -> bool:
        """Have this key let the user in, beside those that do. Is that done, or soon will be?"""
        ...

    async def stop(self, machine: MachineId) -> None: ...

    async def remove(self, machine: MachineId) -> bool:
        """Delete what there is of it, for a while. Is nothing left?"""
        ...


class VmPlace(Generic[V, SnapshotT]):
    """A place of VMs as far as all clouds are alike: its machines have keys of ours, and SSH leads there."""

    default_canary = 1
    changeable = ("ssh_from",)

    def __init__(
        self, name: str, settings: VmSettings, account: VmAccount, context: PlaceContext, folder: str
    ) -> None:
        """`folder`: in the home, with the keys of all places of this kind."""
        self._name = name
        self._user = settings.user
        self._use: MachineUse = "pool" if context.for_pool else "run"
        self._home = context.home_id
        self._folder = context.home
        self._answer_s = settings.answer_s
        self._owner = account.owner
        self._samples = Samples(context.home)
        login = SshLogin.of(settings.user, settings.port, settings, context.environ)
        self._access = SshAccess.of(name, login, account.key, context, folder, self._let_us_in)
        self._keys = self._access.keys
        self._readiness = Readiness(self._access)
        self._ceiling = VcpuCeiling(settings.max_vcpus)
        self._trials = OfferTrials()
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._shut: set[MachineId] = set()
        """Machines of another computer's that the cloud does not let us into."""

    def _use_cloud(self, cloud: CloudClient, snapshots: Snapshots[SnapshotT], control: VmControl[V]) -> None:
        """To be called first of all, by whoever inherits from this."""
        self._cloud, self._snapshots, self._control = cloud, snapshots, control

    @property
    def name(self) -> str:
        return self._name

    @property
    def owner(self) -> str:
        return self._owner

    # -- what each cloud does in its own way ---------------------------------------------------

    @abstractmethod
    async def _have(
        self,
        snapshot: SnapshotT,
        machine: MachineId,
        offer: Offer,
        until: float,
        on_allocated: Callable[[], None],
    ) -> V:
        """Make the VM, or start it if it is stopped. Returns when it runs. Raises PlaceError.

        `until`: when it ends, by the cloud's clock. `on_allocated` is called as soon as it has got its room.
        """

    @abstractmethod
    def _named(self, machine: MachineId) -> str:
        """The VM as the cloud's own tools would find it."""

    @abstractmethod
    def _vcpus(self, size: str) -> int: ...

    # -- a machine's life ----------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Make the machine, or start it if it is stopped. Returns when it can be used."""
        async with self._turn(machine):
            with self._ceiling.counting(machine, self._vcpus(offer.size)):
                begun = time.monotonic()
                snapshot = await self._snapshot()  # and with it, what time it is in the cloud
                until = self._cloud.now() + expires_s - (time.monotonic() - begun)
                if machine in snapshot.vms:
                    vm = await self._have(snapshot, machine, offer, until, lambda: None)
                else:
                    async with self._trials.asking(offer) as had:
                        vm = await self._have(snapshot, machine, offer, until, had)
                await self._wait_ready(machine, vm, until, self._answer_s)

    async def _wait_ready(self, machine: MachineId, vm: V, until: float, patience_s: float) -> None:
        """`until`: when it ends, by the cloud's clock."""
        boot, here = self._control.boot(machine, vm), until - self._cloud.skew_s
        await self._readiness.wait(machine, boot, lambda: self._control.console(vm), here, patience_s)

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        """Do this step of an offer's `mends`, and return when the machine can be used."""
        async with self._turn(machine):
            await self._access.drop(machine)
            with as_refusal(f"{machine}: {step}"):
                vm = await self._control.again(machine, step)
            await self._wait_ready(machine, vm, self._cloud.now() + expires_s, min(self._answer_s, MENDED_S))

    async def stop(self, machine: MachineId) -> None:
        """Stop it: what stays, its disk at least, is billed."""
        await self._access.drop(machine)
        with as_refusal(machine):
            await self._control.stop(machine)

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        await self._access.drop(machine)
        with as_refusal(self._named(machine)):
            gone = await self._control.remove(machine)
        if gone:
            self._keys.drop(machine)
            self._readiness.forget(machine)

    async def _snapshot(self) -> SnapshotT:
        with as_refusal(UNSEEN):
            return await self._snapshots.fresh()

    def _turn(self, machine: MachineId) -> asyncio.Lock:
        """Held by whoever makes or mends the machine: it is done once at a time."""
        return self._turns.setdefault(machine, asyncio.Lock())

    # -- ways in -------------------------------------------------------------------------------

    async def _let_us_in(self, machine: MachineId) -> bool:
        """Have the cloud put our key onto a machine that lets in another computer's only. Returns whether it
        is worth while to try again."""
        if self._keys.made_host(machine):
            return False  # it was made with our key, which is there as soon as it has booted
        if machine in self._shut:
            return False
        try:
            return await self._control.authorize(machine, self._user, self._keys.login().public)
        except CloudFault as fault:
            refusal = fault.refusal(f"{machine}: our key cannot be put onto it")
            if not refusal.transient:
                self._shut.add(machine)
                log.warning("%s", refusal)
            return False

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        return self._access.channel(machine, fence)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        return self._access.shell(machine, command)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self._access.dial(machine, port)

    async def close(self) -> None:
        await self._access.close()
        await self._cloud.close()


OfferKey = tuple[str, str, bool]
"""Size, region with its zone, and whether it is spot: the price does not matter."""
TRIAL_S = 30.0


class OfferTrials:
    """The offers of a place that nobody knows of yet whether they can be had.

    Of many machines that are asked for at once, one goes first. Those that wait for it are refused as it was,
    if that was for good: an empty region is asked once, not once a machine. They wait `patience_s` at most.
    """

    def __init__(self, patience_s: float = TRIAL_S) -> None:
        self._patience_s = patience_s
        self._had: set[OfferKey] = set()
        """Offers of which a machine was had."""
        self._first: dict[OfferKey, asyncio.Future[PlaceError | None]] = {}
        """What becomes of the machine that goes first: its refusal, if that was for good."""

    @asynccontextmanager
    async def asking(self, offer: Offer) -> AsyncGenerator[Callable[[], None]]:
        """To be held while a machine is asked for. Raises PlaceError as the one that went first did.

        What it gives is to be called as soon as the machine has got its room, though it is still coming up.
        """
        key = (offer.size, offer.region, offer.spot)
        while key not in self._had and (first := self._first.get(key)) is not None:
            await asyncio.wait((first,), timeout=self._patience_s)
            if not first.done():
                break
            if (refused := first.result()) is not None:
                raise PlaceError(str(refused), transient=False, scope=refused.scope) from refused
        mine: asyncio.Future[PlaceError | None] = asyncio.get_running_loop().create_future()
        self._first.setdefault(key, mine)

        def settle(refused: PlaceError | None) -> None:
            if not mine.done():
                mine.set_result(refused)
            if self._first.get(key) is mine:
                del self._first[key]

        def had() -> None:
            self._had.add(key)
            settle(None)

        try:
            yield had
            had()
        except PlaceError as err:
            if not err.transient and err.scope != "machine":
                self._had.discard(key)
                settle(err)
            raise
        finally:
            settle(None)


class VcpuCeiling:
    """The most vCPUs that all machines of a home may have together in one place; 0: there is no ceiling.

    Machines that are being made count from the moment that somebody asks for them, so that many asked for at
    the same time do not pass the ceiling together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._coming: dict[MachineId, int] = {}

    @contextmanager
    def counting(self, machine: MachineId, vcpus: int) -> Generator[None]:
        """Count a machine that is being made."""
        self._coming[machine] = vcpus
        try:
            yield
        finally:
            self._coming.pop(machine, None)

    def check(self, machine: MachineId, existing: Mapping[MachineId, int]) -> None:
        """Raises PlaceError if the machine, which is being counted, is too much beside those that exist."""
        used = sum(vcpus for other, vcpus in existing.items() if other not in self._coming)
        if self._most and used + sum(self._coming.values()) > self._most:
            raise PlaceError(
                f"{machine}: {used} of max_vcpus = {self._most} are in use", transient=True, scope="place"
            )


class CallRate:
    """Allows so many calls at once, and so many a second in the long run. It has no clock: `now` is given."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._at = most, 0.0

    def wait_s(self, now: float) -> float:
        """Take one call from the allowance, and tell how long to wait before it."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s) - 1.0
        self._at = now
        return max(0.0, -self._left / self._per_s)


def check_installed(place: str, modules: Iterable[str], extra: str) -> None:
    """Raises RequestError that names the extra of evalfleet to install, if one of the modules is missing."""
    for module in modules:
        try:
            missing = find_spec(module) is None
        except ModuleNotFoundError:  # of the package that it is in
            missing = True
        if missing:
            raise RequestError(f"place {place!r} needs {module}: {install_command(extra)}")


# -- snapshots of all that exists, shared by all who ask, and taken no faster than a cloud bears -----

SPACING_S = 0.1
BURST, REFILL_S = 30.0, 1.0
"""Thirty snapshots may follow one another closely; in the long run there is one a second, unless a cloud
bears more."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, SHARE = 0.1, 3.0, 0.1


class SnapshotPace:
    """An allowance of snapshots that refills with time. It has no clock of its own: `now` is given."""

    def __init__(self, refill_s: float = REFILL_S) -> None:
        self._left, self._at, self._refill_s = BURST, 0.0, refill_s

    def wait_s(self, now: float) -> float:
        """Take one snapshot from the allowance, and tell how long to wait before it."""
        self._left = min(BURST, self._left + (now - self._at) / self._refill_s)
        self._at = now
        self._left -= 1.0
        return SPACING_S if self._left >= 0.0 else -self._left * self._refill_s


class Snapshots(Generic[S]):
    """The snapshots of one cloud, one at a time and paced: as many for a hundred machines as for one."""

    def __init__(self, take: Callable[[], Awaitable[S]], refill_s: float = REFILL_S) -> None:
        pace = SnapshotPace(refill_s)
        self._take = take
        self._flight = SingleFlight(self._take_next, lambda: pace.wait_s(time.monotonic()))
        self._last: tuple[float, S] | None = None
        """The newest one, and when it was asked for, by the steady clock."""

    async def _take_next(self) -> S:
        begun = time.monotonic()
        snapshot = await self._take()
        self._last = (begun, snapshot)
        return snapshot

    async def recent(self, age_s: float) -> S:
        """One that is at most so old. Raises what taking it raises."""
        if self._last is not None and time.monotonic() - self._last[0] <= age_s:
            return self._last[1]
        return await self.fresh()

    async def fresh(self) -> S:
        """One that is never older than the question. Raises what taking it raises."""
        return await self._flight.fresh()

    async def watch(self) -> AsyncGenerator[S]:
        """A fresh one, and then every later one, whoever asked for it. Raises what taking it raises.

        Who has waited for long can wait a little longer: that costs a small share of the whole time, and the
        most impatient of all that wait decides.
        """
        begun = time.monotonic()
        snapshot = await self.fresh()
        while True:
            yield snapshot
            waited_s = time.monotonic() - begun
            snapshot = await self._flight.soon(min(max(FIRST_PAUSE_S, waited_s * SHARE), LONGEST_PAUSE_S))
