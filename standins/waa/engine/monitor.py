"""What outlives `docker run`: keeps one container running, its ports open, and writes down how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from . import dockerd, launching, ports
from .store import Container, mark, now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

BACKOFF_S = 0.1


def main(path: str, told: int) -> int:
    """`told`: a descriptor on which the one who waits hears `up`, or what is wrong, in a line."""
    container = Container(path)
    try:
        listening = ports.listen(container)
    except OSError as err:
        _tell(told, str(err))
        return 1
    try:
        _keep(container, listening, told)
    finally:
        ports.close(listening)
    return 0


def _keep(container: Container, listening: Sequence[tuple[socket.socket, int]], told: int) -> None:
    count = 0
    while True:
        code, problem = _live(container, listening, told if count == 0 else -1, count)
        state = container.state
        again = not problem and not state.get("stopped") and _wants_restart(container, code, count)
        container.change(
            status="restarting" if again else "exited",
            code=code,
            pid=0,
            ended=now(),
            error=problem,
            monitor=mark(os.getpid()) if again else None,
        )
        if not again:
            return
        count += 1
        time.sleep(min(BACKOFF_S * 2**count, 5))


def _live(
    container: Container, listening: Sequence[tuple[socket.socket, int]], told: int, count: int
) -> tuple[int, str]:
    """One life of the container: its exit code, and why it could not start, if so."""
    hear, say = os.pipe()
    with open(container.log, "ab") as log:
        process = subprocess.Popen(
            launching.unshare(container),
            stdin=subprocess.PIPE,
            stdout=say,
            stderr=log,
            env=container.config["env"],
            start_new_session=True,
        )
    os.close(say)
    if not os.read(hear, 64).startswith(b"ready"):
        code = process.wait()
        os.close(hear)
        _tell(told, "failed to create task for container: its file system cannot be set up: see its log")
        return code, "failed to create task for container"
    os.close(hear)
    pid = _first_child(process.pid)
    proxy = ports.serve(container, listening, pid)
    container.change(
        status="running",
        pid=pid,
        started=now(),
        restarts=count,
        monitor=mark(os.getpid()),
        ended="",
        code=0,
        error="",
    )
    _tell(told, "up")
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # now that its number is known
        pipe.write(b"go\n")
    code = process.wait()
    if proxy:
        os.kill(proxy, signal.SIGKILL)
        os.waitpid(proxy, 0)
    return (code if code >= 0 else 128 - code), ""


def _first_child(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return int(file.read().split()[0])


def _wants_restart(container: Container, code: int, count: int) -> bool:
    policy, _, most = container.config["restart"].partition(":")
    if policy == "on-failure":
        return code != 0 and (not most or count < int(most))
    return policy in ("always", "unless-stopped")


def _tell(told: int, word: str) -> None:
    if told >= 0:
        os.write(told, word.replace("\n", " ").encode() + b"\n")
        os.close(told)


def start(container: Container) -> str:
    """Have the container's monitor started, by the daemon if there is one; what it says."""
    word = dockerd.ask(container.path)
    return spawn(container) if word is None else word


def spawn(container: Container) -> str:
    """Start the container's monitor, in nobody's session and with nobody's environment; what it says."""
    hear, say = os.pipe()
    os.set_inheritable(say, True)
    container.change(stopped=False, status="created")
    argv = [sys.executable, "-IS", sys.argv[0], "__monitor", container.path, str(say)]
    subprocess.run(argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, pass_fds=(say,), check=True)
    os.close(say)
    with os.fdopen(hear, encoding="utf-8") as answer:
        word = answer.readline().strip()
    return "" if word == "up" else word or "the container's monitor died"


def daemonized(path: str, told: int) -> int:
    """In the background from here on: the caller's child ends at once."""
    if os.fork():
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    code = main(path, told)
    os._exit(code)
