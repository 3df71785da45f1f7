"""WAA's list of tasks out of saved images: every layout, whiteouts, and what is broken or hostile."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.benchmarks.loaded import Loaded, Outside
from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.errors import RequestError
from tests.unit import image_making as making
from tests.unit.image_making import BASE, FOLDER, LAYERS, docker_archive, oci_archive, oci_folder, tar

LISTED = [("n1", "notepad"), ("n2", "notepad"), ("v1", "vlc")]
LIST = json.dumps(making.TASKS).encode()


def load(path: Path, home: Path | None = None, **settings: Any) -> Loaded:
    given = msgspec.convert({"waa": str(path), **settings}, WaaSettings)
    outside = None if home is None else Outside(home, {})
    return WaaBenchmark.load_from("waa", given, path.parent, outside)


def listed(loaded: Loaded) -> list[tuple[str, str]]:
    return [(task.id, task.domain) for task in loaded.tasks]


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(RequestError) as refused:
        load(path, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "write",
    [
        docker_archive,
        making.linked_archive,
        oci_archive,
        lambda path: oci_archive(path, packed=False),
        lambda path: docker_archive(path, [gzip.compress(layer) for layer in LAYERS]),
        oci_folder,
    ],
    ids=["docker", "links", "oci", "oci-plain", "gzip", "folder"],
)
def test_every_layout_is_read(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    found = load(write(tmp_path / "waa.tar"))
    assert listed(found) == LISTED
    (note,) = found.warnings
    assert note.startswith(f"tasks: from {tmp_path}/waa.tar@sha256:")


def test_lists_and_ids_are_checked_as_those_of_a_checkout(tmp_path: Path) -> None:
    layer = making.tasks_layer(test_small={"vlc": ["v1"]}, test_bad={"a": ["../x"]}, test_odd={"vlc": ["v9"]})
    path = docker_archive(tmp_path / "waa.tar", [layer])
    assert listed(load(path, task_list="test_small")) == [("v1", "vlc")]
    assert "did you mean 'test_small'" in refusal(path, task_list="test_smal")
    assert "no name of a task" in refusal(path, task_list="test_bad")
    (*_, doubt) = load(path, task_list="test_odd", diff_lvl="hard").warnings
    assert "defines no task 'v9' (1 such)" in doubt


# -- layers ----------------------------------------------------------------------------------------

NEWER = json.dumps({"vlc": ["v1"]}).encode()


@pytest.mark.parametrize(
    ("layers", "tasks", "undefined"),
    [
        ([{f"{FOLDER}/test_all.json": NEWER}], ["v1"], 0),
        ([{f"{FOLDER}/examples/vlc/.wh.v1.json": b""}], ["n1", "n2", "v1"], 1),
        ([{f"{FOLDER}/examples/.wh..wh..opq": b"", f"{FOLDER}/examples/vlc/v1.json": b"{}"}], None, 2),
        # what a layer adds itself is not hidden by it, in whatever order its entries come
        ([{f"{FOLDER}/test_all.json": NEWER, f"{FOLDER}/.wh.test_all.json": b""}], ["v1"], 0),
        ([{"./.wh.client": b""}, {f"/{FOLDER}/test_all.json": NEWER}], ["v1"], 0),
        ([{f"{FOLDER}/examples": b"a file"}], None, 0),  # nothing can be said of the definitions
    ],
)
def test_upper_layers_hide_lower_ones(
    tmp_path: Path, layers: Sequence[dict[str, bytes]], tasks: list[str] | None, undefined: int
) -> None:
    path = docker_archive(tmp_path / "waa.tar", [*LAYERS, *map(tar, layers)])
    found = load(path)
    assert [task.id for task in found.tasks] == (tasks or ["n1", "n2", "v1"])
    doubts = [warning for warning in found.warnings if "defines no task" in warning]
    assert [f"({undefined} such)" in doubt for doubt in doubts] == [True] * bool(undefined)


@pytest.mark.parametrize("gone", [".wh.client", f"{FOLDER}/.wh.test_all.json", "client/.wh..wh..opq"])
def test_a_list_that_was_removed_is_not_there(tmp_path: Path, gone: str) -> None:
    path = docker_archive(tmp_path / "waa.tar", [*LAYERS, tar({gone: b""})])
    assert f"an image without /{FOLDER}/test_all.json" in refusal(path)


def test_long_names_and_hard_links_are_understood(tmp_path: Path) -> None:
    id = "i" * 140
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        files = {f"{FOLDER}/test_some.json": json.dumps({"d": [id]}).encode()}
        files[f"{FOLDER}/examples/d/{id}.json"] = b"{}"
        link = tar({f"{FOLDER}/test_all.json": f"{FOLDER}/test_some.json"}, link=tarfile.LNKTYPE)
        path = docker_archive(tmp_path / "waa.tar", [tar(files, format=format), link])
        found = load(path)
        assert listed(found) == [(id, "d")]
        assert len(found.warnings) == 1


def test_of_several_images_the_one_that_machines_use_is_taken(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "waa.tar")
    with tarfile.open(path) as archive:
        held = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
        files = {name: file.read() for name, file in held.items() if file}
    (image,) = json.loads(files["manifest.json"])
    other = {**image, "RepoTags": ["other:1"], "Layers": image["Layers"][:1]}
    files["manifest.json"] = json.dumps([other, image]).encode()
    path.write_bytes(tar(files))
    assert listed(load(path)) == LISTED
    assert listed(load(path, image="docker.io/windowsarena/winarena")) == LISTED
    assert "2 images (other:1, windowsarena/winarena:latest), and none is mine:2" in refusal(
        path, image="mine:2"
    )


# -- size ------------------------------------------------------------------------------------------


def test_an_image_of_many_gigabytes_is_read_in_little_memory_and_time(tmp_path: Path) -> None:
    """The file is sparse: what is not read costs nothing, and reading it would take minutes."""
    size = 25 << 30
    disk = tarfile.TarInfo("models/weights.bin")
    disk.size = size
    tail = tar({"etc/x": b"x"})
    layer = tarfile.TarInfo("big/layer.tar")
    head = disk.tobuf(tarfile.GNU_FORMAT)
    layer.size = len(head) + size + len(tail)
    image = {"Config": "c.json", "RepoTags": None, "Layers": ["small.tar", "big/layer.tar"]}
    rest = tar({"small.tar": LAYERS[1], "c.json": b"{}", "manifest.json": json.dumps([image]).encode()})
    path = tmp_path / "waa.tar"
    with path.open("wb") as file:
        file.write(layer.tobuf(tarfile.GNU_FORMAT) + head)
        file.seek(size, 1)
        file.write(tail + bytes(-layer.size % 512) + rest)
    tracemalloc.start()
    try:
        found = load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert listed(found) == LISTED
    assert found.warnings == (f"tasks: from {path}",), "that configuration tells nothing of its layers"
    assert peak < 8 << 20


def test_what_was_read_is_kept_by_digest(tmp_path: Path) -> None:
    path, home = oci_folder(tmp_path / "waa"), tmp_path / "home"
    first = load(path, home)
    for blob in (path / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(b"\x1f\x8bspoilt")
    assert load(path, home) == first
    for file in (home / ".waa/tasks").glob("sha256-*.json"):
        file.write_text("{}")  # one that cannot be read is not there
    with pytest.raises(RequestError, match="cannot be read"):
        load(path, home)


# -- broken and hostile ----------------------------------------------------------------------------


def raw(name: str, size: int, type: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.linkname = size, type, link
    return entry.tobuf(tarfile.GNU_FORMAT)


def sparse(size: int) -> bytes:
    return raw("a", size, tarfile.GNUTYPE_SPARSE)


HOSTILE = {
    "leads out": (tar({f"{FOLDER}/../../etc/passwd": b"x"}), "leads out of it"),
    "claims much": (raw("a", 1 << 50) + bytes(1024), "absurd size"),
    "claims less than nothing": (raw("a", -512) + bytes(1024), "absurd size"),
    "cut in a file": (raw("a", 5000) + bytes(512), "cut short"),
    "cut in a header": (LAYERS[1][:700], "cut short"),
    "a header of gigabytes": (raw("x", 1 << 32, tarfile.XHDTYPE), "larger than 1 MB"),
    "a name of gigabytes": (raw("x", 1 << 32, b"L"), "larger than 1 MB"),
    "a spoilt header": (raw("x", 10, tarfile.XHDTYPE) + b"99 path=x\n".ljust(512, b"\0"), "is damaged"),
    "garbage": (LAYERS[1][:512] + b"garbage." * 100, "damaged"),
    "sparse": (sparse(10), "sparse"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(100), "zstd"),
    "half of a gzip": (gzip.compress(LAYERS[1])[:-200], "cut short"),
    "a spoilt gzip": (b"\x1f\x8b" + bytes(100), "gzip data is damaged"),
    "a gzip with another sum": (gzip.compress(LAYERS[1])[:-8] + bytes(8), "gzip data is damaged"),
    "a list of megabytes": (tar({f"{FOLDER}/test_all.json": b" " * (5 << 20)}), "larger than 4 MB"),
    "many lists": (tar({f"{FOLDER}/test_{n}.json": b" " * (4 << 20) for n in range(9)}), "32 MB"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_layer_that_is_broken_or_hostile_is_refused(tmp_path: Path, what: str) -> None:
    layer, words = HOSTILE[what]
    said = refusal(docker_archive(tmp_path / "waa.tar", [BASE, layer]))
    assert words in said
    assert "`docker save -o waa.tar windowsarena/winarena:latest` makes one" in said


def saved(*layers: str, config: str = "c", **files: bytes | str) -> bytes:
    manifest = json.dumps([{"Config": config, "Layers": layers}]).encode()
    return tar({"c": b"{}", "manifest.json": manifest, **files})


def pointing_to_itself() -> bytes:
    """It cannot have its own digest: nobody is to rely on that."""
    place = f"blobs/sha256/{'a' * 64}"
    index = json.dumps({"manifests": [{"digest": "sha256:" + "a" * 64}]}).encode()
    return tar({"index.json": index, place: index})


ARCHIVES = {
    "empty": (b"", "neither manifest.json nor index.json"),
    "no archive": (b"# a README\n" * 100, "damaged, or no tar archive"),
    "another archive": (tar({"a": b"b"}), "neither manifest.json nor index.json"),
    "packed as a whole": (gzip.compress(BASE), "unpack it with gunzip"),
    "links in a circle": (saved("l", l="m", m="l"), "leads nowhere"),
    "a link to nothing": (saved("l", l="../../etc/passwd"), "it has no 'l'"),
    "a layer outside": (saved("../../etc/passwd"), "leads out of it"),
    "no such layer": (saved("l"), "it has no 'l'"),
    "no such configuration": (saved("l", config="d", l=BASE), "it has no 'd'"),
    "many layers": (saved(*["l"] * 2000, l=BASE), "more than 1000 layers"),
    "no manifest": (tar({"manifest.json": b"<html>"}), "manifest.json is none"),
    "a deep manifest": (tar({"manifest.json": b"[" * 100_000}), "manifest.json is none"),
    "a name of two lines": (saved("l\nm"), "it has no 'l\\nm'"),
    "no digests": (tar({"index.json": b'{"manifests": [{"digest": "../x"}]}'}), "by no digest"),
    "itself": (pointing_to_itself(), "is something else"),
    "a large manifest": (tar({"manifest.json": b" " * (5 << 20)}), "larger than 4 MB"),
    "for others": (
        tar(
            {
                "index.json": json.dumps(
                    {"manifests": [{"digest": "sha256:" + "a" * 64, "platform": {"architecture": "arm64"}}]}
                ).encode()
            }
        ),
        "nothing for linux/amd64",
    ),
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_an_archive_that_is_broken_or_hostile_is_refused(tmp_path: Path, what: str) -> None:
    data, words = ARCHIVES[what]
    (tmp_path / "waa.tar").write_bytes(data)
    assert words in refusal(tmp_path / "waa.tar")


@pytest.mark.parametrize("write", [docker_archive, oci_archive], ids=["docker", "oci"])
def test_whatever_is_cut_or_changed_gives_tasks_or_one_line(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path, chance = write(tmp_path / "waa.tar"), random.Random(7)
    whole = path.read_bytes()
    refused = 0
    for turn in range(150):
        if turn % 2:
            path.write_bytes(whole[: chance.randrange(len(whole))])
        else:
            at = chance.randrange(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        found = attempt(path)
        refused += isinstance(found, str)
        assert write is docker_archive or isinstance(found, str) or found == LISTED, "digests are checked"
    assert 50 < refused < 150


def attempt(path: Path) -> list[tuple[str, str]] | str:
    try:
        return listed(load(path))
    except RequestError as err:
        return str(err) if "\n" not in str(err) else pytest.fail(f"several lines: {err}")


def test_a_blob_that_is_another_than_its_name_says_is_refused(tmp_path: Path) -> None:
    path = oci_folder(tmp_path / "waa")
    for blob in (path / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(gzip.compress(BASE))
    assert "its digest is another" in refusal(path)
