"""What comes from machines that nothing but a mailbox reaches, and from clusters and clouds about machines:
ways in of `fuzz`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evalfleet.api.documents import belonging_row
from evalfleet.api.places import FoundBelonging
from evalfleet.channels.mail.boxes import Mailboxes, MailStore
from evalfleet.channels.mail.channel import MailChannel
from evalfleet.channels.mail.lines import Mail
from evalfleet.channels.supervisor.mailbox import mail_out, opened, sealed
from evalfleet.channels.supervisor.pilot import ALLOCATED, END, START
from evalfleet.errors import ChannelError, PlaceError, StaleController
from evalfleet.model import Command, Job, MachineId
from evalfleet.places.gce.lifecycle import host_key_in
from evalfleet.places.slurm.commands import Slurm, refusal
from evalfleet.places.slurm.login import Spoken
from evalfleet.places.slurm.sight import HomesTold, Sight, as_told, belonging, folder_of, queue_of
from evalfleet.ports import Fence, PlaceContext
from tests import parcels
from tests.integration.test_hostile_machine import CAPS, JOB, civil, line

KEY = "00" * 32
BETWEEN = b"\n\0\0\n"
"""Between the objects of one input."""
HEADER = b'{"n":1,"read":1}\n'
SECONDS, MAILED_S = 30.0, 2.0
MACHINE = MachineId("run-home-1")
Show = Callable[[str], None]


def signed(name: str, data: bytes) -> bytes:
    """Return what a machine with the key may put under this name: anything."""
    return data + hmac.new(KEY.encode(), name.encode() + b"\0" + data, "sha256").digest()


class HostileMail(Mail):
    """A mailbox whose machine has its key, answers what it is asked, and at one point says something else.

    `objects`: what it puts into the mailbox instead, sealed or not, one object each.
    """

    pace_s = (0.0005, 0.001)

    def __init__(self, objects: Sequence[bytes], when: str, *, is_sealed: bool) -> None:
        self._objects, self._when, self._is_sealed = objects, when, is_sealed
        self._here: dict[str, bytes] = {}
        self._written: dict[str, int] = {}
        self._read: dict[str, int] = {}

    async def create(self, name: str, content: bytes) -> bool:
        header, payload = opened(KEY, name, content)
        of = name.split("/")[1]
        self._read[of] = int(header["n"])
        if header.get("verb") == "pack":
            self._strike(of)
            self._put(of, self._said(of, end=True))
            return True
        for message in payload.splitlines():
            asked = json.loads(message)
            if asked["op"] == self._when:
                self._strike(of)
            for answer in civil(asked):
                self._put(of, self._said(of) + answer)
        return True

    def _strike(self, of: str) -> None:
        for each in self._objects:
            self._put(of, each, plainly=not self._is_sealed)

    def _said(self, of: str, **more: Any) -> bytes:
        return json.dumps({"read": self._read[of], **more}).encode() + b"\n"

    def _put(self, of: str, data: bytes, *, plainly: bool = False) -> None:
        number = self._written[of] = self._written.get(of, 0) + 1
        name = mail_out(of, number)
        self._here[name] = data if plainly else signed(name, data)

    async def read(self, name: str) -> bytes | None:
        await asyncio.sleep(0)
        return self._here.get(name)

    async def names(self, below: str) -> list[str]:
        return [f"{below}/{each.decode('utf-8', 'replace')}" for each in self._objects]

    async def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._here.pop(name, None)


class QuickMail(MailChannel):
    """A channel that does not wait long for a machine which says nothing."""

    hello_s = watch_s = 0.2


def read_mail(data: bytes, folder: Path, show: Show) -> None:
    """Objects with the machine's seal: at the greeting, at a job's start, or where its files should be."""
    _converse(data, folder, show, is_sealed=True)


def read_forged_mail(data: bytes, folder: Path, show: Show) -> None:
    """The same of who has no key."""
    _converse(data, folder, show, is_sealed=False)


async def mailed(objects: Sequence[bytes], when: str, into: Path, *, is_sealed: bool = True) -> None:
    """Start a job, and collect its files, by a mailbox whose machine puts these objects there. Raises as a
    channel does."""
    mail = HostileMail(objects, when, is_sealed=is_sealed)
    channel = QuickMail(mail, KEY, Fence("run", 1, 1.0), {}, caps=CAPS)
    try:
        async with asyncio.timeout(MAILED_S):
            if when != "pack":
                await channel.start(Job(JOB, Command(("true",)), 1.0))
            await channel.collect(JOB, into)
    finally:
        await channel.close()


def _converse(data: bytes, folder: Path, show: Show, *, is_sealed: bool) -> None:
    when = ("pack", "hello", "start", "pack")[len(data) % 4]
    into = folder / "run" / "t.0"
    into.parent.mkdir()
    with _refusals(show):
        asyncio.run(asyncio.wait_for(mailed(data.split(BETWEEN), when, into, is_sealed=is_sealed), SECONDS))
    with contextlib.suppress(FileNotFoundError):
        parcels.check_home(into)


class Marks(Mailboxes):
    """Mailboxes of which the pilot's marks are read."""

    def __init__(self, home: Path, data: bytes) -> None:
        async def opened() -> MailStore:
            raise AssertionError("it opens no bucket")

        super().__init__(PlaceContext(home, "home"), "owner", opened)
        self._data = data

    async def key(self, machine: MachineId) -> str:
        return KEY

    def mail(self, machine: MachineId) -> Any:
        return self

    async def names(self, below: str) -> list[str]:
        return [ALLOCATED, START, END]

    async def read(self, name: str) -> bytes:
        start, _, end = self._data.partition(BETWEEN)
        return signed(name, end if name == END else start)


def read_marks(data: bytes, folder: Path, show: Show) -> None:
    """What a pilot writes of its start and its end."""
    marks = asyncio.run(Marks(folder, data).marks(MACHINE))
    show(f"{int((marks.allocated or 0.0) * 1e6)}")
    if marks.start is not None:
        show(f"{marks.start.start} {marks.start.node} {int(marks.start.at * 1e6)}")
    if marks.end is not None:
        show(f"{marks.end.why} {marks.end.code} {int(marks.end.ran_s * 1e6)} {int(marks.end.at * 1e6)}")


class SaidLogin:
    """A login node on which every command prints the same."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def run(self, argv: Sequence[str], given: str, answer_s: float) -> Spoken:
        return Spoken(0, self._data, self._data)


def ask_cluster(data: bytes, folder: Path, show: Show) -> None:
    """What Slurm's commands print, and what is in the folders of machines, to the list of machines."""
    said, _, told = data.partition(BETWEEN)
    login: Any = SaidLogin(said)
    slurm = Slurm(login)

    async def ask() -> Sight:
        jobs = [*await slurm.jobs(), *await slurm.ended(("1",))]
        with _refusals(show):
            await slurm.longest_s("main")
        return Sight(queue_of(0.0, jobs), await slurm.order(), 1.8e9, 0.0, 3600.0)

    sight = asyncio.run(ask())
    show(str(refusal("sbatch", said.decode("utf-8", "replace"))))
    with _refusals(show), contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(told)
        homes = as_told(answer if isinstance(answer, dict) else {}, HomesTold).homes
        for home, machines in homes.items():
            for name, fields in machines.items():
                found = folder_of(fields)
                job = sight.queue.by_name.get(name)
                sight.machine(MACHINE, "path", name, found)
                ours = belonging("/shared", home, name, found, job, "us", 1.8e9)
                json.dumps(belonging_row(FoundBelonging("slurm", ours, is_own=True)), allow_nan=False)


def read_attributes(data: bytes, folder: Path, show: Show) -> None:
    """What a Compute Engine machine has told of its host key: one line of known_hosts, or nothing."""
    try:
        key = host_key_in(json.loads(data))
    except (ValueError, RecursionError):
        return
    if not re.fullmatch(r"[\x21-\x7e]+ [\x21-\x7e]+|", key):
        raise AssertionError(f"no host key: {key!r}")


@contextlib.contextmanager
def _refusals(show: Show) -> Iterator[None]:
    """What a reader may say of nonsense, and nothing else."""
    try:
        yield
    except (ChannelError, StaleController, PlaceError, OSError) as err:
        show(str(err))


def mail_seeds() -> tuple[bytes, ...]:
    sound = parcels.file("job.json", b"{}") + parcels.file("log", b"logged\n") + parcels.folder("out")
    parcel = parcels.closed(sound)
    return (
        HEADER + parcel,
        HEADER + parcel[:40] + BETWEEN + HEADER + parcel[40:],
        b'{"read":99999,"end":true,"code":96}\n',
        b'{"read":1e999,"code":-1}\nx',
        HEADER + line(n=1, jobs={}, state="running"),
        HEADER
        + line(push="ended", job=JOB, reason="exited", exit_code=0, seconds=1.5, result='{"score": 1}'),
        HEADER + line(n=2, error="stale", detail="epoch 7"),
        sealed(KEY, "out/x/0000000001", {"read": 1}, parcel),
    )


MARKS = (
    b'{"start":"1.0","node":"n1","at":1800000000.5}\n' + BETWEEN + b'{"ran_s":3.5}\n',
    b'{"start":[],"node":null,"at":"inf"}\n' + BETWEEN + b'{"ran_s":1e999}\n',
)
CLUSTER_SAID = (
    b"12|RUNNING|1-02:03:04|n1|main|None|evalfleet-h-m\n13|PENDING|0:00||main|JobHeldUser|m"
    + BETWEEN
    + b'{"homes":{"h":{"m":{"job":"12","start":{"start":"12.0","node":"n1","at":1.8e9},"ran":"5",'
    b'"listens":true,"about":{"owner":"u@c:/h","life_s":60,"at":1.8e9}}}}}',
    b"main*|infinite\nshort|30:00"
    + BETWEEN
    + b'{"homes":{"h":{"m":{"pilot":"x","about":[],"start":"x","made_at":1e400}}}}',
)
ATTRIBUTES = (
    b'{"queryValue":{"items":[{"namespace":"hostkeys","key":"ssh-ed25519","value":"AAAAC3Nz"}]}}',
    b'{"queryValue":{"items":[{"key":"ssh-rsa","value":"AAAA\\n* ssh-rsa BBBB"},{"key":"ssh-ed25519"}]}}',
)
WAYS: tuple[tuple[str, tuple[bytes, ...], Callable[[bytes, Path, Show], None]], ...] = (
    ("mail", mail_seeds(), read_mail),
    ("mail without the key", mail_seeds(), read_forged_mail),
    ("marks of pilots", MARKS, read_marks),
    ("what a cluster says", CLUSTER_SAID, ask_cluster),
    ("guest attributes", ATTRIBUTES, read_attributes),
)
