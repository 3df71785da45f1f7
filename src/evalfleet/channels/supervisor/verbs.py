"""What a controller asks of a host over SSH, a process a question; and the one that stays: the bridge.

`python -I -S supervisor.pyz VERB` in the user's home reads a line of JSON from its standard input and writes
one to its output. `connect` tells where the supervisor of a machine listens, and carries bytes between those
and it until its caller hangs up, having reached it directly.

`take`, `extend`, `halt` and `remove` are about a host that is lent: which machines hold it, and until when.
A machine's directory, ~/.evalfleet/<home>/<machine>, is its lock: mkdir makes it, for `expires_s`, and only
if fewer than `most` other machines, of whatever home, hold the host. All who take or give back a lock hold a
flock on ~/.evalfleet meanwhile. An expired lock holds nothing; its directory, with results, is its owner's.

`elevate`, which is asked by sudo, gives a machine a supervisor that is root where its login is not: attempts
can be users of their own then. The machine's directory is root's from now on, and all verbs about it are
asked by sudo, too. Whoever may log in there still sees which machines hold the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import sys
import time

from .files import ENVIRON, KEY, SOCKET, make_key, read_file, read_key, sha256, write_atomic
from .host import cloud_init, expiry_in, time_left

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

NO_MACHINE = 96
START_S = 15.0
LONGEST = 108
ANSWER_CAP = 1 << 16


def verb(name: str) -> int:
    """Answer a verb. A problem is answered as {"error": ...}."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 if name == "put" else 1 << 16)  # what follows the line is the parcel's
        if not data:
            return 2
        line += data
    request = json.loads(line)
    if name == "connect":
        return connect(request)
    try:
        if name in ("pack", "put"):
            os.chdir(directory_of(request))
            return pack_out(request) if name == "pack" else put_in(request)
        answer = VERBS[name](request)
    except OSError as err:
        answer = {"error": "io", "detail": str(err)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def pack_out(request: dict[str, Any]) -> int:
    from .files import job_name
    from .parcel import pack

    folder = "jobs/" + job_name(request["job"])
    if not os.path.isdir(folder):
        return NO_MACHINE
    pack(folder, sys.stdout.buffer.write, request["bytes"], request["files"])
    sys.stdout.flush()
    return 0


def put_in(request: dict[str, Any]) -> int:
    from .bundles import has_bundle, unpack_bundle

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
    try:
        os.chdir(directory_of(request))
        if os.path.exists("deleting"):
            return NO_MACHINE
    except FileNotFoundError:
        return NO_MACHINE
    sock = upgraded(request)
    os.write(1, f"ok {address()} {read_key()}\n".encode())
    carry(sock)
    return 0


def address() -> str:
    """Return the path where others can connect; empty if it is too long for an address, or odd."""
    path = os.path.join(os.getcwd(), SOCKET)
    return path if len(path) < LONGEST and path.isascii() and " " not in path else ""


def reach() -> socket.socket:
    """Return a connection to this directory's supervisor, which is started if it is dead."""
    until = time.monotonic() + START_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(SOCKET)  # relative: an address holds 108 bytes
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            from .main import start

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
        if request["hash"] is None or about.get("hash") == request["hash"]:
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
        file.write(json.dumps({"n": 1, "key": read_key(), **message}).encode() + b"\n")
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


ROOT = ".evalfleet"
NEW_S = 60.0
MOST_KEPT = 500
OWNER = "owner"
"""The file of a machine that says who made it, and where: user@computer:/home."""
OWNER_CAP = 500
KEEPSAKE_CAP = 1 << 20
LOGIN_FILES = (
    *(
        ".bashrc",
        ".bash_profile",
        ".bash_login",
        ".bash_logout",
        ".profile",
        ".zshrc",
        ".zshenv",
        ".zprofile",
    ),
    *(".config/fish/config.fish", ".pam_environment", ".gitconfig"),
)
ORDER_S = 15.0


def directory_of(request: dict[str, Any]) -> str:
    return os.path.join(ROOT, request["home"], request["folder"])


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Keep all others from taking or giving back anything on this host."""
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
    """Return whose machines hold the host, but for one, and since when."""
    others: list[str] = []
    for home in os.listdir(ROOT):
        with contextlib.suppress(NotADirectoryError, FileNotFoundError, PermissionError):
            for name in os.listdir(os.path.join(ROOT, home)):
                path = os.path.join(ROOT, home, name)
                if path != without and os.path.isdir(path) and not name.startswith(".") and holds(path):
                    others.append(held_by(path, name, home))
    return others


def held_by(path: str, machine: str, home: str) -> str:
    """Return whose machine it is and since when, for people."""
    owner = (read_file(path + "/" + OWNER, OWNER_CAP) or b"").decode("utf-8", "replace") or "home " + home
    since = ""
    with contextlib.suppress(OSError):
        made = time.gmtime(os.stat(path + "/" + KEY).st_mtime)
        since = time.strftime(" since %Y-%m-%d %H:%M UTC", made)
    return f"{machine} of {owner}{since}"


def holds(directory: str) -> bool:
    if os.path.exists(directory + "/expired"):
        return False
    try:
        expiry = json.loads(read_file(directory + "/expiry") or b"null")
        if expiry is None:  # it is just being made
            return abs(time.time() - os.stat(directory).st_mtime) < NEW_S
        return time_left(expiry, directory) > 0
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
    kept = {"kept": keepsakes()} if request.get("lent") else {}
    return problem or {**supervise(directory, request), **kept}


def lock(directory: str, request: dict[str, Any], make: bool) -> dict[str, Any]:
    if os.path.isdir(directory) and holds(directory):
        return {}
    others = holders(directory)
    if len(others) >= request["most"]:
        return {"error": "taken", "detail": ", ".join(sorted(others))}
    if make:
        os.makedirs(directory, 0o700, exist_ok=True)
        expiry = expiry_in(float(request["expires_s"]))
        write_atomic(directory + "/expiry", json.dumps(expiry), durable=True)
        make_key(directory, str(request.get("key") or ""))
        if request.get("owner"):
            write_atomic(directory + "/" + OWNER, str(request["owner"])[:OWNER_CAP])
    return {}


def supervise(directory: str, request: dict[str, Any]) -> dict[str, Any]:
    """Start the machine's supervisor if none runs, and tell it how long the machine may live.

    This is not done under the flock, which a supervisor would inherit.
    """
    from .main import start

    until = time.monotonic() + START_S
    while True:
        problem = start(directory)
        if problem:
            return {"error": "supervisor", "detail": problem}
        from pathlib import Path  # not before: 1.3 MB that every supervisor would keep

        from .machine import order

        home = Path(os.path.realpath(directory))
        try:
            order(home, {"op": "expire", "seconds": request["expires_s"]}, ORDER_S)
            break
        except (ConnectionError, FileNotFoundError):  # it is just leaving, for its expiry or another version
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
    wishes = [{"op": "watch", **request["watch"]}] if request.get("watch") else []
    wishes += [{"op": "anew"}] if request.get("anew") else []
    for wish in wishes:
        try:
            order(home, wish, ORDER_S)
        except OSError as err:
            if str(err) not in ("unknown", "bad"):  # a supervisor of an older version, which leaves soon
                raise
    return cloud_init() if request.get("boot") else {}


def elevate(request: dict[str, Any]) -> dict[str, Any]:
    """Be the machine's supervisor as root from now on, if attempts can be isolated then. May be repeated."""
    from .isolation import HostIsolation
    from .processes import environment_of, host_environment

    directory = os.path.realpath(directory_of(request))
    if not os.path.isdir(directory) or os.path.exists(directory + "/deleting"):
        return {"error": "unknown", "detail": "there is no such machine"}
    why_not = HostIsolation(directory).why_not
    if why_not:
        return {"error": "host", "detail": why_not}
    os.chdir(directory)
    os.chown(".", 0, 0)  # from now on nobody starts a supervisor here who is not root
    os.chmod(".", 0o711)
    until = time.monotonic() + START_S
    while True:
        with reach() as sock:
            pid, uid = peer_of(sock)
            if uid == 0:
                return {}
            given = host_environment(environment_of(pid))  # sudo keeps few variables, and no proxies
            write_atomic(ENVIRON, json.dumps(given))
            with sock.makefile("rwb") as file:
                ask(file, {"op": "leave", "run": request["run"], "epoch": request["epoch"], "now": True})
                while file.read(1 << 16):
                    pass  # until it hangs up
        if time.monotonic() > until:
            return {"error": "supervisor", "detail": "the one that is not root does not leave"}
        time.sleep(0.01)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and user of the process that listens at the other end."""
    import struct

    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


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

    from .machine import halt_machine

    directory = directory_of(request)
    if not os.path.isdir(directory):
        return {"error": "unknown", "detail": "there is no such machine"}
    halt_machine(Path(os.path.realpath(directory)))
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """End everything that runs on a machine, remove it, and with the last one all that is ours."""
    from pathlib import Path

    from .machine import remove_machine

    directory = directory_of(request)
    left = ""
    if os.path.isdir(directory):
        left = remove_machine(Path(os.path.realpath(directory)))
    if os.path.isdir(ROOT):
        with alone():
            tidy(os.path.join(ROOT, request["home"]))
            with contextlib.suppress(OSError):
                os.rmdir(ROOT)
    answer: dict[str, Any] = {"left": left} if left else {}
    return {**answer, "kept": keepsakes()} if request.get("lent") else answer


def keepsakes() -> dict[str, str]:
    """Return what the owner of a lent host finds again: names in its home, hashes of what logins run."""
    with os.scandir(".") as entries:
        names = sorted(entry.name for entry in entries if entry.name not in (ROOT, ".cache"))
    kept = dict.fromkeys(names[:MOST_KEPT], "")
    for name in (".ssh/authorized_keys", ".ssh/rc", ".ssh/config", *LOGIN_FILES):
        content = read_file(name, KEEPSAKE_CAP)
        if content is not None:
            kept[name] = sha256(content)
    kept["crontab"] = sha256(crontab())
    return kept


def crontab() -> bytes:
    """Return the user's crontab; empty where there is none, or no cron."""
    import subprocess  # only here: it is slow to load

    login = os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else ""
    try:
        argv = ["crontab", "-l", *(["-u", login] if login else [])]
        listing = subprocess.run(argv, capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return listing.stdout[:KEEPSAKE_CAP] if listing.returncode == 0 else b""


def tidy(home: str) -> None:
    """Remove the folder of a home without machines: it needs no supervisors."""
    with contextlib.suppress(OSError):
        if any(os.path.isdir(os.path.join(home, name)) for name in os.listdir(home)):
            return
        for name in os.listdir(home):
            os.unlink(os.path.join(home, name))
        os.rmdir(home)


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "take": take,
    "elevate": elevate,
    "extend": extend,
    "halt": halt,
    "remove": remove,
}
