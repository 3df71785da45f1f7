"""What a lab asks of this machine: its tools, and the system calls that Python 3.11 has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from evalfleet.errors import FleetError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# PID 1 of a host shows its environment to the host: nothing of ours may be in it
CLEAN = {"PATH": PATH, "LANG": "C.UTF-8"}
NEEDED = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
}
NET_ADMIN, SYS_ADMIN, MKNOD = 12, 21, 27  # capabilities, by their numbers
CLONE_NEWNET = 0x40000000
MS_REMOUNT = 32
MNT_DETACH = 2


class LabError(FleetError):
    """The lab cannot do this here; the message says what is missing or what failed."""


def find(command: str) -> str | None:
    return shutil.which(command, path=PATH)


def missing() -> str | None:
    """Why there can be no lab of real hosts here, in one line; None if there can."""
    lacks: list[str] = []
    if not sys.platform.startswith("linux"):
        lacks.append("Linux")
    elif os.geteuid() != 0:
        lacks.append("root")
    elif not _may_do_all():
        lacks.append("root's rights (this is a container or a user namespace)")
    lacks += sorted({package for command, package in NEEDED.items() if find(command) is None})
    if not lacks:
        return None
    return f"the lab needs root, iproute2 and openssh-server; missing here: {', '.join(lacks)}"


def _may_do_all() -> bool:
    """Is this root the machine's? One of a container may neither mount nor make devices and networks."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return everybody and all(effective >> right & 1 for right in (NET_ADMIN, SYS_ADMIN, MKNOD))


def run(argv: Sequence[str], text: str = "") -> str:
    """A tool's output. Raises LabError with what it said if it failed."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, env=CLEAN, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"{' '.join(argv)} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount_tmpfs(target: Path, options: str, *, again: bool = False) -> None:
    """Mount a tmpfs; with `again`, change the options of the one that is there."""
    flags = MS_REMOUNT if again else 0
    path = os.fsencode(target)
    made = _libc().mount(b"evalfleet-lab", path, b"tmpfs", ctypes.c_ulong(flags), options.encode())
    _check(made, f"mount {target}")


def unmount(target: Path) -> None:
    """Take it out of sight now; the kernel drops it when nobody uses it any more."""
    _check(_libc().umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def mounts_under(directory: Path) -> list[Path]:
    """Mount points at or below a directory, innermost first."""
    found: list[Path] = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            point = Path(line.split()[4].replace("\\040", " "))
            if point.is_relative_to(directory):
                found.append(point)
    return found[::-1]


@contextlib.contextmanager
def network_namespace(path: Path) -> Generator[None]:
    """This thread is in that network meanwhile, and so is every thread and process it starts.

    A socket stays in the network it was made in, also after the thread has left.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network(path)
        try:
            yield
        finally:
            _check(_libc().setns(home, CLONE_NEWNET), "return to the machine's network")
    finally:
        os.close(home)


def enter_network(path: Path) -> None:
    """This thread joins that network for good."""
    there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(there, CLONE_NEWNET), f"enter {path}")
    finally:
        os.close(there)
