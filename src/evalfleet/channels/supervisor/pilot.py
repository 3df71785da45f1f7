"""A machine that is a job of a service, a pilot: its supervisor runs while the job does and ends with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .files import make_key, read_key
from .machine import halt_machine, order, remove_machine
from .mailbox import HttpPost, Relay, hide_memory, open_post, sealed
from .main import start

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .mailbox import Post

ORDER_S = 30.0
PATIENCE_S, RETRY_S = 600.0, 5.0
STORE_PACE_S = (1.0, 2.0)
RESTARTED = 76
"""The job's exit code where the service has run it anew: what ran there before is lost."""


def hold(folder: Path, seconds: float, post: Post | None, pace_s: tuple[float, float] = (0.2, 1.0)) -> int:
    """Be the machine in this folder until its time is over, it is told to leave or the service ends the job.

    `post`: its mailbox, if it is reached by one. Returns the job's exit code.
    """
    began = time.monotonic()

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    os.environ["EVALFLEET_MACHINE"] = str(folder)
    os.environ["EVALFLEET_PILOT"] = "1"
    relay = None if post is None else Relay(post, read_key(str(folder)), str(folder), *pace_s)
    try:
        # a process that was forked would have the token, too
        problem = _start_apart(folder) if isinstance(post, HttpPost) else start(str(folder))
        if problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        left_s = seconds - (time.monotonic() - began)
        order(folder, {"op": "expire", "seconds": left_s}, ORDER_S)
        if relay is not None:
            threading.Thread(target=relay.run, daemon=True).start()
        with open(folder / "supervisor.lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it has the lock while it lives: at its expiry it leaves
    except SystemExit:  # the service takes the node back: what runs is not to blame for its end
        with contextlib.suppress(OSError):
            order(folder, {"op": "evict"}, ORDER_S)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        halt_machine(folder)
        if relay is not None:
            relay.stop()
    return 0


def _start_apart(folder: Path) -> str:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    argv = [sys.executable, "-I", "-S", root, str(folder)]
    return "" if subprocess.run(argv, stdin=subprocess.DEVNULL).returncode == 0 else "no supervisor starts"


def main(box: dict[str, Any], folder: Path) -> int:
    """A machine of a service that shares no files with the controller, in a new folder of its node.

    `box`: the `way` to its mailbox, its `key`, and `life_s`, how long it may run. Of all starts of the job,
    the first one counts: mail that was read once is not read again by another one.
    """
    began = time.monotonic()
    hide_memory()
    post = open_post(box["way"])
    about = {"start": os.urandom(8).hex(), "node": platform.node(), "at": time.time()}
    if not _create(post, "start", sealed(box["key"], "start", about)):
        sys.stderr.write("the service has run this job anew: what ran before is lost\n")
        return RESTARTED
    os.mkdir(folder, 0o700)
    make_key(str(folder), box["key"])
    try:
        return hold(folder, box["life_s"] - (time.monotonic() - began), post, STORE_PACE_S)
    finally:
        remove_machine(folder)
        with contextlib.suppress(OSError):
            ran_s = round(time.monotonic() - began, 3)
            post.create("end", sealed(box["key"], "end", {"ran_s": ran_s}))


def _create(post: Post, name: str, content: bytes) -> bool:
    """Are we the first? Again and again while the store is away."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            # the answer to an earlier try may have been lost on its way to us
            return post.create(name, content) or post.read(name) == content
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)
