"""Files that machines of Azure ML fetch from the workspace's datastore: sent once, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError, RequestError
from evalfleet.mirror import open_bucket
from evalfleet.model import KeptFiles
from evalfleet.places.azure.blobs import BlobAccount, BlobStorage
from evalfleet.places.azure.uploads import LIST, FolderUpload
from standins.azure_ml import StandIn
from standins.azure_ml.api import CONTAINER
from standins.cloud.faults import Failed
from standins.cloud.words import Call
from tests.azurite import AZURITE_ACCOUNT, AZURITE_KEY, azurite
from tests.cloud.ml_places import FAST, place

DISK = bytes(2500) + os.urandom(12 << 20)
SMALL = b"boots"


@pytest.fixture
def ml() -> Iterator[StandIn]:
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
    return KeptFiles("golden storage", f"golden-{name}", paths, digests, "ADDRESSES")


def keep(ml: StandIn, home: Path, files: KeptFiles, **more: Any) -> tuple[Mapping[str, str], list[str]]:
    """Returns the addresses, and what was told."""
    said: list[str] = []

    async def main() -> Mapping[str, str]:
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


def test_files_are_sent_once_and_each_can_be_read_by_its_address(ml: StandIn, tmp_path: Path) -> None:
    files = kept(tmp_path / "golden")
    addresses, said = keep(ml, tmp_path, files)
    listed = json.loads(there(ml)[LIST])
    assert listed["sizes"] == {"windows.boot": 5, "data.img": len(DISK), "empty": 0}
    for name, path in files.paths.items():
        assert there(ml)[name] == Path(path).read_bytes()
    assert addresses.keys() == files.paths.keys()
    assert "is sent to az://azureml-blobstore-00000000/evalfleet/golden-" in said[0]
    assert "sig=" not in "".join(said), "addresses are shown to nobody"
    trusted = ssl.create_default_context(cafile=str(ml.ca))
    with urllib.request.urlopen(addresses["data.img"], context=trusted) as answer:
        assert answer.read() == DISK
    puts = count_puts(ml)
    _, said = keep(ml, tmp_path, files)
    assert puts() == 0, "what is there is not sent again"
    assert said == [f"golden storage is in az://{CONTAINER}/evalfleet/{files.name} already"]


def test_a_second_try_goes_on_and_nobody_sees_half_of_it(ml: StandIn, tmp_path: Path) -> None:
    """Files that got there whole stay. A file that was cut short is sent again."""
    files, sent = kept(tmp_path / "golden"), list[str]()

    def dies(call: Call) -> object:
        """The second part of the disk, and all after it, get no answer."""
        if call.method == "PUT" and call.path.endswith("data.img"):
            sent.append(call.path)
            return Failed() if len(sent) > 1 else None
        return None

    async def cut_short() -> None:
        made = place(ml, tmp_path)
        task = asyncio.create_task(made.keep_files(files, 3600.0, lambda word: None))
        while len(sent) <= 1:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.close()

    ml.do(lambda: setattr(ml.cloud.faults, "script", dies))
    asyncio.run(cut_short())
    ml.do(lambda: setattr(ml.cloud.faults, "script", None))
    assert "data.img" not in there(ml), "half a disk is nobody's to read"
    begun = ml.do(lambda: len(ml.storage.calls))
    keep(ml, tmp_path, files)
    assert there(ml)["data.img"] == DISK
    again = [path for method, path, _ in ml.do(lambda: ml.storage.calls[begun:]) if method == "PUT"]
    assert not [path for path in again if path.endswith("windows.boot")], "it was there"


def test_a_file_that_changes_while_it_is_sent_is_not_used(ml: StandIn, tmp_path: Path) -> None:
    files = kept(tmp_path / "golden")
    (tmp_path / "golden/data.img").write_bytes(DISK[::-1])
    with pytest.raises(RequestError, match=r"data\.img was changed while it was sent; nothing of it is used"):
        keep(ml, tmp_path, files)
    assert "data.img" not in there(ml)
    (tmp_path / "golden/data.img").unlink()
    with pytest.raises(RequestError, match=r"data\.img: No such file or directory"):
        keep(ml, tmp_path, files)


def test_other_contents_are_another_folder_and_two_may_send_at_once(ml: StandIn, tmp_path: Path) -> None:
    one, other = kept(tmp_path / "one"), kept(tmp_path / "other", DISK + b"more")

    async def main() -> list[Mapping[str, str]]:
        made = place(ml, tmp_path)
        try:
            ways = (made.keep_files(files, 3600.0, lambda word: None) for files in (one, one, other))
            return list(await asyncio.gather(*ways))
        finally:
            await made.close()

    first, same, second = (each["data.img"].partition("?")[0] for each in asyncio.run(main()))
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
    assert any("cannot be reached" in word and "it is tried again" in word for word in said), said


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
    assert words.startswith("storage account standinstorage: "), words
    assert "container" in words if gone else "Storage Blob Data Contributor" in words, words
    assert "\n" not in words


@pytest.mark.nightly
def test_azurite_takes_files_as_the_stand_in_does(tmp_path: Path) -> None:
    """Microsoft's own emulator, with an address that lets its holder read and do nothing else."""
    files, said = kept(tmp_path / "golden"), list[str]()

    async def login() -> str:
        raise AssertionError("the key is known")

    async def main(endpoint: str) -> str:
        storage = BlobStorage(BlobAccount(AZURITE_ACCOUNT, endpoint, AZURITE_KEY), open_bucket, login)
        bucket = storage.bucket("bucket", "evalfleet")
        assert await FolderUpload(bucket, files, said.append).bring()
        assert not await FolderUpload(bucket, files, said.append).bring()
        return (await bucket.sign("GET", [f"{files.name}/data.img"], 600.0))[0]

    with azurite(tmp_path / "azurite") as environ:
        url = asyncio.run(main(environ["AZURE_STORAGE_ENDPOINT"]))
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == DISK
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE"))
