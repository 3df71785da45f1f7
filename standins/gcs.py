"""A stand-in for Cloud Storage, as far as its XML API is used: objects, conditions, lists, parts, and tokens.

It keeps objects in memory. What it does not know, it refuses, so that a client that asks for more is noticed.
`python -m standins.gcs` serves one bucket until Ctrl-C.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from standins import by_hand
from standins.gce.identity import Identity
from standins.gce.words import ApiError

BUCKET = "bucket"
PAGE = 50
LISTING = {"list-type", "prefix", "delimiter", "max-keys", "encoding-type"}
OLDER, NEWER = {"marker"}, {"continuation-token", "start-after", "fetch-owner"}
"""By Google's page "List objects" of the XML API: which parameters belong to which kind of list."""


class Refused(Exception):
    """An answer other than yes: status, Google's code, and what it says."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(status, code, message or code)
        self.status, self.code, self.message = status, code, message or code


class CloudStorage:
    """Buckets with objects, served on a port of this computer."""

    def __init__(
        self, *buckets: str, identity: Identity | None = None, sock: socket.socket | None = None
    ) -> None:
        """`identity`: whose tokens count, if not its own. `sock`: where it is served, bound, if not here."""
        self.buckets: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.read_only: set[str] = set()
        """Buckets that our account may only read."""
        self.generations: dict[tuple[str, str], int] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.refuses: Callable[[str, bytes], bool] = lambda name, content: False
        """Is an object of this name and with this content held back? It is refused for the moment then."""
        self.withholds: Callable[[str], bool] = lambda name: False
        """Is an object of this name not to be had for the moment?"""
        self.identity = identity or Identity()
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        self.requests: list[str] = []
        storage = self

        class Handler(_Handler):
            served = storage

        self._handler = Handler
        self._server = _Server(("127.0.0.1", 0), Handler, sock)
        self._address: tuple[str, int] = self._server.socket.getsockname()
        self._thread = threading.Thread()

    @property
    def url(self) -> str:
        host, port = self._address
        return f"http://{host}:{port}"

    def environ(self, folder: Path) -> dict[str, str]:
        """How it is reached: with a service account's key, which google-auth exchanges for tokens here."""
        self.identity.write_key(folder / "key.json", f"{self.url}/token")
        return {
            "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "key.json"),
            "STORAGE_EMULATOR_HOST": self.url,
        }

    def plant(self, bucket: str, name: str, content: bytes) -> None:
        """Put an object there, as somebody else would."""
        with self.lock:
            self.buckets[bucket][name] = content
            self.generations[bucket, name] = next(self.numbers)

    def start(self) -> None:
        """Serve, at the same address as before, with all that was stored."""
        if self._server.is_closed:
            self._server = _Server(self._address, self._handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Go away: nobody listens there any more, and what was connected is cut off."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._server.is_closed:
            self.stop()


class _Server(ThreadingHTTPServer):
    """A server that ends its connections when it is closed."""

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        sock: socket.socket | None = None,
    ) -> None:
        self._connected: set[socket.socket] = set()
        self.is_closed = False
        super().__init__(address, handler, bind_and_activate=sock is None)
        if sock is not None:
            self.socket.close()
            self.socket = sock
            self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connected.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connected.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not self.is_closed:  # else it was cut off
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.is_closed = True
        super().server_close()
        for connection in list(self._connected):
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    served: CloudStorage
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: else its body waits 40 ms for the other side's acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        self.served.requests.append(format % args)

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, headers, content = self._do(body)
        except Refused as err:
            text = f"<Error><Code>{err.code}</Code><Message>{escape(err.message)}</Message></Error>"
            status, headers, content = err.status, {"Content-Type": "application/xml"}, text.encode()
        except ApiError as err:
            status, headers, content = err.status, {}, b"<Error><Code>AuthenticationRequired</Code></Error>"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _do(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        address = urlsplit(self.path)
        if address.path == "/token":
            answer = self.served.identity.exchange(dict(parse_qsl(body.decode())))
            return answer.status, {"Content-Type": "application/json"}, json.dumps(answer.body).encode()
        self.served.identity.check(self.headers.get("Authorization", ""))
        query = {name: values[0] for name, values in parse_qs(address.query, True).items()}
        bucket, _, name = unquote(address.path).removeprefix("/").partition("/")
        if bucket not in self.served.buckets:
            raise Refused(404, "NoSuchBucket", "The specified bucket does not exist.")
        if self.command not in ("GET", "HEAD") and bucket in self.served.read_only:
            raise Refused(403, "AccessDenied", "tester does not have storage.objects.create access.")
        if self.command == "PUT" and self.served.refuses(name, body):
            raise Refused(503, "ServiceUnavailable", "We encountered an internal error. Please try again.")
        if self.command == "GET" and self.served.withholds(name):
            raise Refused(503, "ServiceUnavailable", "We encountered an internal error. Please try again.")
        with self.served.lock:
            if not name:
                return self._list(bucket, query)
            if "uploads" in query or "uploadId" in query:
                return self._multipart(bucket, name, query, body)
            if not query.keys() <= {"generation"}:  # of permissions, for one: they are the bucket's
                raise Refused(400, "InvalidArgument", f"Cannot use {', '.join(query)} here.")
            return self._object(bucket, name, query.get("generation"), body)

    def _object(
        self, bucket: str, name: str, generation: str | None, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        objects = self.served.buckets[bucket]
        if self.command == "PUT":
            return self._store(bucket, name, body)
        now = str(self.served.generations.get((bucket, name)))
        if name not in objects or generation not in (None, now):
            raise Refused(404, "NoSuchKey", "The specified key does not exist.")
        if self.command == "DELETE":
            del objects[name]
            return 204, {}, b""
        if self.command not in ("GET", "HEAD"):
            raise Refused(405, "MethodNotAllowed")
        headers, content = self._headers(bucket, name), objects[name]
        if some := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(some[1]), min(int(some[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return 206, headers, content[first : last + 1]
        return 200, headers, content

    def _store(self, bucket: str, name: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        known = self.served.generations.get((bucket, name), 0)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (known if name in self.served.buckets[bucket] else 0):
            raise Refused(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        self.served.buckets[bucket][name] = body
        self.served.generations[bucket, name] = next(self.served.numbers)
        return 200, self._headers(bucket, name), b""

    def _headers(self, bucket: str, name: str) -> dict[str, str]:
        digest = hashlib.md5(self.served.buckets[bucket][name], usedforsecurity=False).digest()
        return {
            "ETag": f'"{digest.hex()}"',
            "Last-Modified": formatdate(usegmt=True),
            "x-goog-hash": f"md5={base64.b64encode(digest).decode()}",
            "x-goog-generation": str(self.served.generations[bucket, name]),
        }

    def _multipart(
        self, bucket: str, name: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if self.command == "POST" and "uploads" in query:
            upload = f"upload-{next(self.served.numbers)}"
            self.served.parts[upload] = {}
            what = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{what}</InitiateMultipartUploadResult>".encode()
        parts = self.served.parts.get(query["uploadId"])
        if parts is None:
            raise Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'}, b""
        if self.command != "POST":
            raise Refused(405, "MethodNotAllowed")
        _, headers, _ = self._store(bucket, name, b"".join(parts[number] for number in sorted(parts)))
        del self.served.parts[query["uploadId"]]
        etag = escape(headers["ETag"])
        content = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return 200, headers, content.encode()

    def _list(self, bucket: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if self.command != "GET":
            raise Refused(405, "MethodNotAllowed")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        # the newer kind of list, which obstore asks for, has other words for where to begin and to go on
        newer = query.get("list-type") == "2"
        unknown = query.keys() - LISTING - (NEWER if newer else OLDER)
        if unknown:
            raise Refused(400, "InvalidArgument", f"Cannot use {', '.join(sorted(unknown))} here.")
        after = query.get("start-after" if newer else "marker", "")
        if token := query.get("continuation-token"):
            after = _name_in(token)
        rows: dict[str, str] = {}
        for name in sorted(self.served.buckets[bucket]):
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            row = prefix + head + cut if cut else name
            if name.startswith(prefix) and row > after:
                rows[row] = f"<CommonPrefixes><Prefix>{escape(row)}</Prefix></CommonPrefixes>" if cut else ""
        page = list(rows)[: min(PAGE, int(query.get("max-keys", PAGE)))]
        text = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
        text += "".join(rows[row] or self._listed(bucket, row) for row in page)
        if len(page) < len(rows):
            word, where = ("NextContinuationToken", _token(page[-1])) if newer else ("NextMarker", page[-1])
            text += f"<{word}>{escape(where)}</{word}>"
        text += f"<IsTruncated>{str(len(page) < len(rows)).lower()}</IsTruncated>"
        return 200, {}, f"<ListBucketResult>{text}</ListBucketResult>".encode()

    def _listed(self, bucket: str, name: str) -> str:
        headers, size = self._headers(bucket, name), len(self.served.buckets[bucket][name])
        about = f"<LastModified>2026-11-16T12:00:00.000Z</LastModified><Size>{size}</Size>"
        about += (
            f"<Generation>{headers['x-goog-generation']}</Generation><ETag>{escape(headers['ETag'])}</ETag>"
        )
        return f"<Contents><Key>{escape(name)}</Key>{about}</Contents>"


def _token(name: str) -> str:
    """Where a list goes on after this name, as nobody but the server can read or make it."""
    return base64.urlsafe_b64encode(b"after " + name.encode()).decode()


def _name_in(token: str) -> str:
    try:
        word, _, name = base64.urlsafe_b64decode(token).decode().partition(" ")
    except ValueError:
        word, name = "", ""
    if word != "after":
        raise Refused(400, "InvalidArgument", "The continuation token provided is incorrect.")
    return name


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Serve one bucket meanwhile; the variables by which it is reached."""
    with tempfile.TemporaryDirectory(prefix="gcs-stand-in-") as folder, CloudStorage(BUCKET) as storage:
        yield storage.environ(Path(folder))


def main(argv: list[str]) -> int:
    by_hand.parser("gcs", "A bucket of Cloud Storage on this computer, until Ctrl-C.").parse_args(argv)
    return by_hand.serve("gcs", serving, lambda environ: by_hand.bucket_guide(environ, f"gs://{BUCKET}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
