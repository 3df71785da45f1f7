"""Which machine we hold on which host, and until when: what is known of hosts that do not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.channels.supervisor.files import job_name
from evalfleet.files import replace
from evalfleet.model import MachineId, decodable

FOLDER = ".lent"
MARGIN_S = 30.0


class HostLease(Struct, frozen=True):
    """A machine that is, or may be, on a host until `expires_at` (wall clock, in seconds).

    `deleting`: nobody wants it any more. If its host does not answer, it is a debt, paid when it does.
    """

    machine: MachineId
    host: str
    expires_at: float
    deleting: bool = False
    left: str = ""
    """A path on the host: what could not be removed. Until it is gone the host gets no machine."""
    kept: dict[str, str] = {}
    """What was in the home of the host's user before: names, and hashes of what logins run."""


class Records:
    """What we know of machines on hosts, as one file a machine, so that the next controller of this home
    knows it."""

    def __init__(self, home: Path, place: str, clock: Callable[[], float]) -> None:
        self._folder = home / FOLDER / job_name(place)
        self._clock = clock
        self._held: dict[MachineId, HostLease] = {}
        self._loaded = False

    def get(self, machine: MachineId) -> HostLease | None:
        """The lease of a machine that may still be there; None after its expiry, when its host has ended
        it."""
        self._load()
        held = self._held.get(machine)
        return held if held is not None and not self.over(held) else None

    def over(self, held: HostLease) -> bool:
        return self._clock() > held.expires_at + MARGIN_S

    def expired(self, held: HostLease) -> bool:
        """Has it expired by our clock? Its host's may be late."""
        return self._clock() > held.expires_at

    def on(self, host: str) -> Iterator[HostLease]:
        """All leases of a host, also those that are over: their files may be there still."""
        self._load()
        yield from [held for held in self._held.values() if held.host == host]

    def latest(self, machine: MachineId) -> HostLease | None:
        """The lease of a machine, also of one that is over."""
        self._load()
        return self._held.get(machine)

    def keep(self, machine: MachineId, host: str, expires_s: float) -> None:
        known = self.latest(machine)
        kept = known.kept if known is not None and known.host == host else {}
        self._write(HostLease(machine, host, self._clock() + expires_s, kept=kept))

    def learn(self, machine: MachineId, host: str, expires_at: float) -> None:
        """What a host told us. It can be asked again, so it needs no file."""
        known = self.latest(machine)
        deleting = known is not None and known.deleting
        here = known if known is not None and known.host == host else None
        kept, left = (here.kept, here.left) if here is not None else ({}, "")
        self._held[machine] = HostLease(machine, host, expires_at, deleting, left=left, kept=kept)

    def found(self, machine: MachineId, kept: dict[str, str]) -> None:
        """What was in the home of its host before anything of ours ran there. The first word counts."""
        held = self.latest(machine)
        if held is not None and not held.kept:
            self._write(msgspec.structs.replace(held, kept=kept))

    def leave(self, held: HostLease, left: str) -> None:
        self._write(msgspec.structs.replace(held, deleting=True, left=left))

    def left(self) -> list[HostLease]:
        self._load()
        return [held for held in self._held.values() if held.left]

    def owed(self) -> list[HostLease]:
        """Return the machines that were deleted, and are not known to be gone from their hosts."""
        self._load()
        return [held for held in self._held.values() if held.deleting]

    def unwanted(self, held: HostLease) -> None:
        if not held.deleting:
            self._write(msgspec.structs.replace(held, deleting=True))

    def drop(self, machine: MachineId) -> None:
        self._load()
        if self._held.pop(machine, None) is not None:
            with contextlib.suppress(OSError):
                self._path(machine).unlink()

    def _write(self, held: HostLease) -> None:
        self._load()
        self._held[held.machine] = held
        path = self._path(held.machine)
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(path, msgspec.json.encode(held))

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                held = msgspec.json.decode(path.read_bytes(), type=decodable(HostLease))
                self._held.setdefault(held.machine, held)

    def _path(self, machine: MachineId) -> Path:
        return self._folder / f"{job_name(machine)}.json"
