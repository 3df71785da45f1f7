"""The program: becomes the supervisor of a directory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import traceback

from .files import owner_of_parent

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable

    from .server import Server


def main(argv: list[str]) -> int:
    problem = start(argv[1])
    if problem:
        sys.stderr.write(problem + "\n")
    return 1 if problem else 0


def serve(home: str, ready: int, new_server: Callable[[str], Server]) -> None:
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
    server = new_server(home)
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


def start(directory: str) -> str:
    """Returns once a supervisor of the directory listens: empty, or why there is none."""
    from .server import Server  # a verb needs none of it; here, as the directory is about to change

    reading, ready = os.pipe()
    if os.fork():
        os.close(ready)
        word = os.read(reading, 4096)
        os.close(reading)
        return "" if word == b"ready" else word.decode("utf-8", "replace") or "the supervisor did not start"
    code = 1
    try:
        os.close(reading)
        home = os.path.realpath(directory)
        os.chdir(home)
        # where we are root by sudo, the login must see whether its host is held, and until when
        os.chmod(".", 0o711 if owner_of_parent() != os.geteuid() else 0o700)
        detach()
        serve(home, ready, Server)
        code = 0
    except BaseException as err:  # in a fork: whoever waits for us to be ready is told why we are not
        with contextlib.suppress(OSError):
            os.write(ready, f"{type(err).__name__}: {err}".encode())
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # whoever forked us has its own way out
