"""What is done with machines' folders, on the computer that sees the cluster's shared file system.

That is this one, or a login node: there, its own Python runs a copy of this file (3.8 and later, standard
library only). A request and its answer are JSON: `perform({"verb": "survey", ...})`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DELETING = "deleting"
MAIL = "mail"
"""The mailbox in a machine's folder, where no steps may be used. Its pilot looks whether there is one."""
DETAIL_CAP = 300
LOG_END = 4096
READ_CAP = 1 << 16
ARCHIVE_CAP = 16 << 20


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked. A problem is told as {"error": ...}."""
    try:
        return VERBS[request["verb"]](request)
    except OSError as err:
        return {"error": f"{err.filename or request.get('root', '')}: {err.strerror or err}"}


def resolve(request: dict[str, Any]) -> dict[str, Any]:
    """The whole name of the shared folder."""
    return {"path": os.path.realpath(os.path.expanduser(request["path"]))}


def survey(request: dict[str, Any]) -> dict[str, Any]:
    """What each machine's folder below `root` tells."""
    machines: dict[str, Any] = {}
    for name in _folders(request["root"]):
        machines[name] = _look(os.path.join(request["root"], name))
    if not machines:
        _tidy(request["root"])  # who was about to do so may have been killed
    return {"machines": machines, "now": time.time()}


def survey_all(request: dict[str, Any]) -> dict[str, Any]:
    """The same, for each home that has machines below the folder `shared`."""
    homes: dict[str, Any] = {}
    for home in _folders(request["shared"]):
        root = os.path.join(request["shared"], home)
        with contextlib.suppress(PermissionError):  # of another user, with whom the folder is shared
            ours = [name for name in _folders(root) if _is_ours(root, home, name)]
            homes[home] = {name: _look(os.path.join(root, name)) for name in ours}
            if not ours and _is_home(root, home):
                _tidy(root)
    return {"homes": homes, "now": time.time()}


def look(request: dict[str, Any]) -> dict[str, Any]:
    """What one machine's folder tells, and its key."""
    folder = request["folder"]
    return {**_look(folder), "key": (_read(folder + "/key") or "").strip()}


def make(request: dict[str, Any]) -> dict[str, Any]:
    """A machine's folder, with its key, unless there are `most` others. Tells its job, if it has one."""
    folder = f"{request['root']}/{request['name']}"
    most = request["most"]
    if most is not None and not os.path.isdir(folder) and len(_folders(request["root"])) >= most:
        return {"full": True}
    if os.path.exists(folder + "/" + DELETING):
        return {"deleting": True}
    os.makedirs(request["root"], 0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if request["mail"]:
        os.makedirs(folder + "/" + MAIL, 0o700, exist_ok=True)
    _write(folder + "/key", (request["key"] + "\n").encode(), first_stays=True)
    _write(folder + "/about", json.dumps(request["about"]).encode(), first_stays=True)
    return _look(folder)


def bring(request: dict[str, Any]) -> dict[str, Any]:
    """Write a file, unless it is there as it must be. Its content is sent with the second request."""
    path, digest = request["path"], request["digest"]
    if _digest(path) != digest and "content" in request:
        _write(path, base64.b64decode(request["content"]))
    return {"missing": _digest(path) != digest}


def record(request: dict[str, Any]) -> dict[str, Any]:
    """Write down which job a machine is."""
    _write(os.path.join(request["root"], request["name"], "job"), request["job"].encode())
    return {}


def doom(request: dict[str, Any]) -> dict[str, Any]:
    """From now on the machine is being deleted."""
    folder = f"{request['root']}/{request['name']}"
    if os.path.isdir(folder):
        with contextlib.suppress(FileNotFoundError):
            open(folder + "/" + DELETING, "ab").close()
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Remove a machine's folder; with the last one of its home, what all of them share goes, too."""
    root: str = request["root"]
    folder = f"{root}/{request['name']}"
    if os.path.isdir(folder):
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(folder, request["supervisor"])
    if os.path.isdir(folder):
        return {"error": f"{folder} cannot be removed"}
    _tidy(root)
    return {}


def _tidy(root: str) -> None:
    """A home without machines needs no folder."""
    with contextlib.suppress(OSError):
        if not _folders(root):
            for name in os.listdir(root):
                if name.startswith("supervisor-"):
                    os.unlink(os.path.join(root, name))
            os.rmdir(root)


def _is_home(root: str, home: str) -> bool:
    """Is it a folder that a home has made here? Others may have folders there, too."""
    with contextlib.suppress(OSError):
        named = len(home) == 6 and home.isalnum() and home == home.lower()
        return named and os.stat(root).st_mode & 0o777 == 0o700
    return False


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Can files be made, linked and locked in the shared folder? Leaves nothing there."""
    there = request["path"]
    while not os.path.exists(there):
        there = os.path.dirname(there)
    try:
        with tempfile.TemporaryDirectory(prefix=".evalfleet-", dir=there) as folder:
            first, second = folder + "/first", folder + "/second"
            open(first, "wb").close()
            os.link(first, second)
            with open(second, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return {"error": f"{there} is of no use: {err.strerror or err}"}
    return {}


def plant(request: dict[str, Any]) -> dict[str, Any]:
    """A file in the shared folder that nodes must see."""
    made = not os.path.isdir(request["path"])
    os.makedirs(request["path"], 0o700, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix=".evalfleet-alone-" if made else ".evalfleet-", dir=request["path"])
    os.close(fd)
    return {"path": path, "now": time.time()}


def uproot(request: dict[str, Any]) -> dict[str, Any]:
    """Remove that file, and the folder if it was made for it."""
    folder, name = os.path.split(request["path"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(request["path"])
    if name.startswith(".evalfleet-alone-"):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return {}


def _folders(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_ours(root: str, home: str, name: str) -> bool:
    """Is it a machine's, also if who made it was killed at once? Others may have folders there, too."""
    return name.split("-")[-2:-1] == [home] or os.path.exists(os.path.join(root, name, "key"))


def _look(folder: str) -> dict[str, Any]:
    start = _json(folder + "/start")
    return {
        "job": _read(folder + "/job") or "",
        "start": start,
        "ran": _read(folder + "/ran"),
        "restarted": os.path.exists(folder + "/restarted"),
        "listens": os.path.exists(folder + "/supervisor.sock"),
        "deleting": os.path.exists(folder + "/" + DELETING),
        "pilot": "" if start else _last_words(folder + "/pilot.log"),
        "about": _json(folder + "/about") or {},
        "mail": os.path.isdir(folder + "/" + MAIL),
        "made_at": os.stat(folder).st_mtime if os.path.isdir(folder) else 0.0,
    }


def _read(path: str) -> str | None:
    """What is in a file, which a job of this user may have put in place of ours: so no pipe, no link, and
    not without end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            return file.read(READ_CAP).decode("utf-8", "replace")
    except OSError:
        return None


def _digest(path: str) -> str:
    """The hash of a file; empty if there is none. A job of this user may have put a pipe or a link there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return hashlib.sha256(file.read(ARCHIVE_CAP)).hexdigest()
    except OSError:
        return ""


def _json(path: str) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] | None = json.loads(_read(path) or "null")
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _last_words(log: str) -> str:
    """What the pilot said before it ended, in one line."""
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_END))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:DETAIL_CAP] for line in reversed(lines) if line.strip()), "")


def _write(path: str, content: bytes, first_stays: bool = False) -> None:
    """Whole or not at all; `first_stays`: a file that is there already is left as it is."""
    if first_stays and os.path.exists(path):
        return
    fd, partial = tempfile.mkstemp(prefix=os.path.basename(path) + ".", dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            (os.link if first_stays else os.replace)(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _remove_tree(folder: str, supervisor: str) -> None:
    """As the supervisor does it: also what a job made read-only, or too deep."""
    from pathlib import Path

    remove_tree: Any = None
    try:
        from evalfleet.channels.supervisor.machine import remove_tree
    except ImportError:
        sys.path.insert(0, supervisor)
        with contextlib.suppress(ImportError):
            from supervisor.machine import remove_tree  # type: ignore[import-not-found, no-redef]
    if remove_tree is None:
        shutil.rmtree(folder)
    else:
        remove_tree(Path(folder))


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "resolve": resolve,
    "survey": survey,
    "survey_all": survey_all,
    "look": look,
    "make": make,
    "bring": bring,
    "record": record,
    "doom": doom,
    "remove": remove,
    "check": check,
    "plant": plant,
    "uproot": uproot,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(perform(json.loads(sys.stdin.readline()))) + "\n")
