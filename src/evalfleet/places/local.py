"""The place `local`: each machine is a directory of this computer and a tree of processes."""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast
from urllib.parse import unquote

from msgspec import Meta, Struct

from evalfleet.channels import children
from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.link import OpenLink
from evalfleet.channels.program import local_argv
from evalfleet.channels.resident import Resident
from evalfleet.channels.samples import Samples
from evalfleet.channels.supervisor.facts import gpus
from evalfleet.channels.supervisor.files import job_name, make_key, read_key
from evalfleet.channels.supervisor.machine import DELETING, halt_machine, open_socket, order, remove_machine
from evalfleet.channels.supervisor.processes import host_environment
from evalfleet.errors import ChannelError, NoSuchMachine, PlaceError
from evalfleet.model import Cost, Machine, MachineId, Needs, Offer
from evalfleet.ports import Belonging, Channel, Dialled, Fence, PlaceContext

START_S = 30.0


class LocalSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of `local`. Processes of this computer cost nothing, unless you say so to try budgets
    out."""

    usd_per_hour: Annotated[
        float, Meta(ge=0, le=10_000, description="what a machine costs, to try budgets out")
    ] = 0.0
    billing_step_s: Annotated[float, Meta(gt=0, description="seconds that are billed as a whole")] = 1.0
    max_machines: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="never more than this at once")
    ] = None
    isolation: Annotated[
        Literal["user", "container", "none"] | None,
        Meta(description="user: each attempt is a user of its own; else none"),
    ] = None


class LocalPlace:
    """This computer: each machine is a folder in the home and a tree of processes. Needs no privileges."""

    Settings = LocalSettings
    default_isolation = "none"

    def __init__(
        self,
        name: str,
        settings: LocalSettings,
        root: Path,
        secrets: Mapping[str, str] | None = None,
        samples: Samples | None = None,
        home_id: str = "",
    ) -> None:
        self._name = name
        self._settings = settings
        self._root = Path(os.path.realpath(root))
        self._secrets = secrets or {}
        self._samples = samples
        self._home_id = home_id

    @classmethod
    def make(cls, name: str, settings: LocalSettings, context: PlaceContext) -> LocalPlace:
        return cls(
            name,
            settings,
            context.home / ".machines",
            context.secrets,
            Samples(context.home),
            context.home_id,
        )

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """One, whatever else is needed: benchmarks are tried out here. PlaceError if GPUs are lacking."""
        if needs.strict and needs.gpus and needs.gpus > (have := len(await asyncio.to_thread(gpus))):
            raise PlaceError(
                f"this computer has {have} of the {needs.gpus} GPUs that are needed; choose another place "
                "with --on, or lower `needs`",
                transient=False,
                scope="place",
            )
        settings = self._settings
        return (
            Offer(
                place=self._name,
                size="process",
                capacity=settings.max_machines,
                cost=Cost(usd_per_hour=settings.usd_per_hour, billing_step_s=settings.billing_step_s),
            ),
        )

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        directory = self._directory(machine)
        try:
            if (directory / DELETING).exists():
                raise PlaceError(f"{machine} is being deleted", transient=True, scope="machine")
            self._make_room(directory)
            await start_supervisor(directory)
            await asyncio.to_thread(order, directory, {"op": "expire", "seconds": expires_s}, START_S)
        except OSError as err:
            raise PlaceError(f"{machine} cannot be made: {err}", transient=True, scope="machine") from err

    def _make_room(self, directory: Path) -> None:
        most = self._settings.max_machines
        if most is not None and not directory.exists() and len(_names(self._root)) >= most:
            raise PlaceError(f"all {most} machines of {self._name} are taken", transient=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_key(str(directory))

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        directory = self._directory(machine)
        try:
            if not directory.exists() or (directory / DELETING).exists():
                raise NoSuchMachine(machine)
            await start_supervisor_if_dead(directory)
            await asyncio.to_thread(order, directory, {"op": "expire", "seconds": expires_s}, START_S)
        except OSError as err:
            raise PlaceError(f"{machine} does not answer: {err}", transient=True, scope="machine") from err

    async def list(self, pool: str) -> Sequence[Machine]:
        prefix = job_name(f"{pool}-")
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if entry.name.startswith(prefix) and entry.is_dir()]
        except FileNotFoundError:
            return ()
        except OSError as err:
            raise PlaceError(f"{self._root} cannot be read: {err}", transient=True, scope="place") from err
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

    async def stop(self, machine: MachineId) -> None:
        try:
            await asyncio.to_thread(halt_machine, self._directory(machine))
        except OSError as err:
            raise PlaceError(f"{machine} cannot be stopped: {err}", transient=True, scope="machine") from err

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """A shell in the machine's folder: it is this computer."""
        wanted = shlex.join(command) if command else 'exec "${SHELL:-sh}"'
        return ("sh", "-c", f'cd "$1" && {wanted}', "sh", str(self._directory(machine.id)))

    async def delete(self, machine: MachineId) -> None:
        directory = self._directory(machine)
        if self._samples is not None:
            self._samples.drop(machine)
        if not directory.exists():
            return
        try:
            await asyncio.to_thread(remove_machine, directory)
        except OSError as err:
            raise PlaceError(f"{machine} cannot be removed: {err}", transient=True, scope="machine") from err

    @property
    def owner(self) -> str:
        return ""

    async def belongings(self) -> Sequence[Belonging]:
        """The machines of this home. They end by themselves at their expiry, which they alone know."""
        return [
            Belonging(
                *(MachineId(unquote(name)), self._home_id, "", socket.gethostname(), None),
                (str(self._root / name),),
                of_this_computer=True,
            )
            for name in sorted(_names(self._root))
        ]

    async def reap(self, belonging: Belonging) -> None:
        await self.delete(belonging.machine)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await asyncio.open_connection("127.0.0.1", port)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        directory = Path(machine.address) if machine.address else self._directory(machine.id)

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
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


async def connect(directory: Path, protocol: asyncio.Protocol) -> OpenLink:
    """Connect to the directory's supervisor, started if it is dead: it adopts what its predecessor left."""
    if not directory.exists():
        raise ChannelError(f"there is no machine at {directory}")
    try:
        sock = open_socket(directory)
    except (FileNotFoundError, ConnectionRefusedError):
        await start_supervisor(directory)
        sock = open_socket(directory)
    sock.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=sock)
    return OpenLink(cast("asyncio.WriteTransport", transport), read_key(str(directory)))


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
        await children.end(process)
        raise
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"the supervisor ended with {process.returncode}")


async def start_supervisor_if_dead(directory: Path) -> None:
    try:
        open_socket(directory).close()
    except (FileNotFoundError, ConnectionRefusedError):
        await start_supervisor(directory)
