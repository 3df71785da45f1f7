"""Blobs of one storage account, as far as mailboxes need them: containers, blobs, signatures for them.

Whoever asks is let in by a signature of the account's key, by one of a key that was lent to a login, or by
the login's own token.
"""

from __future__ import annotations

import base64
import hmac
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import unquote, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

from standins.cloud import listener
from standins.cloud.faults import Failed, Lost
from standins.cloud.words import Call

from .identity import CLIENT_ID, STORAGE, Identity
from .words import TENANT, ArmError

ACCOUNT = "standinstorage"
LENT = base64.b64encode(b"a key that the stand-in lends to who is logged in").decode()
KEY = base64.b64encode(b"a key of the stand-in's, which everybody may know, 64 bytes long").decode()
MOST_BYTES = 64 << 20
PAGE = 5000
STAMPS = {"ETag": '"0x8DC"', "Last-Modified": "Wed, 18 Nov 2026 00:00:00 GMT"}
_META = "x-ms-meta-"
_NEEDED = {"GET": "r", "HEAD": "r", "PUT": "cw", "DELETE": "d"}


class BlobError(Exception):
    """A refusal in the shape that the storage gives it."""

    def __init__(self, status: int, code: str, message: str = "", detail: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message, self.detail = status, code, message or code, detail

    def answer(self) -> web.Response:
        text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{self.code}</Code><Message>{self.message}'
        headers = {"x-ms-error-code": self.code, "Content-Type": "application/xml"}
        why = f"<AuthenticationErrorDetail>{escape(self.detail)}</AuthenticationErrorDetail>"
        text += f"</Message>{why if self.detail else ''}</Error>"
        return web.Response(status=self.status, text=text, headers=headers)


@dataclass
class BlobContainer:
    metadata: dict[str, str]
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    blocks: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    """By blob: blocks that were sent and not put together yet."""
    parts: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    """By blob: the blocks that it was put together of."""
    told: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By blob: its metadata."""


class BlobStorage:
    """One storage account. `calls`: what clients asked for, and the status of the answer."""

    def __init__(self, now: Callable[[], float], identity: Identity | None = None) -> None:
        """`identity`: whose tokens let in."""
        self._now, self._identity = now, identity
        self.takes_keys = True
        """Does it let in who has the account's key (`allowSharedKeyAccess`)?"""
        self.roles = {"Storage Blob Data Contributor", "Storage Blob Delegator"}
        """Those of the login."""
        self._runners: list[web.AppRunner] = []
        self.containers: dict[str, BlobContainer] = {"evalfleet": BlobContainer({})}
        self.calls: list[tuple[str, str, int]] = []
        self.is_away = False
        """Does it answer 503 to everything?"""
        self.is_deleted = False
        """Is there no such account any more? Then nothing answers at its address."""
        self.is_closed = False
        """Was its key made anew, and are the login's roles taken away? Then nobody is let in."""
        self.refused = 0
        """How often it has refused for one of these."""
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
        path = unquote(request.path).strip("/")  # as those of an emulator, it begins with the account
        container, _, blob = path.removeprefix(ACCOUNT).strip("/").partition("/")
        try:
            if self.is_away:
                self.refused += 1
                raise BlobError(503, "ServerBusy", "The server is busy.")
            if self.is_deleted:
                self.refused += 1
                return _broken(request)
            if self.is_closed:
                self.refused += 1
                by_login = request.headers.get("Authorization", "").startswith("Bearer ")
                code = "AuthorizationPermissionMismatch" if by_login else "AuthenticationFailed"
                raise BlobError(403, code, "Server failed to authenticate the request.")
            if request.headers.get("Authorization", "").startswith("SharedKey "):
                self._check_key(request)
            elif "Authorization" in request.headers:
                self._check_login(request.headers["Authorization"], dict(request.query))
            else:
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

    # -- who is let in -------------------------------------------------------------------------

    def _check_login(self, authorization: str, query: Mapping[str, str]) -> None:
        if self._identity is None:
            raise BlobError(401, "InvalidAuthenticationInfo")
        try:
            self._identity.check(authorization, STORAGE)
        except ArmError as error:
            raise BlobError(401, "InvalidAuthenticationInfo", detail=error.message) from error
        lends = query.get("comp") == "userdelegationkey"
        if ("Storage Blob Delegator" if lends else "Storage Blob Data Contributor") not in self.roles:
            words = "This request is not authorized to perform this operation using this permission."
            raise BlobError(403, "AuthorizationPermissionMismatch", words)

    def _check_key(self, request: web.Request) -> None:
        """Raises BlobError unless the account's key has signed the request."""
        if not self.takes_keys:
            words = "Key based authentication is not permitted on this storage account."
            raise BlobError(403, "KeyBasedAuthenticationNotPermitted", words)
        given = request.headers
        length = given.get("Content-Length", "")
        names = ["Content-Encoding", "Content-Language", "", "Content-MD5", "Content-Type", "Date"]
        names += ["If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"]
        lines = [given.get(name, "") if name else "" if length == "0" else length for name in names]
        own = sorted(
            (name.lower(), value) for name, value in given.items() if name.lower().startswith("x-ms-")
        )
        resource = f"/{ACCOUNT}{request.raw_path.partition('?')[0]}"
        asked = [f"{name.lower()}:{value}" for name, value in sorted(request.query.items())]
        signed = "\n".join([request.method, *lines, *(f"{k}:{v}" for k, v in own), resource, *asked])
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), "sha256").digest()
        expected = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        if not hmac.compare_digest(expected, given["Authorization"]):
            raise BlobError(403, "AuthenticationFailed", "Server failed to authenticate the request.")

    def _lend_key(self, content: bytes) -> web.Response:
        """A key for as long as the body asks, but no longer than seven days."""
        asked = ElementTree.fromstring(content)
        begin, end = (asked.findtext(name) or "" for name in ("Start", "Expiry"))
        if not 0 < _moment(end) - self._now() <= 7 * 86400:
            raise BlobError(400, "InvalidXmlDocument", "The expiry must be within seven days.")
        told = {"SignedOid": CLIENT_ID, "SignedTid": TENANT, "SignedStart": begin, "SignedExpiry": end}
        told |= {"SignedService": "b", "SignedVersion": "2021-12-02", "Value": LENT}
        items = "".join(f"<{name}>{value}</{name}>" for name, value in told.items())
        text = f'<?xml version="1.0" encoding="utf-8"?><UserDelegationKey>{items}</UserDelegationKey>'
        return web.Response(text=text, content_type="application/xml")

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
            names = ["sip", "spr", "sv", "sr", "snapshot", "ses", "rscc", "rscd", "rsce", "rscl", "rsct"]
            lent = ("skoid", "sktid", "skt", "ske", "sks", "skv", "saoid", "suoid", "scid")
            about = [*map(of, lent)] if of("skoid") else [of("si")]
            signed = [of("sp"), of("st"), of("se"), where, *about, *map(of, names)]
        if not self.takes_keys and not of("skoid"):
            words = "Key based authentication is not permitted on this storage account."
            raise BlobError(403, "KeyBasedAuthenticationNotPermitted", words)
        key = LENT if of("skoid") else KEY
        if of("skoid") and _moment(of("ske")) < _moment(of("se")):
            raise refused
        digest = hmac.new(base64.b64decode(key), "\n".join(signed).encode(), "sha256").digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), of("sig")):
            raise refused
        if _moment(of("se")) < self._now():
            raise refused
        needed = "l" if of("comp") == "list" else _NEEDED[method]
        about_container = of("restype") == "container" or not container
        if (about_container and not of("ss") and of("comp") != "list") or not set(needed) & set(of("sp")):
            raise BlobError(403, "AuthorizationPermissionMismatch", "This permission is not granted.")

    # -- what is done --------------------------------------------------------------------------

    def _answer(self, request: web.Request, container: str, blob: str, content: bytes) -> web.Response:
        query = request.query
        if query.get("comp") == "userdelegationkey":
            return self._lend_key(content)
        if not container:
            return self._list_containers(query.get("prefix", ""))
        if query.get("restype") == "container" and query.get("comp") == "list":
            return self._list_blobs(
                self._need(container), query.get("prefix", ""), query.get("delimiter", "")
            )
        if query.get("restype") == "container" and query.get("comp") != "batch":
            return self._on_container(request, container)
        held = self._need(container)
        if query.get("comp") == "batch":
            return _delete_many(request, held, container, content)
        if query.get("comp") in ("block", "blocklist"):
            return _on_blocks(request, held, blob, content)
        return self._on_blob(request, held, blob, content)

    def _on_blob(self, request: web.Request, held: BlobContainer, blob: str, content: bytes) -> web.Response:
        query = request.query
        match request.method:
            case "PUT":
                if request.headers.get("x-ms-blob-type") != "BlockBlob":
                    raise BlobError(400, "MissingRequiredHeader", "x-ms-blob-type")
                if blob in held.blobs and request.headers.get("If-None-Match") == "*":
                    raise BlobError(409, "BlobAlreadyExists")
                if blob in held.blobs and "w" not in query.get("sp", "w"):
                    raise BlobError(403, "UnauthorizedBlobOverwrite")
                held.blobs[blob], held.told[blob] = content, _metadata(request)
                held.blocks.pop(blob, None)
                held.parts.pop(blob, None)
                return web.Response(status=201, headers=STAMPS)
            case "GET" if blob in held.blobs:
                return _part(held.blobs[blob], request.headers.get("Range", ""))
            case "HEAD" if blob in held.blobs:
                told = {f"{_META}{name}": value for name, value in held.told.get(blob, {}).items()}
                return web.Response(status=200, headers={**told, **STAMPS})
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
        match request.method:
            case "PUT" if request.query.get("comp") == "metadata":
                self._need(name).metadata = _metadata(request)
                return web.Response(status=200)
            case "PUT":
                if name in self.containers:
                    raise BlobError(409, "ContainerAlreadyExists")
                self.containers[name] = BlobContainer(_metadata(request))
                return web.Response(status=201)
            case "GET" | "HEAD":
                metadata = self._need(name).metadata
                return web.Response(status=200, headers={f"{_META}{k}": v for k, v in metadata.items()})
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
        items = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{STAMPS['Last-Modified']}"
            f"</Last-Modified><Content-Type>application/octet-stream</Content-Type><Etag>{STAMPS['ETag']}</Etag><Content-Length>{len(held.blobs[name])}"
            "</Content-Length></Properties></Blob>"
            for name in names
        )
        return _xml(f"<Blobs>{items}</Blobs>")


def container_token(container: str) -> str:
    """Return a shared access signature to read a container's blobs, as people make one by `az`."""
    until = "2999-01-01T00:00:00Z"
    signed = ["r", "", until, f"/blob/{ACCOUNT}/{container}", "", "", "", "2022-11-02", "c", *[""] * 7]
    digest = hmac.new(base64.b64decode(KEY), "\n".join(signed).encode(), "sha256").digest()
    return urlencode({"sp": "r", "se": until, "sv": "2022-11-02", "sr": "c", "sig": base64.b64encode(digest)})


def _delete_many(request: web.Request, held: BlobContainer, container: str, content: bytes) -> web.Response:
    """Delete what the parts of a batch name."""
    paths = re.findall(rb"^DELETE (\S+) HTTP/1.1", content, re.MULTILINE)
    answers: list[str] = []
    for number, path in enumerate(paths):
        name = unquote(path.decode().partition("?")[0]).partition(f"/{container}/")[2]
        found = held.blobs.pop(name, None) is not None
        status = "202 Accepted" if found else "404 The specified blob does not exist."
        code = "" if found else "x-ms-error-code: BlobNotFound\r\n"
        answers.append(
            f"--answers\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            f"HTTP/1.1 {status}\r\n{code}x-ms-version: 2023-11-03\r\n\r\n"
        )
    text = "".join(answers) + "--answers--\r\n"
    return web.Response(
        status=202, body=text.encode(), headers={"Content-Type": "multipart/mixed; boundary=answers"}
    )


def _metadata(request: web.Request) -> dict[str, str]:
    given = {key.lower(): value for key, value in request.headers.items()}
    return {key.removeprefix(_META): value for key, value in given.items() if key.startswith(_META)}


def _on_blocks(request: web.Request, held: BlobContainer, blob: str, content: bytes) -> web.Response:
    """A block is sent, the blocks of a blob are put together, or those are listed that are not yet."""
    sent = held.blocks.setdefault(blob, {})
    match request.method, request.query["comp"]:
        case "PUT", "block":
            block = request.query.get("blockid", "")
            if not block or any(len(other) != len(block) for other in sent):
                raise BlobError(400, "InvalidBlobOrBlock", "The specified blob or block content is invalid.")
            sent[block] = content
        case "PUT", _:
            ids = [
                each.text or ""
                for each in ElementTree.fromstring(content)
                if each.tag in ("Latest", "Uncommitted")
            ]
            known = {**held.parts.get(blob, {}), **sent}
            if any(block not in known for block in ids):
                raise BlobError(400, "InvalidBlockList", "The specified block list is invalid.")
            held.parts[blob] = {block: known[block] for block in ids}
            held.blobs[blob], held.told[blob] = b"".join(map(known.__getitem__, ids)), _metadata(request)
            del held.blocks[blob]
        case "GET", _ if sent or blob in held.blobs:
            named = "".join(
                f"<Block><Name>{block}</Name><Size>{len(part)}</Size></Block>" for block, part in sent.items()
            )
            listed = f"<BlockList><UncommittedBlocks>{named}</UncommittedBlocks></BlockList>"
            return web.Response(text=listed, content_type="application/xml")
        case _:
            raise BlobError(404, "BlobNotFound", "The specified blob does not exist.")
    return web.Response(status=201, headers=STAMPS)


def _moment(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).astimezone(UTC).timestamp()


def _broken(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _xml(items: str) -> web.Response:
    text = (
        f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults>{items}<NextMarker/></EnumerationResults>'
    )
    return web.Response(text=text, content_type="application/xml")


def _part(content: bytes, span: str) -> web.Response:
    """What is asked for of a blob: all of it, or a range of bytes."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", span)
    if found is None:
        return web.Response(status=200, body=content, headers=STAMPS)
    first, last = int(found[1]), min(int(found[2]), len(content) - 1)
    if first > last:
        raise BlobError(416, "InvalidRange", "The range specified is invalid for the current size.")
    told = {"Content-Range": f"bytes {first}-{last}/{len(content)}", **STAMPS}
    return web.Response(status=206, body=content[first : last + 1], headers=told)
