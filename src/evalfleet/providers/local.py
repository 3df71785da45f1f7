"""The place `local`: each machine is a directory of this computer and a tree of processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import unquote

from msgspec import Struct

from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.resident import Resident
from evalfleet.channels.samples import Samples
from evalfleet.channels.shipping import local_argv
from evalfleet.channels.supervisor.files import job_name
from evalfleet.channels.supervisor.processes import (
    birth,
    host_environment,
    kill,
    kill_marked,
    marked,
    marker,
    parse_stat,
)
from evalfleet.errors import ChannelError, ProviderError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Fence

DELETING = "deleting"
SOCKET = "supervisor.sock"
ADDRESS_BYTES = 100
QUIT_S = 10.0
START_S = 30.0


class LocalSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Processes of this computer cost nothing, unless you say so to try budgets out."""

    usd_per_hour: float = 0.0
    billing_step_s: float = 1.0
    max_machines: int | None = None


class Context(Protocol):
    """What a place needs to know of its surroundings."""

    @property
    def home(self) -> Path: ...

    @property
    def secrets(self) -> Mapping[str, str]: ...


class LocalPlace:
    """Machines that are directories under `root`. Needs no privileges."""

    Settings = LocalSettings

    def __init__(
        self,
        name: str,
        settings: LocalSettings,
        root: Path,
        secrets: Mapping[str, str] | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._root = Path(os.path.realpath(root))
        self._secrets = secrets or {}
        self._samples = samples

    @classmethod
    def make(cls, name: str, settings: LocalSettings, context: Context) -> LocalPlace:
        return cls(name, settings, context.home / ".machines", context.secrets, Samples(context.home))

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        settings = self._settings
        return (
            Offer(
                place=self._name,
                size="process",
                usd_per_hour=settings.usd_per_hour,
                billing_step_s=settings.billing_step_s,
                capacity=settings.max_machines,
            ),
        )

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        directory = self._directory(machine)
        try:
            if (directory / DELETING).exists():
                raise ProviderError(f"{machine} is being deleted", transient=True, scope="machine")
            self._make_room(directory)
            await start_supervisor(directory)
            await asyncio.to_thread(order, directory, {"op": "expire", "seconds": expires_s}, START_S)
        except OSError as err:
            raise ProviderError(f"{machine} cannot be made: {err}", transient=True, scope="machine") from err

    def _make_room(self, directory: Path) -> None:
        most = self._settings.max_machines
        if most is not None and not directory.exists() and len(_names(self._root)) >= most:
            raise ProviderError(f"all {most} machines of {self._name} are taken", transient=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        directory = self._directory(machine)
        try:
            if not directory.exists() or (directory / DELETING).exists():
                raise ProviderError(f"there is no machine {machine}", transient=False, scope="machine")
            await start_supervisor_if_dead(directory)
            await asyncio.to_thread(order, directory, {"op": "expire", "seconds": expires_s}, START_S)
        except OSError as err:
            raise ProviderError(f"{machine} does not answer: {err}", transient=True, scope="machine") from err

    async def list(self, pool: str) -> Sequence[Machine]:
        prefix = job_name(f"{pool}-")
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if entry.name.startswith(prefix) and entry.is_dir()]
        except FileNotFoundError:
            return ()
        except OSError as err:
            raise ProviderError(f"{self._root} cannot be read: {err}", transient=True, scope="place") from err
        return tuple(self._seen(name) for name in sorted(names))

    def _seen(self, name: str) -> Machine:
        directory = self._root / name
        # one whose delete was interrupted exists until the delete is repeated
        up = (directory / "jobs").exists() and not (directory / DELETING).exists()
        return Machine(
            MachineId(unquote(name)),
            "up" if up else "pending",
            address=str(directory),
            node=socket.gethostname(),
        )

    async def delete(self, machine: MachineId) -> None:
        directory = self._directory(machine)
        if self._samples is not None:
            self._samples.drop(machine)
        if not directory.exists():
            return
        try:
            await asyncio.to_thread(remove_machine, directory)
        except OSError as err:
            raise ProviderError(
                f"{machine} cannot be removed: {err}", transient=True, scope="machine"
            ) from err

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        directory = Path(machine.address) if machine.address else self._directory(machine.id)

        async def dial(protocol: asyncio.Protocol) -> asyncio.WriteTransport:
            return await connect(directory, protocol)

        mover = LocalMover(directory, self._secrets)
        samples = self._samples
        on_load = functools.partial(samples.keep, machine.id) if samples is not None else None
        return Resident(dial, mover, fence, self._secrets, on_load)

    async def close(self) -> None:
        """Nothing is held open."""

    def _directory(self, machine: str) -> Path:
        return self._root / job_name(machine)


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


# -- supervisors -------------------------------------------------------------------------------


async def connect(directory: Path, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
    """To the directory's supervisor, started if it is dead: it adopts what its predecessor left."""
    if not directory.exists():
        raise ChannelError(f"there is no machine at {directory}")
    try:
        sock = open_socket(directory)
    except (FileNotFoundError, ConnectionRefusedError):
        await start_supervisor(directory)
        sock = open_socket(directory)
    sock.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=sock)
    return cast("asyncio.WriteTransport", transport)


def open_socket(directory: Path, timeout_s: float = 5.0) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with short_path(directory) as path:
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def short_path(directory: Path) -> Generator[str]:
    """A path to the supervisor's socket that fits into an address, whatever the directory's length."""
    path = str(directory / SOCKET)
    if len(os.fsencode(path)) <= ADDRESS_BYTES:
        yield path
    elif os.path.isdir("/proc/self/fd"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{SOCKET}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.symlink(directory, f"{folder}/d")
            yield f"{folder}/d/{SOCKET}"


async def start_supervisor(directory: Path) -> None:
    """Returns once one listens, also if one did before. Raises OSError."""
    environ = {**host_environment(os.environ), "EVALFLEET_MACHINE": str(directory)}
    process = await asyncio.create_subprocess_exec(
        *local_argv(str(directory)),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"the supervisor ended with {process.returncode}")


async def start_supervisor_if_dead(directory: Path) -> None:
    try:
        open_socket(directory).close()
    except (FileNotFoundError, ConnectionRefusedError):
        await start_supervisor(directory)


def order(directory: Path, message: dict[str, Any], timeout_s: float) -> None:
    """What a place itself asks of a supervisor. Returns when it is done; raises OSError if it is not."""
    with open_socket(directory, timeout_s) as sock, sock.makefile("rwb") as file:
        file.write(json.dumps({"n": 1, **message}).encode() + b"\n")
        file.flush()
        answer = json.loads(file.readline() or b'{"error": "no answer"}')
    if "error" in answer:
        raise OSError(str(answer["error"]))


# -- removal -----------------------------------------------------------------------------------


def remove_machine(directory: Path) -> None:
    """End everything that runs on the machine, then remove it. May be repeated. Raises OSError."""
    try:
        (directory / DELETING).touch()  # from now on no supervisor starts here
        with contextlib.suppress(OSError):
            order(directory, {"op": "quit"}, QUIT_S)
        lock = _take_lock(directory)
    except FileNotFoundError:
        return
    try:
        _kill_rest(directory)
        _remove_tree(directory)
    except FileNotFoundError:
        return  # another removal was faster
    finally:
        os.close(lock)


def _take_lock(directory: Path) -> int:
    """The supervisor's lock: who has it knows that there is none, and that none can come."""
    lock = os.open(directory / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + QUIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(lock)
                raise
            if time.monotonic() > until - QUIT_S / 2 or not (directory / SOCKET).exists():
                _kill_recorded(directory / "supervisor.pid")
            time.sleep(0.01)
        else:
            return lock


def _kill_recorded(file: Path, group: bool = False) -> None:
    """By the pid in a file, if that still is the process it was."""
    with contextlib.suppress(OSError):
        pid, born = parse_stat(file.read_bytes())
        if pid is not None and born is not None and birth(pid) == born:
            kill(pid, signal.SIGKILL, group)


def _kill_rest(directory: Path) -> None:
    """What a supervisor that did not answer has left alive."""
    for job in (directory / "jobs").glob("*/pid"):
        if not job.with_name("exit").exists():
            _kill_recorded(job, group=True)
    if not kill_marked(str(directory), QUIT_S):
        raise OSError("some of its processes cannot be killed")
    for pid in marked(marker("EVALFLEET_MACHINE", str(directory))):
        kill(pid, signal.SIGKILL)


def _remove_tree(directory: Path) -> None:
    """The marker goes last: a removal that is interrupted still shows as one."""
    for entry in sorted(directory.iterdir(), key=lambda path: path.name == DELETING):
        if entry.is_dir() and not entry.is_symlink():
            _open_up(entry)
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        if os.path.lexists(entry):
            # another user's files, say a container's: nothing runs any more, but only root can remove them
            os.rename(directory, directory.with_name(f".left-{directory.name}-{time.time_ns()}"))
            return
    directory.rmdir()


def _open_up(top: Path) -> None:
    """Directories that a job made read-only can be emptied then."""
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.lstat(folder).st_mode) & 0o700 != 0o700:
                os.chmod(folder, 0o700)
