"""Names of images: `windowsarena/winarena:latest`, `mine.azurecr.io/waa@sha256:...`."""

from __future__ import annotations

import re
from typing import NamedTuple

from .streams import Unreadable

HUB = "docker.io"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Reference(NamedTuple):
    """`digest` counts more than `tag`."""

    server: str
    repository: str
    tag: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.server}/{self.repository}:{self.tag}" + (f"@{self.digest}" if self.digest else "")


def parse(image: str) -> Reference:
    """Raises Unreadable."""
    name, _, digest = image.partition("@")
    head, slash, rest = name.partition("/")
    has_server = bool(slash) and ("." in head or ":" in head or head == "localhost")
    server, path = (head, rest) if has_server else (HUB, name)
    path, _, tag = path.partition(":")
    server = HUB if server in ("index.docker.io", "registry-1.docker.io") else server
    if server == HUB and "/" not in path:
        path = f"library/{path}"
    found = Reference(server, path, tag or "latest", digest)
    good = _SERVER.fullmatch(server) and _REPOSITORY.fullmatch(path) and _TAG.fullmatch(found.tag)
    if not good or len(image) > 500 or ("@" in image and not _DIGEST.fullmatch(digest)):
        raise Unreadable(f"{image[:80]!r} is no name of an image")
    return found


def same(one: str, other: str) -> bool:
    """Do both mean the same, one of them perhaps without what is usual?"""
    try:
        return parse(one)[:3] == parse(other)[:3]
    except Unreadable:
        return False
