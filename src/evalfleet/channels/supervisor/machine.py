"""A machine's directory seen from outside its supervisor: reaching it, and removing it with all that runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

from .files import CLEANER, SOCKET, read_file, read_key
from .isolation import remove_groups
from .processes import is_still, kill, kill_marked, marker, markers_of_jobs, parse_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

DELETING = "deleting"
LEFT = ".left-"
"""What the folder of a machine begins with that could not be removed."""
ADDRESS_BYTES = 100
QUIT_S = 10.0
ANSWER_CAP = 1 << 16


def open_socket(directory: Path, timeout_s: float = 5.0) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with short_path(directory) as path:
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def short_path(directory: Path) -> Generator[str]:
    """A path to the supervisor's socket that fits into an address, whatever the directory's length."""
    path = str(directory / SOCKET)
    if len(os.fsencode(path)) <= ADDRESS_BYTES:
        yield path
    elif os.path.isdir("/proc/self/fd"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{SOCKET}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.symlink(directory, f"{folder}/d")
            yield f"{folder}/d/{SOCKET}"


def order(directory: Path, message: dict[str, Any], timeout_s: float) -> None:
    """Send a request of a place to a supervisor, and wait until it is done. Raises OSError if it is not."""
    with open_socket(directory, timeout_s) as sock, sock.makefile("rwb") as file:
        file.write(json.dumps({"n": 1, "key": read_key(str(directory)), **message}).encode() + b"\n")
        file.flush()
        line = file.readline(ANSWER_CAP)
    if not line:
        raise ConnectionResetError("no answer")
    try:
        answer = json.loads(line)
        error = answer.get("error")
    except (ValueError, AttributeError, RecursionError):
        error = "nonsense"
    if error is not None:
        raise OSError(str(error)[:200])


def halt_machine(directory: Path) -> None:
    """End everything that runs on the machine, its supervisor too. Its files stay. Raises OSError."""
    with contextlib.suppress(OSError):
        order(directory, {"op": "quit"}, QUIT_S)
    try:
        lock = _take_lock(directory)
    except FileNotFoundError:
        return
    try:
        _kill_rest(directory)
    finally:
        os.close(lock)


def remove_machine(directory: Path) -> str:
    """End everything that runs on the machine, then remove it. May be repeated. Raises OSError.

    Returns the path of what nobody but root can remove: nothing of it runs any more. Empty if all is gone.
    """
    try:
        (directory / DELETING).touch()  # from now on no supervisor starts here
        with contextlib.suppress(OSError):
            order(directory, {"op": "quit"}, QUIT_S)
        lock = _take_lock(directory)
    except FileNotFoundError:
        return ""
    try:
        _kill_rest(directory)
        return remove_tree(directory)
    except FileNotFoundError:
        return ""  # another removal was faster
    finally:
        os.close(lock)


def _take_lock(directory: Path) -> int:
    """The supervisor's lock: who has it knows that there is none, and that none can come."""
    lock = os.open(directory / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + QUIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(lock)
                raise
            if time.monotonic() > until - QUIT_S / 2 or not (directory / SOCKET).exists():
                _kill_recorded(directory / "supervisor.pid")
            time.sleep(0.01)
        else:
            return lock


def _kill_recorded(file: Path, *marks: bytes, group: bool = False) -> None:
    """Kill the process whose pid is in a file, if it still is the one it was."""
    with contextlib.suppress(OSError):
        pid, born = parse_stat(file.read_bytes())
        if pid is not None and born is not None and is_still(pid, born, *marks):
            kill(pid, signal.SIGKILL, group)


def _kill_rest(directory: Path) -> None:
    """Kill what a supervisor that did not answer has left alive."""
    marks = markers_of_jobs(str(directory))
    for job in (directory / "jobs").glob("*/pid"):
        if not job.with_name("exit").exists():
            _kill_recorded(job, *marks, group=True)
    _kill_recorded(directory / "meter/pid")
    remove_groups(_groups_of(directory))
    # also a supervisor that is just being started: until it is really gone, it can make files here
    if not kill_marked(QUIT_S, marker("EVALFLEET_MACHINE", str(directory))):
        raise OSError("some of its processes cannot be killed")
    remove_groups(_groups_of(directory))


def _groups_of(directory: Path) -> list[str]:
    """The machine's control groups, as its supervisor wrote them down."""
    try:
        return [str(path) for path in json.loads(read_file(str(directory / "groups"), ANSWER_CAP) or b"[]")]
    except (ValueError, TypeError):
        return []


def remove_tree(directory: Path) -> str:
    """Remove a machine's directory, in which nothing runs any more. Returns the path of what is left of it.

    The marker goes last: a removal that is interrupted still shows as one.
    """
    for entry in sorted(directory.iterdir(), key=lambda path: path.name == DELETING):
        if entry.is_dir() and not entry.is_symlink():
            try:
                _open_up(entry)
                shutil.rmtree(entry, ignore_errors=True)
            except RecursionError:  # a job can dig deeper than Python follows
                import subprocess  # only here: it is slow to load

                subprocess.run(["sh", "-c", CLEANER, "evalfleet-clean", str(entry)], check=False)
        else:
            with contextlib.suppress(PermissionError):
                entry.unlink(missing_ok=True)
        if os.path.lexists(entry):
            # another user's files, say a container's, or immutable ones: only root can remove them
            return _put_aside(directory)
    try:
        directory.rmdir()
    except OSError:
        return _put_aside(directory)  # it is filled again as fast as it is emptied, or is immutable itself
    return ""


def _put_aside(directory: Path) -> str:
    """Rename the directory: by its name the machine would still seem to be there. Returns what is left."""
    aside = directory.with_name(f"{LEFT}{directory.name}-{time.time_ns()}")
    try:
        os.rename(directory, aside)
    except OSError:
        return str(directory)
    return str(aside)


def _open_up(top: Path) -> None:
    """Directories that a job made read-only can be emptied then."""
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.lstat(folder).st_mode) & 0o700 != 0o700:
                os.chmod(folder, 0o700)
