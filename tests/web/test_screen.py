"""A machine's screen by VNC, from the dashboard in a real browser: what the machine serves stays apart."""

from __future__ import annotations

import base64
import hashlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.dashboard import dashboard
from tests.e2e.harness import Fleet, task
from tests.web.looking import looker

BENCHMARK = """
from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.benchmarks.loaded import Appliance, Screen

class Desktop(CommandBenchmark):
    "A benchmark whose machines have a screen."
    appliance = Appliance(what="desktop", absent=9, screen=Screen(PORT, PORT, "/", ()))
"""
PAGE = b"""<!doctype html><title>screen</title><p id=screen>none</p><p id=stolen>none</p><script>
const socket = new WebSocket(`ws://${location.host}/websockify`);
socket.binaryType = "arraybuffer";
const answers = [
  (version) => socket.send(version),
  () => socket.send(new Uint8Array([1])),
  () => socket.send(new Uint8Array([1])),
  (init) => {
    const view = new DataView(init);
    const name = new TextDecoder().decode(init.slice(24));
    screen_.textContent = `${view.getUint16(0)} x ${view.getUint16(2)} ${name}`;
  },
];
const screen_ = document.getElementById("screen");
socket.onmessage = (message) => answers.shift()(message.data);
const told = (text) => (document.getElementById("stolen").textContent = text);
fetch("http://127.0.0.1:DASHBOARD/api/runs", { credentials: "include" })
  .then((reply) => told(`got ${reply.status}`), () => told("refused"));
</script>"""


class Desktop(socketserver.ThreadingTCPServer):
    """What a machine with a screen serves on a port: a page, and RFB 3.8 by WebSocket, up to `ServerInit`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Visit)
        self.port: int = self.server_address[1]
        self.page = PAGE
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Visit(socketserver.StreamRequestHandler):
    """One request."""

    def handle(self) -> None:
        lines = iter(lambda: self.rfile.readline().decode().strip(), "")
        first, *fields = lines
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        assert isinstance(self.server, Desktop)
        self.server.asked += [first, *fields]
        if "upgrade" in headers.get("connection", "").lower():
            self._speak_rfb(headers["sec-websocket-key"])
        else:
            page = self.server.page
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n")
            self.wfile.write(b"Content-Length: %d\r\n\r\n%s" % (len(page), page))

    def _speak_rfb(self, key: str) -> None:
        digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %s\r\n\r\n" % base64.b64encode(digest)
        )
        name = b"<b>desk</b>"
        pixels = struct.pack(">BBBBHHHBBBxxx", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)
        init = struct.pack(">HH", 1024, 768) + pixels + struct.pack(">I", len(name)) + name
        self._say(b"RFB 003.008\n")
        assert self._heard() == b"RFB 003.008\n"
        self._say(b"\x01\x01")  # one kind of security: none
        assert self._heard() == b"\x01"
        self._say(b"\0\0\0\0")
        # SecurityResult and ServerInit are told apart by ClientInit
        assert self._heard() == b"\x01"
        self._say(init)
        self.rfile.read(1)

    def _say(self, data: bytes) -> None:
        self.wfile.write(bytes([0x82, len(data)]) + data)

    def _heard(self) -> bytes:
        head = self.rfile.read(2)
        mask = self.rfile.read(4)
        return bytes(each ^ mask[n % 4] for n, each in enumerate(self.rfile.read(head[1] & 0x7F)))


@pytest.fixture
def desktop() -> Iterator[Desktop]:
    with Desktop() as served:
        yield served
        served.shutdown()


@pytest.fixture
def fleet(tmp_path: Path, browser: Browser) -> Iterator[Fleet]:
    fleet = Fleet.at(tmp_path / "f")
    yield fleet
    fleet.sweep()


def test_a_screen_opens_on_a_port_of_its_own_and_gets_nothing_of_the_dashboards(
    fleet: Fleet, browser: Browser, desktop: Desktop
) -> None:
    fleet.bench([task("a", "gate 1; score 1")])
    (fleet.folder / "desktops.py").write_text(BENCHMARK.replace("PORT", str(desktop.port)))
    fleet.config('[benchmarks.desktop]\nkind = "desktops:Desktop"\npath = "b.toml"\n')
    run = fleet.start("run", "desktop", "--name", "r", "--workers", "1")
    fleet.started("a.0")
    opened = dashboard(fleet)
    desktop.page = PAGE.replace(b"DASHBOARD", str(opened.port).encode())
    with looker(browser, opened) as looks:
        page = looks.go("/runs/r/machines/worker-1")
        page.get_by_role("button", name="screen by VNC").click()
        link = page.get_by_role("link", name="open its screen")
        expect(link).to_be_visible()
        with page.context.expect_page() as opening:
            link.click()
        screen = opening.value
        expect(screen.locator("#screen")).to_have_text("1024 x 768 <b>desk</b>")
        expect(screen.locator("#stolen")).to_have_text("refused")
        assert screen.evaluate("[window.opener, document.cookie]") == [None, ""]
        assert screen.url.startswith("http://localhost:")
        assert str(desktop.port) not in screen.url, "by a tunnel"
        assert str(opened.port) not in screen.url
        told = [line for line in desktop.asked if line.lower().startswith(("cookie:", "referer:"))]
        assert not [line for line in told if "cookie" in line.lower() or str(opened.port) in line], told
        tunnel = urlsplit(screen.url).port
    opened.process.interrupt()
    opened.process.wait()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", tunnel)) != 0, "the tunnel has outlived the dashboard"
    fleet.open_gate("1")
    run.wait()
