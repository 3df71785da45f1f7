"""Becoming a supervisor: detached from whoever asked for it, and the only one of its directory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys

from .server import Server


def serve(home: str, ready: int) -> None:
    """Be the supervisor of a directory until told to quit. Says so on the descriptor `ready`."""
    lock = os.open("supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.write(ready, b"ready")  # another one is here, or just leaving: who connects will see
        return
    if os.path.exists("deleting"):
        os.write(ready, b"the machine is being deleted")
        return
    server = Server(home)
    server.open()
    gc.freeze()  # modules are for ever: collections need not look at them again
    os.write(ready, b"ready")
    os.close(ready)
    server.run()
    server.close()


def detach() -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open("supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def main(argv: list[str]) -> int:
    home = os.path.realpath(argv[1])
    os.chdir(home)
    os.chmod(".", 0o700)
    told, ready = os.pipe()
    if os.fork():
        os.close(ready)
        word = os.read(told, 4096)
        if word != b"ready":
            sys.stderr.write((word.decode("utf-8", "replace") or "the supervisor did not start") + "\n")
        return 0 if word == b"ready" else 1
    os.close(told)
    try:
        detach()
        serve(home, ready)
    except BaseException as err:
        with contextlib.suppress(OSError):
            os.write(ready, f"{type(err).__name__}: {err}".encode())
        raise
    return 0
