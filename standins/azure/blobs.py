"""Blobs of one storage account, as far as mailboxes need them: containers, blobs, signatures for them."""

from __future__ import annotations

import base64
import hmac
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import formatdate
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from standins.cloud import listener
from standins.cloud.faults import Failed, Lost
from standins.cloud.words import Call

ACCOUNT = "standinstorage"
KEY = base64.b64encode(b"a key of the stand-in's, which everybody may know, 64 bytes long").decode()
MOST_BYTES = 64 << 20
PAGE = 5000
_NEEDED = {"GET": "r", "HEAD": "r", "PUT": "cw", "DELETE": "d"}


class BlobError(Exception):
    """A refusal in the shape that the storage gives it."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code

    def answer(self) -> web.Response:
        text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{self.code}</Code><Message>{self.message}'
        headers = {"x-ms-error-code": self.code, "Content-Type": "application/xml"}
        return web.Response(status=self.status, text=f"{text}</Message></Error>", headers=headers)


@dataclass
class BlobContainer:
    metadata: dict[str, str]
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])


class BlobStorage:
    """One storage account. `calls`: what clients asked for, and the status of the answer."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._runners: list[web.AppRunner] = []
        self.containers: dict[str, BlobContainer] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.is_away = False
        """Does it answer 503 to everything?"""
        self.script: Callable[[Call], object] | None = None
        """Asked about each call: what it says happens to it, as to calls of the Resource Manager."""

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runners.append(await listener.begin(app, sock, tls))

    async def close(self) -> None:
        for runner in self._runners:
            await listener.end(runner)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        container, _, blob = unquote(request.path).strip("/").partition("/")
        try:
            if self.is_away:
                raise BlobError(503, "ServerBusy", "The server is busy.")
            self._check(request.method, dict(request.query), container, blob)
            effect = self.script(Call(request.method, request.path)) if self.script is not None else None
            if isinstance(effect, Failed):
                return _broken(request)
            content = await request.read()
            response = self._answer(request, container, blob, content)
            if isinstance(effect, Lost):
                return _broken(request)
        except BlobError as error:
            response = error.answer()
        self.calls.append((request.method, request.path, response.status))
        response.headers.update({"x-ms-version": "2022-11-02", "Date": formatdate(self._now(), usegmt=True)})
        return response

    # -- signatures ----------------------------------------------------------------------------

    def _check(self, method: str, query: Mapping[str, str], container: str, blob: str) -> None:
        """Raises BlobError unless the signature allows it."""

        def of(name: str) -> str:
            return query.get(name, "")

        refused = BlobError(403, "AuthenticationFailed", "Server failed to authenticate the request.")
        if not of("sig"):
            raise BlobError(401, "NoAuthenticationInformation")
        if of("ss"):
            parts = [ACCOUNT, of("sp"), of("ss"), of("srt"), of("st"), of("se"), of("sip"), of("spr")]
            signed = [*parts, of("sv"), of("ses"), ""]
        else:
            where = f"/blob/{ACCOUNT}/{container}" + (f"/{blob}" if of("sr") == "b" else "")
            names = (
                "si",
                "sip",
                "spr",
                "sv",
                "sr",
                "snapshot",
                "ses",
                "rscc",
                "rscd",
                "rsce",
                "rscl",
                "rsct",
            )
            signed = [of("sp"), of("st"), of("se"), where, *map(of, names)]
        digest = hmac.new(base64.b64decode(KEY), "\n".join(signed).encode(), "sha256").digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), of("sig")):
            raise refused
        if datetime.fromisoformat(of("se").replace("Z", "+00:00")).timestamp() < self._now():
            raise refused
        needed = "l" if of("comp") == "list" else _NEEDED[method]
        about_container = of("restype") == "container" or not container
        if (about_container and not of("ss") and of("comp") != "list") or not set(needed) & set(of("sp")):
            raise BlobError(403, "AuthorizationPermissionMismatch", "This permission is not granted.")

    # -- what is done --------------------------------------------------------------------------

    def _answer(self, request: web.Request, container: str, blob: str, content: bytes) -> web.Response:
        query = request.query
        if not container:
            return self._list_containers(query.get("prefix", ""))
        if query.get("restype") == "container" and query.get("comp") == "list":
            return self._list_blobs(
                self._need(container), query.get("prefix", ""), query.get("delimiter", "")
            )
        if query.get("restype") == "container":
            return self._on_container(request, container)
        held = self._need(container)
        match request.method:
            case "PUT":
                if request.headers.get("x-ms-blob-type") != "BlockBlob":
                    raise BlobError(400, "MissingRequiredHeader", "x-ms-blob-type")
                if blob in held.blobs and request.headers.get("If-None-Match") == "*":
                    raise BlobError(409, "BlobAlreadyExists")
                if blob in held.blobs and "w" not in query.get("sp", ""):
                    raise BlobError(403, "UnauthorizedBlobOverwrite")
                held.blobs[blob] = content
                return web.Response(status=201)
            case "GET" if blob in held.blobs:
                return web.Response(status=200, body=held.blobs[blob])
            case "HEAD" if blob in held.blobs:
                return web.Response(status=200)
            case "DELETE" if blob in held.blobs:
                del held.blobs[blob]
                return web.Response(status=202)
            case _:
                raise BlobError(404, "BlobNotFound", "The specified blob does not exist.")

    def _need(self, name: str) -> BlobContainer:
        if name not in self.containers:
            raise BlobError(404, "ContainerNotFound", "The specified container does not exist.")
        return self.containers[name]

    def _on_container(self, request: web.Request, name: str) -> web.Response:
        prefix = "x-ms-meta-"
        match request.method:
            case "PUT":
                if name in self.containers:
                    raise BlobError(409, "ContainerAlreadyExists")
                given = {key.lower(): value for key, value in request.headers.items()}
                told = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
                self.containers[name] = BlobContainer(told)
                return web.Response(status=201)
            case "GET" | "HEAD":
                metadata = self._need(name).metadata
                return web.Response(status=200, headers={f"{prefix}{k}": v for k, v in metadata.items()})
            case "DELETE":
                self._need(name)
                del self.containers[name]
                return web.Response(status=202)
            case _:
                raise BlobError(405, "UnsupportedHttpVerb")

    def _list_containers(self, prefix: str) -> web.Response:
        items = "".join(
            f"<Container><Name>{escape(name)}</Name><Metadata>"
            + "".join(f"<{key}>{escape(value)}</{key}>" for key, value in held.metadata.items())
            + "</Metadata></Container>"
            for name, held in sorted(self.containers.items())
            if name.startswith(prefix)
        )
        return _xml(f"<Containers>{items}</Containers>")

    def _list_blobs(self, held: BlobContainer, prefix: str, delimiter: str) -> web.Response:
        names = [name for name in sorted(held.blobs) if name.startswith(prefix)]
        if delimiter:
            names = [name for name in names if delimiter not in name[len(prefix) :]]
        items = "".join(f"<Blob><Name>{escape(name)}</Name></Blob>" for name in names)
        return _xml(f"<Blobs>{items}</Blobs>")


def _broken(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _xml(items: str) -> web.Response:
    text = (
        f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults>{items}<NextMarker/></EnumerationResults>'
    )
    return web.Response(text=text, content_type="application/xml")
