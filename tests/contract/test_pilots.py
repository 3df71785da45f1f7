"""Jobs of a service that nobody can connect to: the pilot, its mailbox and its token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from evalfleet.channels.mail.boxes import Mailboxes, MailPilot, MailStore
from evalfleet.channels.mail.lines import ADDRESSES_S
from evalfleet.channels.supervisor.pilot import RESTARTED
from evalfleet.errors import PlaceError
from evalfleet.mirror import open_bucket
from evalfleet.model import AttemptId, Command, Job, MachineId
from evalfleet.places.azure.blobs import BlobStorage, blob_account
from evalfleet.ports import Bucket, Fence, PlaceContext
from standins import s3
from standins.cloud import tls
from tests.azurite import AZURITE_ACCOUNT, azurite, login_token
from tests.pythons import python_3_8
from tests.waiting import PATIENCE_S

MACHINE = MachineId("run-abc123-1")


def s3_boxes(folder: Path, url: str) -> Mailboxes:
    """In the stand-in for S3."""
    store = MailStore(open_bucket("s3://bucket/mail", s3.environ_of(url)))
    return boxes_in(folder, store)


def boxes_in(folder: Path, store: MailStore) -> Mailboxes:
    async def opened() -> MailStore:
        return store

    return Mailboxes(PlaceContext(folder, "0a1b2c"), "Zoë@host", opened, time.time, 60.0)


@asynccontextmanager
async def job(pilot: MailPilot, folder: Path) -> AsyncGenerator[subprocess.Popen[bytes]]:
    """As a service runs it, with nothing but what the pilot was given."""
    folder.mkdir(exist_ok=True)
    argv = (python_3_8() or sys.executable, *pilot.argv[1:])
    trusted = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
    environ = {"PATH": "/usr/bin:/bin", **trusted, **pilot.environ}
    process = subprocess.Popen(argv, cwd=folder, env=environ)
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def life(boxes: Mailboxes, folder: Path) -> None:
    """From the submission of a machine's job to its eviction."""
    pilot = await boxes.make(MACHINE, 600.0, 600.0)
    assert (await boxes.marks(MACHINE)).start is None
    told = await asyncio.to_thread(orders, pilot)
    async with asyncio.timeout(PATIENCE_S), job(pilot, folder / "first") as first:
        channel = boxes.channel(MACHINE, Fence("test", 1, PATIENCE_S), {})
        # it looks for a signature of the machine's where jobs of the same user can
        word = told["from"][-20:]
        places = "/proc/[0-9]*/environ /proc/[0-9]*/cmdline ../../../*"
        look = f"grep -sl '[{word[0]}]{word[1:]}' {places} >found; true"
        command = Command(("sh", "-c", f'cd "$EVALFLEET_OUT"; {look}'))
        await channel.start(Job(AttemptId("t.0"), command, 60.0))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        await channel.collect(AttemptId("t.0"), folder / "home" / "t.0")
        assert (folder / "home/t.0/found").read_text() == "", "a job can read an address"
        started = await boxes.marks(MACHINE)
        assert started.start is not None
        assert (started.end, started.restarted) == (None, False)
        with pytest.raises(urllib.error.HTTPError):
            await asyncio.to_thread(orders, pilot)

        async with job(pilot, folder / "second") as second:
            assert await asyncio.to_thread(second.wait) == RESTARTED
        assert await channel.probe(None), "the second start harms the first"

        await channel.start(Job(AttemptId("t.1"), Command(("sleep", "600")), 900.0))
        first.send_signal(signal.SIGTERM)
        assert (await channel.ended(AttemptId("t.1"))).reason == "evicted"
        assert await asyncio.to_thread(first.wait) == 0
        await channel.close()
    ended = (await boxes.marks(MACHINE, started)).end
    assert ended is not None
    assert (ended.why, ended.ran_s > 0) == ("evicted", True)
    assert not list((folder / "first").iterdir()), "it has left files"


def test_a_pilot_lives_with_its_job(tmp_path: Path) -> None:
    with s3.serving() as url:
        boxes = s3_boxes(tmp_path, url)
        asyncio.run(life(boxes, tmp_path))
        asyncio.run(boxes.remove(MACHINE))
        assert not s3.contents()


def test_a_pilot_without_orders_says_so(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        pilot = await s3_boxes(tmp_path, url).make(MACHINE, 600.0, 600.0)
        environ = {"PATH": "/usr/bin:/bin", **pilot.environ}
        environ["EVALFLEET_MAILBOX"] = environ["EVALFLEET_MAILBOX"].replace("Signature=", "Signature=0")
        argv = (sys.executable, *pilot.argv[1:])
        done = await asyncio.to_thread(
            subprocess.run, argv, cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr == "the mailbox refuses us: 403\n"

    with s3.serving() as url:
        asyncio.run(main(url))


class Meanwhile:
    """A bucket in which something happens before each read."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.before_read: Callable[[], Awaitable[object]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def read(self, name: str, most: int | None = None) -> bytes | None:
        if self.before_read is not None:
            before, self.before_read = self.before_read, None
            await before()
        return await self._bucket.read(name, most)


def test_a_mailbox_that_is_removed_while_others_are_listed_is_left_out(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        bucket = Meanwhile(open_bucket("s3://bucket/mail", s3.environ_of(url)))
        boxes, other = boxes_in(tmp_path, MailStore(cast(Bucket, bucket))), MachineId("run-abc123-2")
        await boxes.make(MACHINE, 600.0, 60.0)
        assert [box.machine for box in await boxes.all()] == [MACHINE]
        await s3_boxes(tmp_path, url).make(other, 600.0, 60.0)
        bucket.before_read = partial(boxes.remove, MACHINE)
        assert [box.machine for box in await boxes.all()] == [other]

    with s3.serving() as url:
        asyncio.run(main(url))


def test_mailboxes_of_a_home_are_listed_and_removed_with_all_that_is_in_them(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        boxes, other = s3_boxes(tmp_path, url), MachineId("run-abc123-2")
        await boxes.mark_allocated(MACHINE, 5.0)  # it has no mailbox
        assert not s3.contents(), "a mark was left without a mailbox"
        await boxes.make(MACHINE, 600.0, 60.0)
        await boxes.make(other, 600.0, 60.0)
        first, second = sorted(await boxes.all())
        assert (first.machine, first.home, first.owner) == (MACHINE, "0a1b2c", "Zoë@host")
        assert [box.machine for box in await boxes.seen()] == [MACHINE, other]
        assert await boxes.mark_allocated(MACHINE, 7.0) == 7.0
        assert await boxes.mark_allocated(MACHINE, 8.0) == 7.0, "the first word counts"
        await boxes.remove_named(second.name)
        await boxes.remove(MACHINE)
        await boxes.remove(MACHINE)
        assert await boxes.all() == []
        assert not s3.contents()

    with s3.serving() as url:
        asyncio.run(main(url))


def test_a_machine_whose_life_outlasts_its_addresses_is_refused(tmp_path: Path) -> None:
    with s3.serving() as url, pytest.raises(PlaceError, match="outlasts its addresses") as refused:
        asyncio.run(s3_boxes(tmp_path, url).make(MACHINE, ADDRESSES_S, 1.0))
    assert not refused.value.transient


# -- Azure ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["key", "login"])
def test_mailboxes_are_in_a_container_of_an_account(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the account's key, and by a login, which signs with a key that is lent to it."""

    async def login() -> str:
        return login_token()

    async def main(environ: Mapping[str, str]) -> None:
        account = blob_account(AZURITE_ACCOUNT, environ)
        storage = BlobStorage(account, open_bucket, login, str(ca or ""))
        await storage.check("bucket")
        assert storage.by_key == (by == "key")
        boxes = boxes_in(tmp_path, MailStore(storage.bucket("bucket", "mail"), account.key))
        await life(boxes, tmp_path)
        await boxes.remove(MACHINE)
        assert await boxes.all() == []

    (tmp_path / "azurite").mkdir()
    ca = None
    if by == "login":  # which is not sent in the clear
        ca, _ = tls.make(tmp_path, ["127.0.0.1"])
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    with azurite(tmp_path / "azurite", ca) as environ:
        keyless = {name: value for name, value in environ.items() if "KEY" not in name}
        asyncio.run(main(environ if by == "key" else keyless))


def orders(pilot: MailPilot) -> dict[str, Any]:
    """The orders of its job. Raises HTTPError if they are no longer there."""
    take = json.loads(pilot.environ["EVALFLEET_MAILBOX"])
    with urllib.request.urlopen(take["GET"], timeout=30) as answer:
        told: dict[str, Any] = json.load(answer)
    return told
