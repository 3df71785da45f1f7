"""Is /dev/kvm usable? Present it may be also where the processor's virtualisation is not passed on."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

from .shell import Failed, as_root, run, say

DEVICE = "/dev/kvm"
GET_API_VERSION = 0xAE00
CREATE_VM = 0xAE01
API_VERSION = 12
REMEDY = (
    "take a size with nested virtualisation (not ARM; security type Standard), "
    "or --set kvm=false for slow software emulation"
)


def step_kvm(device: str = DEVICE) -> None:
    """Makes a virtual machine, and drops it."""
    problem = try_kvm(device)
    if problem == os.strerror(errno.EACCES) and os.geteuid() != 0:
        # only root and the group kvm may; the engine is root
        script = f"import sys; sys.path[:0] = {sys.path[:1]!r}; from {__name__} import main; main({device!r})"
        done = run(as_root([sys.executable, "-c", script]), 60.0)
        problem = "" if done.ok else done.words()
    if problem:
        raise Failed(f"{device} cannot be used ({problem}): {REMEDY}")
    say(f"{device} works")


def try_kvm(device: str) -> str:
    """What is wrong with it; nothing, if a virtual machine can be made."""
    try:
        handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        return err.strerror or "unknown"
    try:
        version = fcntl.ioctl(handle, GET_API_VERSION, 0)
        if version != API_VERSION:
            return f"its version is {version}, not {API_VERSION}"
        os.close(fcntl.ioctl(handle, CREATE_VM, 0))
    except OSError as err:
        return f"no virtual machine can be made: {err.strerror}"
    finally:
        os.close(handle)
    return ""


def main(device: str) -> None:
    sys.exit(try_kvm(device) or 0)
