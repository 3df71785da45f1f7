"""Images in a registry: what the registry's HTTP API gives of them, checked by digest."""

from __future__ import annotations

import hashlib
import http.client
import time
from collections.abc import Generator
from contextlib import contextmanager

from .asking import Asking, Login, reason_of
from .manifests import (
    ACCEPTED,
    DIGEST,
    MOST_CONFIG,
    MOST_MANIFEST,
    Descriptor,
    Image,
    Layer,
    Manifest,
    chosen,
    makers,
    manifest_of,
)
from .reference import HUB, Reference
from .streams import Stream, Unreadable, Verified, unpacked

HUB_API = "registry-1.docker.io"
MOST_HOPS = 4
LIMIT_S = 1800.0
_ACCEPT = {"Accept": ", ".join(ACCEPTED)}


class Registry:
    """Where one image is. Raises Unreadable (Refused) all over."""

    def __init__(self, reference: Reference, login: Login) -> None:
        server = HUB_API if reference.server == HUB else reference.server
        self._asking = Asking(server, login)
        self._reference = reference
        self._path = f"/v2/{reference.repository}"

    def digest(self) -> str:
        """What its name stands for now. Costs no pull; empty if the registry does not say."""
        if self._reference.digest:
            return self._reference.digest
        with self._asking.get(f"{self._path}/manifests/{self._reference.tag}", _ACCEPT, "HEAD") as answer:
            told = answer.headers.get("Docker-Content-Digest", "")
        return told if DIGEST.fullmatch(told) else ""

    def image(self) -> Image:
        """Manifest and configuration are read now, its layers when they are opened."""
        digest = self._reference.digest
        data = self._manifest(digest or self._reference.tag, digest)
        top = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for _ in range(MOST_HOPS):
            found = manifest_of(data, "the manifest")
            if found.config is not None:
                return Image(str(self._reference), top, self._layers(found, found.config))
            choice = chosen(found.manifests, str(self._reference))
            data = self._manifest(choice.digest, choice.digest)
        raise Unreadable("its index leads nowhere")

    def _manifest(self, name: str, digest: str) -> bytes:
        with self._asking.get(f"{self._path}/manifests/{name}", _ACCEPT) as answer:
            return _read(answer, MOST_MANIFEST, "the manifest", digest)

    def _layers(self, manifest: Manifest, config: Descriptor) -> list[Layer]:
        with self._asking.get(f"{self._path}/blobs/{config.digest}") as answer:
            configuration = _read(answer, MOST_CONFIG, "the configuration", config.digest)
        told = makers(configuration, len(manifest.layers))
        return [self._layer(each, made_by) for each, made_by in zip(manifest.layers, told, strict=True)]

    def _layer(self, about: Descriptor, made_by: str) -> Layer:
        @contextmanager
        def open() -> Generator[Stream]:
            with self._asking.get(f"{self._path}/blobs/{about.digest}") as answer:
                try:
                    verified = Verified(_Timed(answer), about.digest, about.size)
                    yield unpacked(verified)
                    verified.finish()
                except (OSError, http.client.HTTPException) as err:
                    raise Unreadable(f"a layer broke off ({reason_of(err)})") from None

        return Layer(about.size, made_by, open)


class _Timed:
    """A server that sends a byte now and then must not hold us for ever."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self._until = time.monotonic() + LIMIT_S

    def read(self, size: int) -> bytes:
        if time.monotonic() > self._until:
            raise Unreadable(f"a layer was not there after {LIMIT_S:g} s")
        return self._answer.read(size)


def _read(answer: http.client.HTTPResponse, most: int, what: str, digest: str) -> bytes:
    try:
        data = answer.read(most + 1)
    except (OSError, http.client.HTTPException) as err:
        raise Unreadable(f"{what} broke off ({reason_of(err)})") from None
    if len(data) > most:
        raise Unreadable(f"{what} is larger than {most >> 20} MB")
    if digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise Unreadable(f"{what} that came is not {digest[:19]}...: its digest is another")
    return data
