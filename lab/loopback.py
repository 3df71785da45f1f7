"""Hosts without root: an sshd each, as this user, on an address of their own in 127.1.0.0/16.

They share this machine's files and processes. A session starts in a directory of the host's (also its HOME)
and its processes are known by a mark in their environment, so that one that clears it is not the host's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Self

from . import keys, state, system
from .client import LabClient
from .host import Host, HostProcess, checked
from .login import loopback_config
from .system import LabError

SESSION = Path(__file__).with_name("session.sh")
WAIT_S = 20.0


class LoopbackHost(Host):
    """A host without root. `power_off` closes connections: without a cable to pull, clients notice at
    once."""

    def __init__(self, directory: Path, index: int, client_key: str) -> None:
        self.name = directory.name
        self.address = f"127.1.{1 + index // 250}.{1 + index % 250}"
        self.port = _free_port(self.address)
        self.users = (pwd.getpwuid(os.geteuid()).pw_name,)
        self.home = directory / "home"
        self._directory = directory
        self._mark = f"{directory.parent.name}/{self.name}"
        self._key = keys.new_key(self.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, str] = {}
        """The sshds of connections that have outlived the one that took them, and when they began."""
        self.home.mkdir(parents=True)
        (directory / "authorized_keys").write_text(f"{client_key}\n")
        keys.write_private(directory / "host_key", self._key.private)
        session = shlex.join(["/bin/sh", str(SESSION), str(self.home), self._mark])
        config = loopback_config(directory, self.address, self.port, session)
        (directory / "sshd_config").write_text(config)

    @property
    def host_public_key(self) -> str:
        return self._key.public

    @property
    def is_on(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        server = system.find("sshd")
        if server is None:
            raise LabError("the lab needs openssh-server")
        self._await_port()
        argv = [server, "-D", "-e", "-f", str(self._directory / "sshd_config")]
        with open(self._directory / "console", "ab") as console:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=console,
                env=system.CLEAN,
                start_new_session=True,
            )

    def await_sshd(self) -> None:
        self._wait((self._directory / "sshd.pid").exists, "has no sshd")

    def power_on(self) -> None:
        if not self.is_on:
            self.launch()
            self.await_sshd()

    def power_off(self) -> None:
        if self.is_on:
            self.freeze()  # what stands still starts no others that would be overlooked
        kill_all(self._all)
        self._end_sshd()

    def stop(self) -> None:
        self.power_off()

    def freeze(self) -> None:
        self._wait(lambda: freeze_all(self._all), "cannot be frozen")

    def thaw(self) -> None:
        signal_all(self._all(), signal.SIGCONT)

    def swap_host_key(self) -> None:
        self._key = keys.new_key(self.name)
        keys.write_private(self._directory / "host_key", self._key.private)
        self.restart_sshd()

    def restart_sshd(self, *, drop_sessions: bool = False) -> None:
        if self._process is not None:
            listener = self._process.pid
            self._wait(lambda: freeze_all(lambda: [listener]), "has an sshd that cannot be stopped")
            others = (pid for pid in self._all() if pid != listener)
            self._sessions = {pid: began for pid in others if (began := _sshd_began(pid))}
        self._end_sshd()
        if drop_sessions:
            signal_all(self._sessions, signal.SIGTERM)
        self.power_on()

    def processes(self) -> list[HostProcess]:
        return [HostProcess(pid, pid, argv) for pid in self._all() if (argv := argv_of(pid))]

    def run(
        self,
        argv: Sequence[str],
        *,
        text: str | None = None,
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        if not self.is_on:
            raise LabError(f"{self.name} is off")
        environ = {**system.CLEAN, "HOME": str(self.home), MARK: self._mark}
        done = subprocess.run(
            argv,
            input=text or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environ,
            cwd=self.home,
            check=False,
        )
        return checked(self.name, done, check)

    def _all(self) -> list[int]:
        own = [pid for pid, began in self._sessions.items() if _sshd_began(pid) == began]
        if self._process is not None and self.is_on:
            own.append(self._process.pid)
        return processes_of(own, self._mark)

    def _end_sshd(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        (self._directory / "sshd.pid").unlink(missing_ok=True)

    def _await_port(self) -> None:
        """Wait until sshd can listen: a child of the last one has its listening socket, too, for a moment."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_server((self.address, self.port)).close()
            except OSError as err:
                if time.monotonic() > until:
                    raise LabError(f"{self.name} cannot have port {self.port}: {err}") from err
                time.sleep(0.002)
            else:
                return

    def _wait(self, happened: Callable[[], bool], complaint: str) -> None:
        until = time.monotonic() + WAIT_S
        while not happened():
            if not self.is_on or time.monotonic() > until:
                said = (self._directory / "console").read_text(errors="replace")[-500:].strip()
                raise LabError(f"{self.name} {complaint}: {said}")
            time.sleep(0.002)


class LoopbackLab:
    """Some loopback hosts; otherwise as a Lab."""

    def __init__(self, held: state.State) -> None:
        self._state = held
        self.hosts: list[LoopbackHost] = []
        self.client = LabClient(held.path, ())

    @classmethod
    def missing(cls) -> str | None:
        """Why there can be none here, in one line; None if there can."""
        if not sys.platform.startswith("linux"):
            return "the loopback lab needs Linux, whose loopback network has more than one address"
        if system.find("sshd") is None:
            return "the loopback lab needs openssh-server"
        return None

    @classmethod
    def create(cls, count: int) -> Self:
        """`count` hosts called host-0, host-1, .... Raises LabError, and leaves nothing behind then."""
        complaint = cls.missing()
        if complaint:
            raise LabError(complaint)
        cls.sweep()
        lab = cls(state.claim(_root(), _demolish))
        try:
            lab._add(count)
        except BaseException:
            lab.destroy()
            raise
        return lab

    @classmethod
    def sweep(cls) -> list[str]:
        """Remove what dead processes' labs of this user left; never touches a live lab."""
        return state.sweep(_root(), _demolish)

    def _add(self, count: int) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd insists on it; it stays
        self.client.write()
        for index in range(count):
            host = LoopbackHost(self._state.path / f"host-{index}", index, self.client.public_key)
            self.hosts.append(host)
            host.launch()
        for host in self.hosts:
            host.await_sshd()
        self.client.trust(self.hosts)

    @property
    def prefix(self) -> tuple[str, ...]:
        return ()

    def inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def socket(self) -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def destroy(self) -> None:
        """Nothing is left afterwards. Repeats safely."""
        for host in self.hosts:
            host.power_off()
        self._state.destroy()
        self.hosts = []

    def __iter__(self) -> Iterator[LoopbackHost]:
        return iter(self.hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def _root() -> Path:
    root = Path(tempfile.gettempdir(), f"evalfleet-loopback-{os.geteuid()}")
    if any(character.isspace() for character in str(root)):
        raise LabError(f"the loopback lab cannot be in {root}: sshd takes no spaces")
    return root


def _demolish(directory: Path) -> None:
    """What a dead creator left: its sshds, known by their configuration, and what they started."""
    for host in directory.glob("host-*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int((host / "sshd.pid").read_text())
            if any(str(host / "sshd_config") in word for word in argv_of(pid)):
                kill_all(partial(processes_of, [pid], ""))
        mark = f"{directory.name}/{host.name}"
        kill_all(partial(processes_of, [], mark))


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as err:
            raise LabError(f"the loopback lab needs the address {address}: {err}") from err
        return int(probe.getsockname()[1])


MARK = "EVALFLEET_LAB_HOST"
GONE_S = 10.0


def argv_of(pid: int) -> tuple[str, ...]:
    """Empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return ()
    return tuple(map(os.fsdecode, words.split(b"\0"))) if words else ()


def processes_of(own: Iterable[int], mark: str) -> list[int]:
    """These, the marked ones, and all that descend from either. Dead ones do not count."""
    alive = {pid: parent for pid, parent, status in _table() if status not in "ZX"}
    found = {pid for pid in own if pid in alive}
    found |= {pid for pid in alive if mark and _is_marked(pid, mark)}
    children: dict[int, list[int]] = {}
    for pid, parent in alive.items():
        children.setdefault(parent, []).append(pid)
    waiting = list(found)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(new)
        waiting += new
    return sorted(found - {os.getpid()})


def signal_all(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_all(find: Callable[[], list[int]]) -> None:
    """Until none is found: some may start others meanwhile."""
    until = time.monotonic() + GONE_S
    while pids := find():
        if time.monotonic() > until:
            raise LabError(f"processes {pids} cannot be killed")
        # a parent that is killed first leaves its children to nobody: stop them all before
        signal_all(pids, signal.SIGSTOP)
        signal_all(pids, signal.SIGKILL)
        time.sleep(0.002)


def freeze_all(find: Callable[[], list[int]]) -> bool:
    """True once all that are found stand still. To be called until then."""
    found = find()
    moving = [pid for pid, _, status in _table() if pid in found and status not in "TtZX"]
    signal_all(moving, signal.SIGSTOP)
    # one that has started another just before it stopped shows it only now
    return not moving and find() == found


def _table() -> list[tuple[int, int, str]]:
    """Pid, parent and status of every process."""
    rows: list[tuple[int, int, str]] = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text(errors="replace")
                status, parent = text[text.rindex(")") + 2 :].split(" ", 2)[:2]
                rows.append((int(name), int(parent), status))
    return rows


def _sshd_began(pid: int) -> str:
    """When this sshd began, which tells it from a later one of its number. Empty if it is gone, or none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    name, _, rest = text.partition("(")[2].rpartition(")")
    return rest.split()[19] if name.startswith("sshd") else ""


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
