"""Control groups: what a lab's processes are counted, frozen and killed by.

Killing and freezing need version 2, mounted alone (/sys/fs/cgroup) or beside version 1
(/sys/fs/cgroup/unified). HostLimits use version 2 where it has the controller, else version 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .system import LabError

GONE_S = 10.0
PERIOD_US = 100_000


class HostLimits(NamedTuple):
    """What one host may use. None: as much as there is."""

    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = 4096
    """Processes and threads. It protects this machine from what runs on a host; so where no control group can
    count them, there is no limit."""


class Mount(NamedTuple):
    path: Path
    kind: str
    options: frozenset[str]


class Layout(NamedTuple):
    """The lab's own groups: `unified` of version 2, and one a controller of version 1 that limits need."""

    unified: Path
    memory: Path | None
    cpu: Path | None
    pids: Path | None

    def tops(self) -> list[Path]:
        return [self.unified, *self._legacy()]

    def _legacy(self) -> list[Path]:
        return [path for path in (self.memory, self.cpu, self.pids) if path is not None]

    def host(self, name: str, limits: HostLimits) -> Group:
        legacy = [path / name for path in self._legacy()]
        group = Group(self.unified / name, legacy)
        for path in (group.path, *legacy):
            path.mkdir(exist_ok=True)
        if limits.memory_bytes is not None:
            self._limit_memory(name, limits.memory_bytes)
        if limits.cpus is not None:
            self._limit_cpu(name, limits.cpus)
        if limits.pids is not None and (counter := (self.pids or self.unified) / name / "pids.max").exists():
            counter.write_text(str(limits.pids))
        return group

    def _limit_memory(self, name: str, limit: int) -> None:
        if self.memory is not None:
            (self.memory / name / "memory.limit_in_bytes").write_text(str(limit))
        else:
            (self.unified / name / "memory.max").write_text(str(limit))

    def _limit_cpu(self, name: str, cpus: float) -> None:
        quota = int(cpus * PERIOD_US)
        if self.cpu is not None:
            (self.cpu / name / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.unified / name / "cpu.max").write_text(f"{quota} {PERIOD_US}")


class Group:
    """One host's control group."""

    def __init__(self, path: Path, legacy: Sequence[Path] = ()) -> None:
        self.path = path
        self.legacy = tuple(legacy)

    def joins(self) -> list[str]:
        """Files that a process writes 0 to, to be in the group."""
        return [str(path / "cgroup.procs") for path in (self.path, *self.legacy)]

    def pids(self) -> list[int]:
        return _pids(self.path)

    def freeze(self, frozen: bool) -> None:
        """Returns when every process has stopped, or runs again."""
        (self.path / "cgroup.freeze").write_text("1" if frozen else "0")
        self._wait("frozen", "1" if frozen else "0")

    def kill(self) -> None:
        """Returns when no process is left, frozen ones included. Does nothing if the group is removed."""
        if self.path.exists():
            kill_all(self.path)
            self._wait("populated", "0")

    def remove(self) -> None:
        for path in (self.path, *self.legacy):
            remove_group(path)

    def _wait(self, field: str, value: str) -> None:
        until = time.monotonic() + GONE_S
        while f"{field} {value}" not in _read(self.path / "cgroup.events"):
            if time.monotonic() > until:
                raise LabError(f"the control group {self.path} does not reach {field} {value}")
            time.sleep(0.001)


def plan(lab: str, limits: HostLimits) -> Layout:
    """Where this lab's groups will be. Makes nothing, so that a sweeper can be told first."""
    mounts = _mounts()
    unified = next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    if unified is None:
        raise LabError("the lab needs control groups version 2, mounted at /sys/fs/cgroup or .../unified")
    if not os.access(unified.path, os.W_OK):
        raise LabError(f"the lab needs to write control groups, but {unified.path} is read-only")
    has = _read(unified.path / "cgroup.controllers").split()
    memory, cpu = (
        _legacy(mounts, controller, lab) if wanted is not None and controller not in has else None
        for controller, wanted in (("memory", limits.memory_bytes), ("cpu", limits.cpus))
    )
    pids = None
    if limits.pids is not None and "pids" not in has:
        with contextlib.suppress(LabError):
            pids = _legacy(mounts, "pids", lab)
    return Layout(unified.path / lab, memory, cpu, pids)


def make(layout: Layout, limits: HostLimits) -> None:
    for path in layout.tops():
        path.mkdir(exist_ok=True)
    wanted: list[str] = []
    if limits.memory_bytes is not None and layout.memory is None:
        wanted.append("+memory")
    if limits.cpus is not None and layout.cpu is None:
        wanted.append("+cpu")
    if limits.pids is not None and layout.pids is None:
        with contextlib.suppress(OSError):
            for group in (layout.unified.parent, layout.unified):
                (group / "cgroup.subtree_control").write_text("+pids")
    for group in (layout.unified.parent, layout.unified) if wanted else ():
        try:
            (group / "cgroup.subtree_control").write_text(" ".join(wanted))
        except OSError as err:
            raise LabError(f"limits are not possible here: {group} does not pass {wanted} on: {err}") from err


def _legacy(mounts: Iterable[Mount], controller: str, lab: str) -> Path:
    """Below our own group, so that what limits us limits the lab, too."""
    for mount in mounts:
        if mount.kind == "cgroup" and controller in mount.options:
            own = next((path for names, path in _own_groups() if controller in names), "/")
            inside = mount.path / own.lstrip("/")
            return (inside if inside.is_dir() else mount.path) / lab
    raise LabError(f"limits are not possible here: no control group has the controller {controller!r}")


def _own_groups() -> list[tuple[list[str], str]]:
    lines = _read(Path("/proc/self/cgroup")).splitlines()
    return [(names.split(","), path) for _, names, path in (line.split(":", 2) for line in lines)]


def _mounts() -> list[Mount]:
    found: list[Mount] = []
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            found.append(Mount(Path(before.split()[4]), kind, frozenset(options.split(","))))
    return found


def kill_all(top: Path) -> None:
    """SIGKILL to every process in a group and below it."""
    try:
        (top / "cgroup.kill").write_text("1")
    except OSError:  # not there: before Linux 5.14, and in version 1
        for folder, _, _ in os.walk(top):
            for pid in _pids(Path(folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def remove_group(top: Path) -> None:
    """Kill what is in a group and below it, and remove it. Does nothing if there is none."""
    until = time.monotonic() + GONE_S
    while top.exists():
        kill_all(top)
        try:
            for folder, _, _ in os.walk(top, topdown=False):
                os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError as err:  # a killed process takes a moment to be gone
            if time.monotonic() > until:
                raise LabError(f"the control group {top} cannot be removed: {err}") from err
            time.sleep(0.002)


def _pids(path: Path) -> list[int]:
    return [int(pid) for pid in _read(path / "cgroup.procs").split()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
