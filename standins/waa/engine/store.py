"""Where everything is: images, containers, and what the test decided about this engine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import urllib.parse

from .errors import Failure, no_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ROOT = os.environ.get("STAND_IN_DOCKER", "/var/lib/stand-in-docker")
HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")


def settings() -> dict[str, Any]:
    """engine.json: registry (a folder), daemon (false: it is down), logins {server: {user: password}}.

    all_users: containers know all users of the host, which takes newuidmap and newgidmap.
    """
    return read_json(os.path.join(ROOT, "engine.json")) or {}


def read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_json(path: str, what: object) -> None:
    """Whole or not at all: others read it meanwhile."""
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(what, file, indent=1)
    os.replace(draft, path)


@contextlib.contextmanager
def locked(folder: str = ROOT) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def quoted(reference: str) -> str:
    return urllib.parse.quote(reference, safe="")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09}Z"


class Container:
    """One folder: config.json (what was asked), state.json (how it is), log, rootfs/."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id = os.path.basename(path)
        self.config: dict[str, Any] = read_json(os.path.join(path, "config.json")) or {}

    @property
    def name(self) -> str:
        return str(self.config.get("name", ""))

    @property
    def rootfs(self) -> str:
        return os.path.join(self.path, "rootfs")

    @property
    def log(self) -> str:
        return os.path.join(self.path, "log")

    @property
    def state(self) -> dict[str, Any]:
        """Of a container whose monitor is gone (power loss): it runs no more, whatever it says."""
        found: dict[str, Any] = read_json(os.path.join(self.path, "state.json")) or {"status": "created"}
        if found["status"] in ("running", "restarting") and not alive(found.get("monitor")):
            found = {**found, "status": "exited", "code": 255, "pid": 0, "ended": now(), "lost": True}
        return found

    def change(self, **facts: object) -> None:
        """The monitor and a command may both have something to say."""
        with locked(self.path):
            write_json(os.path.join(self.path, "state.json"), {**self.state, **facts})

    @property
    def running(self) -> bool:
        return bool(self.state["status"] == "running")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def on_host(self, path: str) -> str:
        """Where `path` of the container is on the host, also when it does not run."""
        path = os.path.normpath(os.path.join("/", path))
        mounts = sorted(self.config["mounts"], key=lambda mount: -len(mount["target"]))
        for mount in mounts:
            if path == mount["target"] or path.startswith(mount["target"].rstrip("/") + "/"):
                return str(mount["source"] + path[len(mount["target"].rstrip("/")) :])
        inside = self.rootfs + path
        top = path.split("/")[1]
        if top in HOST_FOLDERS and not os.path.lexists(inside):
            return path
        return inside


def birth(pid: int) -> str:
    """Tells a process from a later one of the same number; empty if it does not live."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def mark(pid: int) -> list[object]:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return [pid, birth(pid), file.read().strip()]


def alive(marked: Any) -> bool:
    return bool(marked) and bool(marked[1]) and marked == mark(marked[0])


def containers() -> list[Container]:
    folder = os.path.join(ROOT, "containers")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [Container(os.path.join(folder, name)) for name in names]
    return sorted((each for each in found if each.config), key=lambda each: each.config["created"])


def find(name: str) -> Container:
    """By name, id or the start of one."""
    wanted = name.lstrip("/")
    some = containers()
    for each in some:
        if wanted in (each.name, each.id):
            return each
    starts = [each for each in some if wanted and each.id.startswith(wanted)]
    if len(starts) > 1:
        raise Failure(f"Error response from daemon: Multiple IDs found with provided prefix: {name}")
    if not starts:
        raise no_container(name)
    return starts[0]
