"""What a controller asks of a host over SSH, a process a question; and the one that stays: the bridge.

`python -I -S supervisor.pyz VERB` in the user's home reads a line of JSON from its standard input and writes
one to its output. `connect` tells where the supervisor of a machine listens, and carries bytes between those
and it until its caller hangs up, having reached it directly.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

from .files import SOCKET

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

NO_MACHINE = 96
START_S = 15.0
LONGEST = 108
ANSWER_CAP = 1 << 16


def verb(name: str) -> int:
    """Do what is asked. A problem is told as {"error": ...}."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 if name == "put" else 1 << 16)  # what follows the line is the parcel's
        if not data:
            return 2
        line += data
    request = json.loads(line)
    if name == "connect":
        return connect(request)
    from . import lent

    try:
        if name in ("pack", "put"):
            os.chdir(lent.directory_of(request))
            return pack_out(request) if name == "pack" else put_in(request)
        answer = lent.VERBS[name](request)
    except OSError as err:
        answer = {"error": "io", "detail": str(err)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def pack_out(request: dict[str, Any]) -> int:
    from .files import job_name
    from .pack import pack

    folder = "jobs/" + job_name(request["job"])
    if not os.path.isdir(folder):
        return NO_MACHINE
    pack(folder, sys.stdout.buffer.write, request["bytes"], request["files"])
    sys.stdout.flush()
    return 0


def put_in(request: dict[str, Any]) -> int:
    from .pack import has_bundle, unpack_bundle

    answer: dict[str, Any] = {}
    try:
        if not has_bundle(request["digest"]):
            unpack_bundle(request["digest"], chunks())
    except OSError as err:
        answer = {"error": "io", "detail": str(err)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def chunks() -> Iterator[bytes]:
    while True:
        data = os.read(0, 1 << 18)
        if not data:
            return
        yield data


# -- the bridge ----------------------------------------------------------------------------------


def connect(request: dict[str, Any]) -> int:
    """Become the line to a machine's supervisor: a running one, or one that is started."""
    directory = os.path.join(".evalfleet", request["home"], request["folder"])
    try:
        os.chdir(directory)
        if os.path.exists("deleting"):
            return NO_MACHINE
    except FileNotFoundError:
        return NO_MACHINE
    sock = upgraded(request)
    os.write(1, f"ok {address()}\n".encode())
    carry(sock)
    return 0


def address() -> str:
    """Where others can connect to; empty if the name is longer than an address may be, or odd."""
    path = os.path.join(os.getcwd(), SOCKET)
    return path if len(path) < LONGEST and path.isascii() and " " not in path else ""


def reach() -> socket.socket:
    """A connection to this directory's supervisor, which is started if it is dead."""
    until = time.monotonic() + START_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(SOCKET)  # relative: an address holds 108 bytes
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            from .starting import start

            problem = start(".")
            if problem or time.monotonic() > until:
                sys.exit(problem or "the supervisor does not listen")
            time.sleep(0.01)
        else:
            return sock


def upgraded(request: dict[str, Any]) -> socket.socket:
    """As `reach`; a supervisor of another version is asked to make room, now if nothing runs.

    If something does, and it speaks what the controller speaks, it serves on until its jobs have ended;
    then it leaves, the controller loses the connection, and its next one starts the new version. If they
    have no protocol in common it leaves at once, and the new version adopts what runs.
    """
    sock = reach()
    with sock.makefile("rwb") as file:
        about = ask(file, {"op": "ping"})
        if about.get("hash") == request["hash"]:
            return sock
        try:
            now = not set(about.get("protocols", [1])).intersection(request["protocols"])
        except TypeError:
            now = False
        plea = {"op": "leave", "run": request["run"], "epoch": request["epoch"], "now": now}
        if ask(file, plea).get("state") == "leaving":
            while file.read(1 << 16):
                pass  # until it hangs up
    sock.close()
    return reach()


def ask(file: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        file.write(json.dumps({"n": 1, **message}).encode() + b"\n")
        file.flush()
        answer: dict[str, Any] = json.loads(file.readline(ANSWER_CAP) or b"{}")
        answer.get("n")  # is it an object?
        return answer
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}  # a job may have taken its place: what it says, the controller shall see


def carry(sock: socket.socket) -> None:
    """Bytes both ways until either side hangs up."""
    peer = sock.fileno()
    try:
        while True:
            ready = select.select([0, peer], [], [])[0]
            if peer in ready:
                data = sock.recv(1 << 16)
                if not data:
                    return
                write_all(1, data)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                sock.sendall(data)
    except OSError:
        return


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
