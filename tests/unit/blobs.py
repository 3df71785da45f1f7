"""A store of files on loopback, as clouds have them."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Blobs(http.server.BaseHTTPRequestHandler):
    """A store that gives ranges, wants a token, and may break off."""

    files: dict[str, bytes]
    asked: list[str]
    token: str = "sig=ok"
    breaks: int = 0
    written: str = "Mon, 01 Jan 2024 00:00:00 GMT"
    whole_after: int | None = None
    """After so many parts it sends whole files, whatever it is asked for."""

    def do_GET(self) -> None:
        path, _, token = self.path.partition("?")
        data = self.files.get(path)
        if token != self.token or data is None:
            self.send_error(403 if token != self.token else 404)
            return
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        last = min(last, len(data) - 1)
        if first > 0 or last > 0:
            self.asked.append(f"{path} {first}")
        whole = self.whole_after is not None and len(self.asked) > self.whole_after
        if whole:
            first, last = 0, len(data) - 1
        self.send_response(200 if whole else 206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", "v1")
        self.send_header("Last-Modified", self.written)
        self.end_headers()
        part = data[first : last + 1]
        if self.breaks > 0 and len(part) > 1:
            type(self).breaks -= 1
            part = part[: len(part) // 2]
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def store(files: dict[str, bytes]) -> Generator[tuple[str, type[Blobs]]]:
    """Its address, and what it is asked."""

    class Mine(Blobs): ...

    Mine.files, Mine.asked = files, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Mine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
