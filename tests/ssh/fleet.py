"""Real sshd processes on loopback addresses, a host each, with a home directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.channels.ssh.host_home import HostHome
from evalfleet.channels.ssh.hosts import SshHost
from evalfleet.channels.ssh.target import target
from evalfleet.channels.supervisor.processes import marked
from evalfleet.model import Machine, MachineId, Needs
from evalfleet.places.ssh import SshPlace, SshSettings
from evalfleet.places.ssh.place import access_of
from evalfleet.ports import Place, PlaceContext
from tests.waiting import slowness, until, until_async

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HOME_ID = "abc123"
_addresses = itertools.count(1)

CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {key}.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 200
SetEnv HOME={home}
{more}
"""


def keygen(path: Path) -> None:
    for each in (path, path.with_suffix(".pub")):
        each.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


class Sshd:
    """One host."""

    def __init__(self, folder: Path, key: Path, more: str = "") -> None:
        number = os.getpid() * 250 + next(_addresses)
        self.address = f"127.{1 + number // 62500 % 250}.{number // 250 % 250}.{1 + number % 250}"
        with socket.create_server((self.address, 0)) as free:
            self.port = free.getsockname()[1]
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.within: tuple[str, ...] = ()
        """A command that starts what follows it, in surroundings of its own."""
        keygen(folder / "host_key")
        config = CONFIG.format(
            address=self.address, port=self.port, folder=folder, key=key, home=self.home, more=more
        )
        (folder / "sshd_config").write_text(config)

    @property
    def name(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def known(self) -> str:
        return f"[{self.address}]:{self.port} {(self.folder / 'host_key.pub').read_text()}"

    @property
    def ours(self) -> Path:
        return self.home / ".evalfleet"

    def machine(self, machine: str) -> Path:
        return self.ours / HOME_ID / machine

    def start(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        argv = [
            *self.within,
            SSHD,
            "-D",
            "-f",
            str(self.folder / "sshd_config"),
            "-E",
            str(self.folder / "sshd.log"),
        ]
        self.process = subprocess.Popen(argv)
        until(self._answers, lambda: f"sshd to listen: {(self.folder / 'sshd.log').read_text()}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 10):
            return True
        return False

    def give_tool(self, name: str, script: str) -> None:
        """Whoever logs in finds this program before all others of its name."""
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
        config, home = self.folder / "sshd_config", f"SetEnv HOME={self.home}"  # the first SetEnv counts
        config.write_text(config.read_text().replace(home, f"{home} PATH={tools}:{os.environ['PATH']}"))
        self.stop()
        self.start()

    def stop(self) -> None:
        """No new connections, and the old ones are cut."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
            # once it has stopped it forks no more: a child that is not known here would go on listening
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            sessions = self.sessions()
            self.process.kill()
            self.process.wait()
            self.process = None
            self._kill(sessions)
            until(lambda: not self._answers(), "sshd to listen no more")

    def sessions(self) -> list[int]:
        """The processes of sshd that serve connections."""
        assert self.process is not None
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                kids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                found += [int(kid) for kid in kids if b"sshd" in Path(f"/proc/{kid}/comm").read_bytes()]
        return found[1:]

    def cut(self) -> None:
        """Every connection ends; the next one is welcome."""
        self._kill(self.sessions())

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pause(self, signum: int = signal.SIGSTOP) -> None:
        """Silence, without a FIN: what a frozen host looks like."""
        assert self.process is not None
        for pid in [self.process.pid, *self.sessions()]:
            os.kill(pid, signum)

    def clear(self) -> None:
        """End and remove all that is there, and let it answer again."""
        self.end_leftovers()
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(exist_ok=True)
        if self.process is None:
            self.start()

    def leftovers(self) -> list[int]:
        """The supervisors of its machines, and what their jobs have started."""
        return [*self.supervisors(), *marked(b"\0EVALFLEET_MACHINE=" + os.fsencode(str(self.ours)))]

    def supervisors(self) -> list[int]:
        """Those of its machines. Their environment is the login's: the path of their program tells them."""
        program, found = b"\0" + os.fsencode(self.ours) + b"/", list[int]()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes()
                if program in command and command.endswith(b"\0take\0"):
                    found.append(int(process.name))
        return found

    def end_leftovers(self) -> None:
        def none_is_left() -> bool:
            left = self.leftovers()
            self._kill(left)
            return not left

        until(none_is_left, "the end of what was left")


class Fleet:
    """Some hosts, and what is needed to use them as a place."""

    def __init__(self, folder: Path, count: int, more: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.key = folder / "key"
        keygen(self.key)
        self.hosts = [Sshd(folder / f"host-{n}", self.key, more) for n in range(count)]
        self.known_hosts = folder / "known_hosts"
        self.learn()
        for host in self.hosts:
            host.start()

    def learn(self) -> None:
        self.known_hosts.write_text("".join(host.known for host in self.hosts))

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "hosts": [host.name for host in self.hosts],
            "user": getpass.getuser(),
            "key": str(self.key),
            "known_hosts": str(self.known_hosts),
            "connect_timeout_s": 5.0 * slowness(),
            "isolation": "none",  # jobs meet in folders of the tests, which no other user sees
            **more,
        }

    def place(
        self, home: str = "a", home_id: str = HOME_ID, secrets: Mapping[str, str] | None = None, **more: Any
    ) -> SshPlace:
        settings = msgspec.convert(self.settings(**more), SshSettings)
        context = PlaceContext(self.folder / f"home-{home}", home_id, secrets or {})
        context.home.mkdir(exist_ok=True)
        return SshPlace.make("lab", settings, context)

    def host_home(self, name: str, turns: asyncio.Semaphore | None = None, **more: Any) -> HostHome:
        """The share of one host, without a place around it."""
        settings = msgspec.convert(self.settings(**more), SshSettings)
        access = access_of("lab", settings, PlaceContext(Path(), HOME_ID))
        return HostHome(SshHost(target(name), access, turns or asyncio.Semaphore(1)), HOME_ID)

    def stop(self) -> None:
        for host in self.hosts:
            if host.process is not None:
                with contextlib.suppress(OSError):
                    host.pause(signal.SIGCONT)
            host.stop()
            host.end_leftovers()


@contextlib.contextmanager
def fleet(folder: Path, count: int, more: str = "") -> Iterator[Fleet]:
    made = Fleet(folder, count, more)
    try:
        yield made
    finally:
        made.stop()


async def bring_up(place: Place, n: int = 1, expires_s: float = 600.0) -> Machine:
    machine = MachineId(f"pool-{HOME_ID}-{n}")
    offer = (await place.offers(Needs()))[0]
    await place.create(machine, offer, expires_s)

    async def up() -> Machine | None:
        return next((m for m in await place.list("pool") if m.id == machine and m.phase == "up"), None)

    return await until_async(up, f"{machine} to come up")
