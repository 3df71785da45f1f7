"""Files that machines of Azure ML fetch from the workspace's datastore: sent once, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import KeptFiles
from evalfleet.places.azure import uploads
from evalfleet.places.azure.blobs import BlobAccount, BlobClient
from evalfleet.places.azure.uploads import LIST, FolderUpload
from standins.azure_ml import StandIn
from standins.azure_ml.api import CONTAINER
from standins.cloud.faults import Failed
from standins.cloud.words import Call
from tests.azurite import AZURITE_ACCOUNT, AZURITE_KEY, azurite
from tests.cloud.ml_places import FAST, place

BLOCK = 1000
DISK = bytes(2500) + os.urandom(5200)
SMALL = b"boots"


@pytest.fixture
def ml(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Blocks are small, and one is sent at a time: so it is known what was sent."""
    monkeypatch.setattr(uploads, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(uploads, "AT_ONCE", 1)
    with StandIn(ml_timing=FAST) as made:
        yield made


def kept(folder: Path, disk: bytes = DISK) -> KeptFiles:
    contents = {"windows.boot": SMALL, "data.img": disk, "empty": b""}
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    digests = {name: sha256(content).hexdigest() for name, content in contents.items()}
    name = sha256(json.dumps(digests).encode()).hexdigest()[:32]
    paths = {name: str(folder / name) for name in contents}
    return KeptFiles("golden storage", f"golden-{name}", paths, digests, ("URL", "TOKEN"))


def keep(ml: StandIn, home: Path, files: KeptFiles, **more: Any) -> tuple[tuple[str, str], list[str]]:
    """Returns the address and the token, and what was told."""
    said: list[str] = []

    async def main() -> tuple[str, str]:
        made = place(ml, home, **more)
        try:
            return await made.keep_files(files, 3600.0, said.append)
        finally:
            await made.close()

    return asyncio.run(main()), said


def there(ml: StandIn) -> dict[str, bytes]:
    blobs = ml.do(lambda: dict(ml.storage.containers[CONTAINER].blobs))
    return {name.rpartition("/")[2]: content for name, content in blobs.items()}


def count_puts(ml: StandIn) -> Callable[[], int]:
    begun = ml.do(lambda: len(ml.storage.calls))
    return lambda: sum(method == "PUT" for method, _, _ in ml.do(lambda: ml.storage.calls[begun:]))


def test_files_are_sent_once_and_can_be_read_by_their_address_and_token(ml: StandIn, tmp_path: Path) -> None:
    files = kept(tmp_path / "golden")
    (url, token), said = keep(ml, tmp_path, files)
    listed = json.loads(there(ml).pop(LIST))
    assert listed["sizes"] == {"windows.boot": 5, "data.img": 7700, "empty": 0}
    assert {name: content for name, content in there(ml).items() if name != LIST} == {
        name: Path(path).read_bytes() for name, path in files.paths.items()
    }
    assert url == f"{ml.storage_endpoint}/{CONTAINER}/evalfleet/{files.name}"
    assert "is sent to azureml-blobstore-00000000/evalfleet/golden-" in said[0]
    assert token not in "".join(said), "the token is nobody's to read"
    trusted = ssl.create_default_context(cafile=str(ml.ca))
    assert urllib.request.urlopen(f"{url}/data.img?{token}", context=trusted).read() == DISK
    puts = count_puts(ml)
    again, said = keep(ml, tmp_path, files)
    assert again[0] == url
    assert puts() == 0, "what is there is not sent again"
    assert said == [f"golden storage is in {CONTAINER}/evalfleet/{files.name} already"]


def test_a_second_try_goes_on_and_nobody_sees_half_of_it(ml: StandIn, tmp_path: Path) -> None:
    files, sent = kept(tmp_path / "golden"), list[str]()

    def dies(call: Call) -> object:
        """The third block of the disk, and all after it, get no answer."""
        if call.method == "PUT" and call.path.endswith("data.img"):
            sent.append(call.path)
            return Failed() if len(sent) > 3 else None
        return None

    async def cut_short() -> None:
        made = place(ml, tmp_path)
        task = asyncio.create_task(made.keep_files(files, 3600.0, lambda word: None))
        while len(sent) <= 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.close()

    ml.do(lambda: setattr(ml.cloud.faults, "script", dies))
    asyncio.run(cut_short())
    ml.do(lambda: setattr(ml.cloud.faults, "script", None))
    assert set(there(ml)) == {"windows.boot"}, "half a disk is nobody's to read"
    puts = count_puts(ml)
    keep(ml, tmp_path, files)
    assert there(ml)["data.img"] == DISK
    # five of eight blocks, both lists of blocks, and the list of files: the three that got there stay
    assert puts() == 5 + 2 + 1


def test_a_file_that_changes_while_it_is_sent_is_not_used(ml: StandIn, tmp_path: Path) -> None:
    files = kept(tmp_path / "golden")
    (tmp_path / "golden/data.img").write_bytes(DISK[::-1])
    with pytest.raises(RequestError, match=r"data\.img was changed while it was sent; nothing of it is used"):
        keep(ml, tmp_path, files)
    assert set(there(ml)) == {"windows.boot"}
    (tmp_path / "golden/data.img").unlink()
    with pytest.raises(RequestError, match=r"data\.img: No such file or directory"):
        keep(ml, tmp_path, files)


def test_other_contents_are_another_folder_and_two_may_send_at_once(ml: StandIn, tmp_path: Path) -> None:
    one, other = kept(tmp_path / "one"), kept(tmp_path / "other", DISK + b"more")

    async def main() -> list[tuple[str, str]]:
        made = place(ml, tmp_path)
        try:
            ways = (made.keep_files(files, 3600.0, lambda word: None) for files in (one, one, other))
            return list(await asyncio.gather(*ways))
        finally:
            await made.close()

    first, same, second = (url for url, _ in asyncio.run(main()))
    assert first == same != second
    lists = [name for name in ml.do(lambda: ml.storage.containers[CONTAINER].blobs) if name.endswith(LIST)]
    assert len(lists) == 2


def test_a_storage_that_is_away_for_a_while_is_asked_again(ml: StandIn, tmp_path: Path) -> None:
    refused: list[str] = []

    def busy(call: Call) -> object:
        if call.method == "PUT" and call.path.endswith("data.img") and len(refused) < 12:
            refused.append(call.path)
            return Failed()
        return None

    ml.do(lambda: setattr(ml.cloud.faults, "script", busy))
    _, said = keep(ml, tmp_path, kept(tmp_path / "golden"))
    assert there(ml)["data.img"] == DISK
    assert any("does not answer" in word and "it is tried again" in word for word in said), said


@pytest.mark.parametrize("gone", [True, False], ids=["no datastore", "no right to write"])
def test_what_keeps_files_from_being_sent_is_said_in_a_line(ml: StandIn, tmp_path: Path, gone: bool) -> None:
    if gone:
        ml.do(lambda: ml.storage.containers.pop(CONTAINER))
    else:
        ml.service.has_key = False
        ml.do(lambda: ml.storage.roles.clear())
    with pytest.raises(PlaceError) as refused:
        keep(ml, tmp_path, kept(tmp_path / "golden"))
    words = str(refused.value)
    assert words.startswith("place 'ml': golden storage: "), words
    assert "container" in words if gone else "Storage Blob Data Contributor" in words, words
    assert "\n" not in words


@pytest.mark.nightly
def test_azurite_takes_files_as_the_stand_in_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microsoft's own emulator: blocks that nobody sees, what was sent already, and the token to read."""
    monkeypatch.setattr(uploads, "BLOCK_BYTES", BLOCK)
    files, said = kept(tmp_path / "golden"), list[str]()

    async def main(endpoint: str) -> str:
        account = BlobAccount(AZURITE_ACCOUNT, endpoint, AZURITE_KEY)
        blobs = BlobClient(account, time.time)
        try:
            disk = f"evalfleet/{files.name}/data.img"
            first = uploads._block_id(0, DISK[:BLOCK])
            await blobs.put_block("bucket", disk, first, DISK[:BLOCK])
            assert await blobs.blocks("bucket", disk) == {first}
            assert await blobs.names("bucket") == [], "half a blob is nobody's to see"
            assert await FolderUpload(blobs, "bucket", "evalfleet", files, said.append).bring()
            assert not await FolderUpload(blobs, "bucket", "evalfleet", files, said.append).bring()
            return f"{endpoint}/bucket/{disk}?{await blobs.token('r', 4e9, 'bucket')}"
        finally:
            await blobs.close()

    with azurite(tmp_path / "azurite") as environ:
        url = asyncio.run(main(environ["AZURE_STORAGE_ENDPOINT"]))
        assert urllib.request.urlopen(url).read() == DISK
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE"))
