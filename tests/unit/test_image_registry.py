"""WAA's list of tasks out of a registry: a real server on loopback that speaks the registry's protocol."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.benchmarks.loaded import Loaded, Outside
from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.errors import RequestError
from tests.unit import image_making as making
from tests.unit.image_making import BASE, COPY, FOLDER, LAYERS, digest_of, oci_files, tar
from tests.unit.image_registry import PASSWORD, TOKEN, USER, Registry, registry

BLOBS = [digest_of(gzip.compress(layer, mtime=0)) for layer in LAYERS]
LOGIN = {"registry_user": USER, "registry_password": "SECRET"}
LARGE = 70 << 20


@pytest.fixture
def server() -> Iterator[Registry]:
    with registry(oci_files()) as made:
        yield made


def load(image: str, folder: Path, password: str = PASSWORD, **settings: Any) -> Loaded:
    given = msgspec.convert({"image": image, **settings}, WaaSettings)
    return WaaBenchmark.load_from("waa", given, folder, Outside(folder / "home", {"SECRET": password}))


def refusal(image: str, folder: Path, **settings: Any) -> str:
    with pytest.raises(RequestError) as refused:
        load(image, folder, **settings)
    said = str(refused.value)
    assert "\n" not in said
    assert not any(secret in said for secret in (PASSWORD, TOKEN, "sig="))
    return said


def ids(loaded: Loaded) -> list[str]:
    return [task.id for task in loaded.tasks]


def test_the_list_comes_from_the_layer_that_the_history_names(server: Registry, tmp_path: Path) -> None:
    found = load(server.image, tmp_path)
    assert ids(found) == ["n1", "n2", "v1"]
    assert found.warnings == (f"tasks: from {server.image}@{server.digest}",)
    assert BLOBS[1] in server.blobs_asked()
    assert set(server.store.words) == {None}, "our token is not for the store that blobs are in"


def test_a_large_layer_that_only_speaks_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    """As in WAA's own image, where gigabytes come of `pip install -r /client/requirements.txt`."""
    large = tar({"usr/lib/torch.so": bytes(LARGE)})
    files = oci_files((large, *LAYERS), made_by=(making.MAKERS[0], *making.MAKERS), packed=False)
    with registry(files) as server:
        assert ids(load(server.image, tmp_path)) == ["n1", "n2", "v1"]
        assert digest_of(large) not in server.blobs_asked()


@pytest.mark.parametrize("made_by", [(), ("RUN something", "RUN else"), ("too", "many", "words")])
def test_without_a_history_that_helps_small_layers_are_read(tmp_path: Path, made_by: Sequence[str]) -> None:
    with registry(oci_files(made_by=made_by)) as server:
        assert ids(load(server.image, tmp_path)) == ["n1", "n2", "v1"]


def test_nothing_large_is_read_on_the_off_chance(tmp_path: Path) -> None:
    large = tar({"usr/lib/torch.so": bytes(LARGE)})
    with registry(oci_files((large,), made_by=("RUN something",), packed=False)) as server:
        assert "no layer that may hold /client" in refusal(server.image, tmp_path)
        assert digest_of(large) not in server.blobs_asked()


def test_upper_layers_hide_lower_ones(tmp_path: Path) -> None:
    newer = tar({f"{FOLDER}/test_all.json": b'{"vlc": ["v1"]}'})
    with registry(oci_files((*LAYERS, newer), made_by=(*making.MAKERS, COPY))) as server:
        assert ids(load(server.image, tmp_path)) == ["v1"]


# -- logins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", ["token", "basic"])
def test_a_private_registry_is_asked_with_its_login(tmp_path: Path, login: str) -> None:
    with registry(oci_files(), login) as server:
        assert ids(load(server.image, tmp_path, **LOGIN)) == ["n1", "n2", "v1"]
        assert set(server.store.words) == {None}
        said = refusal(server.image, tmp_path / "a", password="wrong:pass", **LOGIN)
        assert f"{server.address} refuses it (answer 401; me is logged in)" in said
        assert "check image, registry_user and registry_password" in said
        assert "wrong:pass" not in said
        assert "nobody is logged in" in refusal(server.image, tmp_path / "b")
        server.status = 500
        assert "answers 500" in refusal(server.image, tmp_path / "c", **LOGIN)
    kept = b"".join(file.read_bytes() for file in (tmp_path / "home").rglob("*") if file.is_file())
    assert kept
    assert PASSWORD.encode() not in kept
    assert TOKEN.encode() not in kept


def test_a_password_that_is_not_there_is_asked_for(server: Registry, tmp_path: Path) -> None:
    assert "needs SECRET, the password of me" in refusal(server.image, tmp_path, password="", **LOGIN)
    assert server.asked == []


@pytest.mark.parametrize("realm", ["http://registry.test/token", "file:///etc/passwd", "http://[", ""])
def test_a_password_goes_nowhere_in_the_clear(server: Registry, tmp_path: Path, realm: str) -> None:
    server.login, server.realm = "token", realm
    assert "refuses it (answer 401" in refusal(server.image, tmp_path, **LOGIN)


# -- what is kept ----------------------------------------------------------------------------------


def test_a_second_run_reads_nothing_again(server: Registry, tmp_path: Path) -> None:
    first = load(server.image, tmp_path)
    server.asked.clear()
    assert load(server.image, tmp_path) == first
    assert {path for path, _ in server.asked} == {"/v2/windowsarena/winarena/manifests/latest"}
    server.asked.clear()
    pinned = f"{server.image}@{server.digest}"
    assert ids(load(pinned, tmp_path)) == ids(first)
    assert server.asked == [], "what a digest stands for does not change"


def test_a_registry_that_tells_no_digest_is_read_by_what_it_sends(server: Registry, tmp_path: Path) -> None:
    server.tells_digest = False
    assert load(server.image, tmp_path).warnings == (f"tasks: from {server.image}@{server.digest}",)


def test_a_tag_that_has_moved_is_read_anew(server: Registry, tmp_path: Path) -> None:
    load(server.image, tmp_path)
    server.files = oci_files((BASE, making.tasks_layer({"vlc": ["v1"]})))
    assert ids(load(server.image, tmp_path)) == ["v1"]


def test_without_a_network_the_last_list_serves_with_a_note(server: Registry, tmp_path: Path) -> None:
    first = load(server.image, tmp_path)
    server.status = 429
    found = load(server.image, tmp_path)
    assert found.tasks == first.tasks
    said, doubt = found.warnings
    assert said == first.warnings[0]
    assert "has given too much (answer 429): the tasks are those of the last time" in doubt


def test_without_a_network_and_a_list_both_ways_out_are_told(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        image = f"127.0.0.1:{nobody.getsockname()[1]}/waa"
        said = refusal(image, tmp_path)
    assert "cannot be reached (Connection refused)" in said
    assert (
        "git clone https://github.com/microsoft/WindowsAgentArena, then --set waa=WindowsAgentArena" in said
    )
    assert f"`docker save -o waa.tar {image}` where the image is, then --set waa=waa.tar" in said


# -- bad days --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "has no such image; check image"),
        (403, "refuses it (answer 403; nobody is logged in); check image, registry_user"),
        (429, "has given too much (answer 429); log in with registry_user and registry_password, or wait"),
        (503, "answers 503"),
    ],
)
def test_a_refusal_says_what_to_do(server: Registry, tmp_path: Path, status: int, words: str) -> None:
    server.status = status
    assert words in refusal(server.image, tmp_path)


def test_a_layer_that_comes_in_part_or_is_another_is_refused(server: Registry, tmp_path: Path) -> None:
    server.cut = True
    assert "cut short" in refusal(server.image, tmp_path)
    server.cut, server.swap = False, True
    assert "its digest is another" in refusal(server.image, tmp_path)
    assert not list((tmp_path / "home").rglob("sha256*"))
    server.swap = False
    assert ids(load(server.image, tmp_path)) == ["n1", "n2", "v1"]


@pytest.mark.parametrize("where", ["ftp://x.test", "http://registry.test", "http://127.0.0.1:9/\x7f"])
def test_blobs_that_are_nowhere_are_refused_without_what_they_were_signed_with(
    server: Registry, tmp_path: Path, where: str
) -> None:
    server.blobs_at = where
    assert "the list of tasks cannot be read from" in refusal(server.image, tmp_path)


def index(**about: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, **about}).encode()


ARM = {"digest": BLOBS[0], "platform": {"os": "linux", "architecture": "arm64"}}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"<html>a proxy's page</html>", "the manifest is none"),
        (index(manifests=[ARM]), "nothing for linux/amd64"),
        (index(manifests=[{"digest": BLOBS[1]}]), "its digest is another"),
        (index(manifests=[{"digest": "sha256:" + "0" * 64}]), "has no such image"),
        (index(schemaVersion=1), "of a kind that is not understood"),
        (index(manifests=[{"digest": "../../x"}]), "by no digest"),
        (index(config={"digest": BLOBS[0]}, layers=[{"digest": BLOBS[0], "size": -1}]), "by no digest"),
        (index(config={"digest": BLOBS[0]}, layers=[{"digest": BLOBS[0]}] * 2000), "more than 1000 layers"),
        (b" " * (5 << 20), "larger than 4 MB"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    server: Registry, tmp_path: Path, manifest: bytes, words: str
) -> None:
    server.files[BLOBS[1]] = BASE
    server.files["index.json"] = manifest
    assert words in refusal(server.image, tmp_path)


@pytest.mark.parametrize("image", ["UPPER/x", "a b", "x@sha256:12", "http://x.test/y", "x:-", "", "x/../y"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, image: str) -> None:
    assert "is no name of an image" in refusal(image, tmp_path)
