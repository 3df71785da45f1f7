"""A registry on loopback: token service, index, manifests, blobs elsewhere, and its bad days."""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import threading
import urllib.parse
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.unit.image_making import digest_of

USER, PASSWORD = "me", "pass:word/that-nobody-may-see"
REPOSITORY = "windowsarena/winarena"
GZIP = b"\x1f\x8b"
TOKEN = "a-token-that-nobody-may-see"
SIGNED = "sig=signed-for-a-moment"


class Registry(ThreadingHTTPServer):
    """`login`: basic, token (which only USER gets) or anonymous. `asked` is what was asked, with whose word.

    Bad days: `status` is the answer to all but the token service; `cut` and `swap` spoil layers on the way.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, files: dict[str, bytes], login: str = "anonymous") -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        self.store = _Store(self)
        self.files = files
        self.login = login
        self.asked: list[tuple[str, str]] = []
        self.status = 0
        self.cut = self.swap = False
        self.tells_digest = True
        self.realm = f"http://{self.address}/token"
        self.blobs_at = f"http://127.0.0.1:{self.store.server_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def image(self) -> str:
        return f"{self.address}/{REPOSITORY}:latest"

    @property
    def digest(self) -> str:
        return digest_of(self.files["index.json"])

    def blobs_asked(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _ in self.asked if "/blobs/" in path]


class _Store(ThreadingHTTPServer):
    """Where blobs are: another server, which takes no word but the signature in the URL."""

    daemon_threads = True

    def __init__(self, registry: Registry) -> None:
        super().__init__(("127.0.0.1", 0), _Blobs)
        self.registry = registry
        self.words: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...

    def answer(self, code: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Blobs(_Handler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Store)
        self.server.words.append(self.headers.get("Authorization"))
        path, _, query = self.path.partition("?")
        registry = self.server.registry
        data = registry.files[path.lstrip("/")]
        if query != SIGNED or self.headers.get("Authorization"):
            return self.answer(400, b"Only one auth mechanism allowed")
        if registry.swap and data.startswith(GZIP):
            data = gzip.compress(bytes(len(data) * 10))[: len(data)].ljust(len(data), b"\0")
        if not registry.cut or not data.startswith(GZIP):
            return self.answer(200, data)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])


class _Api(_Handler):
    @property
    def registry(self) -> Registry:
        assert isinstance(self.server, Registry)
        return self.server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        word = self.headers.get("Authorization", "")
        url = urllib.parse.urlsplit(self.path)
        if url.path == "/token":
            return self._token(word, urllib.parse.parse_qs(url.query))
        self.registry.asked.append((url.path, word))
        if self.registry.status:
            return self.answer(self.registry.status, b"<html>no</html>")
        if not self._known(word):
            return self.answer(401, headers=self._challenge())
        *head, kind, name = url.path.split("/")
        if "/".join(head) != f"/v2/{REPOSITORY}":
            return self.answer(404)
        return self._manifest(name) if kind == "manifests" else self._blob(name)

    def _known(self, word: str) -> bool:
        if self.registry.login == "basic":
            return word == _basic(USER, PASSWORD)
        return word == f"Bearer {TOKEN}"

    def _challenge(self) -> dict[str, str]:
        if self.registry.login == "basic":
            return {"WWW-Authenticate": 'Basic realm="registry"'}
        where = f'realm="{self.registry.realm}",service="registry.test"'
        return {"WWW-Authenticate": f'Bearer {where},scope="repository:{REPOSITORY}:pull"'}

    def _token(self, word: str, query: dict[str, Any]) -> None:
        asked = {"service": ["registry.test"], "scope": [f"repository:{REPOSITORY}:pull"]}
        welcome = not word if self.registry.login == "anonymous" else word == _basic(USER, PASSWORD)
        if query != asked or not welcome:
            return self.answer(401, b"{}")
        key = "token" if self.registry.login == "anonymous" else "access_token"
        return self.answer(200, json.dumps({key: TOKEN, "expires_in": 300}).encode())

    def _manifest(self, name: str) -> None:
        data = self.registry.files.get("index.json" if name in ("latest", self.registry.digest) else name)
        if data is None:
            return self.answer(404)
        told = {"Docker-Content-Digest": digest_of(data)} if self.registry.tells_digest else {}
        return self.answer(200, data, told)

    def _blob(self, name: str) -> None:
        if name not in self.registry.files:
            return self.answer(404)
        return self.answer(307, headers={"Location": f"{self.registry.blobs_at}/{name}?{SIGNED}"})


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@contextmanager
def serving(server: ThreadingHTTPServer) -> Generator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def registry(
    files: dict[str, bytes], login: str = "anonymous", context: ssl.SSLContext | None = None
) -> Generator[Registry]:
    made = Registry(files, login)
    if context is not None:
        made.socket = context.wrap_socket(made.socket, server_side=True)
    with serving(made), serving(made.store):
        yield made
