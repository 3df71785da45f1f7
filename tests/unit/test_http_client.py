"""Asking by HTTP: any answer is an answer, and what is not one is told in words that show no address."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from evalfleet.http_client import NoAnswer, ask
from tests.waiting import PATIENCE_S


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the path asks for."""

    def do_GET(self) -> None:
        self._answer(b"got")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        code = int(self.path.rpartition("/")[2])
        if code == 0:  # something that is no HTTP
            self.wfile.write(b"SSH-2.0-x\r\n")
            return
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)
        if self.path.startswith("/dribble"):
            for _ in range(1000):
                if self.server.enough.wait(0.01):  # type: ignore[attr-defined]
                    return
                self.wfile.write(b".")

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.enough = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.enough.set()  # type: ignore[attr-defined]
        server.shutdown()


@pytest.mark.parametrize("code", [200, 404, 429, 500])
def test_an_answer_is_an_answer_whatever_its_code(origin: str, code: int) -> None:
    assert ask(f"{origin}/{code}", timeout_s=PATIENCE_S)[:2] == (code, b"got")
    assert ask(f"{origin}/{code}", b"sent", timeout_s=PATIENCE_S, direct=True)[:2] == (code, b"sent")


def test_an_answer_that_is_too_large_is_none(origin: str) -> None:
    with pytest.raises(NoAnswer, match="more than 2 bytes"):
        ask(f"{origin}/200", timeout_s=PATIENCE_S, most_bytes=2)


def test_a_server_that_dribbles_does_not_keep_us(origin: str) -> None:
    with pytest.raises(NoAnswer, match="did not end its answer in time"):
        ask(f"{origin}/dribble/200", timeout_s=0.5)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1/SECRET", "Connection refused"),
        ("no address SECRET", "ValueError"),
        ("http://127.0.0.1:notaport/SECRET", "InvalidURL"),
    ],
)
def test_why_there_is_no_answer_shows_no_address(url: str, words: str) -> None:
    with pytest.raises(NoAnswer) as caught:
        ask(url, timeout_s=PATIENCE_S)
    assert str(caught.value) == words


def test_what_is_no_http_is_told(origin: str) -> None:
    with pytest.raises(NoAnswer, match="BadStatusLine"):
        ask(f"{origin}/0", timeout_s=PATIENCE_S)
