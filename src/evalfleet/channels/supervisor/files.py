"""Small files: read, replaced and removed without trusting who wrote them."""

from __future__ import annotations

import contextlib
import os
import re
import stat

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

SOCKET = "supervisor.sock"
KEY = "key"
"""The file with a machine's key: who shows it to the supervisor is obeyed. Its owner alone can read it."""
KEY_CAP = 200
ENVIRON = "environ"
"""The file with what jobs inherit of the login's environment, where the supervisor is root by sudo."""
CLEANER = 'chmod -R u+rwX "$1" 2>/dev/null; rm -rf "$1"'
MOST_DEEP = 500
"""Folders in folders that come home: Python cannot remove many more, nor can other tools of the user's."""

_makers: list[Any] = []  # kept: Python looks for a module that is missing every time
_PLAIN_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.~-]{1,180}")
_KEPT = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.~-"


def hasher() -> Any:
    """A SHA-256 to be fed."""
    if not _makers:
        for name in ("_sha2", "_sha256", "hashlib"):  # hashlib loads OpenSSL: 5 ms
            with contextlib.suppress(ImportError):
                _makers.append(__import__(name).sha256)
                break
    return _makers[0]()


def sha256(data: bytes) -> str:
    digest = hasher()
    digest.update(data)
    return str(digest.hexdigest())


def job_name(id: str) -> str:
    """Return one file name for any id, as `evalfleet.names.safe_name` makes it."""
    if _PLAIN_NAME.fullmatch(id):
        return id
    if not id:
        return "%empty"
    raw = id.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in raw)
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) <= 180:
        return name
    suffix = "%~" + sha256(raw)[:32]
    return re.sub(r"%.?$", "", name[: 180 - len(suffix)]) + suffix


def read_file(path: str, cap: int = -1) -> bytes | None:
    """Return the content; None if there is no such regular file, or it is longer than the cap."""
    try:
        # the file may be a job's making: a fifo must not block us, a link not lead us away
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or 0 <= cap < about.st_size:
            return None  # looked at before it is opened as a file: a folder cannot be
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(fd)


def file_size(path: str) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def write_atomic(path: str, text: str, durable: bool = False) -> None:
    with open(path + ".tmp", "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def read_key(directory: str = ".") -> str:
    """Return the machine's key; empty where a supervisor of an earlier version has made none."""
    key = (read_file(f"{directory}/{KEY}", KEY_CAP) or b"").strip()
    return key.decode() if not key.strip(b"0123456789abcdef") else ""


def make_key(directory: str = ".", key: str = "") -> str:
    """Return the machine's key. If it has none, it gets the given one, or a new one."""
    existing = read_key(directory)
    if existing:
        return existing
    partial = f"{directory}/{KEY}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, (key or os.urandom(32).hex()).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileExistsError):
        os.link(partial, f"{directory}/{KEY}")  # whole or not at all, and the first one stays
    os.unlink(partial)
    return read_key(directory)


def owner_of_parent() -> int:
    """Another user than ours where the machine is a login's that is not root, and we are root by sudo."""
    return os.stat("..").st_uid


def make_folder(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def make_folders(top: str, names: tuple[str, ...]) -> None:
    for path in (top, *(f"{top}/{name}" for name in names)):
        make_folder(path)
