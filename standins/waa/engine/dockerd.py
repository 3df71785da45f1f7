"""The daemon, where a test wants one: what a job starts through it is not the job's, and outlives it.

Without one, `docker` starts containers itself, and a supervisor that ends all that a job left ends them, too.
"""

from __future__ import annotations

import os
import socket

from .store import ROOT, Container

SOCKET = os.path.join(ROOT, "dockerd.sock")


def ask(path: str) -> str | None:
    """Have the container's monitor started; what it says. None: there is no daemon."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(SOCKET)
        except OSError:
            return None
        line.sendall(path.encode() + b"\n")
        with line.makefile("r", encoding="utf-8") as answer:
            return answer.readline().strip()


def serve() -> int:
    from .monitor import spawn

    os.makedirs(ROOT, exist_ok=True)
    if os.path.exists(SOCKET):
        os.unlink(SOCKET)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        while True:
            line, _ = listener.accept()
            with line, line.makefile("rw", encoding="utf-8") as file:
                path = file.readline().strip()
                if path:
                    file.write(spawn(Container(path)) + "\n")
