"""What an image says of itself: index, manifest, configuration, in Docker's words and OCI's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from .reference import same
from .streams import Stream, Unreadable, one_line

MOST_MANIFEST = 4 << 20
MOST_CONFIG = 8 << 20
MOST_LAYERS = 1000
ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
REF_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

T = TypeVar("T")


class Layer(NamedTuple):
    """`made_by` is the build's own word for what made it. `open` gives its tar, unpacked."""

    size: int
    made_by: str
    open: Callable[[], AbstractContextManager[Stream]]


class Image(NamedTuple):
    """`digest` is that of its manifest or of what that was chosen from, in Docker's archives that of its
    configuration; empty where that does not tell its layers. Layers, the lowest first.
    """

    name: str
    digest: str
    layers: Sequence[Layer]


class Platform(Struct, frozen=True):
    os: str = ""
    architecture: str = ""


class Descriptor(Struct, frozen=True, rename="camel"):
    digest: str
    size: int = 0
    media_type: str = ""
    platform: Platform | None = None
    annotations: Mapping[str, str] | None = None


class Manifest(Struct, frozen=True, rename="camel"):
    """An index has `manifests`, an image `config` and `layers`."""

    schema_version: int = 2
    manifests: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()


class History(Struct, frozen=True):
    created_by: str = ""
    empty_layer: bool = False


class RootFs(Struct, frozen=True):
    diff_ids: tuple[str, ...] = ()


class Configuration(Struct, frozen=True):
    history: tuple[History, ...] | None = None
    rootfs: RootFs = RootFs()


def decoded(data: bytes, type_: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as err:
        raise Unreadable(f"{what} is none ({one_line(str(err))})") from None


def manifest_of(data: bytes, what: str) -> Manifest:
    found = decoded(data, Manifest, what)
    if found.schema_version != 2 or not (found.manifests or found.config):
        raise Unreadable(f"{what} is of a kind that is not understood")
    every = (*found.manifests, *found.layers, *((found.config,) if found.config else ()))
    if any(not DIGEST.fullmatch(each.digest) or each.size < 0 for each in every):
        raise Unreadable(f"{what} names something by no digest")
    if len(every) > MOST_LAYERS:
        raise Unreadable(f"{what} has more than {MOST_LAYERS} layers")
    return found


def chosen(choices: Sequence[Descriptor], wanted: str) -> Descriptor:
    """The one for the machines: by its name, if some have one, and for amd64."""
    named = [each for each in choices if any(same(name, wanted) for name in _names(each))]
    fitting = [each for each in named or choices if _fits(each)]
    if not fitting:
        raise Unreadable("it has nothing for linux/amd64")
    if len({each.digest for each in fitting}) > 1 and not named and not any(e.platform for e in fitting):
        names = sorted({name for each in fitting for name in _names(each)})
        raise Unreadable(f"it has several images ({one_line(', '.join(names))}), and none is {wanted}")
    return fitting[0]


def _names(choice: Descriptor) -> list[str]:
    return [name for key in REF_NAMES if (name := (choice.annotations or {}).get(key))]


def _fits(choice: Descriptor) -> bool:
    platform = choice.platform
    return platform is None or (platform.os in ("", "linux") and platform.architecture in ("", "amd64"))


def makers(configuration: bytes, count: int) -> list[str]:
    """What made each of so many layers, as far as it is told."""
    history = decoded(configuration, Configuration, "its configuration").history or ()
    told = [each.created_by for each in history if not each.empty_layer]
    return told if len(told) == count else [""] * count


def tells_layers(configuration: bytes, count: int) -> bool:
    """Does its digest stand for the layers, too?"""
    told = decoded(configuration, Configuration, "its configuration").rootfs.diff_ids
    return len(told) == count and all(DIGEST.fullmatch(each) for each in told)
