"""The system calls a lab needs that Python 3.11 has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Generator
from pathlib import Path

CLONE_NEWNET = 0x40000000
MS_REMOUNT = 32
MNT_DETACH = 2


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
