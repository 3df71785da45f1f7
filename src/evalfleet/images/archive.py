"""Images in files: what `docker save` and `podman save` write, an archive or a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from .manifests import (
    MOST_CONFIG,
    MOST_LAYERS,
    MOST_MANIFEST,
    Descriptor,
    Image,
    Layer,
    Manifest,
    chosen,
    decoded,
    makers,
    manifest_of,
    tells_layers,
)
from .reference import same
from .streams import GZIP, ZSTD, Inflated, Stream, Unreadable, Verified, Window, one_line, unpacked, whole
from .tars import Archive, plain

MOST_PARTS = 20_000
MOST_HOPS = 8
DOCKER, OCI = "manifest.json", "index.json"


class Part(NamedTuple):
    """A file of an archive or folder: a piece of a file here."""

    path: Path
    start: int
    size: int

    @contextmanager
    def open(self) -> Generator[Window]:
        with self.path.open("rb") as file:
            yield Window(file, self.start, self.size)

    def read(self, most: int, what: str) -> bytes:
        with self.open() as window:
            return whole(window, most, what)


Find = Callable[[str], Part]
"""Raises Unreadable if there is none of that name."""


class Saved(Struct, frozen=True, rename="pascal"):
    """An image in Docker's `manifest.json`."""

    config: str
    layers: tuple[str, ...]
    repo_tags: tuple[str, ...] | None = None


def open_archive(path: Path, wanted: str) -> Image:
    """The image in there; `wanted` if there are several. Raises Unreadable, OSError."""
    find, names = _folder(path) if path.is_dir() else _archive(path)
    if DOCKER in names:
        return _from_docker(path, find, wanted)
    if OCI in names:
        return _from_oci(path, find, wanted)
    raise Unreadable(f"it has neither {DOCKER} nor {OCI}, so it is no saved image")


def is_layout(path: Path) -> bool:
    """A folder that holds an image."""
    return (path / OCI).is_file() and (path / "blobs").is_dir()


# -- where its parts are -------------------------------------------------------------------------


def _folder(path: Path) -> tuple[Find, set[str]]:
    def find(name: str) -> Part:
        file = path / plain(name)
        if not file.is_file():
            raise Unreadable(f"it has no {name[:100]!r}")
        return Part(file, 0, file.stat().st_size)

    return find, {name for name in (DOCKER, OCI) if (path / name).is_file()}


def _archive(path: Path) -> tuple[Find, set[str]]:
    """Only its headers are read."""
    size = path.stat().st_size
    parts: dict[str, Part] = {}
    links: dict[str, str] = {}
    with path.open("rb") as file:
        head = file.read(4)
        if head.startswith((GZIP, ZSTD)):
            raise Unreadable("it is compressed as a whole; unpack it with gunzip or unzstd first")
        archive = Archive(Window(file, 0, size), MOST_PARTS)
        for entry in archive:
            if entry.kind == "file":
                parts[entry.name] = Part(path, archive.at, entry.size)
            elif entry.kind in ("hard", "soft"):
                links[entry.name] = entry.target if entry.kind == "hard" else _led(entry.name, entry.target)

    def find(name: str) -> Part:
        at = plain(name)
        for _ in range(MOST_HOPS):
            if at in parts:
                return parts[at]
            if at not in links:
                raise Unreadable(f"it has no {name[:100]!r}")
            at = links[at]
        raise Unreadable(f"its {name[:100]!r} is a link that leads nowhere")

    return find, {*parts, *links}


def _led(name: str, target: str) -> str:
    """Where a link leads: older archives have one layer twice, as `../OTHER/layer.tar`."""
    parts = name.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


# -- Docker's --------------------------------------------------------------------------------------


def _from_docker(path: Path, find: Find, wanted: str) -> Image:
    saved = decoded(find(DOCKER).read(MOST_MANIFEST, DOCKER), tuple[Saved, ...], DOCKER)
    one = _one_of(saved, wanted)
    if len(one.layers) > MOST_LAYERS:
        raise Unreadable(f"it has more than {MOST_LAYERS} layers")
    configuration = find(one.config).read(MOST_CONFIG, "its configuration")
    told = makers(configuration, len(one.layers))
    layers = [_layer(find(name), made_by) for name, made_by in zip(one.layers, told, strict=True)]
    named = tells_layers(configuration, len(layers))
    return Image(str(path), f"sha256:{hashlib.sha256(configuration).hexdigest()}" if named else "", layers)


def _one_of(saved: Sequence[Saved], wanted: str) -> Saved:
    named = [each for each in saved if any(same(tag, wanted) for tag in each.repo_tags or ())]
    if not saved or (len(saved) > 1 and not named):
        tags = ", ".join(tag for each in saved for tag in each.repo_tags or ())
        raise Unreadable(f"it has {len(saved)} images ({one_line(tags)}), and none is {wanted}")
    return (named or saved)[0]


def _layer(part: Part, made_by: str, digest: str = "") -> Layer:
    @contextmanager
    def open() -> Generator[Stream]:
        with part.open() as window:
            verified = Verified(window, digest, part.size) if digest else None
            stream = unpacked(verified or window)
            yield stream
            if isinstance(stream, Inflated):
                stream.drain()  # what gzip knows of damage stands at its end
            if verified is not None:
                verified.finish()

    return Layer(part.size, made_by, open)


# -- OCI's -----------------------------------------------------------------------------------------


def _from_oci(path: Path, find: Find, wanted: str) -> Image:
    found = manifest_of(find(OCI).read(MOST_MANIFEST, OCI), OCI)
    digest = ""
    for _ in range(MOST_HOPS):
        if found.config is not None:
            return _image(path, find, digest, found, found.config)
        choice = chosen(found.manifests, wanted)
        digest = digest or choice.digest
        found = manifest_of(_blob(find, choice, MOST_MANIFEST), "its manifest")
    raise Unreadable("its index leads nowhere")


def _image(path: Path, find: Find, digest: str, manifest: Manifest, config: Descriptor) -> Image:
    told = makers(_blob(find, config, MOST_CONFIG), len(manifest.layers))
    layers = [
        _layer(find(_place(layer.digest)), made_by, layer.digest)
        for layer, made_by in zip(manifest.layers, told, strict=True)
    ]
    return Image(str(path), digest, layers)


def _blob(find: Find, about: Descriptor, most: int) -> bytes:
    data = find(_place(about.digest)).read(most, about.digest[:19])
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != about.digest:
        raise Unreadable(f"what it has as {about.digest[:19]}... is something else")
    return data


def _place(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
