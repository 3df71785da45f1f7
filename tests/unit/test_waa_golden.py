"""Golden storage as one archive behind a URL: brought, resumed, unpacked sparsely, and refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.golden_files import golden_files
from evalfleet.benchmarks.waa.host import download, golden, machine
from evalfleet.benchmarks.waa.host.config import SENT_FROM, HostConfig
from evalfleet.benchmarks.waa.host.docker import Docker
from evalfleet.benchmarks.waa.host.iso import Wanted
from evalfleet.benchmarks.waa.host.shell import Failed
from evalfleet.benchmarks.waa.settings import WaaSettings
from standins.waa import standin
from tests.unit.blobs import Blobs, store

pytestmark = pytest.mark.usefixtures("own_home")

DISK = os.urandom(3000) + bytes(4 << 20) + os.urandom(777)
TOKEN = "sig=ok"


def archive(inside: str = "golden", names: Sequence[str] = standin.STORAGE_FILES, **files: bytes) -> bytes:
    """A folder of it, as people pack it."""
    held = {name: name.encode() for name in names}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, data in {**held, "data.img": DISK, "notes.txt": b"x", **files}.items():
            entry = tarfile.TarInfo(f"{inside}/{name}")
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, type[Blobs]]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text("#!/bin/sh\n")
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SAS", TOKEN)
    with store({}) as made:
        yield made


def config_of(tmp_path: Path, url: str) -> HostConfig:
    settings = WaaSettings(data=str(tmp_path / "data"), golden=url, golden_token="SAS")
    probe = WaaBenchmark(settings).probe
    assert probe is not None
    config = HostConfig(json.loads(probe.env["EVALFLEET_WAA"]))
    machine.step_disk(config)
    return config


def there(config: HostConfig) -> dict[str, bytes]:
    names = [name for name in os.listdir(config.golden_folder) if name != golden.COMPLETE]
    return {name: Path(config.golden_folder, name).read_bytes() for name in names}


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data").glob("golden-download*"))


@pytest.mark.parametrize(
    ("name", "pack"), [("g.tar", bytes), ("g.tar.gz", gzip.compress), ("g.tgz", gzip.compress)]
)
def test_an_archive_is_brought_and_unpacked(
    tmp_path: Path, shop: tuple[str, type[Blobs]], name: str, pack: Any
) -> None:
    url, blobs = shop
    blobs.files[f"/{name}"] = pack(archive())
    config = config_of(tmp_path, f"{url}/{name}")
    golden.step_golden(config, Docker())
    assert golden.is_there(config)
    assert there(config) == {**{each: each.encode() for each in standin.STORAGE_FILES}, "data.img": DISK}
    disk = os.stat(f"{config.golden_folder}/data.img")
    assert disk.st_blocks * 512 < len(DISK) // 2, "zeros take no room"
    assert left(tmp_path) == []
    asked = len(blobs.asked)
    golden.step_golden(config, Docker())
    assert len(blobs.asked) == asked, "it is there"


@pytest.mark.parametrize("form", ["g.tar", "g", "folder", "here"])
def test_a_windows_that_was_booted_once_is_taken_with_the_firmware_it_had_then(
    tmp_path: Path, shop: tuple[str, type[Blobs]], form: str
) -> None:
    url, blobs = shop
    held = {**{name: name.encode() for name in standin.BOOTED_FILES}, "data.img": DISK}
    (tmp_path / "folder").mkdir()
    for name, data in held.items():
        (tmp_path / "folder" / name).write_bytes(data)
        blobs.files[f"/g/{name}"] = data
    blobs.files["/g.tar"] = archive(names=standin.BOOTED_FILES)
    if form == "here":
        kept = golden_files(WaaSettings(golden="here:folder"), tmp_path, tmp_path, "b")
        assert kept is not None
        assert set(kept.paths) == held.keys()
        return
    config = config_of(tmp_path, str(tmp_path / form) if form == "folder" else f"{url}/{form}")
    golden.step_golden(config, Docker())
    assert there(config) == held
    firmware = Path(config.storage, "windows_secure.rom")
    assert firmware.read_bytes() == b"windows_secure.rom", "the container finds it"
    Path(config.golden_folder, "windows_secure.vars").unlink()
    assert golden.lacking(there(config)) == ["windows_secure.vars"]


def test_what_is_in_a_places_storage_is_asked_for_once_and_fetched_by_its_address(
    tmp_path: Path, shop: tuple[str, type[Blobs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, blobs = shop
    held = {name: name.encode() for name in standin.STORAGE_FILES}
    blobs.files.update({f"/g/{name}": data for name, data in {**held, "data.img": DISK}.items()})
    config = config_of(tmp_path, "sent:golden-1")
    with pytest.raises(Wanted, match="`evalfleet pool prepare` sends it"):
        golden.step_golden(config, Docker())
    addresses = {name: f"{url}/g/{name}?{TOKEN}" for name in (*held, "data.img")}
    monkeypatch.setenv(SENT_FROM, json.dumps(addresses))
    golden.step_golden(config, Docker())
    assert there(config)["data.img"] == DISK
    monkeypatch.delenv(SENT_FROM)
    golden.step_golden(config, Docker())  # it is there: no address is needed
    assert config.golden_folder == str(tmp_path / "data/golden"), "it is ours, and goes when all goes"


def test_an_archive_that_broke_off_goes_on_where_it_stopped(
    tmp_path: Path, shop: tuple[str, type[Blobs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, blobs = shop
    blobs.files["/g.tar"] = archive()
    monkeypatch.setattr(download.Download.__init__, "__defaults__", (1 << 20, 1))  # small parts, tried once
    config = config_of(tmp_path, f"{url}/g.tar")
    blobs.breaks = 1
    with pytest.raises(Failed, match="bytes came of") as broken:
        golden.step_golden(config, Docker())
    assert TOKEN not in str(broken.value)
    assert left(tmp_path) == ["golden-download.part", "golden-download.part.json"]
    assert not golden.is_there(config)
    parts = len(blobs.asked)
    golden.step_golden(config, Docker())
    assert there(config)["data.img"] == DISK
    assert (parts, len(blobs.asked)) == (5, 6), "the one that broke off, and no other"


WRONG = {
    "no archive": (b"<html>sign in</html>" * 100, "is damaged, or no tar archive"),
    "half an archive": (archive()[: len(DISK) // 2], "is damaged, or no tar archive"),
    "half a gzip": (gzip.compress(archive())[:2000], "is damaged, or no tar archive"),
    "a spoilt gzip": (gzip.compress(archive())[:1000] + bytes(5000), "is damaged, or no tar archive"),
    "nothing": (b"", "is damaged, or no tar archive"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_archive_is_told_and_brought_anew(
    tmp_path: Path, shop: tuple[str, type[Blobs]], what: str
) -> None:
    url, blobs = shop
    blobs.files["/g.tar"], words = WRONG[what]
    config = config_of(tmp_path, f"{url}/g.tar")
    with pytest.raises(Failed, match=words) as refused:
        golden.step_golden(config, Docker())
    assert TOKEN not in str(refused.value)
    assert left(tmp_path) == []
    blobs.files["/g.tar"] = archive()
    golden.step_golden(config, Docker())
    assert there(config)["data.img"] == DISK


def test_an_archive_without_windows_is_named(tmp_path: Path, shop: tuple[str, type[Blobs]]) -> None:
    url, blobs = shop
    blobs.files["/g.tar"] = archive()[:2048] + bytes(1024)  # its end comes after two files
    config = config_of(tmp_path, f"{url}/g.tar")
    with pytest.raises(Failed, match=r"has no windows\.rom, windows\.vars, data\.img"):
        golden.step_golden(config, Docker())
    with pytest.raises(Failed, match=r"/other\.tar is not there"):
        golden.step_golden(config_of(tmp_path, f"{url}/other.tar"), Docker())


def test_without_room_what_came_is_kept(tmp_path: Path, shop: tuple[str, type[Blobs]]) -> None:
    url, blobs = shop
    blobs.files["/g.tar"] = archive()
    config = config_of(tmp_path, f"{url}/g.tar")
    full = Path(config.golden_folder, "data.img")
    full.parent.mkdir()
    full.symlink_to("/dev/full")
    with pytest.raises(Failed, match=r"cannot be written \(No space left on device; .* GB free\)"):
        golden.step_golden(config, Docker())
    assert left(tmp_path) == ["golden-download"]
    asked = len(blobs.asked)
    full.unlink()
    golden.step_golden(config, Docker())
    assert there(config)["data.img"] == DISK
    assert len(blobs.asked) == asked


def test_a_server_that_sends_all_instead_of_a_part_spoils_nothing(
    tmp_path: Path, shop: tuple[str, type[Blobs]]
) -> None:
    url, blobs = shop
    blobs.files["/data.img"] = DISK
    blobs.whole_after = 2
    path = tmp_path / "data.img"
    bring = download.Download(f"{url}/data.img", TOKEN, str(path), piece=1 << 20, tries=1).bring
    with pytest.raises(Failed, match="answer 200 instead of a part"):
        bring()
    blobs.whole_after = None
    bring()
    assert path.read_bytes() == DISK
