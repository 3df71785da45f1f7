"""Published ports: listened to on the host, answered from inside the container's network."""

from __future__ import annotations

import ctypes
import os
import socket

from . import launching
from .store import Container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SPACES = (("user", 0x10000000), ("net", 0x40000000))


def listen(container: Container) -> list[tuple[socket.socket, int]]:
    """Raises OSError in docker's words when a port is taken."""
    found: list[tuple[socket.socket, int]] = []
    if launching.on_host_network(container):
        return found
    for port in container.config["ports"]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((port["ip"], port["host"]))
        except OSError as err:
            close([*found, (sock, 0)])
            raise OSError(
                f"driver failed programming external connectivity on endpoint {container.name}: "
                f"Bind for {port['ip']}:{port['host']} failed: port is already allocated."
            ) from err
        sock.listen(64)
        found.append((sock, port["container"]))
    return found


def close(listening: Sequence[tuple[socket.socket, int]]) -> None:
    for sock, _ in listening:
        sock.close()


def serve(container: Container, listening: Sequence[tuple[socket.socket, int]], pid: int) -> int:
    """A process that carries bytes until it is killed: the host's sockets, in the container's network."""
    if not listening:
        return 0
    child = os.fork()
    if child:
        return child
    try:
        os.environ.clear()
        libc = ctypes.CDLL(None, use_errno=True)
        for name, kind in SPACES:
            descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            if libc.setns(descriptor, kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")
        from . import carrying  # asyncio takes long to load

        carrying.run(listening)
    finally:
        os._exit(1)
