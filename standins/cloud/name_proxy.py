"""A proxy that leads to a stand-in, whatever host is asked for: some libraries know the vendor's own only."""

from __future__ import annotations

import contextlib
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import BinaryIO, cast


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    leads_to: tuple[str, int] = ("", 0)
    asked: list[str]


class _Tunnel(socketserver.StreamRequestHandler):
    """One CONNECT, as HTTP has it, and then bytes in both directions."""

    rbufsize = 0  # what is read is handed on at once

    def handle(self) -> None:
        method, where, _ = self.rfile.readline().decode().split(" ", 2)
        while self.rfile.readline().strip():
            pass  # headers
        if method != "CONNECT":
            self.wfile.write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
            return
        server = cast(_Server, self.server)
        server.asked.append(where.partition(":")[0])
        with socket.create_connection(server.leads_to) as other, other.makefile("rwb", 0) as stream:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            far, near = cast(BinaryIO, stream), cast(BinaryIO, self.wfile)
            back = threading.Thread(target=_carry, args=(far, near), daemon=True)
            back.start()
            _carry(cast(BinaryIO, self.rfile), far)
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)
            back.join()


def _carry(source: BinaryIO, target: BinaryIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # one of them has ended
        shutil.copyfileobj(source, target)


@contextlib.contextmanager
def leading_to(host: str, port: int) -> Iterator[tuple[str, list[str]]]:
    """The proxy's URL, for HTTPS_PROXY, and the hosts that it was asked for."""
    with _Server(("127.0.0.1", 0), _Tunnel) as server:
        server.leads_to, server.asked = (host, port), []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
        finally:
            server.shutdown()
            thread.join()
