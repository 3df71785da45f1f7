"""Disposable real hosts on one machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from typing import Self

from . import cgroups, network, state, system
from .cgroups import HostLimits
from .client import LabClient
from .disk import Base
from .hosts import LabSite, NamespaceHost, boot
from .system import LabError

ROOT = Path("/run/evalfleet-lab")
GIB = 1 << 30
NO_LIMITS = HostLimits()
AT_ONCE = 8  # hosts that boot together: more wait for the same cores


class Lab:
    """Some hosts and a network of their own, without uplink. Use as a context manager.

    All calls block. The hosts live as long as the creating process: what a killed one leaves is removed
    by the next `create` or `sweep`, of whatever process.

        with Lab.create(5) as lab:
            subprocess.run(lab.client.ssh(lab.hosts[0], "hostname"))
    """

    def __init__(self, held: state.State, site: LabSite, limits: HostLimits) -> None:
        """Is called by `create`, which makes what this describes."""
        self._state = held
        self._limits = limits
        self._site = site
        self._layout: cgroups.Layout | None = None
        self._made = 0
        self.hosts: list[NamespaceHost] = []
        self.client = LabClient(held.path, self.prefix)

    @classmethod
    def missing(cls) -> str | None:
        """Why there can be none here, in one line; None if there can."""
        return system.missing()

    @classmethod
    def create(
        cls,
        count: int,
        *,
        rootfs: Path = Path("/"),
        disk_bytes: int = GIB,
        limits: HostLimits = NO_LIMITS,
        mask: Iterable[Path] = (),
        expose: Iterable[Path] = (),
    ) -> Self:
        """`count` hosts called host-0, host-1, ..., up and reachable.

        `rootfs`: what the hosts' disks show; it needs sshd, and is not written to. `disk_bytes`: what a
        host may write; it is memory, once written. `mask`: paths that hosts do not see, besides home
        directories, temporary files, this checkout and all that is not the system's. `expose`: directories
        they do see, read-only. Raises LabError, and leaves nothing behind then.
        """
        complaint = system.missing() or _unfit(rootfs)
        if complaint:
            raise LabError(complaint)
        cls.sweep()
        held = state.claim(ROOT, _demolish)
        base = Base(held.path / "base", rootfs.resolve())
        exposed = tuple(path.absolute() for path in expose)
        lab = cls(held, LabSite(network.Network(held.path / "net"), base, exposed, disk_bytes), limits)
        try:
            lab._make([*_private(), *(path.absolute() for path in mask)])
            lab.add(count)
        except BaseException as err:
            lab.destroy()
            if isinstance(err, OSError):
                raise LabError(f"the lab cannot be made: {err}") from err
            raise
        return lab

    def _make(self, mask: Iterable[Path]) -> None:
        """All but the hosts."""
        directory = self._state.path
        layout = cgroups.plan(_group_name(directory), self._limits)
        (directory / "cgroups").write_text("".join(f"{path}\n" for path in layout.tops()))
        cgroups.make(layout, self._limits)
        self._layout = layout
        self._site.network.make()
        self.client.write()
        self._site.base.make(self.client.public_key, mask, self._site.expose)

    @classmethod
    def sweep(cls) -> list[str]:
        """Remove what dead processes' labs left; never touches a live lab. Returns their names."""
        return state.sweep(ROOT, _demolish)

    def add(self, count: int = 1) -> list[NamespaceHost]:
        """More hosts, up and reachable: all of them or none."""
        if self._made + count > network.MOST_HOSTS:
            raise LabError(f"a lab has at most {network.MOST_HOSTS} hosts, counting removed ones")
        added = [self._define(self._made + n) for n in range(count)]
        self._made += count
        self.hosts += added
        try:
            self._boot(added)
        except BaseException:
            for host in added:
                with suppress(LabError, OSError):  # what stays goes with the lab
                    self.remove(host)
            raise
        self.client.trust(added)
        return added

    def _boot(self, hosts: Iterable[NamespaceHost]) -> None:
        waiting = iter(hosts)
        while some := list(islice(waiting, AT_ONCE)):
            for host in some:
                host.make()
            boot(some, self._site.network)
        for host in hosts:
            host.await_sshd()

    def remove(self, host: NamespaceHost) -> None:
        """End one host, without a word to its clients, and drop its disk. May be repeated if it fails."""
        host.destroy()
        self.hosts.remove(host)

    def _define(self, index: int) -> NamespaceHost:
        directory = self._state.path / "hosts" / f"host-{index}"
        assert self._layout is not None
        return NamespaceHost(self._site, directory, index, self._layout.host(directory.name, self._limits))

    @property
    def directory(self) -> Path:
        """Where the lab is; root's alone, and gone with the lab."""
        return self._state.path

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command: it runs on this machine, in the lab's network."""
        return self._site.network.prefix

    @property
    def network_path(self) -> Path:
        """The network namespace, for `nsenter --net=`."""
        return self._site.network.path

    def inside(self) -> AbstractContextManager[None]:
        """This thread is in the lab's network meanwhile, and so is what it starts (threads, processes).

        For a client in this process: what it connects in here stays connected afterwards.
        """
        return self._site.network.inside()

    def enter(self) -> None:
        """This thread joins the lab's network for good: for a child that does nothing else."""
        system.enter_network(self.network_path)

    def socket(self) -> socket.socket:
        """A TCP socket of the lab's network, to connect from anywhere in this process."""
        return self._site.network.socket()

    def destroy(self) -> None:
        """Nothing is left afterwards: process, mount, network, control group, file. Repeats safely."""
        self._state.destroy()
        for host in self.hosts:
            host.reap()
        self.hosts = []

    def __iter__(self) -> Iterator[NamespaceHost]:
        return iter(self.hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def _unfit(rootfs: Path) -> str | None:
    if not (rootfs / "usr/sbin/sshd").exists():
        return f"the lab needs an sshd in {rootfs}usr/sbin: install openssh-server there"
    if any(character in str(rootfs) for character in ":, \\"):
        return f"the lab cannot use a root file system at {rootfs}: overlays take no such characters"
    if rootfs.resolve() == Path("/") and os.path.ismount("/usr"):
        # an overlay of / does not show what is mounted below it
        return "the lab cannot use this root file system, since /usr is mounted apart: give another rootfs"
    return None


def _private() -> Sequence[Path]:
    """What of ours may lie among the system's files; all else of this machine is hidden anyway."""
    here = Path(__file__).resolve().parents[1]
    places = [Path.home(), Path(tempfile.gettempdir()), ROOT]
    if (here / "pyproject.toml").exists():
        places.append(here)
    # a HOME of /usr, say, must not take the system away
    return [place for place in places if len(place.parts) > 2]


def _group_name(directory: Path) -> str:
    return f"evalfleet-lab-{directory.name}"


def _demolish(directory: Path) -> None:
    try:
        recorded = (directory / "cgroups").read_text().splitlines()
    except FileNotFoundError:
        recorded = []
    for top in recorded:
        # never more than what a lab makes, whatever the file says
        if Path(top).name == _group_name(directory):
            cgroups.remove_group(Path(top))
    for mount in system.mounts_under(directory.resolve()):
        system.unmount(mount)
