"""A registry of container images that demands a token, as Google's Artifact Registry does, on loopback.

It speaks what an engine asks for when it pulls: a challenge, a token for its owner's short-lived password,
then manifests and blobs. Its words for a refusal are Artifact Registry's own, as people have reported them.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from urllib.parse import parse_qs, urlsplit

USER = "oauth2accesstoken"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_RIGHT = "artifactregistry.repositories.downloadArtifacts"


class Registry:
    """Images by their names below its address, who may pull them, and what it was asked."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.address = f"127.0.0.1:{server.server_address[1]}"
        self.images: dict[str, Path] = {}
        """Name -> the folder of it, as `podman save --format oci-dir` writes one."""
        self.passwords: dict[str, tuple[str, ...]] = {}
        """Those that have not expired -> the names of images that their owner may pull."""
        self.bearers: dict[str, str] = {}
        """Tokens that were given out, each for one image."""
        self.user = USER
        """Who logs in with those."""
        self.failures = 0
        """So many manifests more are answered by a 503."""
        self.asked: list[str] = []
        """Method, path and status of each request."""

    def name(self, image: str) -> str:
        """What engines call it."""
        return f"{self.address}/{image}:latest"

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Status, media type and body."""
        url = urlsplit(path)
        kind, _, secret = authorization.partition(" ")
        if url.path == "/v2/token":
            return self._token(parse_qs(url.query), b64decode(secret).decode() if kind == "Basic" else "")
        image, _, rest = url.path.removeprefix("/v2/").rpartition("/")
        image, _, what = image.rpartition("/")
        if kind != "Bearer" or self.bearers.get(secret) != image:
            return _refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHORIZED", "authentication required")
        if what == "manifests" and self.failures:
            self.failures -= 1
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"try again later"
        if image not in self.images:
            return _refusal(HTTPStatus.NOT_FOUND, "MANIFEST_UNKNOWN", f'Failed to fetch "{rest}"')
        folder = self.images[image]
        if not rest.startswith("sha256:"):
            rest = json.loads((folder / "index.json").read_bytes())["manifests"][0]["digest"]
        blob = folder / "blobs" / rest.replace(":", "/")
        return (
            HTTPStatus.OK,
            MANIFEST if what == "manifests" else "application/octet-stream",
            blob.read_bytes(),
        )

    def _token(self, query: dict[str, list[str]], login: str) -> tuple[int, str, bytes]:
        image = query.get("scope", ["::"])[0].split(":")[1]
        user, _, password = login.partition(":")
        if not login:
            told = f'Unauthenticated request. Unauthenticated requests do not have permission "{_RIGHT}"'
            return _refusal(HTTPStatus.FORBIDDEN, "DENIED", told)
        if user != self.user or password not in self.passwords:
            return _refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHORIZED", "failed authentication")
        if image not in self.passwords[password]:
            told = f'Permission "{_RIGHT}" denied on resource "{image}" (or it may not exist)'
            return _refusal(HTTPStatus.FORBIDDEN, "DENIED", told)
        bearer = token_hex(16)
        self.bearers[bearer] = image
        return HTTPStatus.OK, "application/json", json.dumps({"token": bearer}).encode()


def _refusal(status: int, code: str, message: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"errors": [{"code": code, "message": message}]}).encode()


@contextmanager
def registry() -> Iterator[Registry]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, media, body = made.answer(self.path, self.headers.get("Authorization", ""))
            made.asked.append(f"{self.command} {self.path} {status}")
            self.send_response(status)
            if status == HTTPStatus.UNAUTHORIZED:
                realm = f'Bearer realm="http://{made.address}/v2/token",service="{made.address}"'
                self.send_header("WWW-Authenticate", realm)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Registry(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield made
        finally:
            server.shutdown()
