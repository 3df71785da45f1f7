"""Jobs that run as users of their own: what they see of the host, what bounds them, and how all of it ends.

An isolated job has a user id that nobody has had before, control groups where the host has them, and its own
view of the file system: /tmp is its own, and of the machine's directory it sees its folder and, read-only,
the benchmark's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import time

from .files import read_file, sha256, write_atomic
from .processes import birth, checked, libc

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

FIRST_UID, UIDS = 0x70000000, 0x0FFE0000
"""User ids that no system hands out: above those of containers, below those of systemd's own."""
FEW_UIDS = 20_000
"""In a user namespace there may be only 65,536: those below this one may be the system's."""
GROUP = "evalfleet-machine-"
USER = "agent"
PROCESSES = 4096
MEMORY_SHARE = 0.9
REMOVE_S = 2.0

NEWNS, NEWIPC = 0x00020000, 0x08000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
NO_NEW_PRIVS = 38


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Raises OSError."""
    words = (os.fsencode(word) or None for word in (source, target, kind))
    import ctypes

    checked(libc().mount(*words, ctypes.c_ulong(flags), options.encode() or None), target)


def bind(fd: int, target: str, read_only: bool = False) -> None:
    """Show what is open as `fd` at the target, too."""
    mount(f"/proc/self/fd/{fd}", target, flags=BIND)
    if read_only:
        mount("", target, flags=BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def own_view() -> None:
    """Hide from all other processes what this process mounts from now on. Raises OSError."""
    checked(libc().unshare(NEWNS | NEWIPC), "unshare")
    mount("", "/", flags=REC | SLAVE)


# -- what a host offers --------------------------------------------------------------------------


class HostIsolation:
    """What this host offers to keep jobs apart, found out when it is first asked for.

    `groups`: the machine's control groups by controller; empty until then, and where there are none.
    """

    def __init__(self, home: str) -> None:
        self.home = home
        self.hidden = closed_folder(home)
        self.groups: dict[str, str] = {}
        self._why_not: str | None = None

    @property
    def why_not(self) -> str:
        """Return why jobs cannot be kept apart; empty if they can."""
        if self._why_not is None:
            self._why_not = self._obstacle()
            if not self._why_not:
                self.groups = machine_groups(GROUP + sha256(os.fsencode(self.home))[:12])
                write_atomic(self.home + "/groups", json.dumps(list(self.groups.values())))
        return self._why_not

    def _obstacle(self) -> str:
        if not sys.platform.startswith("linux"):
            return "it is not Linux"
        if os.geteuid() != 0:
            return "the supervisor is not root"
        libc()  # now: each fork would load it anew
        pid = os.fork()
        if not pid:
            code = 1
            try:
                own_view()
                mount("none", self.hidden, "tmpfs")
                os.setresuid(new_uid(), -1, -1)
                code = 0
            finally:
                os._exit(code)
        return "it allows no mount namespaces" if os.waitpid(pid, 0)[1] else ""

    def words(self) -> str:
        """Return what an isolated job has here, for people."""
        has = ["own user", "own /tmp"]
        has += ["own cgroup"] if self.groups else []
        limits = [name for name in ("pids", "memory") if name in self.groups]
        return ", ".join(has) + (f", limits of {' and '.join(limits)}" if limits else "")


def closed_folder(home: str) -> str:
    """Return the first folder on the way to `home` that other users may not enter."""
    path = "/"
    for part in home.strip("/").split("/"):
        path = os.path.join(path, part)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return path
    return home


def new_uid() -> int:
    """Return a user id that nobody has had, but for a chance in many millions."""
    first, count = FIRST_UID, UIDS
    lines = (read_file("/proc/self/uid_map") or b"").split()
    if len(lines) == 3 and int(lines[2]) < FIRST_UID + UIDS:
        first, count = FEW_UIDS, max(int(lines[2]) - FEW_UIDS - 2, 1)
    return first + int.from_bytes(os.urandom(8), "big") % count


def machine_groups(name: str) -> dict[str, str]:
    """Controller -> the machine's control group for it, made now; "" is that of version 2, which can kill.

    Version 2 has the limits too where it has their controllers; else version 1, where it has them.
    """
    paths: dict[str, str] = {}
    for line in _text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths.update((controller, path) for controller in names.split(","))
    made: dict[str, str] = {}
    for point, kind, options in cgroup_mounts():
        wanted = [""] if kind == "cgroup2" else [name for name in ("pids", "memory") if name in options]
        for controller in wanted:
            with contextlib.suppress(OSError):
                made[controller] = _machine_group(point, paths.get(controller, "/"), name)
    if "" in made:
        for controller in ("pids", "memory"):
            if controller in _text(made[""] + "/cgroup.controllers").split():
                with contextlib.suppress(OSError):
                    _write(made[""] + "/cgroup.subtree_control", "+" + controller)
                    made[controller] = made[""]
    return dict(sorted(made.items()))  # the one that can kill is the first


def cgroup_mounts() -> Iterable[tuple[str, str, list[str]]]:
    """Return (folder, kind, options) of each mounted tree of control groups."""
    for line in _text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield before.split()[4], kind, options.split(",")


def _machine_group(point: str, own: str, name: str) -> str:
    """Make a group below our own, so that what bounds us bounds the jobs. Those of systemd are left alone."""
    base = point + own.rstrip("/")
    if not os.path.isdir(base) or own.endswith((".scope", ".service")):
        base = point
    path = f"{base}/{name}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    return path


def remove_groups(tops: Iterable[str]) -> None:
    """End all that lives in a machine's groups, and remove them."""
    for top in tops:
        if not os.path.basename(top).startswith(GROUP):
            continue
        for folder, _, _ in os.walk(top, topdown=False):
            _remove_group(folder)


def _remove_group(path: str) -> None:
    """Remove a group once the last of its killed processes is gone. One that stays is left."""
    until = time.monotonic() + REMOVE_S
    while os.path.isdir(path) and time.monotonic() < until:
        kill_group(path)
        try:
            os.rmdir(path)
        except OSError:
            time.sleep(0.01)


def kill_group(path: str) -> bool:
    """Send SIGKILL to all in a group. Returns False if there was nobody."""
    events = path + "/cgroup.events"
    if "populated 0" in _text(events):
        return False  # to kill waits for whoever just joins another group
    try:
        _write(path + "/cgroup.kill", "1")
    except OSError:  # version 1, or a kernel before 5.14
        pids = _text(path + "/cgroup.procs").split()
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        return bool(pids)
    return "populated 1" in _text(events)


def kill_user(uid: int) -> bool:
    """Send SIGKILL to all processes of a user at once: none can fork away. Returns False for none."""
    if not processes_of(uid):
        return False
    pid = os.fork()
    if not pid:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return True


def processes_of(uid: int) -> list[int]:
    """Return the processes of a user that live. One that has ended and was not reaped yet does not."""
    pids: list[int] = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            mine = name.isdigit() and os.stat("/proc/" + name).st_uid == uid
            if mine and birth(int(name)) is not None:
                pids.append(int(name))
    return pids


def host_memory() -> int:
    """Return the bytes of memory that the host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(host: HostIsolation, group: str, most: int) -> None:
    if "memory" in host.groups:
        path = f"{host.groups['memory']}/{group}"
        version_1 = os.path.exists(path + "/memory.limit_in_bytes")
        _write(path + ("/memory.limit_in_bytes" if version_1 else "/memory.max"), str(most))


def enclose(host: HostIsolation, group: str, pid: int, most: int) -> None:
    """Put a process that serves jobs into a group of its own, with so much memory. Raises OSError."""
    for top in dict.fromkeys(host.groups.values()):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{top}/{group}")
        _write(f"{top}/{group}/cgroup.procs", str(pid))
    limit_memory(host, group, most)


# -- one job -------------------------------------------------------------------------------------


class Box:
    """The bounds of one isolated job: its user and its control groups."""

    def __init__(self, uid: int, groups: list[str]) -> None:
        self.uid = uid
        self.groups = groups

    @classmethod
    def make(cls, host: HostIsolation, processes: int, memory_bytes: int) -> Box:
        """Make a user and groups that no job has had, with so many processes and so much memory. 0: as
        much as any job may have. Raises OSError."""
        uid = new_uid()
        box = cls(uid, [f"{top}/{uid}" for top in dict.fromkeys(host.groups.values())])
        for group in box.groups:
            os.mkdir(group)
        if "pids" in host.groups:
            _write(f"{host.groups['pids']}/{uid}/pids.max", str(processes or PROCESSES))
        limit_memory(host, str(uid), memory_bytes or int(MEMORY_SHARE * host_memory()))
        return box

    @classmethod
    def restored(cls, record: dict[str, Any] | None) -> Box | None:
        """Return the box in a job.json, which an earlier version, or a job of root's, may have written."""
        if not record or int(record["uid"]) < FEW_UIDS:
            return None
        groups = [str(path) for path in record["groups"]]
        return cls(int(record["uid"]), [path for path in groups if f"/{GROUP}" in path and ".." not in path])

    def record(self) -> dict[str, Any]:
        return {"uid": self.uid, "groups": self.groups}

    def kill(self) -> bool:
        """Send SIGKILL to all that the job has forked, wherever it went. Returns False if nothing lives."""
        first = self.groups[0] if self.groups else ""
        if first and os.path.exists(first + "/cgroup.kill"):
            return kill_group(first)
        return kill_user(self.uid)

    def remove(self) -> bool:
        """Remove the groups. Returns False if some group cannot be removed yet."""
        gone = True
        for group in self.groups:
            try:
                os.rmdir(group)
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone

    def own(self, *folders: str) -> None:
        for folder in folders:
            os.chown(folder, self.uid, self.uid)
            os.chmod(folder, 0o700)


def show_files(host: HostIsolation, uid: int, folder: str, shown: list[tuple[str, bool]]) -> None:
    """Show this process, which becomes an isolated job, what that job may see of the file system.

    `folder` is the job's. `shown` are other folders below the machine's directory, each with whether it is
    read-only. The machine's directory is the working directory and stays so while it is covered: what is
    below it is found from there. Raises OSError.
    """
    own_view()
    if os.path.isdir("/dev/shm"):
        mount("none", "/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    users = (read_file("/etc/passwd") or b"").rstrip(b"\n")
    tmp = os.open(below(host, folder) + "/tmp", os.O_PATH | os.O_DIRECTORY)
    for path in ("/tmp", "/var/tmp"):
        if os.path.isdir(path) and not os.path.islink(path):
            bind(tmp, path)
    os.makedirs(host.hidden, exist_ok=True)  # it may have been below /tmp
    mount("none", host.hidden, "tmpfs", NOSUID | NODEV, "mode=755,size=4m")
    # programs want to know who they are: whoami, git, ssh, Python's getpass
    agent = f"\n{USER}:x:{uid}:{uid}::{folder}/home:/bin/sh\n".encode()
    with contextlib.suppress(OSError):  # a host without that file has other ways
        passwd = os.open(host.hidden + "/.passwd", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(passwd, users + agent)
        bind(passwd, "/etc/passwd", read_only=True)
    for path, read_only in ((folder, False), *shown):
        fd = os.open(below(host, path), os.O_PATH | os.O_DIRECTORY)
        os.makedirs(path, exist_ok=True)
        bind(fd, path, read_only)


def below(host: HostIsolation, path: str) -> str:
    return path[len(host.home) + 1 :]


def confine(
    box: Box, host: HostIsolation, folder: str, shown: list[tuple[str, bool]], processes: int
) -> None:
    """Bound this process, which is root's and becomes an isolated job. Raises OSError."""
    import resource

    os.fchown(1, box.uid, box.uid)  # its log: /dev/stdout and /dev/stderr can be opened then
    for group in box.groups:
        _write(group + "/cgroup.procs", "0")
    mask = os.umask(0o022)
    show_files(host, box.uid, folder, shown)
    os.umask(mask)
    most = processes or PROCESSES
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    os.setgroups([])
    os.setresgid(box.uid, box.uid, box.uid)
    os.setresuid(box.uid, box.uid, box.uid)
    checked(libc().prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def _text(path: str) -> str:
    return (read_file(path) or b"").decode("utf-8", "surrogateescape")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
