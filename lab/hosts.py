"""A host made of namespaces: its own network, processes, mounts, name and control group."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import keys, network, system
from .cgroups import Group
from .disk import Base, HostDisk
from .host import Host, HostProcess, checked
from .login import USERS
from .system import LabError

BOOT = Path(__file__).with_name("boot.sh")
BOOT_S = 30.0
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"


class LabSite(NamedTuple):
    """What the hosts of a lab share."""

    network: network.Network
    base: Base
    expose: tuple[Path, ...]
    disk_bytes: int


class NamespaceHost(Host):
    """A host made of namespaces, by a Lab. The steps of its boot are apart, so that a lab can boot many at
    once."""

    users = USERS
    port = 22

    def __init__(self, site: LabSite, directory: Path, index: int, group: Group) -> None:
        self.name = directory.name
        self.cable = network.cable(index)
        self.address = self.cable.address
        self._site = site
        self._directory = directory
        self._group = group
        self._disk = HostDisk(directory, site.disk_bytes)
        self._key = keys.new_key(self.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def make(self) -> None:
        """Directory and disk."""
        self._directory.mkdir(parents=True)
        self._disk.make(self.name, self.address, self._key.private)
        (self._directory / "net").write_text(network.host_side(self.cable))

    # -- boot ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start process 1, up to where it waits for its cable."""
        self._disk.prepare_boot(self._site.base, self._site.expose)
        argv = ["/bin/sh", str(BOOT), "launch", str(self._directory), self.name, *self._group.joins()]
        with open(self._directory / "console", "ab") as console:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=console,
                env=system.CLEAN,
                start_new_session=True,
            )

    def find_init(self) -> int:
        """The machine's pid of process 1, once it exists."""
        self._wait(self._found_init, "starts no process 1")
        return self._pid

    def plug_in(self) -> None:
        """The cable is there: go on."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b"plugged\n")

    def await_sshd(self, not_pid: str = "") -> None:
        # sshd writes this file when it listens; to connect would cost it a process
        self._wait(lambda: self._sshd_pid() not in ("", not_pid), "has no sshd")

    def check_alive(self) -> None:
        """Raises what it died of."""
        self._wait(lambda: self.is_on, "died when it booted")

    def _found_init(self) -> bool:
        for pid in self._group.pids():
            if _inside(pid) == 1:
                self._pid = pid
                return True
        return False

    def _sshd_pid(self) -> str:
        try:
            return Path(f"/proc/{self._pid}/root/run/sshd.pid").read_text().strip()
        except OSError:
            return ""

    def _wait(self, happened: Callable[[], bool], complaint: str) -> None:
        until = time.monotonic() + BOOT_S
        while not happened():
            if not self.is_on or time.monotonic() > until:
                raise LabError(
                    f"{self.name} {complaint}: {self.console()[-500:].strip() or 'it says nothing'}"
                )
            time.sleep(0.001)

    def console(self) -> str:
        """What boot and sshd have said."""
        try:
            return (self._directory / "console").read_text(errors="replace")
        except OSError:
            return ""

    # -- power ---------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def power_on(self) -> None:
        if self.is_on:
            return
        self._off()  # it may have switched itself off
        self._group.freeze(False)
        boot([self], self._site.network)
        self.await_sshd()

    def power_off(self) -> None:
        if self.is_on:
            # the cable first: a kernel whose processes die says so to their peers
            self._site.network.plug(self.cable, False)
        self._off()

    def stop(self) -> None:
        self._off()

    def _off(self) -> None:
        self._group.kill()
        if self._process is not None:
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None
            self._pid = 0
            self._site.network.detach(self.cable)

    def destroy(self) -> None:
        """Repeats safely, and whatever of it was made."""
        self.power_off()
        self._group.remove()
        self._disk.remove()
        if self._directory.exists():
            shutil.rmtree(self._directory)

    def reap(self) -> None:
        """After somebody else has killed it."""
        if self._process is not None:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    # -- faults --------------------------------------------------------------------------------

    def freeze(self) -> None:
        self._need_power()
        self._group.freeze(True)

    def thaw(self) -> None:
        self._group.freeze(False)

    def partition(self) -> None:
        self._need_power()
        self._site.network.plug(self.cable, False)

    def heal(self) -> None:
        self._need_power()
        self._site.network.plug(self.cable, True)

    def slow_link(self, kbit: int | None) -> None:
        self._site.network.slow(self.cable, self._need_power(), kbit)

    def lose_packets(self, percent: float) -> None:
        network.lose(self._need_power(), percent)

    def fill_disk(self, bytes_left: int = 0) -> None:
        self._disk.fill(bytes_left)

    def free_disk(self) -> None:
        self._disk.free()

    # -- sshd ----------------------------------------------------------------------------------

    @property
    def host_public_key(self) -> str:
        return self._key.public

    def swap_host_key(self) -> None:
        root = Path(f"/proc/{self._need_power()}/root")
        self._key = keys.new_key(self.name)
        keys.write_private(root / HOST_KEY, self._key.private)
        self.restart_sshd()

    def restart_sshd(self, *, drop_sessions: bool = False) -> None:
        self._need_power()
        listener = self._sshd_pid()
        for process in self.processes():
            is_session = drop_sessions and process.argv[0].startswith("sshd:")
            if str(process.inside) == listener or is_session:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        self.await_sshd(not_pid=listener)

    # -- looking inside ------------------------------------------------------------------------

    def processes(self) -> list[HostProcess]:
        found: list[HostProcess] = []
        for pid in self._group.pids():
            inside = _inside(pid)
            with contextlib.suppress(OSError):
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if inside is not None and argv != [b""]:  # a zombie has none
                    found.append(HostProcess(pid, inside, tuple(map(os.fsdecode, argv))))
        return found

    def run(
        self,
        argv: Sequence[str],
        *,
        text: str | None = None,
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self._need_power()}", "--all", "--root", "--wd", "--"]
        environ = {**system.CLEAN, "HOME": "/root"}
        done = subprocess.run(
            [*enter, *argv],
            input=text or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environ,
            check=False,
        )
        return checked(self.name, done, check)

    def _need_power(self) -> int:
        if not self.is_on:
            raise LabError(f"{self.name} is off")
        return self._pid


def boot(hosts: Sequence[NamespaceHost], site_network: network.Network) -> None:
    """Together, up to where their sshds start."""
    for host in hosts:
        host.launch()
    try:
        site_network.attach([(host.cable, host.find_init()) for host in hosts])
    except LabError:
        for host in hosts:
            host.check_alive()
        raise
    for host in hosts:
        host.plug_in()


def _inside(pid: int) -> int | None:
    """Its pid in the host; None for a process that is not in a namespace below ours, or gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    numbers: list[str] = []
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            numbers = line.split()[1:]
    # /proc shows them from our own namespace on, outermost first
    return int(numbers[1]) if len(numbers) > 1 else None
