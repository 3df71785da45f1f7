"""Marks that hosts of a lab leave: they share no files with us; a listener at their gateway counts them."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading

from lab.network import GATEWAY

COUNTED = "counted\n"


class Marks:
    """Counts what is said to a socket of the lab's network. At `port` 0 the network chooses a free one."""

    def __init__(self, sock: socket.socket, counts: collections.Counter[str], port: int = 0) -> None:
        self._sock = sock
        self._counts = counts
        try:
            sock.bind((GATEWAY, port))
            sock.listen()
        except OSError:
            sock.close()
            raise
        self.port: int = sock.getsockname()[1]
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:  # it is closed
                return
            with connection, contextlib.suppress(OSError), connection.makefile("rw") as file:
                self._counts.update(file.readline().split())
                file.write(COUNTED)

    def close(self) -> None:
        """When this returns the port is free: no thread waits at the socket any more."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


def leave(mark: str, port: int) -> str:
    """A command of the host's, which waits until the mark is counted: a job must not end before."""
    if not mark:
        return ""
    return f"bash -c 'exec 3<>/dev/tcp/{GATEWAY}/{port}; echo {mark} >&3; read -r _ <&3'"
