"""Images with WAA's tasks in them, in the layouts of docker and podman."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "client/evaluation_examples_windows"
TASKS = {"notepad": ["n1", "n2"], "vlc": ["v1"]}
NAME = "windowsarena/winarena:latest"
COPY = "COPY src/win-arena-container/client /client # buildkit"


def tar(files: Mapping[str, bytes | str | None], **about: Any) -> bytes:
    """Nothing is a folder, text is where a link leads to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=about.get("format", tarfile.PAX_FORMAT)) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                entry.size = len(data)
            else:
                entry.type = tarfile.DIRTYPE if data is None else about.get("link", tarfile.SYMTYPE)
                entry.linkname = data or ""
            archive.addfile(entry, io.BytesIO(data) if isinstance(data, bytes) else None)
    return out.getvalue()


def tasks_layer(tasks: Mapping[str, Sequence[str]] = TASKS, **lists: Mapping[str, Sequence[str]]) -> bytes:
    """What WAA's `COPY .../client /client` makes."""
    every = {"test_all": tasks, **lists}
    files: dict[str, bytes | str | None] = {f"{FOLDER}/": None, "client/run.py": b"print()\n"}
    files |= {f"{FOLDER}/{name}.json": json.dumps(listed).encode() for name, listed in every.items()}
    for level in ("examples", "examples_noctxt"):
        files |= {
            f"{FOLDER}/{level}/{domain}/{id}.json": b"{}" for domain, ids in tasks.items() for id in ids
        }
    return tar(files)


BASE = tar({"etc/": None, "etc/os-release": b"x" * 5000, "client/requirements.txt": b"torch\n"})
LAYERS = (BASE, tasks_layer())
MAKERS = ("RUN pip install -r /client/requirements.txt", COPY)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def configuration(layers: Sequence[bytes], made_by: Sequence[str] = ()) -> bytes:
    history = [{"created_by": "ENV A=B", "empty_layer": True}, *({"created_by": each} for each in made_by)]
    diff_ids = [digest_of(layer) for layer in layers]
    return json.dumps({"rootfs": {"diff_ids": diff_ids}, "history": history}).encode()


def docker_archive(path: Path, layers: Sequence[bytes] = LAYERS, tags: Sequence[str] = (NAME,)) -> Path:
    """As `docker save` has done for long: a folder a layer, the list of layers at the end."""
    config = configuration(layers)
    files: dict[str, bytes | str | None] = {}
    names: list[str] = []
    for layer in layers:
        names.append(f"{digest_of(layer)[7:]}/layer.tar")
        files |= {f"{digest_of(layer)[7:]}/": None, names[-1]: layer}
    place = f"{digest_of(config)[7:]}.json"
    image = {"Config": place, "RepoTags": list(tags), "Layers": names}
    files |= {place: config, "manifest.json": json.dumps([image]).encode()}
    path.write_bytes(tar(files))
    return path


def linked_archive(path: Path, layers: Sequence[bytes] = LAYERS) -> Path:
    """Older still, and podman: some layers are links to others."""
    config = configuration(layers)
    files: dict[str, bytes | str | None] = {"0" * 64 + ".json": config}
    names: list[str] = []
    for number, layer in enumerate(layers):
        files[f"{number}.tar"] = layer
        names.append(f"old-{number}/layer.tar")
        files[names[-1]] = f"../{number}.tar"
    manifest = [{"Config": "0" * 64 + ".json", "RepoTags": None, "Layers": names}]
    path.write_bytes(tar({**files, "manifest.json": json.dumps(manifest).encode()}))
    return path


def oci_files(
    layers: Sequence[bytes] = LAYERS, *, packed: bool = True, made_by: Sequence[str] = MAKERS
) -> dict[str, bytes]:
    """Blobs by digest, and the index as `index.json`."""
    blobs = [gzip.compress(layer, mtime=0) if packed else layer for layer in layers]
    config = configuration(layers, made_by)
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"digest": digest_of(config), "size": len(config)},
            "layers": [{"digest": digest_of(blob), "size": len(blob)} for blob in blobs],
        }
    ).encode()
    arm = {"digest": digest_of(b"arm"), "size": 3, "platform": {"os": "linux", "architecture": "arm64"}}
    amd = {
        "digest": digest_of(manifest),
        "size": len(manifest),
        "platform": {"os": "linux", "architecture": "amd64"},
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [arm, amd]}).encode()
    return {digest_of(data): data for data in (*blobs, config, manifest)} | {"index.json": index}


def oci_archive(path: Path, layers: Sequence[bytes] = LAYERS, *, packed: bool = True) -> Path:
    path.write_bytes(tar({_place(name): data for name, data in oci_files(layers, packed=packed).items()}))
    return path


def oci_folder(path: Path, layers: Sequence[bytes] = LAYERS) -> Path:
    for name, data in oci_files(layers).items():
        file = path / _place(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return path


def _place(name: str) -> str:
    return f"blobs/{name.replace(':', '/')}" if ":" in name else name
