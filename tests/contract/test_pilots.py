"""Jobs of a service that nobody can connect to: the pilot, its mailbox and its token."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.mailbox import Mail, StoreMail, empty_mail
from evalfleet.channels.mailboxes import KeptMailbox, Mailboxes, MailPilot
from evalfleet.channels.supervisor.pilot import RESTARTED
from evalfleet.mirror import open_objects
from evalfleet.model import AttemptId, Command, Job, MachineId
from evalfleet.places.azure.blobs import BlobAccount, BlobClient, LentKey, blob_account, signature
from evalfleet.places.azure.mailboxes import BlobMailboxes
from evalfleet.places.azure.names import moment
from evalfleet.ports import Fence, Objects, PlaceContext
from standins.cloud import tls
from standins.gcs import CloudStorage
from tests.azurite import AZURITE_ACCOUNT, azurite, login_token
from tests.mailboxes import QUICK_S, Store, cloud_storage
from tests.pythons import python_3_8
from tests.waiting import PATIENCE_S

MACHINE = MachineId("run-abc123-1")


class BucketMailboxes(Mailboxes):
    """In the stand-in for Cloud Storage, a prefix each."""

    def __init__(self, home: Path, store: Store) -> None:
        super().__init__(home)
        self._store = store

    async def _open(self, machine: MachineId, seconds: float) -> Mapping[str, Any]:
        return {**self._store.way, "url": f"{self._store.way['url']}/mail/{machine}"}

    def mail(self, machine: MachineId) -> Mail:
        objects = open_objects(f"{self._store.url}/mail", self._store.environ)

        async def opened() -> Objects:
            return objects

        return StoreMail(opened, machine, QUICK_S)

    async def remove(self, machine: MachineId) -> None:
        await empty_mail(self.mail(machine))

    async def all(self) -> Sequence[KeptMailbox]:
        return ()

    async def remove_kept(self, box: KeptMailbox) -> None:
        raise AssertionError


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
        # it looks for the token where jobs of the same user can
        token = told["way"]
        word = (token.get("query") or token["headers"]["Authorization"])[-20:]
        places = "/proc/[0-9]*/environ /proc/[0-9]*/cmdline ../../../*"
        look = f"grep -sl '[{word[0]}]{word[1:]}' {places} >found; true"
        command = Command(("sh", "-c", f'cd "$EVALFLEET_OUT"; {look}'))
        await channel.start(Job(AttemptId("t.0"), command, 60.0))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        await channel.collect(AttemptId("t.0"), folder / "home" / "t.0")
        assert (folder / "home/t.0/found").read_text() == "", "a job can read the token"
        started = await boxes.marks(MACHINE)
        assert started.start is not None
        assert (started.end, started.restarted) == (None, False)
        with contextlib.suppress(urllib.error.HTTPError):
            assert await asyncio.to_thread(orders, pilot) == told
            assert "take" not in json.loads(pilot.environ["EVALFLEET_MAILBOX"]), "orders are there for all"

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
    assert not (folder / "first/evalfleet/machine").exists()


def test_a_pilot_lives_with_its_job(tmp_path: Path) -> None:
    with CloudStorage("bucket") as storage:
        boxes = BucketMailboxes(tmp_path, cloud_storage(storage, tmp_path))
        asyncio.run(life(boxes, tmp_path))


def test_a_pilot_without_a_mailbox_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        with CloudStorage("bucket") as storage:
            boxes = BucketMailboxes(tmp_path, cloud_storage(storage, tmp_path))
            pilot = await boxes.make(MACHINE, 600.0, 600.0)
            storage.buckets["bucket"].clear()
            environ = {"PATH": "/usr/bin:/bin", **pilot.environ}
            argv = (sys.executable, *pilot.argv[1:])
            said = await asyncio.to_thread(
                subprocess.run, argv, cwd=tmp_path, env=environ, capture_output=True, text=True
            )
            assert said.returncode == 1
            assert said.stderr == "the mailbox refuses us: 404\n"

    asyncio.run(main())


# -- Azure ---------------------------------------------------------------------------------------------


def test_signatures_are_those_of_the_vendors_client() -> None:
    """What azure-storage-blob 12.15.0, of the same version of the API, makes of the same."""
    account = BlobAccount("acct", key=base64.b64encode(b"a" * 32).decode())
    expiry = "2026-11-18T00:00:00Z"
    until = moment(expiry) or 0.0
    assert signature(account, "rc", until, "evalfleet-x").endswith(
        "&sig=MwkSPUfy8fMkx4AYSUZJVyVseKrls1hKD8PwEsRK%2Fe0%3D"
    )
    lent = LentKey(
        *("11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-000000000000"),
        *("2026-11-17T09:00:00Z", "2026-11-24T08:00:00Z", "b", "2021-12-02"),
        base64.b64encode(b"k" * 32).decode(),
    )
    assert signature(account, "rc", until, "evalfleet-x", lent=lent).endswith(
        "&sig=clOuwSDl4%2Be7r1TamVgyelWUHON0%2FCbiMkoZJYJMt4I%3D"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["key", "login"])
def test_mailboxes_are_containers_of_an_account(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the account's key, and by a login, which signs with a key that is lent to it."""

    async def login() -> str:
        return login_token()

    async def main(environ: Mapping[str, str]) -> None:
        account = blob_account(AZURITE_ACCOUNT, environ)
        blobs = BlobClient(account, time.time, str(ca or ""), login)
        assert blobs.by_key == (by == "key")

        async def opened() -> BlobClient:
            return blobs

        boxes = BlobMailboxes("test", PlaceContext(tmp_path, "0a1b2c"), "Zoë@host", opened, time.time, 60.0)
        try:
            await life(boxes, tmp_path)
            other = await boxes.make(MachineId("run-abc123-2"), 60.0, 60.0)
            first, second = sorted(await boxes.all())
            assert (first.machine, first.home, first.owner) == (MACHINE, "0a1b2c", "Zoë@host")
            refused = asyncio.to_thread(statuses, other, f"{environ['AZURE_STORAGE_ENDPOINT']}/{first.name}")
            assert await refused == {"own": 200, "other": 403, "delete": 403, "list": 403}
            await boxes.remove_kept(second)
            await boxes.remove(MACHINE)
            await boxes.remove(MACHINE)
            assert await boxes.all() == []
        finally:
            await blobs.close()

    (tmp_path / "azurite").mkdir()
    ca = None
    if by == "login":  # which is not sent in the clear
        ca, _ = tls.make(tmp_path, ["127.0.0.1"])
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    with azurite(tmp_path / "azurite", ca) as environ:
        keyless = {name: value for name, value in environ.items() if "KEY" not in name}
        asyncio.run(main(environ if by == "key" else keyless))


def orders(pilot: MailPilot) -> dict[str, Any]:
    """What its job is told, or where it takes that from. Raises HTTPError if that is no longer there."""
    told: dict[str, Any] = json.loads(pilot.environ["EVALFLEET_MAILBOX"])
    if "take" in told:
        with urllib.request.urlopen(told["take"], timeout=30) as answer:
            told = json.load(answer)
    return told


def statuses(pilot: MailPilot, other: str) -> dict[str, int]:
    """What the token of a machine is good for."""
    box = orders(pilot)
    url, query, program = box["way"]["url"], box["way"]["query"], box["program"]
    return {
        "own": status("GET", f"{url}/{program}?{query}"),
        "other": status("GET", f"{other}/{program}?{query}"),
        "delete": status("DELETE", f"{url}/{program}?{query}"),
        "list": status("GET", f"{url}?restype=container&comp=list&{query}"),
    }


def status(method: str, url: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        with err:
            return err.code
