"""exec: a command in a running container. It is the engine's child, not the caller's.

So it is with the original, and it matters: to kill `docker exec` leaves what it started running.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys

from . import flags, launching
from .environment import environment
from .errors import Failure, daemon
from .store import Container, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SWITCHES = ("interactive", "tty", "detach", "privileged")
VALUES = ("env", "env-file", "workdir", "user", "detach-keys")
SHORT = {"i": "interactive", "t": "tty", "d": "detach", "e": "env", "w": "workdir", "u": "user"}
HEAD = struct.Struct(">BI")
OUT, ERR, CODE = 1, 2, 3


def execute(argv: list[str]) -> int:
    given = flags.parse("exec", argv, SWITCHES, VALUES, SHORT, anywhere=False)
    if len(given.rest) < 2:
        raise Failure("\"docker exec\" requires at least 2 arguments.\nSee 'docker exec --help'.")
    container, command = find(given.rest[0]), given.rest[1:]
    if not container.running:
        raise daemon(f"container {container.id} is not running")
    env = environment(given, [f"{key}={value}" for key, value in container.config["env"].items()])
    workdir = given.of("workdir") or container.config["workdir"] or "/"
    _check(container, command[0], env, workdir)
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    helper = [
        sys.executable,
        "-IS",
        sys.argv[0],
        "__exec",
        container.path,
        str(theirs.fileno()),
        workdir,
        *command,
    ]
    stdin = None if given.has("interactive") else subprocess.DEVNULL
    subprocess.run(helper, env=env, stdin=stdin, pass_fds=(theirs.fileno(),), check=True)
    theirs.close()
    return 0 if given.has("detach") else _show(ours)


def _check(container: Container, program: str, env: dict[str, str], workdir: str) -> None:
    what = "OCI runtime exec failed: exec failed: unable to start container process"
    if not os.path.isdir(container.on_host(workdir)):
        raise Failure(f'{what}: chdir to cwd ("{workdir}"): no such file or directory: unknown', 126)
    if "/" in program:
        path = container.on_host(os.path.join(workdir, program))
        if not os.path.lexists(path):
            raise Failure(
                f'{what}: exec: "{program}": stat {program}: no such file or directory: unknown', 127
            )
        if os.path.isdir(path) or not (os.path.islink(path) or os.access(path, os.X_OK)):
            raise Failure(f'{what}: exec: "{program}": permission denied: unknown', 126)
        return
    folders = [container.on_host(folder) for folder in env.get("PATH", "").split(":") if folder]
    if shutil.which(program, path=os.pathsep.join(folders)) is None and not any(
        os.path.islink(os.path.join(folder, program)) for folder in folders
    ):
        raise Failure(f'{what}: exec: "{program}": executable file not found in $PATH: unknown', 127)


def _show(link: socket.socket) -> int:
    """What comes back, until the command has ended. 137 when its container was killed under it."""
    with link, link.makefile("rb") as stream:
        while True:
            head = stream.read(HEAD.size)
            if len(head) < HEAD.size:
                return 137
            kind, size = (int(number) for number in HEAD.unpack(head))
            if kind == CODE:
                return size
            output = sys.stdout.buffer if kind == OUT else sys.stderr.buffer
            output.write(stream.read(size))
            output.flush()


def helper(path: str, link: int, workdir: str, command: list[str]) -> int:
    """In the background: runs the command, sends what it says while somebody listens."""
    if os.fork():
        return 0
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    container = Container(path)
    argv = launching.enter(container, container.state.get("pid") or 0, workdir, command)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # or whoever called would wait for us
        os.dup2(null, descriptor)
    os.chdir("/")
    with socket.socket(fileno=link) as sock:
        _relay(process, sock)
        code = process.wait()
        _send(sock, HEAD.pack(CODE, code if code >= 0 else 128 - code))
    os._exit(0)


def _relay(process: Any, sock: socket.socket) -> None:
    kinds = {process.stdout.fileno(): OUT, process.stderr.fileno(): ERR}
    while kinds:
        for descriptor in select.select(list(kinds), [], [])[0]:
            data = os.read(descriptor, 1 << 16)
            if data:
                _send(sock, HEAD.pack(kinds[descriptor], len(data)) + data)
            else:
                del kinds[descriptor]


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: the command goes on
        sock.sendall(data)
