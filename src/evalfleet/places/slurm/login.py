"""Where Slurm's commands are run and machines' folders are seen: this computer, or a login node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evalfleet.channels import children
from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.link import Dial, OpenLink
from evalfleet.channels.mail.folder import FolderClerk, FolderMail
from evalfleet.channels.mail.lines import MailTransport, open_mail
from evalfleet.channels.resident import Resident
from evalfleet.channels.session import OnLoad
from evalfleet.channels.supervisor.processes import host_environment
from evalfleet.errors import PlaceError
from evalfleet.ports import Channel, Fence

from . import folders
from .step import StepTransport, open_step

KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
STEP_END_S = 5.0


class Spoken(NamedTuple):
    """What a command said, and its exit code."""

    code: int
    out: bytes
    errors: bytes


class MachineWay(NamedTuple):
    """How a machine is reached once its supervisor can be dialled."""

    machine: str
    folder: str
    """Its folder on the shared file system."""
    supervisor: str
    """The supervisor's file there."""
    dial: Dial
    fence: Fence
    on_load: OnLoad


class Login(Protocol):
    """The computer from which the cluster is used."""

    async def run(self, argv: Sequence[str], given: str, answer_s: float) -> Spoken:
        """Run a command to its end. Raises PlaceError; TimeoutError, and then nothing of it goes on."""
        ...

    async def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do something with folders there, as `folders.perform` does. Raises PlaceError."""
        ...

    async def open_step(
        self, argv: Sequence[str], protocol: asyncio.Protocol, patience_s: float
    ) -> asyncio.WriteTransport:
        """Start a program that carries bytes, once it has said so. Raises OSError, ChannelError."""
        ...

    def channel(self, way: MachineWay, secrets: Mapping[str, str]) -> Channel: ...

    async def close(self) -> None: ...


class ThisComputer:
    """A login node that evalfleet itself runs on."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Jobs get all of it. In a job of the cluster itself, Slurm's variables of that job are not for ours.
        kept = {name: environ[name] for name in KEPT if name in environ}
        sbatch = {name: value for name, value in environ.items() if name.startswith("SBATCH_")}
        self.environ = {**host_environment(os.environ), **sbatch, **kept}
        self._lines: set[StepTransport | MailTransport] = set()
        self._clerk = FolderClerk()

    async def run(self, argv: Sequence[str], given: str, answer_s: float) -> Spoken:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=self.environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us: a job that is half submitted would be forgotten
            )
        except OSError as err:
            raise PlaceError(
                f"{argv[0]} cannot be run ({err.strerror}): run evalfleet where Slurm's commands are, on a "
                "login node of the cluster, or name one in `login` of the place",
                transient=False,
                scope="place",
            ) from err
        try:
            async with asyncio.timeout(answer_s):
                out, errors = await process.communicate(given.encode())
        finally:
            if process.returncode is None:
                await children.end(process)
        return Spoken(process.returncode or 0, out, errors)

    async def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(folders.perform, dict(request))

    async def open_step(
        self, argv: Sequence[str], protocol: asyncio.Protocol, patience_s: float
    ) -> asyncio.WriteTransport:
        return self._kept(await open_step(argv, self.environ, protocol, patience_s))

    async def open_mail(self, folder: str, key: str, protocol: asyncio.Protocol) -> OpenLink:
        """Open a line to a machine by the mailbox in this folder. Raises OSError."""
        line = await open_mail(FolderMail(self._clerk, folder), key, protocol)
        return OpenLink(self._kept(line), write_secret=line.write_secret)

    def _kept(self, line: StepTransport | MailTransport) -> asyncio.WriteTransport:
        self._lines = {other for other in self._lines if not other.ended.is_set()} | {line}
        return line

    def channel(self, way: MachineWay, secrets: Mapping[str, str]) -> Channel:
        mover = LocalMover(Path(way.folder), secrets)
        return Resident(way.dial, mover, way.fence, secrets, way.on_load)

    async def close(self) -> None:
        """Lines end with their channels, which are closed by now: wait until they have."""
        try:
            async with asyncio.timeout(STEP_END_S):
                for line in self._lines:
                    await line.ended.wait()
        except TimeoutError:
            for line in self._lines:
                line.abort()
            for line in self._lines:
                await line.ended.wait()
