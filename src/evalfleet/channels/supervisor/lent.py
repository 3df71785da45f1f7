"""A host that is lent: which machines hold it, and until when.

A machine's directory, ~/.evalfleet/<home>/<machine>, is its lock: mkdir makes it, for `expires_s`, and only
if fewer than `most` other machines, of whatever home, hold the host. All who take or give back a lock hold a
flock on ~/.evalfleet meanwhile. An expired lock holds nothing; its directory, with results, is its owner's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

from .boot import cloud_init
from .files import read_file, write_atomic
from .host import boot_id
from .starting import start

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

ROOT = ".evalfleet"
NEW_S = 60.0
ORDER_S = 15.0


def directory_of(request: dict[str, Any]) -> str:
    return os.path.join(ROOT, request["home"], request["folder"])


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Nobody else takes or gives back anything on this host."""
    fd = locked_root()
    try:
        yield
    finally:
        os.close(fd)


def locked_root() -> int:
    while True:
        os.makedirs(ROOT, 0o700, exist_ok=True)
        fd = os.open(ROOT, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(ROOT)):
                return fd
        os.close(fd)  # the last machine's removal took it away while we waited


def holders(without: str) -> list[str]:
    """The machines that hold the host, but for one."""
    found: list[str] = []
    for home in os.listdir(ROOT):
        with contextlib.suppress(NotADirectoryError, FileNotFoundError, PermissionError):
            for name in os.listdir(os.path.join(ROOT, home)):
                path = os.path.join(ROOT, home, name)
                if path != without and os.path.isdir(path) and not name.startswith(".") and holds(path):
                    found.append(name)
    return found


def holds(directory: str) -> bool:
    if os.path.exists(directory + "/expired"):
        return False
    try:
        expiry = json.loads(read_file(directory + "/expiry") or b"null")
        if expiry is None:  # it is just being made
            return time.time() - os.stat(directory).st_mtime < NEW_S
        if expiry["boot"] == boot_id():
            return bool(expiry["mono"] > time.monotonic())
        return bool(expiry["wall"] > time.time())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def take(request: dict[str, Any]) -> dict[str, Any]:
    """Lock the host for a machine, and start its supervisor. May be repeated."""
    directory = directory_of(request)
    with alone():
        if os.path.exists(directory + "/deleting"):
            return {"error": "deleting", "detail": "the machine is being deleted"}
        problem = lock(directory, request, make=True)
        if problem:
            tidy(os.path.join(ROOT, request["home"]))
    return problem or supervise(directory, request)


def lock(directory: str, request: dict[str, Any], make: bool) -> dict[str, Any]:
    if os.path.isdir(directory) and holds(directory):
        return {}
    others = holders(directory)
    if len(others) >= request["most"]:
        return {"error": "taken", "detail": ", ".join(sorted(others))}
    if make:
        os.makedirs(directory, 0o700, exist_ok=True)
        left = float(request["expires_s"])
        expiry = {"mono": time.monotonic() + left, "wall": time.time() + left, "boot": boot_id()}
        write_atomic(directory + "/expiry", json.dumps(expiry), durable=True)
    return {}


def supervise(directory: str, request: dict[str, Any]) -> dict[str, Any]:
    """Not under the flock: a supervisor would inherit it."""
    problem = start(directory)
    if problem:
        return {"error": "supervisor", "detail": problem}
    from pathlib import Path

    from .removal import order

    home = Path(os.path.realpath(directory))
    order(home, {"op": "expire", "seconds": request["expires_s"]}, ORDER_S)
    wishes = [{"op": "watch", **request["watch"]}] if request.get("watch") else []
    wishes += [{"op": "anew"}] if request.get("anew") else []
    for wish in wishes:
        try:
            order(home, wish, ORDER_S)
        except OSError as err:
            if str(err) not in ("unknown", "bad"):  # a supervisor of an older version, which leaves soon
                raise
    return cloud_init() if request.get("boot") else {}


def extend(request: dict[str, Any]) -> dict[str, Any]:
    """Move the expiry. Also of an expired machine, if nobody else has taken the host meanwhile."""
    directory = directory_of(request)
    if not os.path.isdir(directory) or os.path.exists(directory + "/deleting"):
        return {"error": "unknown", "detail": "there is no such machine"}
    with alone():
        problem = lock(directory, request, make=False)
    return problem or supervise(directory, request)


def halt(request: dict[str, Any]) -> dict[str, Any]:
    """End everything that runs on a machine, and keep it."""
    from pathlib import Path

    from .removal import halt_machine

    directory = directory_of(request)
    if not os.path.isdir(directory):
        return {"error": "unknown", "detail": "there is no such machine"}
    halt_machine(Path(os.path.realpath(directory)))
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """End everything that runs on a machine, remove it, and with the last one all that is ours."""
    from pathlib import Path

    from .removal import remove_machine

    directory = directory_of(request)
    if os.path.isdir(directory):
        remove_machine(Path(os.path.realpath(directory)))
    if os.path.isdir(ROOT):
        with alone():
            tidy(os.path.join(ROOT, request["home"]))
            with contextlib.suppress(OSError):
                os.rmdir(ROOT)
    return {}


def tidy(home: str) -> None:
    """A home without machines needs no supervisors."""
    with contextlib.suppress(OSError):
        if any(os.path.isdir(os.path.join(home, name)) for name in os.listdir(home)):
            return
        for name in os.listdir(home):
            os.unlink(os.path.join(home, name))
        os.rmdir(home)


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "take": take,
    "extend": extend,
    "halt": halt,
    "remove": remove,
}
