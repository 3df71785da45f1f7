"""What a test can do to a host, whatever it is made of."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from .system import LabError


class HostProcess(NamedTuple):
    """A process of a host. `pid` is for signals from outside; `inside` is the pid that the host itself
    knows."""

    pid: int
    inside: int
    argv: tuple[str, ...]


class Host(ABC):
    """A machine with an sshd. Calls block until what they do is done; one thread at a time a host.

    Faults may be combined. A power cycle ends freezing, partition, slow link and packet loss (the host
    gets a new cable), and keeps the disk, its size, and the host key. The clock is the machine's.
    What a kind of host cannot do raises LabError.
    """

    name: str
    address: str
    port: int
    users: tuple[str, ...]
    """Who can log in with the lab's key; the first one is an administrator where there is one."""

    @property
    @abstractmethod
    def host_public_key(self) -> str:
        """The host's key as in known_hosts: kind and key. It is a new one after `swap_host_key`."""

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Also False after the host has switched itself off."""

    def known_hosts_line(self) -> str:
        where = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return f"{where} {self.host_public_key}"

    @abstractmethod
    def power_off(self) -> None:
        """Power loss: every process is gone, the disk stays, and nobody is told. Repeats safely."""

    @abstractmethod
    def power_on(self) -> None:
        """Boot from the same disk; returns when sshd listens. Does nothing if it is on."""

    @abstractmethod
    def stop(self) -> None:
        """Shut down: as `power_off`, but connections are closed, so that clients notice at once."""

    def start(self) -> None:
        """The same as `power_on`."""
        self.power_on()

    def reboot(self) -> None:
        """Power loss and power on: clients hear nothing until the new system refuses their packets."""
        self.power_off()
        self.power_on()

    @abstractmethod
    def freeze(self) -> None:
        """Every process stops where it is; the kernel still answers. Lasts until `thaw`."""

    @abstractmethod
    def thaw(self) -> None: ...

    def partition(self) -> None:
        """Unplug the network cable: nothing arrives, in either direction, and nobody is told."""
        raise self._cannot("be partitioned")

    def heal(self) -> None:
        """Plug the cable in again."""
        raise self._cannot("be partitioned")

    def slow_link(self, kbit: int | None) -> None:
        """Let at most so many kilobits a second pass each way; None takes the limit away."""
        raise self._cannot("have a slow link")

    def lose_packets(self, percent: float) -> None:
        """Drop so many of the packets, at random, each way. 0: none."""
        raise self._cannot("lose packets")

    def fill_disk(self, bytes_left: int = 0) -> None:
        """Writing more than this fails with `No space left on device`, until `free_disk`."""
        raise self._cannot("have a full disk")

    def free_disk(self) -> None:
        raise self._cannot("have a full disk")

    @abstractmethod
    def swap_host_key(self) -> None:
        """Give it a new key and restart sshd with it, as if another host had taken the address."""

    @abstractmethod
    def restart_sshd(self, *, drop_sessions: bool = False) -> None:
        """Sessions go on, as after `systemctl restart ssh`, unless they are to be dropped."""

    @abstractmethod
    def processes(self) -> list[HostProcess]:
        """All there are on the host, seen from outside; none if it is off."""

    def workload(self) -> list[HostProcess]:
        """The processes that are neither the host's init nor an sshd (listener or session)."""
        return [
            process
            for process in self.processes()
            if process.inside != 1 and not process.argv[0].startswith(("sshd:", "/usr/sbin/sshd"))
        ]

    @abstractmethod
    def run(
        self,
        argv: Sequence[str],
        *,
        text: str | None = None,
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host without its sshd and whatever its network is like, as root if it has one.

        For set-up and assertions, not for starting what is to last: it is not in `processes`, and a frozen
        host runs it. With `check`, a command that fails raises LabError.
        """

    def _cannot(self, what: str) -> LabError:
        return LabError(f"{self.name} cannot {what}: that needs a lab of namespaces, with root")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}:{self.port}>"


def checked(
    host: str, done: subprocess.CompletedProcess[str], check: bool
) -> subprocess.CompletedProcess[str]:
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"{host}: exit code {done.returncode}: {said}")
    return done
