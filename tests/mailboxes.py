"""Machines of this computer that are reached by mailboxes, for tests and measurements."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.link import OpenLink
from evalfleet.channels.mail.channel import MailChannel
from evalfleet.channels.mail.folder import FolderClerk, FolderMail
from evalfleet.channels.mail.lines import (
    LINES_AHEAD,
    Mail,
    StoreMail,
    empty_mail,
    first_uses,
    open_mail,
    signed,
)
from evalfleet.channels.program import archive
from evalfleet.channels.resident import Resident
from evalfleet.channels.supervisor.files import read_key
from evalfleet.mirror import open_bucket
from evalfleet.model import Machine, MachineId, Offer
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Bucket, Channel, Fence
from tests.pythons import python_3_8

QUICK_S = (0.02, 0.2)
NODE = """\
import sys
sys.path.insert(0, sys.argv[1])
from supervisor.files import read_key
import json, os
from supervisor.mailbox import Relay, hide_memory, open_post
program, directory, path, *pace_s = sys.argv[1:]
with open(path) as file:
    way = json.load(file)
os.unlink(path)
hide_memory()
Relay(open_post(way), read_key(directory), directory, *map(float, pace_s)).run()
"""


@cache
def _python() -> str:
    """As old as those of machines may be, if there is one here."""
    return python_3_8() or sys.executable


class Nodes:
    """The machines' ends of mailboxes, a process each, with nothing but the supervisor's one file."""

    def __init__(self, folder: Path, pace_s: tuple[float, float] = QUICK_S) -> None:
        self.pace_s = pace_s
        self._program = folder / "supervisor.pyz"
        self._program.write_bytes(archive())
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, directory: Path, way: dict[str, Any]) -> None:
        if str(directory) not in self._running:
            path = directory / "way"
            path.write_text(json.dumps(way))
            path.chmod(0o600)
            argv = (_python(), "-I", "-S", "-c", NODE, str(self._program), str(directory), str(path))
            self._running[str(directory)] = subprocess.Popen((*argv, *map(str, self.pace_s)))

    def end(self, directory: Path) -> None:
        if (process := self._running.pop(str(directory), None)) is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        for directory in list(self._running):
            self.end(Path(directory))


class MailboxPlace(LocalPlace):
    """Machines of this computer, of which nothing is used but what a mailbox carries, and their folders."""

    def __init__(self, root: Path, nodes: Nodes) -> None:
        super().__init__("mail", LocalSettings(), root)
        self._nodes = nodes
        self._clerk = FolderClerk()

    def mail(self, machine: str) -> Mail:
        return FolderMail(self._clerk, str(self._directory(machine) / "mail"), self._nodes.pace_s)

    async def way(self, machine: str) -> dict[str, Any]:
        folder = self._directory(machine) / "mail"
        folder.mkdir(exist_ok=True)
        return {"folder": str(folder)}

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await super().create(machine, offer, expires_s)
        self._nodes.start(self._directory(machine), await self.way(machine))

    async def delete(self, machine: MachineId) -> None:
        self._nodes.end(self._directory(machine))
        await super().delete(machine)

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        directory = self._directory(machine.id)

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
            line = await open_mail(self.mail(machine.id), read_key(str(directory)), protocol)
            return OpenLink(line, write_secret=line.write_secret)

        return Resident(dial, LocalMover(directory, {}), fence, {})


class Store(NamedTuple):
    """A bucket, as evalfleet reaches it."""

    url: str
    environ: Mapping[str, str]


class StorePlace(MailboxPlace):
    """Machines that share no files with the controller: nothing but objects of a bucket, which they reach by
    HTTP through signed addresses."""

    def __init__(self, root: Path, nodes: Nodes, store: Store, secrets: Mapping[str, str]) -> None:
        super().__init__(root, nodes)
        self._bucket = open_bucket(f"{store.url}/mail", store.environ)  # one for all, as places have it
        self._secrets = secrets

    def mail(self, machine: str) -> Mail:
        async def opened() -> Bucket:
            return self._bucket

        return StoreMail(opened, machine, self._nodes.pace_s)

    async def way(self, machine: str) -> dict[str, Any]:
        uses = first_uses(range(1, LINES_AHEAD + 1))
        return {"urls": await signed(self._bucket, f"{machine}/", uses, 3600.0)}

    async def delete(self, machine: MachineId) -> None:
        await super().delete(machine)
        await empty_mail(self.mail(machine))

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        key = read_key(str(self._directory(machine.id)))
        return MailChannel(self.mail(machine.id), key, fence, self._secrets)
