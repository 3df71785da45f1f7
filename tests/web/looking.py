"""Somebody who looks at the dashboard's pages with a real browser, and runs that are worth a look."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Playwright, expect

from tests.e2e.dashboard import Dashboard
from tests.e2e.harness import Fleet, task
from tests.waiting import PATIENCE_S

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PATIENCE_MS = PATIENCE_S * 1000 / 4
expect.set_options(timeout=PATIENCE_MS)  # else five seconds, which a busy computer may take for a click
DESKTOP, PHONE, WIDE = (1280, 900), (390, 844), (2560, 1300)
Scheme = Literal["light", "dark"]
MARKUP = "<img src=x onerror=alert(1)>\"'`&amp;</script>"
NASTY = f"a/../{MARKUP}"


def png(width: int, height: int, shade: int = 90) -> bytes:
    """A grey picture."""
    rows = zlib.compress((b"\0" + bytes([shade]) * width) * height)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", rows),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


class Wire:
    """What is between a browser and the server, and can be cut. It keeps what browsers have asked."""

    def __init__(self, port: int) -> None:
        self._there = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.asked: list[bytes] = []
        self._start(self._accept)

    def cut(self) -> None:
        """All connections end; new ones lead nowhere until the wire is mended."""
        self._whole.clear()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        self.mend()
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            self._whole.wait()
            with socket.create_connection(("127.0.0.1", self._there)) as far:
                self._open += [near, far]
                back = self._start(_carry, far, near, None)
                _carry(near, far, self.asked)
                back.join()


def _carry(one: socket.socket, other: socket.socket, kept: list[bytes] | None) -> None:
    """Until one of them ends, and so both do."""
    with suppress(OSError):
        while data := one.recv(1 << 16):
            if kept is not None:
                kept.append(data)
            other.sendall(data)
    for each in (one, other):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


HOSTILE = r"""
head -c 1100000 /dev/zero | tr '\0' x; echo
printf '\033[2J\033]0;title\007 <script>alert(1)</script> \xe2\x80\xae gnirts \xff\n'
cd "$EVALFLEET_OUT"
mkdir sub; echo inner > 'sub/<b>"q".html'
printf '<svg onload=alert(1)>' > fake.png
echo '{"n": 1, "at": 1, "model": "forged", "status": 200, "usd": "1"}' > calls.jsonl
cp FOLDER/real.png FOLDER/huge.png FOLDER/cut.png .
echo '{"n": 1, "action": "<b>click</b> \u202e", "screenshot": "real.png", "x": 300, "y": 200}' > traj.jsonl
echo '{"n": 2, "action": "see", "screenshot": "fake.png", "error": "<i>"}' >> traj.jsonl
echo '{"n": 3, "action": "see", "screenshot": "huge.png"}' >> traj.jsonl
echo '{"n": 4, "action": "see", "screenshot": "cut.png", "x": 1e9, "y": -5}' >> traj.jsonl
result '{"score": 0, "error": "<script>alert(2)</script>", "<b>key</b>": "\u202e<img src=x>"}'
"""
SEEN = r"""
for n in 1 2 3; do
  cp FOLDER/real.png $EVALFLEET_OUT/s$n.png
  echo '{"n": '$n', "action": "click ('$n'00, 50)", "screenshot": "s'$n'.png", "x": '$n'00, "y": 50}'
done > $EVALFLEET_OUT/traj.jsonl
echo "step by step"; score 1
"""
FLAKY = "echo ERROR 500 from /setup/launch >&2; [ $EVALFLEET_ATTEMPT = 1 ] && score 1 || exit 3"


def launched(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


class Looker:
    """Somebody who looks at pages, and whatever those pages complain of."""

    def __init__(self, page: Page, opened: Dashboard | None) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.opened = opened
        page.on("dialog", self._refuse)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(PATIENCE_MS)

    def _note(self, line: ConsoleMessage) -> None:
        if line.type == "error":
            self.complaints.append(line.text)

    def _refuse(self, dialog: Dialog) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def go(self, path: str, port: int | None = None) -> Page:
        """Open a page of the dashboard, by way of another port if told so; the token goes with the first."""
        assert self.opened is not None
        begun = not self.page.url.startswith("http")
        token = f"{'&' if '?' in path else '?'}token={self.opened.token}" if begun else ""
        self.page.goto(f"http://{self.opened.host}:{port or self.opened.port}{path}{token}")
        self.shows()
        return self.page

    def shows(self) -> None:
        """The page is drawn: nothing on it is still to come."""
        expect(self.page.locator("main h1")).to_be_visible()
        expect(self.page.locator("main .skeleton")).to_have_count(0)

    def has_no_markup_of_others(self) -> None:
        """Nothing that somebody wrote into a run is an element of the page."""
        for selector in ("main script", "main b b", "img[src=x]", "main i i", "[onerror]", "[onload]"):
            assert self.page.locator(selector).count() == 0, selector

    def text(self) -> str:
        return re.sub(r"\s+", " ", self.page.locator("main").inner_text())


@contextmanager
def looker(
    browser: Browser,
    opened: Dashboard | None = None,
    size: tuple[int, int] = DESKTOP,
    scheme: Scheme = "light",
) -> Iterator[Looker]:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, accept_downloads=False
    )
    try:
        yield Looker(context.new_page(), opened)
    finally:
        context.close()


def bench(fleet: Fleet) -> None:
    """A benchmark with a task of each kind."""
    (fleet.folder / "real.png").write_bytes(png(640, 400))
    (fleet.folder / "huge.png").write_bytes(
        (real := png(4, 4))[:16] + struct.pack(">II", 60_000, 60_000) + real[24:]
    )
    (fleet.folder / "cut.png").write_bytes(png(640, 400)[:60])
    in_folder = str(fleet.folder)
    fleet.bench(
        [
            task(
                NASTY,
                HOSTILE.replace("FOLDER", in_folder),
                domain=MARKUP,
                tags=[MARKUP],
                metadata={MARKUP: {"inner": f"\u202e{MARKUP}"}},
            ),
            task("seen", SEEN.replace("FOLDER", in_folder), domain="d"),
            *(task(f"bad_{n}", f"echo 500 from /setup/{n}; exit 3", domain="d") for n in range(2)),
            task("flaky", FLAKY, domain="e"),
            task("zero", 'echo \'{"action": "look"}\' > $EVALFLEET_OUT/traj.jsonl; score 0', domain="e"),
            task("flips", f"[ -e {in_folder}/gates/second ] && score 1 || score 0", domain="e"),
        ],
        steps="traj.jsonl",
    )
